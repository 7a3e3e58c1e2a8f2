"""The constants of papers and libraries, where they end up in a network: numbers from the papers,
torch, timm.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, lived_in, run, swapped
from support.model_sources import ARGS
from support.tiny_modules import ONE, C, Net, bn, conv, net
from torch import Tensor, nn

import normswap
from normswap.layers.scalars import FixedScale
from normswap.schemes.residual_scale import RULES

DEPTH = 8


@pytest.fixture(scope="module")
def resnet() -> nn.Module:
    torch.manual_seed(0)
    return lived_in(
        timm.create_model("resnet18", num_classes=10, **ARGS), torch.randn(4, 3, 33, 33).double()
    )


PRINTED: dict[str, Callable[[int], tuple[float, float]]] = {
    "balduzzi": lambda block: (
        0.70710678118654752,
        0.70710678118654752,
    ),  # arXiv:1702.08591: 1/sqrt(2) of either
    "szegedy": lambda block: (1.0, 0.2),  # arXiv:1602.07261, section 3.3: between 0.1 and 0.3
    "hanin": lambda block: (
        1.0,
        math.exp(block * math.log(0.9)),
    ),  # arXiv:1803.01719: eta_l = b^l, sum of all finite
    "arpit": lambda block: (1.0, 0.125),  # arXiv:1906.02341: 1/B of B blocks
    "rescale": lambda block: (
        math.sqrt((block - 1 + 8) / (block + 8)),
        1 / math.sqrt(block + 8),
    ),  # arXiv:2001.07094
}


@pytest.mark.parametrize("rule", PRINTED)
def test_residual_scales_are_the_papers(resnet: nn.Module, rule: str) -> None:
    """What each block of the converted network multiplies its branch and its sum with."""
    result = swapped(resnet, "residual-scale", rule=rule)
    scales = [
        (path, float(m.alpha)) for path, m in result.named_modules() if isinstance(m, FixedScale)
    ]

    for block in range(1, DEPTH + 1):
        at = f"layer{(block + 1) // 2}.{(block - 1) % 2}."
        found = {path.removeprefix(at): value for path, value in scales if path.startswith(at)}
        a, b = PRINTED[rule](block)
        on_the_sum = [value for path, value in found.items() if path.startswith("act2")]
        on_the_branch = [value for path, value in found.items() if path.startswith("bn2")]
        assert on_the_sum == ([] if a == 1 else [pytest.approx(a, rel=1e-12)])
        assert on_the_branch == [pytest.approx(b / a, rel=1e-12)]


def linear(m: Any, x: Tensor) -> Tensor:
    """Two blocks, after whose sums there is no activation."""
    x = m.first(x)
    x = x + m.bn(m.conv(x))
    return m.last(x + m.bn2(m.conv2(x)))


@pytest.mark.parametrize("rule", PRINTED)
def test_branches_hold_the_factors_of_sums_that_no_activation_follows(rule: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, C, 9, 9, dtype=torch.float64)
    model = lived_in(net(linear, **ONE, conv2=conv, bn2=bn, first=conv, last=conv)(), x)
    done = normswap.convert(model, "residual-scale", inputs=x, rule=rule)
    assert {block.order for block in normswap.inspect(model, x).blocks} == {"linear"}
    assert distance(run(model, x), run(done.model, x)) < 1e-12
    assert sum(isinstance(module, FixedScale) for module in done.model.modules()) == 2


@pytest.mark.parametrize("depth", [1, 2, 7, 50])
def test_what_rescalenet_is_for(depth: int) -> None:
    """arXiv:2001.07094: the variance stays 1, and all branches weigh the same at the end: 1 / (2 L)
    each, skips 1/2.
    """
    pairs = [RULES["rescale"](block, depth) for block in range(1, depth + 1)]
    skip = 1.0
    for a, b in reversed(pairs):
        assert (skip * b) ** 2 == pytest.approx(1 / (2 * depth))
        skip *= a
    assert skip**2 == pytest.approx(1 / 2)
    hanin = [RULES["hanin"](block, 1000)[1] for block in range(1, 1001)]
    assert sum(hanin) == pytest.approx(9.0), "a geometric series from 0.9 on"


def test_fixups_exponent_in_bottlenecks() -> None:
    """De & Smith 2020, section 6, Fixup's component 2: with m = 3 convolutions in a branch,
    L^(-1/4).
    """
    torch.manual_seed(0)
    make = timm.create_model("resnet26", channels=(4, 8, 12, 16), num_classes=10)
    model: Any = lived_in(make, torch.randn(2, 3, 33, 33).double())
    keep: Any = swapped(model, "fixup")

    reset: Any = swapped(model, "fixup", init="fixup")
    for name in ("conv1", "conv2"):
        before, after = (net.layer2[1].get_submodule(name).weight for net in (keep, reset))
        assert torch.allclose(after, before * math.exp(-math.log(8) / 4), rtol=1e-12)

    assert not reset.layer2[1].conv3.weight.any()
    assert not reset.fc.weight.any()
    assert torch.equal(reset.layer2[0].downsample[0].weight, keep.layer2[0].downsample[0].weight)


def upsampling() -> nn.Module:
    """Its transposed convolution is a product a m, whose norm is |a| |m| as (out, rest), |a| |m|_F
    as (in, rest).
    """
    torch.manual_seed(0)
    up = nn.ConvTranspose2d(4, 6, 3, stride=2)
    up.weight.data = torch.randn(4, 1, 1, 1) * torch.randn(1, 6, 3, 3)
    model = Net(
        lambda m, x: m.head(m.bn(m.up(m.conv(x))).relu().mean((2, 3))),
        conv=nn.Conv2d(3, 4, 3),
        up=up,
        bn=nn.BatchNorm2d(6),
        head=nn.Linear(6, 2),
    )

    return lived_in(model, torch.randn(4, 3, 9, 9).double())


def test_weight_norm_of_transposed_convolutions_is_per_filter() -> None:
    """g has one entry per output channel, which scales that channel and no other; W = g v / |v|."""
    net: Any = swapped(upsampling(), "weightnorm")
    weight = net.up.parametrizations.weight
    assert weight.original0.shape == (1, 6, 1, 1)

    x = torch.randn(2, 4, 5, 5, dtype=torch.float64)
    bias = net.up.bias.view(1, -1, 1, 1)
    before = net.up(x) - bias

    for channel in range(6):
        v = weight.original1[:, channel]
        assert torch.allclose(
            net.up.weight[:, channel], weight.original0[0, channel] * v / v.square().sum().sqrt()
        )

    with torch.no_grad():
        weight.original0[0, 2] *= 3
    after = net.up(x) - bias

    assert torch.allclose(after[:, 2], 3 * before[:, 2])
    assert torch.equal(after[:, [0, 1, 3, 4, 5]], before[:, [0, 1, 3, 4, 5]])


def test_a_dead_filter_keeps_its_direction() -> None:
    """gamma = 0 kills it: g is 0, and v what it was, so that it can live again; a filter of zeros
    gets ones.
    """
    model: Any = upsampling()
    with torch.no_grad():
        model.bn.weight[:2] = 0
        model.up.weight[:, 1] = 0

    before = model.up.weight.detach().clone()
    net: Any = swapped(model, "weightnorm")
    gain = net.up.parametrizations.weight.original0.flatten()
    direction = net.up.parametrizations.weight.original1

    assert gain[:2].tolist() == [0, 0]
    assert bool((gain[2:] != 0).all())
    assert (
        torch.nn.functional.cosine_similarity(direction[:, 0].flatten(), before[:, 0].flatten(), 0)
        > 0.999
    )
    assert bool((direction[:, 1] == direction[0, 1, 0, 0]).all())


def test_spectral_norm_of_transposed_convolutions_is_of_the_matrix_of_filters() -> None:
    """Miyato et al. 2018, arXiv:1802.05957: of W as (out, rest); its largest singular value, by
    LAPACK.
    """
    net: Any = swapped(upsampling(), "spectralnorm")
    folded: Any = swapped(upsampling(), "folded")
    weight = folded.up.weight.detach()
    largest, other = (
        torch.linalg.svdvals(w.flatten(1))[0].item() for w in (weight.transpose(0, 1), weight)
    )
    (gain,) = net.up.parametrizations.weight[1].parameters()
    assert abs(other / largest - 1) > 0.05, "else this test would not tell"
    assert gain.item() == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 24, 3), nn.ConvTranspose2d(8, 24, 2)])
def test_a_forward_in_training_changes_no_weight_of_spectral_norm(layer: nn.Module) -> None:
    """torch takes another step of its power iteration in each. At the singular vectors it stays."""
    torch.manual_seed(0)
    source = nn.Sequential(nn.Conv2d(3, 8, 3), layer, nn.ReLU(), nn.Conv2d(24, 4, 1)).double()
    images = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = source.eval()(images)
    result = normswap.convert(source, "spectralnorm", inputs=images).model
    for _ in range(50):
        result.train()(images)
    assert (result.eval()(images) - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize(("size", "groups"), [(4, 16), (16, 4), (64, 1), (128, 1)])
def test_group_size_is_of_channels(resnet: nn.Module, size: int, groups: int) -> None:
    """The stem's 64 channels form groups of this size, and F.group_norm agrees."""
    net: Any = swapped(resnet, "groupnorm", group_size=size, relative_eps=0)
    assert net.bn1.num_groups == groups
    x: Tensor = torch.randn(2, 64, 5, 5, dtype=torch.float64)
    expected = F.group_norm(x, groups, net.bn1.weight, net.bn1.bias, net.bn1.eps)
    assert distance(expected.detach(), net.bn1(x).detach()) < 1e-14
    assert net.layer1[0].bn1.num_groups == max(8 // size, 1)
