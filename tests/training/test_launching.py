"""What `--nproc` starts, and what it says of how that ended, with torch's launcher taken out; who a process is."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from normswap.errors import OptionError, OutputError, TrainingError
from normswap.training import launching, processes
from normswap.training.run_folder import Folder


def failure(code: int) -> ChildFailedError:
    return ChildFailedError("train", {1: ProcessFailure(local_rank=1, pid=2, exitcode=code, error_file="<N/A>")})


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the launcher was asked for; `raises`: what it is to end with."""
    seen: dict[str, Any] = {"raises": None}

    def launch(config: Any, entrypoint: str) -> Any:
        def call(*words: str) -> None:
            seen.update(config=config, words=words, threads=os.environ["OMP_NUM_THREADS"])
            if seen["raises"] is not None:
                raise seen["raises"]

        return call

    monkeypatch.setattr(launching.run, "elastic_launch", launch)
    monkeypatch.setenv(launching._OURS, "")
    monkeypatch.setenv("OMP_NUM_THREADS", "")  # so that what `launch` sets is taken back
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    return seen


@pytest.mark.parametrize(("processes", "threads"), [(1, "8"), (2, "4"), (3, "2"), (8, "1"), (9, "1")])
def test_processes_share_the_cores(launched: dict[str, Any], processes: int, threads: str) -> None:
    assert launching.launch(processes, ["finetune", "x"], restarts=2) == 0
    assert launched["threads"] == threads
    assert launched["words"] == ("-u", "-m", "normswap", "finetune", "x")
    assert (launched["config"].nproc_per_node, launched["config"].max_nodes) == (processes, 1)
    assert launched["config"].max_restarts == 2


@pytest.mark.parametrize(
    ("raises", "code"), [(SignalException("ended", signal.SIGTERM), 143), (failure(7), 7), (failure(1), 1)]
)
def test_its_exit_code_is_theirs(launched: dict[str, Any], raises: Exception, code: int) -> None:
    launched["raises"] = raises
    assert launching.launch(2, []) == code


@pytest.mark.parametrize(("code", "why"), [(-9, "is there memory enough"), (-11, "by signal 11")])
def test_a_killed_process_is_said(launched: dict[str, Any], code: int, why: str) -> None:
    launched["raises"] = failure(code)
    with pytest.raises(TrainingError, match=f"process 1 of 2 was killed .*{why}"):
        launching.launch(2, [])


@pytest.mark.parametrize("wanted", ["0", "-1", "two", "1.5", ""])
def test_no_number_of_processes(wanted: str) -> None:
    with pytest.raises(OptionError, match="above zero, or auto"):
        launching.count(wanted)


def test_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert launching.count("1") == 1
    assert launching.count("12") == 12
    monkeypatch.setattr(launching.torch.cuda, "device_count", lambda: 0)
    assert launching.count("auto") == 1
    monkeypatch.setattr(launching.torch.cuda, "device_count", lambda: 4)
    assert launching.count("auto") == 4


def test_the_smallest_signal_is_one(launched: dict[str, Any]) -> None:
    launched["raises"] = failure(-1)  # SIGHUP: a terminal that was closed
    with pytest.raises(TrainingError, match="killed by signal 1"):
        launching.launch(2, [])


def test_a_folder_that_cannot_be_made_is_said_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError) as said:
        Folder(tmp_path / "file" / "run", {}).begin(None)  # type: ignore[arg-type]
    assert "Errno" not in str(said.value)
    assert str(said.value).endswith("Not a directory")


STARTS = {"SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}
NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_STEP_ID")


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The variables of a job; nothing that is set afterwards stays."""
    monkeypatch.setattr(os, "environ", {**os.environ})
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    for name, value in STARTS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_task_of_srun_is_one_of_several(slurm: pytest.MonkeyPatch) -> None:
    slurm.setenv("SLURM_STEP_ID", "0")
    assert launching.is_worker()
    slurm.setenv("MASTER_PORT", "29500")
    with pytest.raises(OptionError, match="srun has started 8 processes: no MASTER_ADDR"):
        launching.read_slurm()
    slurm.setenv("MASTER_ADDR", "node1")
    launching.read_slurm()
    assert [os.environ[name] for name in NAMES[:3]] == ["5", "1", "8"]


def test_a_batch_script_and_what_torchrun_starts_in_a_task_are_no_tasks_of_srun(slurm: pytest.MonkeyPatch) -> None:
    launching.read_slurm()  # in the script itself: no SLURM_STEP_ID
    assert "RANK" not in os.environ
    assert not launching.is_worker()
    slurm.setenv("SLURM_STEP_ID", "0")
    slurm.setenv("RANK", "1")
    launching.read_slurm()
    assert os.environ["RANK"] == "1"


def test_a_task_by_itself_is_one_process(slurm: pytest.MonkeyPatch) -> None:
    slurm.setenv("SLURM_STEP_ID", "0")
    slurm.setenv("SLURM_NTASKS", "1")
    assert not launching.is_worker()
    launching.read_slurm()
    assert "RANK" not in os.environ


def test_all_take_the_newest_state_whoever_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four processes the third has trained on; the others have none, an older one, and none."""
    monkeypatch.setattr(processes, "gathered", lambda _, one: [None] * 4 if one is None else [one, 3, 7, one])
    monkeypatch.setattr(processes, "_broadcast", lambda _, one, source: (one, source))
    engine: Any = None
    assert processes.newest_state(engine, None) == (None, 2)


@pytest.mark.parametrize(
    ("part", "what"), [("images", "the training images are others"), ("plan", "otherwise"), ("network", "")]
)
def test_processes_train_alike_but_for_weights_that_are_drawn(
    part: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random weights may differ by rounding from machine to machine."""
    one = {"network": "a", "plan": "b", "images": "c", "recipe": {}}
    monkeypatch.setattr(processes, "gathered", lambda *_: [one, one, {**one, part: "another"}])
    engine: Any = None
    folder: Any = SimpleNamespace(identity=one)
    with pytest.raises(OptionError, match=f"process 2 does not train as the first.*{what}") if what else nullcontext():
        processes.require_same_run(engine, folder)


def test_what_fails_in_one_process_fails_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, engine = TrainingError("its disk is full"), SimpleNamespace(is_main_process=False)
    monkeypatch.setattr(processes, "gathered", lambda *_: [None, problem])
    with pytest.raises(TrainingError, match="its disk is full"):
        processes.in_first(cast("Any", engine), lambda: pytest.fail("the first does it alone"))


def common_names(store: dist.Store, ranks: list[int]) -> list[str]:
    with ThreadPoolExecutor() as pool:
        names = [pool.submit(launching.common_name, store, rank, 3, patience=20) for rank in ranks]
        return [name.result() for name in names]


def test_processes_that_are_started_again_have_another_name() -> None:
    store = dist.HashStore()
    rounds = [set(common_names(store, [0, 1, 2])), set(common_names(store, [2, 1, 0]))]
    assert [len(names) for names in rounds] == [1, 1]
    assert rounds[0] != rounds[1]


def test_a_process_that_does_not_come_is_said() -> None:
    store = dist.HashStore()
    common_names(store, [0, 1, 2])  # and then the last two do not come again
    with pytest.raises(TrainingError, match="process 1 of 3 has not started"):
        launching.common_name(store, 0, 3, patience=0.1)
