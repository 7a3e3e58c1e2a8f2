"""The rescaling before the norms with statistics per sample, chosen on images: they show what leaves let guess.

Of few images, made ones of leaves fill up the number: how hundreds of channels' means go together is not seen on a
dozen, and a rescaling that suits those alone loses more on others than the one that was chosen without any.

What an error in a channel costs is what gamma says. Squared gradients of the outputs were tried: with the factors that
they choose a few photographs went badly wrong (EfficientNet-Lite0, 100 images).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from normswap.layers import affine
from normswap.layers.per_sample import before, group_moments, last, move, moved
from normswap.plan import Step
from normswap.schemes.parts.channels_seen import joined, watched_on_images, watched_on_leaves_of, watching
from normswap.schemes.parts.steady_signs import Site

ENOUGH = 16  # images
FILLED = 192  # with made ones


@torch.no_grad()
def choose_rescaling(target: nn.Module, result: nn.Module, step: Step, batches: Iterable[object]) -> None:
    """Give target and result, in place, another rescaling before each norm that has one; the target computes the same.

    Args:
        target: the source with its BatchNorms, with the rescaling of `step` (`per_sample_norms.recentred`).
        result: with the per-sample norms in place.
        batches: what they take (`Example.read`); fewer images than `ENOUGH` do nothing.
    """
    holders = {edit.reads[0]: edit.path for edit in step.edits if edit.layer == "Steadied"}
    free = {e.path: e.args for e in step.edits if e.layer == "GroupNorm" and "eps" in e.args}
    norms = {path: last(target.get_submodule(path)) for path in free}
    seen = joined(watched_on_images(target, norms, batches, watching))
    missing = FILLED - min((len(means) for means, _ in seen.values()), default=FILLED)
    made = joined(watched_on_leaves_of(target, norms, batches, watching, missing)) if missing > 0 else {}
    for path, args in free.items():
        if path not in seen or len(seen[path][0]) < ENOUGH:
            continue
        norm, groups, eps = norms[path], args["groups"], args["eps"]
        site = Site.of(*seen[path], norm, groups, eps)
        if path in made:
            means, squares = made[path]
            site = site.beside(Site.of(means[:missing], squares[:missing], norm, groups, eps))
        scale = site.quieted().to(norm.weight.device)
        shift = -scale * norm.running_mean.double()
        for network in (target, result):
            move(before(network, path, holders), scale, shift)
        moved(norm, scale, shift)
        _match(last(result.get_submodule(path)), norm, groups)


def _match(norm: Any, like: Any, groups: int) -> None:
    """Gamma and beta of a per-sample norm that on an average sample computes what the BatchNorm does."""
    scale, offset = affine.read(like)
    mean, var = group_moments(like.running_mean.double(), like.running_var.double(), groups)
    mean, var = (value.repeat_interleave(scale.numel() // groups) for value in (mean, var))
    norm.weight.copy_(scale * (var + norm.eps).sqrt())
    norm.bias.copy_(offset + scale * mean)
