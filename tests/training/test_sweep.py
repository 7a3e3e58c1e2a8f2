"""Sweeps: grids, the best k of n, several workers, workers that die, runs that diverge."""

import csv
import itertools
import shutil
import sqlite3
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from support.command_line import MODEL, as_documented, environment
from support.kept_runs import files_of, same, table

from normswap.cli.app import main
from normswap.cli.commands import sweep_command
from normswap.errors import NormswapError, OptionError, SourceError, TrainingError
from normswap.training import engine, recipe_files, sweep as sweeps
from normswap.training.engine import TrainingRun
from normswap.training.recipe import Recipe
from normswap.training.sweep import Point, RunEnd, Sweep, Trial, parse_rates

optuna.logging.set_verbosity(optuna.logging.WARNING)

RECIPE = recipe_files.check({"summary": "For the tests"}, "test")
NETWORK = {"model": "resnet18", "weights": "random"}


def grid(lrs: list[float], seeds: int) -> list[Point]:
    return list(itertools.product(lrs, range(seeds)))


GRID = grid([0.25, 0.5, 1.0], 2)


def sweep(place: Path, chosen: list[Point] = GRID, recipe: Recipe = RECIPE, **more: Any) -> Sweep:
    return Sweep(recipe, more.pop("subject", NETWORK), chosen, place, **more)


def score(recipe: Recipe, folder: Path) -> RunEnd:
    """Best at lr 0.5."""
    top1 = 90 - 10 * abs(recipe.optim.lr - 0.5) + recipe.train.seed / 10
    return RunEnd(top1, train_loss=recipe.optim.lr, classes=10, images=1000)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("2^-4..2^1", [0.0625, 0.125, 0.25, 0.5, 1, 2]),
        ("2^0..2^0", [1]),
        ("0.1, 0.01", [0.01, 0.1]),
        ("10^-3..10^-1", [0.001, 0.01, 0.1]),
        ("1e-3,2^-1,2^-3..2^-2,0.5", [0.001, 0.125, 0.25, 0.5]),
    ],
)
def test_grids(text: str, values: list[float]) -> None:
    assert parse_rates(text) == pytest.approx(values, rel=1e-15)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "fast",
        "0",
        "-1",
        "inf",
        "0.1,,0.2",
        "2^99999",
        "0^-1",
        "2^1..2^-1",
        "2^-4..1",
        "10^-1..2^1",
        "2^0..2^5000",
    ],
)
def test_grids_that_make_no_sense(text: str) -> None:
    with pytest.raises(OptionError, match=r"^--lr: .*names no positive rates"):
        parse_rates(text)


def trials(lr: float, *top1: float | None) -> list[Trial]:
    found = []
    for seed, accuracy in enumerate(top1):
        state = "diverged" if accuracy is None else "done"
        found.append(Trial(lr, seed, state, accuracy))
    return found


def test_mean_and_deviation_of_the_best() -> None:
    scores = (90.0, 91.5, 10.0, 92.0, 89.5, 91.0, 90.5)
    worse = trials(0.2, *(v - 1 for v in scores))
    low, high = sweeps.lines([*trials(0.1, *scores), *worse], 7, 5)
    assert low.mean == pytest.approx(statistics.fmean([90.0, 91.5, 92.0, 91.0, 90.5]))
    assert low.std == pytest.approx(statistics.stdev([90.0, 91.5, 92.0, 91.0, 90.5]))
    assert (low.counted, low.runs, low.lost, low.full, low.best) == (5, 7, 0, True, True)
    assert not high.best


def test_runs_that_diverge_are_among_the_worst() -> None:
    few = sweeps.lines(trials(0.1, 90, None, 91, None, 92, 93, 94), 7, 5)[0]
    assert (few.mean, few.lost, few.full) == (92, 2, True)
    many = sweeps.lines(
        [*trials(0.1, 95, None, None, None, 95, 95, 95), *trials(0.2, *[80.0] * 7)], 7, 5
    )
    assert [line.best for line in many] == [False, True], "a mean of fewer than k cannot win"
    none = sweeps.lines(trials(0.1, None, None), 2, 2)
    assert (none[0].mean, none[0].std, none[0].best) == (None, None, False)


@pytest.mark.parametrize(("seeds", "kept"), [(1, 1), (3, 3), (4, 4), (5, 3), (7, 5), (15, 13)])
def test_how_many_count(seeds: int, kept: int) -> None:
    assert sweeps.count_best(seeds) == kept
    assert sweeps.count_best(seeds, 1) == 1
    with pytest.raises(OptionError, match=f"--best {seeds + 1} of {seeds}"):
        sweeps.count_best(seeds, seeds + 1)


