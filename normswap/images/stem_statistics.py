"""Whether images are normalized as a network was trained on them, read off the statistics of its first norm.

A BatchNorm keeps mean and variance of what the stem made of the training images. Of pixels that nobody normalized the
stem makes something else.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import evaluating, hooked
from normswap.models.preprocessing import data_config

_IMAGES = 64
# Normalized images must be so many times nearer, or nothing is said.
_CLEARLY = 4.0
# Nats: noise is nearer to a trained network than that, and pixels in 0..1 are not.
_FAR = 0.5


class _SeenError(Exception):
    """Ends a forward at the first norm."""


def doubt(model: nn.Module, images: Tensor) -> list[str]:
    """A sentence that says so, if images (N, C, H, W) are pixels in 0..1 or 0..255 and should be normalized."""
    images = images[:_IMAGES]
    now = _distance(model, images) if images.ndim == 4 and images.is_floating_point() else None
    if now is None or now < _FAR:
        return []
    config = data_config(model)
    mean, std = (torch.tensor(config[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    for white in (1, 255) if len(mean) in (1, images.shape[1]) else ():
        distance = _distance(model, (images / white - mean) / std)
        if distance is not None and distance * _CLEARLY < now:
            far = f"they are {now:.2g} nats from the statistics of its first norm"
            return [
                f"the images look like pixels in 0..{white}, not normalized: {far}, "
                f"{distance:.2g} with the mean and std that the network's record states"
            ]
    return []


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it is in eval mode.

    None where there is none, or the network does not run on them.
    """
    seen: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append((module, args[0]))
            raise _SeenError

    norms = [module for module in model.modules() if affine.has_moments(module)]
    hooks = hooked(norm.register_forward_pre_hook(look) for norm in norms)
    # The end at the norm is suppressed, and whatever the network raises: others will say it.
    with suppress(Exception), evaluating(model), hooks:
        calling.form(model).of(images).like(model).call(model)
    return seen[0] if seen else None


def _distance(model: nn.Module, images: Tensor) -> float | None:
    """KL divergence, in nats, of what reaches the first norm from the statistics it keeps, both taken as normal.

    The median of the channels; None where there is no norm that keeps any.
    """
    seen = at_first_norm(model, images)
    if seen is None:
        return None
    norm, x = seen
    kept_mean, kept_var = affine.statistics(norm)
    if x.ndim < 3 or x.shape[1] != len(kept_mean) or (kept_mean == 0).all():
        return None
    channels = x.double().transpose(0, 1).flatten(1)
    ratio = (channels.var(1) + 1e-12) / (kept_var + 1e-12)
    shift = (channels.mean(1) - kept_mean).square() / (kept_var + 1e-12)
    return float(((ratio - 1 - ratio.log() + shift) / 2).median())
