"""The zoo: its manifest is right, and one command makes, measures and publishes its rows."""

import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import timm
import torch
from support.hub_server import hub_server, use_hub
from support.lived_in_networks import lived_in
from support.model_sources import write_folder

from normswap import schemes, shipped
from normswap.errors import OptionError
from normswap.training import recipe_files

SCRIPT = shipped.recipes() / "zoo.py"
MANIFEST = shipped.recipes() / "zoo.yaml"
TESTS = Path(__file__).parents[1]
SMALL = TESTS / "data" / "zoo.yaml"


@pytest.fixture(scope="module")
def zoo() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("zoo_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["zoo_script"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["zoo_script"]


def changed(file: Path, old: str, new: str, to: Path) -> Path:
    """A copy of a manifest with one text replaced."""
    text = file.read_text(encoding="utf-8")
    assert old in text
    to.write_text(text.replace(old, new, 1), encoding="utf-8")
    return to


def test_the_rows_of_the_shipped_manifest_are_right(zoo: ModuleType) -> None:
    rows = zoo.rows_of(zoo.read_manifest(MANIFEST, {}))

    assert len({row.id for row in rows}) == len(rows) == 9 * 6
    assert len({row.hash for row in rows}) == len(rows)
    for row in rows:
        assert timm.models.get_pretrained_cfg(row.source).license == row.of.licence
        assert schemes.changed(row.scheme.to, row.scheme.options) == row.scheme.options
        if row.scheme.recipe is not None:
            overrides = ["convert=null", *row.scheme.overrides]
            assert recipe_files.load_recipe(row.scheme.recipe, overrides).convert is None


def test_the_sizes_of_the_manifest_are_those_of_the_networks(zoo: ModuleType) -> None:
    for name, network in zoo.read_manifest(MANIFEST, {}).networks.items():
        with torch.device("meta"):
            model = timm.create_model(name)
        millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
        assert millions == pytest.approx(network.parameters, abs=0.06), name


def test_the_speeds_of_the_manifest_are_those_that_were_measured(zoo: ModuleType) -> None:
    speeds = zoo.read_manifest(MANIFEST, {}).speeds
    names = {"groupnorm --relative-eps 0": "groupnorm-plain"}
    measured: dict[str, dict[str, float]] = {"evaluate": {}, "train": {}, "gibibytes": {}}
    page = (TESTS / "lab/gpu/h200.md").read_text(encoding="utf-8")
    for line in page.partition("## Speed of a converted network")[2].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        # The lines of networks that were not compiled: scheme, "", inference, ratio, training ...
        if len(cells) != 7 or cells[1] or not cells[2].isdigit():
            continue
        scheme = names.get(cells[0], cells[0])
        for name, cell in {"evaluate": 2, "train": 4, "gibibytes": 6}.items():
            if cells[cell]:
                measured[name][scheme] = float(cells[cell])

    for name, figures in measured.items():
        ours = getattr(speeds, name)
        assert ours, name
        for scheme, figure in ours.items():
            assert figures[scheme] == figure, (name, scheme)


def test_the_place_of_the_images_does_not_change_a_row_and_everything_else_does(
    zoo: ModuleType, tmp_path: Path
) -> None:
    def first(file: Path, places: dict[str, str]) -> Any:
        return zoo.rows_of(zoo.read_manifest(file, places))[0]

    row = first(SMALL, {})
    assert first(SMALL, {"demo": "/elsewhere"}).images.place == "/elsewhere"
    assert first(SMALL, {"demo": "/elsewhere"}).hash == row.hash

    changes = {
        "epochs: [1]": "epochs: [1, 2]",
        "count: 500": "count: 499",
        "calibrate: 50": "calibrate: 51",
        "min_kept: 0.5": "min_kept: 0.6",
        "data.batch_size=25": "data.batch_size=20",
        "licence: apache-2.0": "licence: mit",
        "publish: 1": "publish: 0",
    }
    hashes = {row.hash}
    for number, (old, new) in enumerate(changes.items()):
        hashes.add(first(changed(SMALL, old, new, tmp_path / f"{number}.yaml"), {}).hash)
    assert len(hashes) == len(changes) + 1


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("min_kept: 1}", "min_kept: 1, gate: 1}", "gate"),
        ("min_kept: 1}", "min_kept: 1.5}", "min_kept"),
        ("images: demo,", "images: cifar,", "sources.demo.images"),
        ("schemes: [folded]", "schemes: [fold]", "'fold'"),
        ("publish: 1", "publish: 5", "schemes.groupnorm-plain.publish"),
    ],
)
def test_a_wrong_manifest_is_refused_by_its_key(
    zoo: ModuleType, tmp_path: Path, old: str, new: str, says: str
) -> None:
    with pytest.raises(OptionError, match=says):
        zoo.read_manifest(changed(SMALL, old, new, tmp_path / "zoo.yaml"), {})


