"""Norms with statistics per sample as sources: the BatchNorm that computes, on images, most nearly what each does.

GroupNorm, LayerNorm over channels and positions, or over channels, InstanceNorm: in place of each a norm with the
mean and variance per channel of what reaches it over the calibration images, and the gamma and beta of the
least-squares affine map from there to the source's output, in topological order, so that each is fitted to what the
network before it has become. Approximate: what a norm does to a sample depends on the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, fx, nn

from normswap.calibration.lockstep import Interpreter, Lockstep, interpreters
from normswap.errors import spelled
from normswap.graph.tracing import inputs
from normswap.layers import affine
from normswap.layers.known_norms import BatchNorm
from normswap.layers.site_norm import SiteNorm
from normswap.models.modes import Progress, evaluating

NEEDED = 2


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
        layers = _layers(theirs, ours)
        lockstep = Lockstep([theirs, ours], examples, needed=NEEDED)
        try:
            for done, (there, here) in enumerate(layers):
                old, new = theirs.traced.module(there), ours.traced.module(here)
                assert old is not None
                assert isinstance(new, SiteNorm)
                _fit(_linear(old), new, lockstep, (there, here))
                if progress is not None:
                    progress(done + 1, len(layers))
        finally:
            lockstep.close()


def _layers(theirs: Interpreter, ours: Interpreter) -> list[tuple[fx.Node, fx.Node]]:
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}
    return [
        (calls[str(node.target)], node)
        for node in ours.nodes
        if isinstance(ours.traced.module(node), SiteNorm)
        and str(node.target) in calls
        and affine.has_average(theirs.traced.modules[str(node.target)])
    ]


def _linear(norm: nn.Module) -> nn.Module:
    """The norm without the activation that it carries."""
    plain = copy.deepcopy(norm).eval()
    for name in ("act", "drop"):
        if isinstance(getattr(plain, name, None), nn.Module):
            setattr(plain, name, nn.Identity())
    return plain


def _fit(old: nn.Module, new: SiteNorm, lockstep: Lockstep, nodes: tuple[fx.Node, fx.Node]) -> None:
    sums = torch.zeros(4, new.num_features, dtype=torch.float64, device=new.weight.device)
    count = 0
    there, here = (inputs(node)[0].name for node in nodes)
    for held in lockstep.run_to([*nodes]):
        x, y = _rows(held[1][here]), _rows(old(held[0][there].clone()))
        sums += torch.stack([x.sum(1), y.sum(1), x.square().sum(1), (x * y).sum(1)])
        count += x.shape[1]
    mean, target, square, product = sums / count
    variance = (square - mean.square()).clamp_min(0)
    slope = (product - mean * target) / variance.clamp_min(1e-30)
    slope = torch.where(variance > 1e-12, slope, torch.zeros_like(slope))
    norm = cast(BatchNorm, new)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance * count / max(count - 1, 1))
    new.weight.copy_(slope * (norm.running_var.double() + new.eps).sqrt())
    new.bias.copy_(target)


def _rows(x: Tensor) -> Tensor:
    """(N, C, ...) -> (C, N ...), float64."""
    return x.double().transpose(0, 1).flatten(1)