def test_a_tie_has_no_winner() -> None:
    trials = [
        Trial(lr, 0, "done", top1=top1) for lr, top1 in ((0.1, 80.0), (0.2, 85.0), (0.4, 85.0))
    ]
    found = sweeps.lines(trials, 1, 1)
    assert not any(line.best for line in found)
    assert sweeps.notes(trials, found, True) == [
        "lr 0.2, 0.4 are level: none is the best; more seeds or images tell them apart"
    ]


def test_a_best_lr_at_the_edge_is_said() -> None:
    found = [*trials(0.1, 90), *trials(0.2, 91), *trials(0.4, 92)]
    assert sweeps.notes(found, sweeps.lines(found, 1, 1), True) == [
        "the best lr is at the edge of the grid: try further ones"
    ]
    middle = [*trials(0.1, 90), *trials(0.2, 95), *trials(0.4, 92)]
    assert sweeps.notes(middle, sweeps.lines(middle, 1, 1), True) == []


def test_the_range_of_good_rates_is_what_the_deviation_of_the_best_cannot_tell_apart() -> None:
    """The best has a mean of 91 and a deviation of 1."""
    runs = [
        *trials(0.1, 89.8, 89.9),
        *trials(0.2, 90, 90.2),
        *trials(0.4, 91 - 0.5**0.5, 91 + 0.5**0.5),
    ]
    found = sweeps.lines([*runs, *trials(0.8, 90.5, None)], 2, 2)
    assert "good rates: 0.2 to 0.4, within one standard deviation of the best" in sweeps.notes(
        runs, found, True
    )


@pytest.mark.slow
def test_every_point_is_run_once(tmp_path: Path) -> None:
    given = ["optim.lr=9", "optim.momentum=0.5", "optim.scalar_lr=0.1", "train.seed=9"]
    given += ["train.epochs=3", "train.smoothing=0.2", "data.batch_size=16", "distill.weight=0.7"]
    whole = recipe_files.check(RECIPE.model_dump(), "test", given)
    seen: list[tuple[float, int, str]] = []
    recipes: list[Recipe] = []

    def train(recipe: Recipe, folder: Path) -> RunEnd:
        seen.append((recipe.optim.lr, recipe.train.seed, folder.name))
        recipes.append(recipe)
        return score(recipe, folder)

    said: list[str] = []
    assert sweep(tmp_path / "s", recipe=whole).work(train, progress=said.append)
    assert sorted(seen) == [(lr, seed, f"lr-{lr:g}-seed-{seed}") for lr, seed in GRID]
    for recipe, (lr, seed, _) in zip(recipes, seen, strict=True):
        own = [f"optim.lr={lr}", f"train.seed={seed}"]
        assert recipe == recipe_files.check(whole.model_dump(), "test", own)
    assert said == [f"lr {lr:g}, seed {seed} ({i} of 6)" for i, (lr, seed, _) in enumerate(seen, 1)]
    again = sweep(tmp_path / "s", recipe=whole)
    assert again.work(lambda recipe, folder: pytest.fail("run again"))
    assert [(one.lr, one.seed, one.state, one.top1) for one in again.trials()] == [
        (lr, seed, "done", 90 - 10 * abs(lr - 0.5) + seed / 10) for lr, seed in GRID
    ]
    assert [line.best for line in sweeps.lines(again.trials(), 2, 2)] == [False, True, False]


def test_a_grid_may_grow(tmp_path: Path) -> None:
    sweep(tmp_path / "s", grid([0.25], 2)).work(score)
    seen: list[tuple[float, int]] = []

    def train(recipe: Recipe, folder: Path) -> RunEnd:
        seen.append((recipe.optim.lr, recipe.train.seed))
        return score(recipe, folder)

    assert sweep(tmp_path / "s", grid([0.25, 0.5], 2)).work(train)
    assert sorted(seen) == [(0.5, 0), (0.5, 1)]


