"""A run that was killed before its first state goes on; what others keep in a folder stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.small_trainings import made, network, recipe, train, weights, write_images

from normswap.errors import LeftBehindNote, NormswapError, OptionError, OutputError
from normswap.models import preprocessing
from normswap.models.stated_images import Preprocessing
from normswap.training import recipe_files
from normswap.training.engine import TrainingProgress
from normswap.training.recipe import Recipe
from normswap.training.run_folder import COLUMNS, Folder, State, TrainingState, identify

SHORT = {"train": {"epochs": 1}}
# A run makes its folder, and calls these, until it has written its first state.
STEPS = (("mkdir", 2), ("mkdtemp", 5), ("replace", 5))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A process is copied while it has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made.cache_clear()
    yield
    made.cache_clear()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 1)


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(network(), recipe(images, **SHORT), out)
    return out


def killed_at(step: str, number: int, work: Callable[[], object]) -> bool:
    """Whether a copy of this process dies at the n-th call of a function that makes a file."""
    child = os.fork()
    if not child:
        owner: Any = tempfile if step == "mkdtemp" else os
        function = getattr(owner, step)
        calls: list[object] = []

        def counted(*arguments: Any, **options: Any) -> Any:
            if len(calls) == number:
                os._exit(9)
            calls.append(arguments)
            return function(*arguments, **options)

        setattr(owner, step, counted)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def moments() -> list[Any]:
    """Every moment; a few of them by default."""
    found = []
    for step, count in STEPS:
        for number in range(count):
            often = (step, number) in {("replace", 1), ("replace", 4), ("mkdtemp", 2)}
            marks = () if often else pytest.mark.slow
            found.append(pytest.param(step, number, marks=marks))
    return found


@pytest.mark.parametrize(("step", "number"), moments())
@pytest.mark.parametrize("resume", [None, "auto"])
@pytest.mark.one_in(2)
def test_a_run_killed_before_its_first_state_goes_on(
    step: str, number: int, resume: str | None, images: Path, whole: Path, tmp_path: Path
) -> None:
    plan = recipe(images, **SHORT)
    out = tmp_path / "run"
    assert killed_at(step, number, lambda: train(network(), plan, out))
    assert not (out / "state" / "run.pt").exists()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(network(), plan, out, resume=resume)

    assert result.finished
    for name in ("best", "last"):
        again = weights(out / name)
        assert all(torch.equal(again[key], value) for key, value in weights(whole / name).items())
    notes = [str(each.message) for each in caught if each.category is LeftBehindNote]
    hidden = [path for path in out.rglob(".*") if not any(str(path) in note for note in notes)]
    assert hidden == []


def test_a_killed_run_is_continued_with_what_it_had_moved_aside(
    images: Path, tmp_path: Path
) -> None:
    """It was killed between the two renames of best/, after its first state."""
    out = tmp_path / "run"

    def stop(moment: TrainingProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(network(), recipe(images, **SHORT), out, progress=stop)
    old = out / "best" / ".model.abcdefgh" / "old"
    old.mkdir(parents=True)
    names = ["config.json", "README.md", "model.safetensors"]
    (old.parent / ".normswap").write_text(json.dumps(names), encoding="utf-8")
    before = (out / "best" / "model.safetensors").read_bytes()
    (out / "best" / "model.safetensors").rename(old / "model.safetensors")
    (out / "best" / "config.json").rename(old / "config.json")
    folder = Folder(out, {})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder.put_back()

    assert ["was put back" in str(each.message) for each in caught] == [True, False]
    assert (out / "best" / "model.safetensors").read_bytes() == before
    assert not old.parent.exists()


def begun(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)
    (folder / "recipe.yaml").write_text(recipe_files.dump(recipe("images")), encoding="utf-8")


def _nothing(folder: Path) -> None:
    folder.mkdir()


def _state(folder: Path) -> None:
    (folder / "state").mkdir(parents=True)


def _recipe(folder: Path) -> None:
    begun(folder)


def _half_a_state(folder: Path) -> None:
    begun(folder)
    (folder / "state" / ".run.abcdefgh").mkdir()
    (folder / "state" / ".run.abcdefgh" / ".normswap").write_text('["run.pt"]', encoding="utf-8")
    (folder / "state" / ".run.abcdefgh" / "run.pt").write_bytes(b"half")


def _trackers(folder: Path) -> None:
    begun(folder)
    (folder / "trackers" / "normswap").mkdir(parents=True)


def _half_a_network(folder: Path) -> None:
    begun(folder)
    (folder / ".best.abcdefgh" / "best").mkdir(parents=True)
    (folder / ".best.abcdefgh" / ".normswap").write_text('["best"]', encoding="utf-8")


def _networks(folder: Path) -> None:
    begun(folder)
    for name in ("best", "last", ".last.abcdefgh", ".metrics.abcdefgh"):
        (folder / name).mkdir()


def _a_first_row(folder: Path) -> None:
    _networks(folder)
    cells = ["0", "0", *[""] * (len(COLUMNS) - 2)]
    (folder / "metrics.csv").write_text(
        f"{','.join(COLUMNS)}\n{','.join(cells)}\n", encoding="utf-8"
    )


@pytest.mark.parametrize(
    "make",
    [
        _nothing,
        _state,
        _recipe,
        _half_a_state,
        _trackers,
        _half_a_network,
        _networks,
        _a_first_row,
    ],
)
def test_what_a_run_makes_before_its_first_state_is_no_hindrance(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    make(tmp_path / "run")
    Folder(tmp_path / "run", {}).check_new()


def _thesis(folder: Path) -> None:
    folder.mkdir()
    (folder / "thesis.tex").write_text("years", encoding="utf-8")


def _thesis_beside(folder: Path) -> None:
    begun(folder)
    (folder / "thesis.tex").write_text("years", encoding="utf-8")


def _hidden(folder: Path) -> None:
    begun(folder)
    (folder / ".git").mkdir()


def _own_best(folder: Path) -> None:
    (folder / "best").mkdir(parents=True)
    (folder / "best" / "model.safetensors").write_text("years", encoding="utf-8")


def _best_without_state(folder: Path) -> None:
    _a_first_row(folder)
    (folder / "state").rmdir()


def _a_trained_row(folder: Path) -> None:
    _a_first_row(folder)
    with (folder / "metrics.csv").open("a", encoding="utf-8") as opened:
        opened.write(f"1,4{',' * (len(COLUMNS) - 2)}\n")


def _own_metrics(folder: Path) -> None:
    _networks(folder)
    (folder / "metrics.csv").write_text("epoch,accuracy\n1,0.5\n", encoding="utf-8")


def _own_recipe(folder: Path) -> None:
    folder.mkdir()
    (folder / "recipe.yaml").write_text("# years of thought\nsummary: mine\n", encoding="utf-8")


def _own_state(folder: Path) -> None:
    _state(folder)
    (folder / "state" / "of-mind.txt").write_text("years", encoding="utf-8")


def _own_hidden(folder: Path) -> None:
    begun(folder)
    (folder / ".best.abcdefgh").mkdir()
    (folder / ".best.abcdefgh" / "thesis.tex").write_text("years", encoding="utf-8")


def _own_hidden_best(folder: Path) -> None:
    begun(folder)
    (folder / ".best.abcdefgh" / "best").mkdir(parents=True)
    (folder / ".best.abcdefgh" / "thesis.tex").write_text("years", encoding="utf-8")


def _hidden_trackers(folder: Path) -> None:
    """A run writes trackers/ in its place, so it leaves no such folder."""
    begun(folder)
    (folder / ".trackers.abcdefgh").mkdir()


def _link(folder: Path) -> None:
    begun(folder)
    (folder.parent / "elsewhere").mkdir()
    (folder / "best").symlink_to("../elsewhere")


def _file(folder: Path) -> None:
    folder.write_text("years", encoding="utf-8")


def _best_is_a_file(folder: Path) -> None:
    begun(folder)
    (folder / "best").write_text("years", encoding="utf-8")


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "make",
    [
        _thesis,
        _thesis_beside,
        _hidden,
        _own_best,
        _best_without_state,
        _a_trained_row,
        _own_metrics,
        _own_recipe,
        _own_state,
        _own_hidden,
        _own_hidden_best,
        _hidden_trackers,
        _link,
        _file,
        _best_is_a_file,
    ],
)
@pytest.mark.parametrize("resume", [None, "auto"])
def test_what_no_run_makes_is_refused_and_stays(
    make: Callable[[Path], None], resume: str | None, images: Path, tmp_path: Path
) -> None:
    make(tmp_path / "run")
    before = everything(tmp_path)

    with pytest.raises(OutputError, match="run exists, and no run can be continued there"):
        train(network(), plan_of(images), tmp_path / "run", resume=resume)

    assert everything(tmp_path) == before


def plan_of(images: Path) -> Recipe:
    return recipe(images, **SHORT)


def everything(folder: Path) -> dict[str, bytes | None]:
    found: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        found[str(path.relative_to(folder))] = path.read_bytes() if path.is_file() else None
    return found


def state_folder(out: Path) -> Folder:
    """A run's folder in which a state can be written."""
    folder = Folder(out, identify(network(), recipe("images"), "digest"))
    folder.state.parent.mkdir(parents=True)
    return folder


