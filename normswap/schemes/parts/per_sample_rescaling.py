"""The rescaling before the norms with statistics per sample, chosen on images: they show what leaves let guess.

What an error in a channel costs is what gamma says. Squared gradients of the outputs were tried: with the factors that
they choose a few photographs went badly wrong (EfficientNet-Lite0, 100 images).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import checked, misfit
from normswap.layers import affine
from normswap.layers.per_sample import group_moments, moved, per_filter
from normswap.layers.placeholders import Chain
from normswap.models.modes import evaluating
from normswap.plan import Step
from normswap.schemes.parts.channels_seen import Seen, joined, watching
from normswap.schemes.parts.steady_signs import Site

ENOUGH, MOST = 16, 512  # images


@torch.no_grad()
def choose_rescaling(target: nn.Module, result: nn.Module, step: Step, batches: Iterable[object]) -> None:
    """Give target and result, in place, another rescaling before each norm that has one; the target computes the same.

    Args:
        target: the source with its BatchNorms, with the rescaling of `step` (`per_sample_norms.recentred`).
        result: with the per-sample norms in place.
        batches: what they take (`Example.read`); at most `MOST` images are looked at, fewer than `ENOUGH` do nothing.
    """
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Steadied"}
    steady = {e.path: e.args for e in step.edits if e.layer == "GroupNorm" and (e.path in holders or "lead" in e.args)}
    shares = {edit.reads[0]: edit.args["steady"] for edit in step.edits if edit.layer == "Steadied"}
    norms = {path: _inner(target.get_submodule(path)) for path in steady}
    seen = _observe(target, norms, batches)
    for path, args in steady.items():
        if path not in seen or len(seen[path][0]) < ENOUGH:
            continue
        norm = norms[path]
        share = shares[path] if path in shares else args.get("steady", 0.0)
        scale, offset = Site.of(*seen[path], norm, args["groups"]).steadied(share)
        scale, offset = scale.to(norm.weight.device), offset.to(norm.weight.device)
        shift = offset - scale * norm.running_mean.double()  # `offset` is what the mean becomes
        for network in (target, result):
            before = network.get_submodule(path)
            before = before.inner if isinstance(before, Chain) else network.get_submodule(holders[path])
            _move(before, scale, shift)
        moved(norm, scale, shift)
        _match(_inner(result.get_submodule(path)), norm, args["groups"])


def _inner(layer: nn.Module) -> Any:
    return layer.then if isinstance(layer, Chain) else layer


def _observe(model: nn.Module, norms: dict[str, nn.Module], batches: Iterable[object]) -> dict[str, Seen]:
    """Per norm, each image's means and mean squares."""
    count = 0
    try:
        with evaluating(model), watching(norms) as seen:
            for example in checked(model, batches):
                example.call(model)
                count += example.count
                if count >= MOST:
                    break
    except Exception as error:  # whatever the network raises
        raise misfit(error) from None
    return joined(seen)


def _move(layer: Any, scale: Tensor, shift: Tensor) -> None:
    """Let a convolution, or a scale and shift, give scale * y + shift."""
    weight = scale if layer.weight.ndim == 1 else per_filter(layer, scale)
    layer.weight.copy_(layer.weight.double() * weight)
    layer.bias.copy_(scale * layer.bias.double() + shift)


def _match(norm: Any, like: Any, groups: int) -> None:
    """Gamma and beta of a per-sample norm that on an average sample computes what the BatchNorm does."""
    scale, offset = affine.read(like)
    mean, var = group_moments(like.running_mean.double(), like.running_var.double(), groups)
    mean, var = (value.repeat_interleave(scale.numel() // groups) for value in (mean, var))
    norm.weight.copy_(scale * (var + norm.eps).sqrt())
    norm.bias.copy_(offset + scale * mean)