@pytest.mark.slow
def test_workers_share_the_points(tmp_path: Path) -> None:
    seen: list[tuple[float, int]] = []
    gate = threading.Barrier(3)
    lock = threading.Lock()
    chosen = grid([0.25, 0.5], 3)

    def train(recipe: Recipe, folder: Path) -> RunEnd:
        with lock:
            seen.append((recipe.optim.lr, recipe.train.seed))
        return score(recipe, folder)

    def worker() -> None:
        mine = sweep(tmp_path / "s", chosen)
        gate.wait()
        mine.work(train)

    threads = [threading.Thread(target=worker) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == chosen
    assert len(sweep(tmp_path / "s", chosen).trials()) == 6


def test_runs_that_fail_are_rows(tmp_path: Path) -> None:
    def train(recipe: Recipe, folder: Path) -> RunEnd:
        if recipe.optim.lr == 1:
            raise TrainingError("the loss is nan at update 3")
        if recipe.optim.lr == 0.5 and recipe.train.seed == 1:
            raise RuntimeError("CUDA out of memory\nmore")
        return score(recipe, folder)

    found = sweep(tmp_path / "s")
    assert found.work(train)
    states = {(one.lr, one.seed): (one.state, one.note) for one in found.trials()}
    assert states[1.0, 0] == ("diverged", "the loss is nan at update 3")
    assert states[0.5, 1] == ("failed", "CUDA out of memory")
    assert states[0.5, 0] == ("done", "")
    assert [line.lost for line in sweeps.lines(found.trials(), 2, 1)] == [0, 1, 2]


def test_a_run_at_chance_is_lost(tmp_path: Path) -> None:
    """Guessing one of 10 classes, 1000 times, has a deviation of 0.95 points."""
    guessed = {0: 12.8, 1: 12.9}

    def train(recipe: Recipe, folder: Path) -> RunEnd:
        return RunEnd(guessed[recipe.train.seed], train_loss=2.3, classes=10, images=1000)

    found = sweep(tmp_path / "s", grid([0.5], 2))
    assert found.work(train)
    low, high = found.trials()
    assert (low.state, low.top1, low.train_loss) == ("at chance", 12.8, 2.3)
    assert (high.state, high.top1) == ("done", 12.9)
    (line,) = sweeps.lines(found.trials(), 2, 1)
    assert (line.mean, line.lost, line.full) == (12.9, 1, True)
    assert "at chance" in sweeps.notes(found.trials(), [line], True)[0]


@pytest.mark.slow
def test_what_is_wrong_with_every_run_ends_the_sweep_and_is_tried_again(tmp_path: Path) -> None:
    def wrong(recipe: Recipe, folder: Path) -> RunEnd:
        raise SourceError("/nowhere does not exist")

    with pytest.raises(SourceError, match="nowhere"):
        sweep(tmp_path / "s").work(wrong)
    found = sweep(tmp_path / "s")
    assert found.trials() == []
    assert found.work(score)
    assert len(found.trials()) == 6


def test_a_run_that_is_asked_to_stop_stops_the_worker(tmp_path: Path) -> None:
    left = [3]

    def train(recipe: Recipe, folder: Path) -> RunEnd | None:
        left[0] -= 1
        return score(recipe, folder) if left[0] else None

    first = sweep(tmp_path / "s")
    assert not first.work(train)
    assert len(first.trials()) == 2
    assert first.work(score), "the same worker goes on"
    assert len(first.trials()) == 6


def until(file: Path) -> None:
    """Wait for a file; not for ever, as the test that makes it may fail."""
    for _ in range(1200):
        if file.exists():
            return
        time.sleep(0.1)


def start(place: Path, first: str, then: str) -> subprocess.Popen[str]:
    """A worker in another process with a quick pulse, that does this in its first run and that in
    its second.
    """
    code = (
        "import os, sys, time; from pathlib import Path; import test_sweep as t; t.sweeps.BEAT,"
        " t.sweeps.GRACE = 1, 3\nleft = [2]\ndef train(recipe, folder):\n    left[0] -= 1\n   "
        f" {first} if left[0] else {then}\n    print('ran', folder.name, flush=True)\n    return"
        " t.score(recipe, folder)\nt.sweep(Path(sys.argv[1])).work(train)"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, str(place)]
    return subprocess.Popen(
        command, cwd=Path(__file__).parent, env=environment(), stdout=subprocess.PIPE, text=True
    )


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a worker leaves that is killed in its second run."""
    place = tmp_path_factory.mktemp("killed") / "s"
    with start(place, "None", "os.kill(os.getpid(), 9)") as worker:
        worker.communicate()
    assert worker.returncode == -9
    return place


@pytest.fixture
def pulse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "BEAT", 1)
    monkeypatch.setattr(sweeps, "GRACE", 3)


@pytest.mark.slow
def test_what_a_killed_worker_had_begun_is_begun_again(
    left: Path, tmp_path: Path, pulse: None
) -> None:
    shutil.copytree(left, tmp_path / "s")
    found = sweep(tmp_path / "s")
    assert [one.state for one in found.trials()].count("running") == 1
    assert found.work(score)
    assert [one.state for one in found.trials()] == ["done"] * 6


@pytest.mark.slow
def test_what_a_living_worker_has_begun_is_its_own(tmp_path: Path, pulse: None) -> None:
    """It takes longer than a dead one is waited for."""
    go = tmp_path / "go"
    worker = start(tmp_path / "s", f"t.until(Path({str(go)!r}))", "None")

    while (
        not (tmp_path / "s" / "sweep.db").is_file() or not (found := sweep(tmp_path / "s")).trials()
    ):
        time.sleep(0.1)

    assert not found.work(score)

    states = [one.state for one in found.trials()]
    assert (states.count("done"), states.count("running")) == (5, 1)

    said = sweeps.notes(found.trials(), sweeps.lines(found.trials(), 2, 2), False)
    assert "not all runs have ended" in said[0]

    go.touch()
    assert str(worker.communicate()[0]).count("ran") == 1
    assert [one.state for one in found.trials()] == ["done"] * 6


def changed(key: str, value: str) -> Callable[[], Sweep]:
    return lambda: sweep(
        Path("s"), recipe=recipe_files.check(RECIPE.model_dump(), "test", [f"{key}={value}"])
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            changed("optim.weight_decay", "0.1"),
            "s holds another sweep: optim.weight_decay was 5e-05, is 0.1",
        ),
        (
            changed("convert.to", "skipinit"),
            "s holds another sweep: convert.calibrate was None, is False",
        ),
        (
            lambda: sweep(Path("s"), subject={"model": "resnet34"}),
            "model was 'resnet18', is 'resnet34'",
        ),
        (lambda: sweep(Path("s"), url="nonsense://x"), "nonsense://x is no storage of sweeps"),
    ],
)
def test_another_sweep_needs_another_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Callable[[], Sweep], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    sweep(Path("s"))
    with pytest.raises(NormswapError) as caught:
        other()
    assert message in str(caught.value)
    changed("data.root", "/other/mount")()  # where the images are may differ between machines
    changed("summary", "other words")()


@pytest.mark.parametrize("url", ["nonsense://me:pass:w@rd@host:port/x", "://me:passw@rd@host"])
def test_the_password_of_a_storage_is_not_printed(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "_ATTEMPTS", 1)
    with pytest.raises(SourceError, match=r"://me:\*\*\*@host.* is no storage") as caught:
        sweep(tmp_path / "s", url=url)
    assert "rd" not in str(caught.value)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_command, "trainer", lambda *given: score)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: None) -> None:
    recipe = tmp_path / "mine.yaml"
    out = tmp_path / "out"
    recipe.write_text("summary: For the tests\n", encoding="utf-8")
    images = ["data.root=demo", "data.validation=demo"]
    model = ["resnet18", "train.epochs=2", *images]
    command = ["sweep", str(recipe), *model, "--lr", "2^-2..2^0", "--seeds", "3", "-o", str(out)]

    assert main([*command, "--best", "2", "--json"]) == 0

    body = as_documented(capsys.readouterr().out, "sweep")
    assert body["done"]
    assert (body["seeds"], body["counted"]) == (3, 2)
    assert [(line["lr"], line["best"], line["runs"]) for line in body["lines"]] == [
        (0.25, False, 3),
        (0.5, True, 3),
        (1.0, False, 3),
    ]
    assert body["lines"][1]["mean"] == pytest.approx(90.15)

    with (out / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["done"] * 9
    assert all(float(row["train_loss"]) == float(row["lr"]) for row in rows)
    assert main(command) == 0

    printed = capsys.readouterr().out
    assert "mean and std of the best 3 of 3 runs" in printed

    line = next(line for line in printed.splitlines() if line.strip().startswith("0.5 "))
    assert line.split() == ["0.5", "90.10", "±", "0.10", "3", "3", "best"]
    assert f"normswap finetune {' '.join(model)} --recipe {recipe} optim.lr=0.5" in " ".join(
        printed.split()
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["resnet18"], "--lr is not given"),
        (["resnet18", "--lr", "2^3..2^1"], "--lr: '2^3..2^1' names no positive rates"),
        (["--lr", "0.1"], "nothing to train"),
        (
            ["resnet18", "resnet34", "--lr", "0.1"],
            "'resnet34' is neither the MODEL (that is resnet18) nor KEY=VALUE",
        ),
        (
            ["resnet18", "optim.lr=1", "--lr", "0.1"],
            "optim.lr and train.seed are what a sweep varies",
        ),
        (["resnet18", "optim.lrr=1", "--lr", "0.1"], "unknown key optim.lrr"),
        (["resnet18", "--lr", "0.1", "--seeds", "2", "--best", "3"], "--best 3 of 2 runs"),
    ],
)
def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fake: None, words: list[str], message: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    out = tmp_path / "out"
    recipe.write_text("summary: For the tests\n", encoding="utf-8")
    assert main(["sweep", str(recipe), *words, "-o", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_without_optuna_the_error_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(OptionError, match=r"pip install -e '\.\[train\]'"):
        sweep(tmp_path / "s")


def test_workers_wait_for_each_other_in_sqlite(tmp_path: Path) -> None:
    """Where a read locks nothing, two may take the same trial."""
    storage = sweep(tmp_path / "s")._storage(f"sqlite:///{tmp_path / 'one.db'}")
    with (
        storage.engine.begin(),
        sqlite3.connect(tmp_path / "one.db", timeout=0.0) as other,
        pytest.raises(sqlite3.OperationalError, match="locked"),
    ):
        other.execute("BEGIN IMMEDIATE")


def recorded(state: str, lr: float | None, **more: Any) -> Any:
    """A trial as Optuna keeps it. Without a learning rate it was started without a point."""
    point = {} if lr is None else {"fixed_params": {"lr": lr, "seed": 3}}
    more = {"value": None, "duration": None, "user_attrs": {}, **more}
    return SimpleNamespace(state=SimpleNamespace(name=state), system_attrs=point, **more)


def test_the_runs_that_were_begun_are_listed_once_whatever_stands_between() -> None:
    done = {"train_loss": 0.5, "folder": "runs/a"}
    lost = {"lost": "diverged", "note": "the loss is nan"}
    minute = timedelta(minutes=1)
    found = Sweep.__new__(Sweep)
    found.__dict__["_valid"] = lambda: [
        recorded("WAITING", 0.5),
        recorded("RUNNING", None),
        recorded("COMPLETE", 0.25, value=91.5, duration=minute, user_attrs=done),
        recorded("FAIL", 0.125, user_attrs=lost),
        recorded("RUNNING", 0.25),
        recorded("RUNNING", 1.0),
    ]

    assert found.trials() == [
        Trial(0.125, 3, "diverged", note="the loss is nan"),
        Trial(0.25, 3, "done", 91.5, 0.5, "", "runs/a", 60.0),
        Trial(1.0, 3, "running", note=""),
    ]


@pytest.mark.parametrize("model", ["net", None])
def test_a_run_is_handed_to_the_training_and_its_last_row_counts(
    model: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    rows: list[dict[str, float | None]] = [
        {"top1": 90.0, "train_loss": 9.0},
        {"top1": 55.5, "train_loss": 0.75},
    ]
    result = SimpleNamespace(
        rows=rows, finished=True, model=SimpleNamespace(num_classes=7), validated=41
    )

    def finetune(source: object, recipe: Recipe, folder: Path, **options: Any) -> Any:
        given.update(source=source, recipe=recipe, folder=folder, **options)
        return result

    def shown(_: engine.TrainingProgress) -> None:
        pass

    monkeypatch.setattr(engine, "finetune", finetune)
    opening: Any = SimpleNamespace(open=lambda name: f"the network {name}")

    train = sweep_command.trainer(model, opening, "cuda", shown)

    assert train(RECIPE, tmp_path) == RunEnd(55.5, train_loss=0.75, classes=7, images=41)
    assert given == {
        "source": "the network net" if model else None,
        "recipe": RECIPE,
        "folder": tmp_path,
        "resume": "auto",
        "device": "cuda",
        "track": "none",
        "progress": shown,
    }
    result.finished = False
    assert train(RECIPE, tmp_path) is None
    result.finished = True
    rows[-1] = {"top1": None, "train_loss": 0.5}
    assert train(RECIPE, tmp_path) is None


class Killed(BaseException):
    """What takes the place of SIGKILL where the process should live on."""


def kill_before(update: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a process die when it begins this update, counted over all its runs from 0."""
    done = itertools.count()
    update_once = TrainingRun.update

    def dying(self: TrainingRun, batches: Any) -> None:
        if next(done) == update:
            raise Killed
        update_once(self, batches)

    monkeypatch.setattr(TrainingRun, "update", dying)


def all_heartbeats_stop(out: Path) -> None:
    """Make the last sign of life of each worker an old one, instead of waiting for a minute."""
    with sqlite3.connect(out / "sweep.db") as database:
        database.execute("UPDATE trial_heartbeats SET heartbeat = '2020-01-01 00:00:00'")


def kept_by_sweep(out: Path) -> list[tuple[Any, ...]]:
    """The runs that have ended, in runs.csv and in the database, without folders and seconds."""
    with (out / "runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    columns = ("lr", "seed", "state", "top1", "train_loss", "note")
    kept: list[tuple[Any, ...]] = [tuple(row[name] for name in columns) for row in rows]

    study = optuna.load_study(study_name=None, storage=f"sqlite:///{out / 'sweep.db'}")
    for trial in study.get_trials():
        if trial.state.name == "COMPLETE":
            notes = {key: value for key, value in trial.user_attrs.items() if key != "folder"}
            kept.append((*sorted(trial.params.items()), trial.value, notes))
    return sorted(kept, key=repr)


def test_a_run_whose_worker_has_died_is_handed_out_again_and_no_other_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = grid([0.25, 0.5], 1)
    begun: list[tuple[float, str]] = []

    def dies_in_the_second(recipe: Recipe, folder: Path) -> RunEnd:
        begun.append((recipe.optim.lr, folder.name))
        if len(begun) == 2:
            raise Killed
        return score(recipe, folder)

    with pytest.raises(Killed):
        sweep(tmp_path / "s", chosen).work(dies_in_the_second)
    all_heartbeats_stop(tmp_path / "s")
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(sleep=lambda _: None))
    found = sweep(tmp_path / "s", chosen)

    assert found.work(dies_in_the_second)

    first, second = ("lr-0.25-seed-0", "lr-0.5-seed-0")
    assert begun == [(0.25, first), (0.5, second), (0.5, second)]
    rows = [(run.lr, run.seed, run.state, run.top1, run.train_loss) for run in found.trials()]
    assert rows == [(0.25, 0, "done", 87.5, 0.25), (0.5, 0, "done", 90.0, 0.5)]
    assert [run.folder for run in found.trials()] == [
        str(tmp_path / "s/runs" / name) for name in (first, second)
    ]


@pytest.mark.slow
def test_a_killed_sweep_that_is_continued_ends_as_an_uncut_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It dies in the second update of its second run, which has three."""
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("summary: For the tests\ndata: {augment: {mixup: 0.2}}\n", encoding="utf-8")
    command = ["sweep", str(recipe), MODEL, "--lr", "0.001,0.3", "--json", "--device", "cpu"]
    command += ["data.root=demo", "data.validation=demo", "data.samples=24"]
    command += ["data.validation_samples=40", "data.batch_size=8", "data.workers=0"]
    command += ["train.epochs=1", "train.checkpoint=1", "train.ema.decay=0.9"]
    assert main([*command, "-o", str(tmp_path / "whole")]) == 0
    uncut = as_documented(capsys.readouterr().out, "sweep")

    with monkeypatch.context() as patch:
        kill_before(4, patch)
        with pytest.raises(Killed):
            main([*command, "-o", str(tmp_path / "cut")])
    all_heartbeats_stop(tmp_path / "cut")
    monkeypatch.setattr(sweeps, "time", SimpleNamespace(sleep=lambda _: None))
    capsys.readouterr()
    assert main([*command, "-o", str(tmp_path / "cut")]) == 0
    continued = as_documented(capsys.readouterr().out, "sweep")

    assert [line["best"] for line in uncut["lines"]] == [True, False]
    assert continued["lines"] == uncut["lines"]
    assert (continued["notes"], continued["done"]) == (uncut["notes"], True)
    assert kept_by_sweep(tmp_path / "cut") == kept_by_sweep(tmp_path / "whole")
    for name in ("lr-0.001-seed-0", "lr-0.3-seed-0"):
        whole = tmp_path / "whole/runs" / name
        cut = tmp_path / "cut/runs" / name
        assert same(whole, cut)
        assert table(whole) == table(cut)
        assert files_of(whole) == files_of(cut)
