"""Standardized convolutions of one and of three dimensions, beside timm's of two and beside the formula by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo_networks
from crossed import sampled
from lived import batchnorms, distance, lived_in, run
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn

import normswap
from normswap.layers import reparametrized, standardized
from normswap.layers.standardized import STANDARDIZED, ScaledStdConv1d, ScaledStdConv3d


class Ours(standardized.Other, nn.Conv2d):
    """What timm has a class of its own for."""


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "1-D": (ScaledStdConv1d, {}),
    "1-D grouped, strided, same": (ScaledStdConv1d, {"groups": 2, "padding": "same", "dilation": 2}),
    "3-D": (ScaledStdConv3d, {"stride": 2, "padding": 1}),
    "3-D without bias": (ScaledStdConv3d, {"bias": False}),
}


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_formula_filter_by_filter(name: str, mean: bool) -> None:
    """Brock et al. 2021, as timm has it: (w - mean w) / sqrt(var w + eps) gain / sqrt(fan in)."""
    torch.manual_seed(0)
    kind, options = CASES[name]
    conv = kind(4, 6, 3, mean=mean, **options).double()
    nn.init.normal_(conv.gain)
    if mean:
        nn.init.normal_(conv.mean)
    weight = torch.empty_like(conv.weight)
    for i, w in enumerate(conv.weight.detach()):
        unit = (w - w.mean()) / (w.var(correction=0) + conv.eps) ** 0.5
        weight[i] = unit * conv.gain[i] / w.numel() ** 0.5 + (conv.mean[i] if mean else 0)
    plain = kind.__bases__[1](4, 6, 3, **options).double()
    plain.load_state_dict({"weight": weight, **({} if conv.bias is None else {"bias": conv.bias})})
    x = torch.randn(2, 4, *(9,) * (conv.weight.ndim - 2), dtype=torch.float64)
    assert distance(run(plain, x), run(conv, x)) < 1e-14


def test_in_two_dimensions_it_is_timms() -> None:
    torch.manual_seed(0)
    ours, theirs = (kind(4, 6, 3, padding=1, groups=2, eps=1e-3) for kind in (Ours, ScaledStdConv2d))
    nn.init.normal_(ours.gain)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(run(ours, x), run(theirs, x))


@pytest.mark.parametrize("mean", [False, True])
def test_a_weight_is_computed_up_to_its_filters_means(mean: bool) -> None:
    torch.manual_seed(0)
    conv, weight = ScaledStdConv3d(2, 3, 3, mean=mean).double(), torch.randn(3, 2, 3, 3, 3, dtype=torch.float64)
    standardized.set_effective(conv, weight)
    wanted = weight if mean else torch.stack([w - w.mean() for w in weight])
    assert distance(wanted, reparametrized.effective(conv).detach()) < 1e-13


def trained(kind: str) -> tuple[nn.Module, Tensor]:
    shape = {"one_d": (8, 96, 32), "three_d": (8, 3, 4, 16, 16)}[kind]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return lived_in(zoo_networks.KINDS[kind](), x), x


@pytest.mark.parametrize(("kind", "conv"), [("one_d", ScaledStdConv1d), ("three_d", ScaledStdConv3d)])
@pytest.mark.parametrize("to", sampled(["nf", "centered-weightnorm"], every=2))
def test_networks_of_other_dimensions(kind: str, conv: type, to: str, tmp_path: Path) -> None:
    """Exact with the means kept, by way of the disk, and back to plain layers; fitted without them."""
    model, x = trained(kind)
    kept = normswap.convert(model, to, inputs=x, mean="keep")
    assert kept.report.exact
    assert batchnorms(kept.model) == []
    assert sum(type(m) is conv for m in kept.model.modules()) > 2
    again = normswap.load(normswap.save(kept, tmp_path / "kept"), skeleton=trained(kind)[0])
    assert distance(run(model, x), run(again, x)) < 1e-10
    plain = normswap.convert(again, "folded", inputs=x).model
    assert not any(isinstance(m, STANDARDIZED) for m in plain.modules())
    assert distance(run(model, x), run(plain, x)) < 1e-10
    fitted = normswap.convert(model, to, inputs=x, calibrate=[x[i : i + 2] for i in (0, 2, 4, 6)] * 4)
    left = [m for m in fitted.model.modules() if isinstance(m, STANDARDIZED) and not reparametrized.keeps_mean(m)]
    assert left
    for m in left:
        assert reparametrized.effective(m).flatten(1).sum(1).abs().max() < 1e-10
    assert normswap.load(normswap.save(fitted, tmp_path / "fitted"), skeleton=trained(kind)[0])(x).isfinite().all()
