"""Ctrl-C ends a command with 130, also where an import would swallow it; what was to be written is not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from normswap.cli.interruption import INTERRUPTED

SWALLOWS = """
import time
try:
    print("importing", flush=True)
    time.sleep(60)
except BaseException:
    pass
"""
BUILDS = """
import time
def build():
    print("building", flush=True)
    time.sleep(60)
"""


def interrupted(body: str, folder: Path, ignored: bool = False) -> subprocess.Popen[str]:
    """A command that imports a module of this body, at the place where it prints, after one Ctrl-C."""
    (folder / "their_networks.py").write_text(body)
    command = [sys.executable, "-m", "normswap", "convert", "their_networks:build", "--to", "folded", "-o", "out"]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[2]}{os.pathsep}{folder}"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler),
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    return process


@pytest.mark.parametrize("body", [SWALLOWS, BUILDS], ids=["import", "forward"])
def test_an_interruption_ends_a_command(body: str, tmp_path: Path) -> None:
    process = interrupted(body, tmp_path)
    out, err = process.communicate(timeout=40)  # less than the sleep
    assert (process.returncode, out, err) == (INTERRUPTED, "", "")
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["their_networks.py"]


def test_a_command_that_was_told_to_mind_no_interruption_goes_on(tmp_path: Path) -> None:
    process = interrupted(BUILDS.replace("60", "0.1"), tmp_path, ignored=True)
    _, err = process.communicate(timeout=40)
    assert process.returncode == 2  # `build` gives nothing
    assert "their_networks:build" in err
