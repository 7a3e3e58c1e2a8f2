"""Beyond ResNets: SkipInit, NF and the canonical form of RegNet, ResNeXt, SE-ResNet, EfficientNet, MobileNet, exactly.

THE table (test_schemes.py) has the ResNets; the coverage walk folds everything else.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import timm
import torch
from crossed import crossed, named, sampled
from lived import batchnorms, distance, lived_in, run, step
from small import SMALL_IMAGES
from torch import Tensor, nn

from normswap.layers.scalars import Scale
from normswap.surgery import applying

# Residual branches, and the norm that ends each, from the papers (how they are counted: test_inspection_families.py;
# SE-ResNeXt-26t: 2 + 2 + 2 + 2 bottlenecks). In the SE-ResNeXt a gate follows that norm, in the others it comes before.
BRANCHES: dict[str, tuple[int, str]] = {
    "regnetx_002": (13, "conv3.bn"),
    "regnety_002": (13, "conv3.bn"),
    "seresnext26t_32x4d": (8, "bn3"),
    "efficientnet_b0": (9, "bn3"),
    "mobilenetv3_small_050": (7, "bn3"),
}
NARROW: dict[str, dict[str, Any]] = {"seresnext26t_32x4d": {"channels": (16, 32, 64, 128)}}
SCHEMES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("folded", {}),
    ("skipinit", {}),
    ("regularized-skipinit", {"dropout": 0.2}),
    ("nf", {"mean": "keep"}),
    ("fixup", {}),
    ("residual-scale", {"rule": "arpit"}),
    ("tune", {}),
)
architectures = pytest.mark.parametrize("arch", BRANCHES)


@functools.cache
def source(arch: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    seen, x = torch.randn(2, 2, 3, 64, 64, dtype=torch.float64)
    narrow = timm.create_model(arch, num_classes=10, pretrained_cfg_overlay=SMALL_IMAGES, **NARROW.get(arch, {}))
    model = lived_in(narrow, seen)
    return model, x, run(model, x)


@crossed("arch, scheme", BRANCHES, SCHEMES, every=4, ids=named)
def test_exact(arch: str, scheme: tuple[str, dict[str, Any]]) -> None:
    model, x, reference = source(arch)
    planned, builder = step(model, scheme[0], **scheme[1])
    assert builder.refusals == {}
    result = applying.apply_step(model, planned)
    assert batchnorms(result) == []
    assert type(result) is type(model)
    assert distance(reference, reference.flip(0)) > 0.01
    assert distance(reference, run(result, x)) <= 1e-10


@architectures
def test_alpha_is_the_deviation_of_the_branch(arch: str) -> None:
    """The root mean square of the gammas of the norm that ends the branch, De & Smith's gamma; one for every branch."""
    model, _, _ = source(arch)
    count, last = BRANCHES[arch]
    planned, builder = step(model, "skipinit")
    result = applying.apply_step(model, planned)
    found = [module.alpha.item() for module in result.modules() if isinstance(module, Scale)]
    assert len(found) == count
    wanted = []
    for block in builder.anatomy.blocks:
        gamma = model.get_submodule(f"{block.path}.{last}").get_parameter("weight")
        wanted.append(gamma.square().mean().sqrt().item())
    assert found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("arch", sampled(BRANCHES, every=3))
def test_groupnorm_replaces_every_norm(arch: str) -> None:
    """Approximate: what it keeps of trained networks is measured in lab/benchmarks; here: it runs, and differs."""
    model, x, reference = source(arch)
    planned, builder = step(model, "groupnorm")
    assert builder.refusals == {}
    result = applying.apply_step(model, planned)
    assert sum(isinstance(module, nn.GroupNorm) for module in result.modules()) == len(batchnorms(model))
    assert batchnorms(result) == []
    assert 1e-3 < distance(reference, run(result, x)) < float("inf")


@architectures
def test_one_wrong_channel_is_noticed(arch: str) -> None:
    model, x, reference = source(arch)
    broken: Any = applying.apply_step(model, step(model, "skipinit")[0])
    scale = next(module for module in broken.modules() if isinstance(module, Scale))
    with torch.no_grad():
        scale.alpha *= 1.01
    assert distance(reference, run(broken, x)) > 1e-6
