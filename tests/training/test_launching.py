"""What `--nproc` starts, and what it says of how that ended, with torch's launcher taken out."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from normswap.errors import OptionError, OutputError, TrainingError
from normswap.training import launching
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
