"""Law of what is said: the command that a finding names is run, and the finding is gone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from commands import MODEL, QUICK, Capture, here, named_commands, run_json
from test_doctor import FAULTS, opened

import normswap

__all__ = ["here"]  # a fixture


@pytest.mark.parametrize("fault", FAULTS)
def test_a_finding_is_mended_by_its_command(fault: str, here: Path, capfd: Capture) -> None:
    """As a user has the network: in a file of weights beside the name of its architecture."""
    plant, name = FAULTS[fault]
    model = opened("demo")
    before = opened("demo").state_dict()
    plant(model)
    state = model.state_dict()
    if state.keys() != before.keys() or all(torch.equal(state[key], before[key]) for key in state):
        pytest.skip("no such fault is in weights: it is not there")
    torch.save(state, "faulty.pth")
    ill = run_json(capfd, "doctor", MODEL, "--weights", "faulty.pth", code=1)
    finding = next(each for each in ill["findings"] if each["name"] == name)
    for words in named_commands(finding["mend"]):
        run_json(capfd, *words, *QUICK[words[0]], "-o", "mended")
        found = normswap.diagnose(normswap.load("mended"))
        assert name not in [each.name for each in found.faults]