def test_images_that_the_manifest_does_not_have_are_refused(zoo: ModuleType) -> None:
    with pytest.raises(OptionError, match="--images cifar"):
        zoo.read_manifest(SMALL, {"cifar": "here"})


def test_a_row_is_done_if_the_hub_has_its_hash(
    zoo: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = zoo.rows_of(zoo.read_manifest(SMALL, {}))[0]
    repos: dict[str, Path] = {}
    with hub_server(repos, store=tmp_path) as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        place = zoo.Zoo(tmp_path / "zoo", "me", "cpu", 0)
        assert place.done(row) is None, "there is no repository"

        other = replace(row, epochs=(1, 2))
        for name, digest in {row.id: row.hash, "older": "0123456789abcdef"}.items():
            repos[f"me/{name}"] = tmp_path / name
            repos[f"me/{name}"].mkdir()
            (tmp_path / name / "zoo.json").write_text(
                json.dumps({"hash": digest}), encoding="utf-8"
            )
        assert place.done(row) == {"hash": row.hash}
        assert place.done(other) is None, "it is made by another manifest"
        assert place.done(replace(row, id="older")) is None


def test_costs_are_named_by_row(zoo: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert zoo.main(["--dry-run", "--rows", "resnet50.a1*"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    hours = {line.split()[0]: float(line.split()[2]) for line in lines[1:-1]}
    slow = hours["resnet50.a1_in1k-groupnorm"]
    assert slow > hours["resnet50.a1_in1k-frozen-bn"] > hours["resnet50.a1_in1k-folded"]


def command(work: Path, *words: str) -> list[str]:
    """The command of the issue, with two threads less."""
    own = ["--workers", "0", "--device", "cpu", "-o", str(work / "zoo")]
    return [sys.executable, str(SCRIPT), "--manifest", str(SMALL), "--to", "me", *own, *words]


def run(work: Path, environment: dict[str, str], *words: str) -> tuple[int, str]:
    done = subprocess.run(
        command(work, *words), env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


STRANGER = """
import sys
sys.modules["normswap"] = None
import json
import timm
import torch
from timm.data import create_dataset, create_transform, resolve_data_config

model = timm.create_model("hf-hub:me/demo-groupnorm-plain", pretrained=True).eval()
transform = create_transform(**resolve_data_config({}, model=model))
images = create_dataset("", root=sys.argv[1], transform=transform)
names = model.pretrained_cfg["label_names"]
folders = {number: name for name, number in images.reader.class_name_to_idx.items()}
right = 0
with torch.inference_mode():
    for image, label in images:
        right += names[int(model(image[None]).argmax())] == folders[label]
print(100 * right / len(images))
"""


@pytest.mark.slow
def test_one_command_makes_the_zoo_goes_on_after_a_kill_and_then_does_nothing(
    tmp_path: Path,
) -> None:
    args = {"channels": (32, 32, 32, 32), "num_classes": 10}
    torch.manual_seed(0)
    narrow = lived_in(timm.create_model("resnet18", **args), torch.randn(8, 3, 64, 64)).float()
    cfg = {"input_size": [3, 64, 64], "num_classes": 10, "license": "mit"}
    state = narrow.eval().state_dict()
    write_folder(tmp_path / "narrow", state, model_args=args, pretrained_cfg=cfg)

    seen: list[str] = []
    collection: dict[str, Any] = {}
    repos = {"some/narrow": tmp_path / "narrow"}
    store = tmp_path / "store"
    with hub_server(repos, seen=seen, store=store, collection=collection) as url:
        environment = {
            **os.environ,
            "HF_ENDPOINT": url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_TOKEN": "hf_x",
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("HF_HUB_OFFLINE", None)

        # Killed in the middle of a training, after a state was written.
        process = subprocess.Popen(command(tmp_path), env=environment)
        while process.poll() is None and not list((tmp_path / "zoo").rglob("state/run.pt")):
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert repos.keys() == {"some/narrow"}

        code, said = run(tmp_path, environment)
        assert code == 1, said
        check_table(tmp_path / "zoo" / "zoo.csv")
        check_repositories(repos)
        assert collection["title"] == "The tests' zoo"
        assert collection["items"] == ["me/demo-groupnorm-plain", "me/narrow-folded"]
        check_stranger(tmp_path, environment)

        # A second call does nothing.
        seen.clear()
        start = time.perf_counter()
        code, said = run(tmp_path, environment)
        took = time.perf_counter() - start
    assert code == 1
    assert "made" not in said
    assert not [request for request in seen if request.startswith("POST")]
    check_table(tmp_path / "zoo" / "zoo.csv")
    print(f"the second call took {took:.1f} s")
    assert took < 10


def table(file: Path) -> list[dict[str, str]]:
    """The lines of zoo.csv."""
    return list(csv.DictReader(file.read_text(encoding="utf-8").splitlines()))


def check_table(file: Path) -> None:
    """zoo.csv has a line for every row, and the failed one says why."""
    lines = {line["id"]: line for line in table(file)}
    states = {name: line["state"] for name, line in lines.items()}
    assert states == {
        "demo-groupnorm-plain": "published",
        "demo-instancenorm": "failed",
        "narrow-folded": "published",
    }
    assert "min_kept is 90 %" in lines["demo-instancenorm"]["reason"]

    trained = lines["demo-groupnorm-plain"]
    assert trained["loads_with"] == "timm"
    assert trained["top1"] == trained["top1_1"]
    assert float(trained["source_top1"]) == 87.2
    assert 50 < float(trained["top1_0"]) < 87
    assert float(trained["batchnorm_1"]) > 70

    folded = lines["narrow-folded"]
    assert (folded["loads_with"], folded["verdict"]) == ("the card's code", "PROVED")
    assert float(folded["kept"]) == 1
    assert folded["top1"] == folded["source_top1"]


def check_repositories(repos: dict[str, Path]) -> None:
    """Each has the network, a card with the figure, and the mark."""
    for name in ("me/demo-groupnorm-plain", "me/narrow-folded"):
        files = {
            path.relative_to(repos[name]).as_posix()
            for path in repos[name].rglob("*")
            if path.is_file()
        }
        wanted = {"model.safetensors", "config.json", "README.md", "zoo.json"}
        assert wanted | {".eval_results/demo-images.yaml"} <= files
        line = json.loads((repos[name] / "zoo.json").read_text(encoding="utf-8"))
        card = (repos[name] / "README.md").read_text(encoding="utf-8")
        assert f"Top-1: **{line['top1']:.2f} %** of 500 labelled images" in card
        assert "- me/demo-images" in card


def check_stranger(work: Path, environment: dict[str, str]) -> None:
    """Somebody with timm alone has the top-1 that the table claims."""
    home = {**environment, "HF_HOME": str(work / "fresh")}
    words = [sys.executable, "-I", "-c", STRANGER, str(shipped.IMAGES)]
    done = subprocess.run(words, env=home, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (line, *_) = table(work / "zoo" / "zoo.csv")
    assert float(done.stdout) == pytest.approx(float(line["top1"]))
