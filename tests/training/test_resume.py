"""Nothing is lost: a run that was killed, stopped or restarted ends in the weights of the
uninterrupted one.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.kept_runs import files_of, same, table
from support.sampled_tables import quick
from support.small_trainings import (
    command,
    made,
    merged,
    network,
    recipe,
    train,
    weights,
    write_images,
)
from torch import nn

import normswap
from normswap.errors import NormswapError, OptionError, OutputError, SourceError, TrainingError
from normswap.training.assembly import Task
from normswap.training.engine import TrainingProgress, TrainingRun

BUSY: dict[
    str, Any
] = {  # everything that has a state: momentum, EMA, dropout, augmentation, mixup, annealed rate
    "data": {"augment": {"hflip": 0.5, "padding": 4, "mixup": 0.2, "erase": 0.2}},
    "train": {"epochs": 3, "ema": {"decay": 0.9}, "smoothing": 0.1},
    "schedule": {"warmup": 1},
    "optim": {"clip": {"mode": "agc", "value": 0.1}},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes started here: other threads add in another order, in the making of the
    network as well.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    made.cache_clear()
    yield
    made.cache_clear()
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 3)  # three updates per epoch


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "whole"
    train(busy(), recipe(images, **BUSY), out)
    return out


def busy() -> nn.Module:
    return network("regularized-skipinit")


class Killed(BaseException):
    """What takes the place of SIGKILL where the process should live on."""


def train_until(update: int, model: nn.Module, plan: Any, out: Path, **options: Any) -> None:
    def kill(moment: TrainingProgress) -> None:
        if moment.update == update:
            raise Killed

    with pytest.raises(Killed):
        train(model, plan, out, progress=kill, **options)


@pytest.mark.parametrize("every", quick([None, 7], [7]))
def test_a_continued_run_ends_as_the_uninterrupted_one(
    images: Path, whole: Path, tmp_path: Path, every: int | None
) -> None:
    plan = recipe(images, **{**BUSY, "train": {**BUSY["train"], "checkpoint": every}})
    train_until(5, busy(), plan, tmp_path / "cut")
    train_until(8, busy(), plan, tmp_path / "cut", resume="auto")
    torch.manual_seed(5)  # another process would have another state
    result = train(busy(), plan, tmp_path / "cut", resume="auto")

    assert result.finished
    assert result.notes == (f"continuing at update {6 if not every else 7} of 9",)
    assert same(whole, tmp_path / "cut")
    assert table(whole) == table(tmp_path / "cut")

    again = train(busy(), plan, tmp_path / "cut", resume="auto")  # there is nothing left to do
    assert again.updates == 9
    assert same(whole, tmp_path / "cut")


# What else has a state, or makes one anew where a run goes on: beside `BUSY`.
ALSO: dict[str, dict[str, Any]] = {
    "teacher": {"convert": {"to": "skipinit"}, "distill": {"weight": 0.7}},
    "teacher of another network": {"distill": {"teacher": "a directory"}},
    "clipping by norm": {"optim": {"clip": {"mode": "norm", "value": 0.1}}},
    "AdamW": {"optim": {"name": "adamw", "clip": None}},
    "accumulation": {"train": {"accumulate": 2}},
    "bfloat16": {"train": {"precision": "bf16"}},
    "layer decay": {"optim": {"layer_decay": 0.5, "scalar_lr": 0.1}},
    "repeated images": {"data": {"augment": {"repeats": 3}}},
    "steps": {"schedule": {"name": "step", "milestones": [1], "warmup": 0}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALSO)
def test_a_continued_run_ends_as_the_uninterrupted_one_whatever_it_has(
    images: Path, tmp_path: Path, name: str
) -> None:
    parts = merged(merged(BUSY, {"train": {"checkpoint": 2}}), ALSO[name])
    if name == "teacher of another network":
        teacher = normswap.save(
            normswap.convert(network(), "affine", input_size=(3, 32, 32)), tmp_path / "teacher"
        )
        parts["distill"] = {"teacher": str(teacher)}
    plan = recipe(images, **parts)

    def start() -> nn.Module:
        return network() if "convert" in parts else busy()

    train(start(), plan, tmp_path / "whole")
    train_until(3, start(), plan, tmp_path / "cut")
    train_until(6, start(), plan, tmp_path / "cut", resume="auto")
    torch.manual_seed(5)
    train(start(), plan, tmp_path / "cut", resume="auto")

    assert same(tmp_path / "whole", tmp_path / "cut")
    assert table(tmp_path / "whole") == table(tmp_path / "cut")
    assert files_of(tmp_path / "whole") == files_of(tmp_path / "cut")


def test_the_scale_of_gradients_in_half_precision_is_continued() -> None:
    """Only a GPU has one in a run: torch's for the CPU takes its place."""

    def task(scaler: Any) -> Any:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=1)
        return SimpleNamespace(
            raw=model, ema=None, optimizer=optimizer, engine=SimpleNamespace(scaler=scaler)
        )

    before, after, fresh = (
        task(torch.amp.GradScaler("cpu", init_scale=scale)) for scale in (8.0, 4.0, 2.0)
    )
    Task.restore(after, Task.parts(before))
    assert after.engine.scaler.get_scale() == 8
    Task.restore(fresh, Task.parts(task(None)))
    assert fresh.engine.scaler.get_scale() == 2, "of a run that had none"
    Task.restore(task(None), Task.parts(before))


