"""A process that is killed at a random moment leaves nothing half written and nothing unnamed.

NORMSWAP_KILLS processes are killed (4 by default), drawn by NORMSWAP_KILL_SEED. The next run of the
same command goes on, and says what lies about.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hub_server import hub_server

from normswap import shipped
from normswap.storage import checkpoint

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("NORMSWAP_KILLS", "4"))
SEED = int(os.environ.get("NORMSWAP_KILL_SEED", "0"))
COMMANDS: dict[str, list[str]] = {
    "convert": ["convert", "demo", "--to", "skipinit", "-o", "net"],
    "convert over a network": ["convert", "demo", "--to", "skipinit", "-o", "old", "--force"],
    "export": ["export", "demo", "-o", "demo.onnx"],
    "export over a file": ["export", "demo", "-o", "old.xml", "--force"],
    "finetune": ["finetune", "--recipe", "r.yaml", "-o", "run", "--resume", "auto"],
    "push": ["push", "pushed", "me/net"],
}
RECIPE = """summary: x
source: x
model: {name: demo}
data: {root: d, batch_size: 8, workers: 1}
optim: {name: sgd, lr: 0.001}
train: {epochs: 2, checkpoint: 3}
"""
# What somebody keeps in the directory of a network, and must find again.
OWN = {".git/HEAD": "ref: refs/heads/main", "notes.txt": "years"}


class Place:
    """A folder in which commands run, with a hub of its own.

    Args:
        folder: The folder.
        url: The address of the hub.
        temporary: The folder for temporary files. Its path must be short: a loader's processes have
            sockets in it, and pytest's own folders are too deep for these.
    """

    def __init__(self, folder: Path, url: str, temporary: Path) -> None:
        self.folder = folder
        self.hub = folder.parent / "store"
        self.temporary = temporary
        self.environment = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(folder.parent / "home"),
            "HF_TOKEN": "hf_x",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temporary),
        }
        self.environment.pop("HF_HUB_OFFLINE", None)

    def start(self, words: list[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "normswap", *words],
            cwd=self.folder,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, words: list[str]) -> tuple[int, str]:
        process = self.start(words)
        out, err = process.communicate(timeout=300)
        return process.returncode, out + err


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a converted network, files of somebody's, images and a recipe."""
    folder = tmp_path_factory.mktemp("prepared") / "work"
    folder.mkdir()
    place = Place(folder, "http://127.0.0.1:9", folder.parent)
    for name in ("old", "pushed"):
        code, said = place.run(["convert", "demo", "--to", "folded", "-o", name])
        assert code == 0, said
    for name, content in OWN.items():
        file = folder / "old" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content, encoding="utf-8")
    code, said = place.run(["export", "demo", "-o", "old.xml"])
    assert code == 0, said
    with tarfile.open(shipped.IMAGES) as archive:
        archive.extractall(folder / "all", filter="data")
    for part, count in (("train", 4), ("val", 2)):
        for label in sorted((folder / "all").iterdir()):
            target = folder / "d" / part / label.name
            target.mkdir(parents=True)
            for image in sorted(label.iterdir())[:count]:
                shutil.copy(image, target)
    shutil.rmtree(folder / "all")
    (folder / "r.yaml").write_text(RECIPE, encoding="utf-8")
    return folder


def wait_for_the_moment(
    process: subprocess.Popen[str], place: Place, before: set[str], writes: bool, delay: float
) -> None:
    """Wait so many seconds after the command began, or, if `writes`, after it began to write."""
    while writes and process.poll() is None and everything(place.folder) == before:
        time.sleep(0.002)
    time.sleep(delay)


def license_of(name: str) -> list[str]:
    return ["--license", "mit"] if name == "push" else []


def drawn() -> list[Any]:
    """The kills: a number, a command, and a moment.

    Most come shortly after the command has begun to write: most of its time goes into what it
    imports.
    """
    draw = random.Random(SEED)
    names = list(COMMANDS)
    kills = []
    for number in range(KILLS):
        name = names[number % len(names)]
        writes = draw.random() < 0.7 and name != "push"
        delay = draw.choice([0.01, 0.1, 0.5, 2]) * draw.random() if writes else draw.uniform(0, 8)
        moment = "writing" if writes else "start"
        label = f"{number}-{name}-{delay:.2f} s after {moment}"
        kills.append(pytest.param(name, writes, delay, id=label))
    return kills


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files under a short path."""
    with tempfile.TemporaryDirectory(prefix="kill") as folder:
        yield Path(folder)


@pytest.mark.parametrize(("name", "writes", "delay"), drawn())
def test_the_next_run_goes_on_after_a_kill(
    name: str, writes: bool, delay: float, prepared: Path, tmp_path: Path, temporary: Path
) -> None:
    shutil.copytree(prepared, tmp_path / "work")
    before = everything(tmp_path / "work")
    words = [*COMMANDS[name], *license_of(name)]
    with hub_server({}, store=tmp_path / "store") as url:
        place = Place(tmp_path / "work", url, temporary)
        process = place.start(words)
        wait_for_the_moment(process, place, before, writes, delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        was_killed = process.returncode == -signal.SIGKILL
        left = sorted(everything(place.folder) - before)
        check_nothing_is_half_written(place)

        code, said = place.run(words)

    outcome = "killed" if was_killed else "done"
    print(f"{name}, {delay:.2f} s after {'writing' if writes else 'start'}: {outcome}, left {left}")
    is_done = name in ("convert", "export") and "exists" in said
    assert code == (2 if is_done else 0), said
    check_nothing_is_half_written(place)
    for path in (*hidden(place.folder), *place.temporary.glob("normswap*")):
        assert path.name in said, f"{path} is named nowhere: {said}"
    assert {file: (place.folder / "old" / file).read_text(encoding="utf-8") for file in OWN} == OWN
    check_result(name, place)


def check_nothing_is_half_written(place: Place) -> None:
    """Each network that has its name opens, and each file of two parts has both."""
    networks = [place.folder / name for name in ("net", "old", "pushed", "run/best", "run/last")]
    for network in networks:
        if (network / "model.safetensors").exists():
            checkpoint.load(network)
    for file, parts in {"demo.onnx": [], "old.xml": ["old.bin"]}.items():
        if (place.folder / file).exists():
            for part in (*parts, f"{file}.preprocess.json"):
                assert (place.folder / part).is_file(), f"{file} stands without {part}"


def check_result(name: str, place: Place) -> None:
    """The command has done what it was asked for."""
    if name == "push":
        assert len(list((place.hub / "me" / "net").iterdir())) == 4
    elif name == "finetune":
        assert (
            len((place.folder / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines())
            == 4
        )
    elif "convert" in name:
        header = checkpoint.read_header(place.folder / COMMANDS[name][5])
        assert [step["scheme"] for step in header.plan["steps"]] == ["skipinit"]
    else:
        assert (place.folder / COMMANDS[name][3]).is_file()


def everything(folder: Path) -> set[str]:
    """The paths below a folder, some of which may vanish meanwhile."""
    paths: set[str] = set()
    for parent, folders, files in os.walk(folder):
        below = os.path.relpath(parent, folder)
        paths.update(os.path.normpath(os.path.join(below, name)) for name in (*folders, *files))
    return paths


def hidden(folder: Path) -> list[Path]:
    """What a writer may have left: hidden, and nobody's own."""
    own = {Path("old") / name.partition("/")[0] for name in OWN}
    found = [path for path in folder.rglob(".*") if path.relative_to(folder) not in own]
    return [path for path in found if not any(part.startswith(".") for part in path.parent.parts)]
