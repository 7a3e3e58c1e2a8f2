"""Norms with statistics per sample as sources: the BatchNorm that computes, on images, most nearly what each does.

GroupNorm, LayerNorm over channels and positions, or over channels, InstanceNorm: in the seat of each a norm with the
mean and variance per channel of what reaches it over the calibration images, and the gamma and beta of the
least-squares affine map from there to the source's output, in topological order, so that each is fitted to what the
network before it has become. Approximate: what a norm does to a sample depends on the sample.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, fx, nn

from normswap.calibration.lockstep import March, Walker, walkers
from normswap.calibration.sequential_fit import Progress
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import inputs
from normswap.layers import known_norms
from normswap.layers.known_norms import Statistics
from normswap.layers.site_norm import SiteNorm
from normswap.models.modes import evaluating

REMEDY = "'--calibrate DATA' (images, no labels needed) replaces them by what they do on average"
NEEDED = 2


def why_not(module: nn.Module) -> str | None:
    """Why no BatchNorm can stand for this norm, or None."""
    kind = known_norms.kind_of(module)
    per_sample = kind is not None and kind.statistics in (Statistics.SAMPLE, Statistics.POSITION)
    if kind is None or not per_sample or kind.dim != 1 or kind.single or not known_norms.is_believed(module):
        return f"{type(module).__name__} is no norm of channels in dimension 1 that is known"
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which would be lost with it"
    if getattr(module, "track_running_stats", False):
        return "it keeps statistics of its own"
    return None


def fits(anatomy: Anatomy, path: str) -> bool:
    """Whether the norm at `path` is one that can be estimated."""
    module = anatomy.traced.modules[path]
    return why_not(module) is None and len(anatomy.traced.calls.get(id(module), ())) == 1


@torch.no_grad()
def fit_norms(
    source: nn.Module, result: nn.Module, batches: Iterable[object], progress: Progress | None = None
) -> None:
    """Set the values of every norm of `result` that was seated for one of `source`, in place.

    Raises:
        SourceError: unusable or too few images.
    """
    with evaluating(source, result):
        (theirs, ours), examples = walkers(batches, source, result)
        stops = _stops(theirs, ours)
        march = March([theirs, ours], examples, needed=NEEDED)
        try:
            for done, (there, here) in enumerate(stops):
                old, new = theirs.traced.module(there), ours.traced.module(here)
                assert old is not None
                assert isinstance(new, SiteNorm)
                _fit(_linear(old), new, march, (there, here))
                if progress is not None:
                    progress(done + 1, len(stops))
        finally:
            march.close()


def _stops(theirs: Walker, ours: Walker) -> list[tuple[fx.Node, fx.Node]]:
    calls = {str(node.target): node for node in theirs.nodes if node.op == "call_module"}
    return [
        (calls[str(node.target)], node)
        for node in ours.nodes
        if isinstance(ours.traced.module(node), SiteNorm)
        and str(node.target) in calls
        and why_not(theirs.traced.modules[str(node.target)]) is None
    ]


def _linear(norm: nn.Module) -> nn.Module:
    """The norm without the activation that it carries."""
    plain = copy.deepcopy(norm).eval()
    for name in ("act", "drop"):
        if isinstance(getattr(plain, name, None), nn.Module):
            setattr(plain, name, nn.Identity())
    return plain


def _fit(old: nn.Module, new: SiteNorm, march: March, nodes: tuple[fx.Node, fx.Node]) -> None:
    sums = torch.zeros(4, new.num_features, dtype=torch.float64, device=new.weight.device)
    count = 0
    there, here = (inputs(node)[0].name for node in nodes)
    for held in march.stop([*nodes]):
        x, y = _rows(held[1][here]), _rows(old(held[0][there].clone()))
        sums += torch.stack([x.sum(1), y.sum(1), x.square().sum(1), (x * y).sum(1)])
        count += x.shape[1]
    mean, target, square, product = sums / count
    variance = (square - mean.square()).clamp_min(0)
    slope = (product - mean * target) / variance.clamp_min(1e-30)
    slope = torch.where(variance > 1e-12, slope, torch.zeros_like(slope))
    new.running_mean.copy_(mean)  # type: ignore[union-attr]
    new.running_var.copy_(variance * count / max(count - 1, 1))  # type: ignore[union-attr]
    new.weight.copy_(slope * (new.running_var.double() + new.eps).sqrt())  # type: ignore[union-attr]
    new.bias.copy_(target)


def _rows(x: Tensor) -> Tensor:
    """(N, C, ...) -> (C, N ...), float64."""
    return x.double().transpose(0, 1).flatten(1)