POSITION = TrainingState(
    update=7,
    rows=[{"epoch": 1.0, "top1": None}],
    loss=1.5,
    seconds=2.5,
    best=-3.0,
    best_epoch=0.5,
)
PARTS: State = {
    "model": {"weight": torch.tensor([1.0, 2.0])},
    "ema": {"weight": torch.tensor([3.0, 4.0])},
    "optimizer": {"state": {0: {"momentum_buffer": torch.ones(2)}}, "param_groups": [{"lr": 0.1}]},
    "scaler": {"scale": 8.0},
}


@pytest.mark.parametrize("stated", [{"mean": (0.5,)}, {"std": (0.5,)}, {"crop_pct": 0.7}])
def test_images_that_are_prepared_in_another_way_are_another_run(stated: dict[str, Any]) -> None:
    plan = recipe("images")
    other = preprocessing.state(network(), Preprocessing(**stated))
    assert identify(network(), plan, "digest") != identify(other, plan, "digest")


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    folder = state_folder(tmp_path / "run")

    folder.write_state(POSITION, PARTS)
    position, parts = Folder(folder.place, folder.identity).read_state()

    assert position == POSITION
    torch.testing.assert_close(parts, PARTS, rtol=0, atol=0)


def test_a_state_that_knew_fewer_keys_had_their_defaults(tmp_path: Path) -> None:
    folder = state_folder(tmp_path / "run")
    whole = dict(folder.identity)
    for key in ("train.bce", "schedule.by_epoch", "data.augment.mixup_switch"):
        del folder.identity[key]
    folder.write_state(POSITION, PARTS)

    position, _ = Folder(folder.place, whole).read_state()

    assert position == POSITION
    with pytest.raises(OptionError, match=r"train\.bce was False, is True"):
        Folder(folder.place, {**whole, "train.bce": True}).read_state()


