"""Mean and variance of what reaches each norm, foretold from the norms before it and the weights
between.

The output of a BatchNorm has mean beta and deviation |gamma| (Ioffe & Szegedy 2015, section 3),
whatever its statistics are. Taken as normal and independent, they are followed through activations,
sums and convolutions to the next norm:

    E[W x + b] = W E[x] + b,    Var[W x] = W^2 Var[x]

Correlations, borders and gates are left out: the means come near, the variances by an order of
magnitude.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from normswap.copying import doubled
from normswap.graph.tracing import Traced, apply, inputs, is_add, listed
from normswap.layers import affine
from normswap.layers.activations import (
    is_activation,
    is_activation_call,
    is_identity,
    keeps_forward,
)
from normswap.layers.known_norms import Pair

_POINTS = torch.distributions.Normal(0.0, 1.0).icdf(torch.arange(0.5, 64) / 64).double()
_POOLS = (
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool3d,
)


def foretold(traced: Traced) -> dict[str, Pair]:
    """Mean and variance (C,), float64, of what each norm reads, by path; those that can be
    foretold.
    """
    moments: dict[fx.Node, Pair] = {}
    read: dict[str, Pair] = {}
    for node in traced.nodes:
        module = traced.module(node)
        if module is not None and affine.has_moments(module):
            before = inputs(node)
            if len(before) == 1 and before[0] in moments and len(traced.calls[id(module)]) == 1:
                read[str(node.target)] = moments[before[0]]
            mean, deviation = affine.moments(module)
            act = affine.activation(module)
            pair = (mean, deviation.square())
            moments[node] = (act and _applied(act, pair)) or pair
            continue
        after = _after(traced, node, moments)
        if after is not None:
            moments[node] = after
    return read


def _after(traced: Traced, node: fx.Node, moments: dict[fx.Node, Pair]) -> Pair | None:
    sources = inputs(node)
    module = traced.module(node)
    read_moments = [moments[source] for source in sources if source in moments]
    if not read_moments or len(read_moments) != len(sources):
        return None
    if is_add(node) and len({len(mean) for mean, _ in read_moments}) == 1:
        return read_moments[0][0] + read_moments[1][0], read_moments[0][1] + read_moments[1][1]
    if node.target is torch.cat and [*listed(node)] == sources:
        return torch.cat([mean for mean, _ in read_moments]), torch.cat(
            [var for _, var in read_moments]
        )
    if len(read_moments) != 1:
        return None
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return _weighted(module, read_moments[0])
    if (
        is_identity(module)
        or node.target in ("contiguous", operator.pos)
        or keeps_forward(module, _POOLS)
    ):
        return read_moments[0]
    if (module is not None and is_activation(module)) or is_activation_call(node.target):
        return _applied(lambda x: apply(traced, node, (x,), node.kwargs), read_moments[0])
    return None


def _applied(act: Callable[[Tensor], object], pair: Pair) -> Pair | None:
    """Mean and variance of an activation's output, by 64 quantiles of a normal input."""
    mean, var = pair
    x = (mean[:, None] + var.sqrt()[:, None] * _POINTS.to(mean))[None]
    try:
        y = act(x)
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return y[0].mean(1), y[0].var(1, correction=0)


def _weighted(module: nn.Linear | nn.modules.conv._ConvNd, pair: Pair) -> Pair | None:
    weight = module.weight.detach().double()
    groups = getattr(module, "groups", 1)
    if type(module).forward not in _FORWARDS or len(pair[0]) != weight.shape[1] * groups:
        return None
    mean, var = (moment.reshape(groups, -1, 1) for moment in pair)
    rows = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    mean = (rows.sum(3) @ mean).flatten()
    bias = doubled(module.bias, torch.zeros((), dtype=torch.float64))
    return mean + bias, (rows.square().sum(3) @ var).flatten()


_FORWARDS = {nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward}