def test_the_comparison_notices(images: Path, whole: Path, tmp_path: Path) -> None:
    train(
        busy(), recipe(images, **{**BUSY, "train": {**BUSY["train"], "seed": 1}}), tmp_path / "two"
    )
    assert not same(whole, tmp_path / "two")


@pytest.mark.slow
def test_sigterm_saves_and_can_be_continued(images: Path, whole: Path, tmp_path: Path) -> None:
    plan = recipe(images, **BUSY)

    def terminate(moment: TrainingProgress) -> None:
        if moment.update == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    stopped = train(busy(), plan, tmp_path / "cut", progress=terminate)
    assert signal.getsignal(signal.SIGTERM) is before
    assert not stopped.finished
    assert stopped.updates == 5
    result = train(busy(), plan, tmp_path / "cut", resume="auto")
    assert result.notes[0] == "continuing at update 5 of 9"
    assert same(whole, tmp_path / "cut")


@pytest.mark.slow
def test_a_scheduler_terminates_every_process_of_a_job(
    images: Path, whole: Path, tmp_path: Path
) -> None:
    """Those that load images as well: the run still saves and ends with 0."""
    parts = {**BUSY, "data": {**BUSY["data"], "workers": 2}}
    words = command(
        images, tmp_path / "cut", "regularized-skipinit", json.dumps(parts), "--nap", 0.3
    )
    process = subprocess.Popen(
        words, env={**os.environ, "OMP_NUM_THREADS": "1"}, start_new_session=True
    )
    while not (tmp_path / "cut/state/run.pt").exists() and process.poll() is None:
        time.sleep(0.02)
    time.sleep(0.8)
    os.killpg(process.pid, signal.SIGTERM)

    assert process.wait() == 0
    assert not same(whole, tmp_path / "cut")

    train(
        busy(), recipe(images, **BUSY), tmp_path / "cut", resume="auto"
    )  # loaded otherwise, and yet the same

    assert same(whole, tmp_path / "cut")