_SECOND = """
import sys
from pathlib import Path
from normswap.errors import OutputError
from normswap.training.run_folder import Folder
try:
    Folder(Path(sys.argv[1]), {}).hold()
except OutputError as error:
    print(error)
else:
    print("held")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="nothing is locked there")
def test_one_process_trains_in_a_folder_at_a_time(tmp_path: Path) -> None:
    """Also before it has written its first state: a conversion may take minutes."""
    place = tmp_path / "run"

    def second() -> str:
        command = [sys.executable, "-c", _SECOND, str(place)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    folder = Folder(place, {})
    folder.hold()
    assert f"a run is going on in {place}" in second()

    folder.release()
    assert not place.exists(), "nothing was written, and nothing stays"
    # A process that is killed loses its lock. What it leaves stands in nobody's way.
    assert "held" in second()
    assert (place / "state" / ".normswap").is_file()
    Folder(place, {}).check_new()
    assert "held" in second()


def test_a_run_that_fails_before_it_begins_leaves_an_empty_folder_as_it_was(
    images: Path, tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    plan = recipe(images, convert={"to": "rmsnorm"}, **SHORT)
    with pytest.raises(NormswapError):
        train(network(), plan, tmp_path / "run")
    assert [*tmp_path.joinpath("run").iterdir()] == []


def test_nothing_is_locked_after_a_run(images: Path, tmp_path: Path) -> None:
    train(network(), plan_of(images), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "state").iterdir()] == ["run.pt"]
