"""Mean and variance of each norm's input, predicted from the norms before it and the weights.

The output of a BatchNorm has mean beta and deviation |gamma| (Ioffe & Szegedy 2015, section 3),
whatever its statistics are. Its channels are taken as normal and independent, and both moments are
followed through activations, sums and convolutions to the next norm:

    E[W x + b] = W E[x] + b,    Var[W x] = W^2 Var[x]

Correlations, borders and gates are left out. So the predicted means are near the measured ones, and
the predicted variances are within an order of magnitude.
"""

import operator
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

from normswap.copying import doubled
from normswap.graph.tracing import Traced, apply, inputs, is_add, listed
from normswap.sites.activations import (
    is_activation,
    is_activation_call,
    is_identity,
    keeps_forward,
)
from normswap.sites.known_norms import Pair
from normswap.sites.site import Site

# 64 quantiles of N(0, 1).
_POINTS = torch.distributions.Normal(0.0, 1.0).icdf(torch.arange(0.5, 64) / 64).double()
_POOLS = (
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.AvgPool1d,
    nn.AdaptiveAvgPool1d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool3d,
)
_LINEAR_FORWARDS = {nn.Linear.forward, nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward}


def predicted_moments(traced: Traced) -> dict[str, Pair]:
    """Return mean and variance, (C,) float64, of the input of each norm, by the norm's path.

    They are predicted without images, from the norms before it and the weights between. Norms whose
    input cannot be predicted are left out.

    Args:
        traced: The recorded forward.
    """
    moments: dict[fx.Node, Pair] = {}
    norm_inputs: dict[str, Pair] = {}
    for node in traced.nodes:
        # What is known of the module that the node calls. None if the node calls no module.
        site = traced.site_at(node)
        # Moments are followed through any operation but a norm. The output of a norm depends on its
        # gamma and beta alone.
        if site is None or not site.has_moments:
            output = _output_moments(traced, node, moments)
            if output is not None:
                moments[node] = output
            continue

        # The statistics of a norm that is called twice are those of a mixture of two inputs.
        sources = inputs(node)
        is_called_once = site.called == 1
        if len(sources) == 1 and sources[0] in moments and is_called_once:
            norm_inputs[str(node.target)] = moments[sources[0]]
        moments[node] = _norm_output(site)
    return norm_inputs


def _norm_output(norm: Site) -> Pair:
    """Return mean and variance of a norm's output per channel, each (C,), in float64.

    Before the activation they are beta and gamma^2, whatever the input is. If the norm's module
    applies an activation, the moments behind it are returned, unless they cannot be computed.

    Args:
        norm: A norm with running statistics.
    """
    mean, deviation = norm.output_moments
    pair = (mean, deviation.square())
    act = norm.activation
    if act is None:
        return pair
    return _activated(act, pair) or pair


def _output_moments(traced: Traced, node: fx.Node, moments: dict[fx.Node, Pair]) -> Pair | None:
    """Return mean and variance of a node's value, or None if they cannot be predicted.

    Args:
        traced: The recorded forward.
        node: A node that is no norm.
        moments: Mean and variance of the values of earlier nodes.
    """
    sources = inputs(node)
    module = traced.module(node)
    read = [moments[source] for source in sources if source in moments]
    if not read or len(read) != len(sources):
        return None

    # The terms of a sum count as independent, so their variances are added. Terms with unequal
    # numbers of channels are not followed.
    means = [mean for mean, _ in read]
    variances = [var for _, var in read]
    widths = {len(mean) for mean in means}
    if is_add(node) and len(widths) == 1:
        return means[0] + means[1], variances[0] + variances[1]
    # A concatenation is followed if it names no value twice.
    if node.target is torch.cat and [*listed(node)] == sources:
        return torch.cat(means), torch.cat(variances)

    # Any other operation is followed only if it reads one value.
    if len(read) != 1:
        return None
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return _weighted(module, read[0])
    if _keeps_moments(node, module):
        return read[0]
    if (module is not None and is_activation(module)) or is_activation_call(node.target):
        return _activated(lambda x: apply(traced, node, (x,), node.kwargs), read[0])
    return None


def _keeps_moments(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether mean and variance of a node's output are taken to be those of its input.

    That is so for a node that returns its input unchanged, and for an average pool. A pool keeps
    the mean. It lowers the variance, which is left out here.

    Args:
        node: A node of the recorded forward.
        module: The module that the node calls, or None.
    """
    is_copy = node.target in ("contiguous", operator.pos)
    return is_identity(module) or is_copy or keeps_forward(module, _POOLS)


def _activated(act: Callable[[Tensor], object], pair: Pair) -> Pair | None:
    """Return mean and variance of an activation's output for a normal input, by 64 quantiles.

    None is returned if the activation does not take such a tensor, or returns another shape.

    Args:
        act: The activation.
        pair: Mean and variance of its input, each (C,).
    """
    # (1, C, 64): each channel of one sample has the 64 quantiles of its normal distribution.
    mean, var = pair
    x = (mean[:, None] + var.sqrt()[:, None] * _POINTS.to(mean))[None]
    # The activation may be the user's code, and raise anything.
    try:
        y = act(x)
    except Exception:
        return None
    if not isinstance(y, Tensor) or y.shape != x.shape:
        return None
    return y[0].mean(1), y[0].var(1, correction=0)


def _weighted(module: nn.Linear | nn.modules.conv._ConvNd, pair: Pair) -> Pair | None:
    """Return mean and variance of a layer's output W x + b, each (outputs,).

    The result is None if the layer may compute something else than W x + b. That is so for a
    transposed convolution, for a class with a forward of its own, and if the layer takes another
    number of channels.

    Args:
        module: The layer.
        pair: Mean and variance of x, each (C,).
    """
    weight = module.weight.detach().double()
    groups = getattr(module, "groups", 1)
    if type(module).forward not in _LINEAR_FORWARDS or len(pair[0]) != weight.shape[1] * groups:
        return None

    # Each group has filters (outputs, inputs, kernel positions) of its own. All inputs of a filter
    # count as independent, so the output's variance is the sum of W^2 var.
    mean, var = (moment.reshape(groups, -1, 1) for moment in pair)
    filters = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)
    output_mean = (filters.sum(3) @ mean).flatten()
    output_var = (filters.square().sum(3) @ var).flatten()
    # The bias in float64. A layer without a bias adds 0.
    bias = doubled(module.bias, torch.zeros((), dtype=torch.float64))
    return output_mean + bias, output_var
