"""Norms with statistics per sample as sources: the BatchNorm that computes, on images, most nearly what each does.

GroupNorm, LayerNorm over channels and positions, or over channels, InstanceNorm: in place of each a norm with the
mean and variance per channel of what reaches it over the calibration images, and the gamma and beta of the
least-squares affine map from there to the source's output, in topological order, so that each is fitted to what the
network before it has become. Approximate: what a norm does to a sample depends on the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.calibration.channel_moments import ChannelLine
from normswap.calibration.lockstep import Interpreter, Lockstep, interpreters
from normswap.errors import spelled
from normswap.graph.tracing import inputs
from normswap.layers import affine
from normswap.layers.site_norm import SiteNorm
from normswap.models.modes import Progress, evaluating


def remedy() -> str:
    """Say what replaces norms that have statistics per sample."""
    images = spelled("calibrate", metavar="DATA")
    return f"'{images}' (images, no labels needed) replaces them by what they do on average"


@torch.no_grad()
def fit_norms(
    source: nn.Module, result: nn.Module, batches: Iterable[object], progress: Progress | None = None
) -> None:
    """Set the values of every norm of `result` that was placed for one of `source`, in place.

    Raises:
        SourceError: unusable or too few images.
    """
    with evaluating(source, result):
        (theirs, ours), examples = interpreters(batches, source, result)
        pairs = _norms(theirs, ours)
        lockstep = Lockstep([theirs, ours], examples)
        for done, (old_node, new_node) in enumerate(pairs, 1):
            old, new = theirs.traced.module(old_node), ours.traced.module(new_node)
            assert old is not None
            assert isinstance(new, SiteNorm)
            line = ChannelLine(new.num_features, new.weight.device)
            old_input, new_input = inputs(old_node)[0].name, inputs(new_node)[0].name
            plain = _without_activation(old)
            for old_values, new_values in lockstep.run_to([old_node, new_node]):
                line.add(_rows(new_values[new_input]), _rows(plain(old_values[old_input].clone())))
            _set(new, line)
            if progress is not None:
                progress(done, len(pairs))


def _norms(theirs: Interpreter, ours: Interpreter) -> list[tuple[fx.Node, fx.Node]]:
    """The calls of each norm with statistics per sample, and of the one that was placed for it."""
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}
    return [
        (calls[str(node.target)], node)
        for node in ours.nodes
        if isinstance(ours.traced.module(node), SiteNorm)
        and str(node.target) in calls
        and affine.has_average(theirs.traced.modules[str(node.target)])
    ]


def _without_activation(norm: nn.Module) -> nn.Module:
    plain = copy.deepcopy(norm).eval()
    for name in ("act", "drop"):
        if isinstance(getattr(plain, name, None), nn.Module):
            setattr(plain, name, nn.Identity())
    return plain


def _set(norm: Any, line: ChannelLine) -> None:
    mean, variance = line.moments()
    slope, offset = line.fitted()
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance * line.count / max(line.count - 1, 1))
    norm.weight.copy_(slope * (norm.running_var.double() + norm.eps).sqrt())
    norm.bias.copy_(offset + slope * mean)


def _rows(x: Tensor) -> Tensor:
    """(N, C, ...) -> (C, N ...), float64."""
    return x.double().transpose(0, 1).flatten(1)