def spawn(
    images: Path,
    out: Path,
    parts: dict[str, Any],
    *words: object,
    scheme: str = "skipinit",
    **run: Any,
) -> None:
    """Several processes under torchrun, two by default."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(run.get("processes", 2)),
    ]
    torchrun += ["--max-restarts", str(run.get("restarts", 0))]
    whole = [*torchrun, *command(images, out, scheme, json.dumps(parts), *words)[1:]]
    subprocess.run(
        whole, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True
    )


@pytest.mark.slow
def test_two_processes_are_as_one(images: Path, tmp_path: Path) -> None:
    """In float64, so that only the order of additions differs. Mixup, EMA, accumulation and
    clipping as well.
    """
    parts = {
        **BUSY,
        "train": {**BUSY["train"], "accumulate": 2},
        "data": {**BUSY["data"], "batch_size": 16},
    }
    spawn(images, tmp_path / "two", {**parts, "double": True})
    train(network("skipinit", double=True), recipe(images, **parts), tmp_path / "one")
    one = table(tmp_path / "one")
    two = table(tmp_path / "two")

    assert len(one) == 5  # a header, and four rows
    assert one == two  # six digits of the losses

    ours = weights(tmp_path / "one/last")
    theirs = weights(tmp_path / "two/last")
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.slow
def test_a_killed_process_is_restarted_by_torchrun_and_the_job_continues(
    images: Path, tmp_path: Path
) -> None:
    parts = {**BUSY, "train": {**BUSY["train"], "checkpoint": 2}}
    spawn(images, tmp_path / "whole", parts)

    spawn(images, tmp_path / "cut", parts, "--kill", 5, "--resume", "auto", restarts=1)

    assert (tmp_path / "cut-killed").exists()
    assert same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.long
def test_one_of_four_processes_is_killed_and_the_weights_are_those_of_an_uncut_run(
    images: Path, tmp_path: Path
) -> None:
    """In float64: the order in which four gradients are added depends on DDP's buckets.

    DDP arranges its buckets anew after the first update of a start.
    """
    parts = {**BUSY, "train": {**BUSY["train"], "checkpoint": 2}, "double": True}
    spawn(images, tmp_path / "whole", parts, processes=4)

    words = ("--kill", 5, "--resume", "auto")
    spawn(images, tmp_path / "cut", parts, *words, restarts=1, processes=4)

    assert (tmp_path / "cut-killed").exists()
    assert table(tmp_path / "whole") == table(tmp_path / "cut")
    ours = weights(tmp_path / "whole/last")
    theirs = weights(tmp_path / "cut/last")
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], rtol=1e-9, atol=1e-11), name


@pytest.mark.slow
def test_without_restarts_a_killed_process_ends_the_job(images: Path, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        spawn(images, tmp_path / "dead", BUSY, "--kill", 5)
    assert (tmp_path / "dead-killed").exists()


@pytest.mark.parametrize(
    ("parts", "scheme", "problem"),
    [
        ({"optim": {"lr": 0.02}}, "skipinit", r"optim.lr was 0.01, is 0.02"),
        ({"train": {"epochs": 3}}, "skipinit", r"train.epochs was 2.0, is 3.0"),
        ({"data": {"batch_size": 4}}, "skipinit", r"data.batch_size was 8, is 4"),
        ({}, "fixup", r"the network's hash was .*"),
    ],
)
@pytest.mark.one_in(2)
def test_another_run_is_not_continued(
    images: Path, tmp_path: Path, parts: dict[str, Any], scheme: str, problem: str
) -> None:
    train_until(4, network("skipinit"), recipe(images), tmp_path / "out")
    before = (tmp_path / "out/state/run.pt").read_bytes()
    with pytest.raises(OptionError, match=f"holds another run.*({problem})"):
        train(network(scheme), recipe(images, **parts), tmp_path / "out", resume="auto")
    assert (tmp_path / "out/state/run.pt").read_bytes() == before


@pytest.mark.slow
def test_a_run_that_knew_fewer_keys_goes_on(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train_until(4, network("skipinit"), recipe(images), out)
    body = torch.load(out / "state/run.pt", weights_only=True)
    for key in ("train.bce", "schedule.by_epoch", "data.augment.mixup_switch"):
        del body["identity"][key]
    torch.save(body, out / "state/run.pt")

    changed = recipe(images, train={"bce": True})
    with pytest.raises(OptionError, match=r"train\.bce was False, is True"):
        train(network("skipinit"), changed, out, resume="auto")
    assert train(network("skipinit"), recipe(images), out, resume="auto").finished


@pytest.mark.slow
def test_other_images_or_a_broken_state_are_not_continued(images: Path, tmp_path: Path) -> None:
    plan = recipe(images)
    train_until(4, network("skipinit"), plan, tmp_path / "out")
    others = write_images(tmp_path / "others", 5)

    with pytest.raises(OptionError, match="the images' was"):
        train(network("skipinit"), recipe(others), tmp_path / "out", resume="auto")
    with pytest.raises(OutputError, match=r'holds a run.*resume="auto"'):
        train(network("skipinit"), plan, tmp_path / "out")

    state = tmp_path / "out/state/run.pt"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(SourceError, match=r"run.pt cannot be read"):
        train(network("skipinit"), plan, tmp_path / "out", resume="auto")

    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.tex").write_text("x", encoding="utf-8")
    with pytest.raises(OutputError, match="no run can be continued there"):
        train(network("skipinit"), plan, tmp_path / "mine", resume="auto")


@pytest.mark.slow
def test_other_images_that_are_held_out_are_not_continued(tmp_path: Path) -> None:
    """Without validation images a tenth is held out of training. With some, an epoch has more
    updates, in another order.
    """
    images = write_images(tmp_path / "images", 20)
    others = write_images(tmp_path / "others", 4)
    plan = recipe(images, data={"validation": None})
    train_until(4, network("skipinit"), plan, tmp_path / "out")
    with_others = recipe(images, data={"validation": str(others)})

    with pytest.raises(OptionError, match="an epoch had 22 updates, and has 25"):
        train(network("skipinit"), with_others, tmp_path / "out", resume="auto")
    assert train(network("skipinit"), plan, tmp_path / "out", resume="auto").finished


def test_a_state_that_runs_code_is_refused(images: Path, tmp_path: Path) -> None:
    plan = recipe(images)
    file = tmp_path / "out/state/run.pt"
    train_until(4, network("skipinit"), plan, tmp_path / "out")
    body = torch.load(file, weights_only=True)

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(tmp_path / "broken_in"),))

    torch.save({**body, "optimizer": Evil()}, file)
    with pytest.raises(SourceError, match="cannot be read"):
        train(network("skipinit"), plan, tmp_path / "out", resume="auto")
    assert not (tmp_path / "broken_in").exists()


def poisoned(at: set[int], *, weights: bool = False) -> Any:
    """The loop, with a NaN in the loss of these updates, each once; or in a weight, after them."""
    original = TrainingRun.update

    def update(self: TrainingRun, batches: Any) -> None:
        original(self, batches)
        if self.at.update in at:
            at.discard(self.at.update)
            if weights:
                next(self.task.raw.parameters()).data.view(-1)[0] = float("nan")
            else:
                self.sum += float("nan")

    return update


@pytest.mark.parametrize(("at", "weights_too"), [(4, False), (5, True)], ids=["loss", "weights"])
def test_what_is_not_finite_stops_and_names_the_last_checkpoint(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int, weights_too: bool
) -> None:
    monkeypatch.setattr(TrainingRun, "update", poisoned({at}, weights=weights_too))
    match = rf"not finite at update {at + 1} of 6.*last good checkpoint is .*out/last, of update 3"
    with pytest.raises(TrainingError, match=match):
        train(network("skipinit"), recipe(images), tmp_path / "out")
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out/last").values())


def test_a_real_explosion_stops(images: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="not finite"):
        train(network("skipinit"), recipe(images, optim={"lr": 1e9}), tmp_path / "out")


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_breaks_nothing(images: Path, tmp_path: Path) -> None:
    plan = recipe(images)
    train_until(4, network("skipinit"), plan, tmp_path / "out")
    size = (tmp_path / "out/state/run.pt").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size - 1000, before[1]))

    try:
        with pytest.raises(OutputError, match=r"cannot write .*run.pt: File too large") as caught:
            train(network("skipinit"), plan, tmp_path / "out", resume="auto")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)

    assert isinstance(caught.value, NormswapError)
    assert sorted(path.name for path in (tmp_path / "out/state").iterdir()) == ["run.pt"]

    train(network("skipinit"), plan, tmp_path / "whole")
    train(network("skipinit"), plan, tmp_path / "out", resume="auto")
    assert same(tmp_path / "whole", tmp_path / "out")
