"""What normswap does on a device that is not the CPU: in a process of its own, as the device patches torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import environment
from torch.utils import backend_registration

OLD = not hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
pytestmark = pytest.mark.skipif(OLD, reason="this torch has no devices in Python")


def flows(*which: str) -> Any:
    command = [sys.executable, str(Path(__file__).with_name("flows.py")), *which]
    run = subprocess.run(command, capture_output=True, text=True, env=environment())
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def said() -> Any:
    return flows()


def test_every_flow_gives_what_it_gives_on_the_cpu(said: Any) -> None:
    """Every scheme, with images and without, verify, recalibrate, exports, under TF32 and where there is no float64."""
    assert len(said["flows"]) >= 40
    assert {name: what for name, what in said["flows"].items() if what != "as on the CPU"} == {}


def test_a_layer_more_waits_a_constant(said: Any) -> None:
    """No wait for each channel, image, weight or ridge: two blocks more, each with a convolution and a norm to fit."""
    two, four = said["waits"]
    assert 0 < four - two <= 4 * 15


def test_a_training_step_does_not_wait(said: Any) -> None:
    """Whatever waits does so at the end of an epoch; of three updates more none does."""
    three, six = said["training"]
    assert 0 < three == six


@pytest.mark.slow
def test_commands_say_what_they_say_on_the_cpu() -> None:
    assert flows("commands")["flows"] == {"commands": "as on the CPU"}
