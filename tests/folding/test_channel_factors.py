"""Factors of channels: which are free, against hand counts and brute force in float64."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run
from support.tiny_modules import C, conv, net
from torch import Tensor, nn

from normswap.exporting import exporter
from normswap.folding import channel_factors
from normswap.folding.channel_factors import FIXED, Channels
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import inspect
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.scalars import Scale
from normswap.layers.standardized import MeanStdConv2d
from normswap.surgery.network import Network

Make = Callable[[], nn.Module]


def images(count: int = 4, side: int = 12, channels: int = C) -> Tensor:
    return torch.randn(
        count, channels, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )


def built(make: Make) -> nn.Module:
    torch.manual_seed(0)
    return make().double().eval()


def channels_of(model: nn.Module, x: Tensor) -> Channels:
    return Channels(PlanBuilder(inspect(model, x)))


def scaled(model: nn.Module, channels: Channels, factors: Tensor) -> nn.Module:
    twin = copy.deepcopy(model)
    channel_factors.scale(twin, channels, factors)
    return twin


def depthwise() -> nn.Conv2d:
    return conv(groups=C)


def twice(model: Any) -> nn.Module:
    model.b.weight = model.a.weight
    return model


def doubled(model: Any) -> nn.Module:
    model.a.register_forward_hook(lambda module, args, output: 2 * output)
    return model


# A network, and how many groups of its channels are free; counted by hand.
CASES: list[tuple[str, Make, int]] = [
    ("two in a row", net(lambda m, x: m.b(m.a(x).relu()), a=conv, b=conv), C),
    (
        "leaky, pooled",
        net(lambda m, x: m.b(m.p(m.f(m.a(x)))), a=conv, b=conv, f=nn.LeakyReLU, p=nn.MaxPool2d(2)),
        C,
    ),
    (
        "depthwise",
        net(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), a=conv, b=depthwise, c=conv),
        2 * C,
    ),
    (
        "grouped",
        net(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), a=conv, b=conv(groups=2), c=conv),
        2 * C,
    ),
    ("a sum shares", net(lambda m, x: m.c(m.a(x) + m.b(x)), a=conv, b=conv, c=conv), C),
    (
        "a sum with means",
        net(lambda m, x: m.c(m.a(x) + m.b(x).mean((2, 3), keepdim=True)), a=conv, b=conv, c=conv),
        0,
    ),
    (
        "a stream shares",
        net(lambda m, x: (lambda y: m.c(y + m.b(y.relu())))(m.a(x)), a=conv, b=conv, c=conv),
        C,
    ),
    ("the input holds", net(lambda m, x: m.c(x + m.b(x)), b=conv, c=conv), 0),
    ("sigmoid holds", net(lambda m, x: m.b(m.a(x).sigmoid()), a=conv, b=conv), 0),
    ("a number added holds", net(lambda m, x: m.b((m.a(x) + 1).relu()), a=conv, b=conv), 0),
    (
        "a gate",
        net(lambda m, x: (lambda y: m.c(y * m.g(y).sigmoid()))(m.a(x)), a=conv, g=conv(1), c=conv),
        C,
    ),
    ("a square", net(lambda m, x: m.b((y := m.a(x)) * y), a=conv, b=conv), 0),
    ("a product of two", net(lambda m, x: m.c(m.a(x) * m.b(x)), a=conv, b=conv, c=conv), 0),
    (
        "joined",
        net(
            lambda m, x: m.c(torch.cat([m.a(x), m.b(x)], 1)),
            a=conv,
            b=conv,
            c=nn.Conv2d(2 * C, C, 1),
        ),
        2 * C,
    ),
    (
        "upsampled",
        net(lambda m, x: m.b(m.u(m.a(x)).relu()), a=conv, u=nn.Upsample(scale_factor=2), b=conv),
        C,
    ),
    (
        "joined in the batch",
        net(
            lambda m, x: m.d(torch.cat([m.a(x), m.b(x)]) + m.c(torch.cat([x, x]))),
            a=conv,
            b=conv,
            c=conv,
            d=conv,
        ),
        0,
    ),
    (
        "rows joined in the batch",
        net(
            lambda m, x: m.k(torch.cat([m.l(y := x.mean((2, 3))), m.j(y)]).relu()),
            l=nn.Linear(C, 6),
            j=nn.Linear(C, 6),
            k=nn.Linear(6, 3),
        ),
        0,
    ),
    (
        "flattened",
        net(lambda m, x: m.l(m.a(x).relu().flatten(1)), a=conv(out=2), l=nn.Linear(2 * 144, 3)),
        2,
    ),
    (
        "pooled, then linear",
        net(lambda m, x: m.l(m.a(x).relu().mean((2, 3))), a=conv, l=nn.Linear(C, 3)),
        C,
    ),
    (
        "mean over channels",
        net(lambda m, x: m.b(m.a(x).mean(1, keepdim=True).repeat(1, C, 1, 1)), a=conv, b=conv),
        0,
    ),
    ("called twice", net(lambda m, x: m.a(m.a(x).relu()), a=conv), 0),
    (
        "linear on tokens",
        net(lambda m, x: m.k(m.l(x.flatten(2).mT).relu()), l=nn.Linear(C, 6), k=nn.Linear(6, 3)),
        0,
    ),
    (
        "a weight that is read elsewhere",
        net(lambda m, x: m.b(m.a(x).relu()) * m.a.weight.sum(), a=conv, b=conv),
        0,
    ),
    ("a shared weight", lambda: twice(net(lambda m, x: m.b(m.a(x).relu()), a=conv, b=conv)()), 0),
    ("hooks", lambda: doubled(net(lambda m, x: m.b(m.a(x).relu()), a=conv, b=conv)()), 0),
    (
        "transposed convolution",
        net(lambda m, x: m.b(m.a(x).relu()), a=nn.ConvTranspose2d(C, C, 2), b=conv),
        0,
    ),
    ("ReLU6 holds", net(lambda m, x: m.b(m.f(m.a(x))), a=conv, f=nn.ReLU6, b=conv), 0),
]


@pytest.mark.parametrize(("name", "make", "free"), CASES, ids=[case[0] for case in CASES])
def test_free_channels_and_no_other_can_be_scaled(name: str, make: Make, free: int) -> None:
    """The function stays if one group alone is multiplied by 3; the counts are by hand."""
    model = built(make)
    x = 3 * images()
    channels = channels_of(model, x)

    assert channels.count == 1 + free

    for group in range(1, channels.count):
        factors = torch.ones(channels.count, dtype=torch.float64)
        factors[group] = 3
        twin = scaled(model, channels, factors)
        assert distance(run(model, x), run(twin, x)) < 1e-13
        pairs = zip(twin.parameters(), model.parameters(), strict=True)
        assert not all(torch.equal(new, old) for new, old in pairs)


def shifted(act: nn.Module | None) -> ChannelBias:
    return ChannelBias(torch.randn(C), torch.tensor([1.0, -1.0] * (C // 2)), act)


def affine(act: nn.Module | None) -> ChannelAffine:
    return ChannelAffine(torch.randn(C), torch.randn(C), act)


# Layers of ours between two convolutions, and how many of the channels are free.
OWN: list[tuple[str, Make, int]] = [
    (
        "a shift",
        net(lambda m, x: m.b(m.s(m.a(x))), a=conv, s=lambda: shifted(nn.ReLU()), b=conv),
        C,
    ),
    (
        "a scale and shift",
        net(lambda m, x: m.b(m.s(m.a(x))), a=conv, s=lambda: affine(None), b=conv),
        C,
    ),
    (
        "under another activation",
        net(lambda m, x: m.b(m.s(m.a(x))), a=conv, s=lambda: affine(nn.SiLU()), b=conv),
        0,
    ),
    (
        "a shift called twice",
        net(lambda m, x: m.b(m.s(m.s(m.a(x)))), a=conv, s=lambda: shifted(None), b=conv),
        0,
    ),
    ("a scalar", net(lambda m, x: m.b(m.s(m.a(x))), a=conv, s=lambda: Scale(0.3), b=conv), C),
    (
        "a scalar with a bias",
        net(lambda m, x: m.b(m.s(m.a(x))), a=conv, s=lambda: Scale(0.3, bias=True), b=conv),
        0,
    ),
    (
        "standardized",
        net(lambda m, x: m.b(m.a(x).relu()), a=lambda: MeanStdConv2d(C, C, 3), b=conv),
        C,
    ),
]


@pytest.mark.parametrize(("name", "make", "free"), OWN, ids=[case[0] for case in OWN])
def test_layers_of_ours_hand_factors_on(name: str, make: Make, free: int) -> None:
    model = built(make)
    x = images()
    channels = channels_of(model, x)
    assert channels.count == 1 + free
    factors = torch.cat([torch.ones(1), torch.rand(free) + 0.5]).double()
    twin = scaled(model, channels, factors)

    assert distance(run(model, x), run(twin, x)) < 1e-13
    if free:
        assert not torch.equal(twin.get_submodule("b").weight, model.get_submodule("b").weight)


# The fraction of all written channels that is free at least.
FREE = {"resnetv2_18": 0.8, "seresnet18": 0.7, "densenet121": 0.4, "ghostnet_100": 0.2}


FAST = "resnetv2_18"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [FAST, *(pytest.param(n, marks=pytest.mark.slow) for n in FREE if n != FAST)]
)
def test_timm_networks_keep_their_function(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64).double()
    model = lived_in(timm.create_model(name, num_classes=10), x)
    folded = exporter.fold_for_export(Network(model, size=(3, 64, 64)))
    channels = channels_of(folded, x)
    written = torch.cat([layer.writes for layer in channels.layers])
    assert float((written != FIXED).double().mean()) >= FREE[name]

    generator = torch.Generator().manual_seed(1)
    factors = torch.randn(channels.count, dtype=torch.float64, generator=generator).exp()
    factors[FIXED] = 1

    assert distance(run(model, x), run(scaled(folded, channels, factors), x)) < 1e-12
