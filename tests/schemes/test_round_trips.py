"""There and back: chains of conversions that end where they began, or somewhere that could be reached directly."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lived import batchnorms, distance, lived_in, run
from narrow_networks import NORM_FREE, norm_free
from timm.layers import ScaledStdConv2d
from tiny import ONE, C, bn, net
from torch import nn

import normswap
from normswap.layers.scalars import Scale
from normswap.storage import checkpoint


@pytest.mark.parametrize("arch", NORM_FREE)
@pytest.mark.one_in(2)
def test_norm_free_to_skipinit_in_one_step(arch: str) -> None:
    """The standardized weights are baked, the factors folded, and every branch gets its scalar: in one conversion."""
    model, x = norm_free(arch)
    done = normswap.convert(model, "skipinit", inputs=x)
    assert [step.scheme for step in done.plan.steps] == ["folded", "skipinit"]
    assert done.report.exact
    assert distance(run(model, x), run(done.model, x)) <= 1e-12
    assert not any(isinstance(module, ScaledStdConv2d) for module in done.model.modules())
    blocks = len(normswap.inspect(model).blocks)
    assert sum(isinstance(module, Scale) for module in done.model.modules()) == blocks > 0


def test_a_standardized_layer_with_a_hook_stays() -> None:
    model = nn.Sequential(ScaledStdConv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)).double().eval()
    model[0].register_forward_hook(lambda module, args, output: None)
    done = normswap.convert(model, "folded", inputs=torch.randn(2, 3, 9, 9).double())
    assert done.notes == ("0 stays a ScaledStdConv2d: 0 has forward hooks, which see its output",)


@pytest.mark.parametrize("cut", ["not called any more", "taken out"])
def test_norms_do_not_come_back_where_nothing_is_called(cut: str) -> None:
    """Of a network that was changed after its conversion: what is left gets its norms, and a note names the rest."""
    torch.manual_seed(0)
    x = torch.randn(4, C, 9, 9, dtype=torch.float64)
    whole = net(lambda m, x: F.silu(m.bn2(m.bn(m.conv(x)) + x)), **ONE, bn2=bn)()
    half: Any = normswap.convert(lived_in(whole, x), "folded", inputs=x).model
    half.body = lambda m, x: F.silu(m.bn(m.conv(x)))
    if cut == "taken out":
        del half.bn2
    done = normswap.convert(half, "batchnorm", inputs=x)
    assert "bn2: there is no place for its norm any more" in done.notes
    assert [path for path in batchnorms(done.model) if path != "bn2"] == ["bn"]
    assert distance(run(half, x), run(done.model, x)) <= 1e-12


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
