"""Unfolding: the source is looked at as it was made to be called."""

from pathlib import Path

import pytest
import torch
from lived import batchnorms, distance, lived_in, run
from torch import nn

import normswap
from normswap.storage import checkpoint

SIZE = (3, 40, 40)
FACTORY = """
from torch import nn

def make():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 38 * 38, 5))
"""


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """A network that takes images of one size, which nothing but its record says."""
    (tmp_path / "made_for_forty.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = checkpoint.open_model("made_for_forty:make", weights="random", input_size=SIZE)
    return lived_in(model, torch.randn(4, *SIZE))


def test_a_network_of_one_size_is_unfolded_at_that_size(network: nn.Module) -> None:
    x = torch.randn(2, *SIZE, dtype=torch.float64)
    folded = normswap.convert(network, "folded").model
    back = normswap.convert(folded, "unfold")
    assert batchnorms(back.model) == batchnorms(network) == ["1"]
    assert distance(run(network, x), run(back.model, x)) < 1e-12
    assert [error.size[1:] for error in back.report.logits] == [SIZE]


def test_the_size_that_is_given_is_the_size_that_is_looked_at(network: nn.Module, tmp_path: Path) -> None:
    """Also of one that was saved with a record that says nothing of it."""
    folded = normswap.convert(network, "folded").model
    record = normswap.Network(folded).provenance.pretrained_cfg
    record.pop("input_size")
    assert normswap.convert(folded, "unfold", input_size=SIZE).report.passed
