"""Law of what is said: the command that a finding names is run, and the finding is gone."""

from pathlib import Path

import pytest
import torch
from support.command_line import MODEL, QUICK, Capture, here, named_commands, run_json
from test_doctor import FAULTS, opened

import normswap

__all__ = ["here"]  # a fixture


# Faults that stand in a file of weights that can be read: others are in the network, and mended by
# a line of Python.
IN_WEIGHTS = (
    "NaN in a variance",
    "infinite mean",
    "mean and variance exchanged",
    "variances of 0",
    "variances far below eps",
    "half of the variances are 0",
    "statistics never updated",
    "one norm never updated",
    "swapped statistics",
    "stale statistics",
    "shuffled channels",
)


def test_small_numbers_are_no_fault() -> None:
    """A layer gives a two-hundredth of what it gave, and its norm knows that."""
    model = opened("demo")
    with torch.no_grad():
        model.get_parameter("layer1.0.conv1.weight").mul_(0.005)
        model.get_buffer("layer1.0.bn1.running_mean").mul_(0.005)
        model.get_buffer("layer1.0.bn1.running_var").mul_(0.005**2)
    assert normswap.diagnose(model).faults == ()


@pytest.mark.parametrize("fault", IN_WEIGHTS)
@pytest.mark.one_in(4)
def test_a_finding_is_mended_by_its_command(fault: str, here: Path, capfd: Capture) -> None:
    """As a user has the network: in a file of weights beside the name of its architecture."""
    plant, name = FAULTS[fault]
    model = opened("demo")
    plant(model)
    torch.nn.init.ones_(model.get_parameter("fc.bias"))
    torch.save(model.state_dict(), "faulty.pth")
    images = (
        ("--data", "demo", "--samples", "96", "--workers", "0")
        if fault == "shuffled channels"
        else ()
    )
    ill = run_json(capfd, "doctor", MODEL, "--weights", "faulty.pth", *images, code=1)
    finding = next(each for each in ill["findings"] if each["name"] == name)
    (words,) = named_commands(finding["mend"])
    run_json(capfd, *words, *QUICK[words[0]], "-o", "mended")
    mended = normswap.load("mended")

    assert normswap.diagnose(mended).faults == ()
    assert bool((mended.get_parameter("fc.bias") == 1).all()), (
        "another network than the one with the fault"
    )
