"""Whether images are normalized as a network was trained on them, read off the statistics of its first norm.

A BatchNorm keeps mean and variance of what the stem made of the training images. Of images that are normalized
otherwise the stem makes something else; the distance tells the usual ways apart (0.5 and 0.5 from ImageNet's, pixels in
0..1 or 0..255 from both), and nothing finer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import hooked, undisturbed
from normswap.models.preprocessing import data_config

_IMAGES = 64
_USUAL = (((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), ((0.5,), (0.5,)))  # mean and std
_CLEARLY = 4.0  # so many times nearer, or nothing is said
_FAR = 0.5  # nats: noise is nearer to a trained network than that, and pixels in 0..1 are not


class _SeenError(Exception):
    """Ends a forward at the first norm."""


def doubt(model: nn.Module, images: Tensor) -> list[str]:
    """A sentence that says so, if images are pixels in 0..1 or 0..255 and the network wants them normalized.

    Args:
        images: (N, C, H, W), as somebody gave them.
    """
    images = images[:_IMAGES]
    now = _distance(model, images) if images.ndim == 4 and images.is_floating_point() else None
    if now is None or now < _FAR:
        return []
    config = data_config(model)
    best = None
    for white in (1, 255):
        for mean, std in ((config["mean"], config["std"]), *_USUAL):
            if len(mean) in (1, images.shape[1]):
                pixels = images / white
                distance = _distance(model, (pixels - _per_channel(mean)) / _per_channel(std))
                if distance is not None and (best is None or distance < best[0]):
                    best = distance, white, mean, std
    if best is None or best[0] * _CLEARLY > now:
        return []
    nearest, white, mean, std = best
    shown_mean, shown_std = (",".join(f"{number:.4g}" for number in values) for values in (mean, std))
    return [
        f"the images look like pixels in 0..{white}, not normalized: they are {now:.2g} nats from the statistics of "
        f"its first norm, {nearest:.2g} with mean {shown_mean} and std {shown_std}"
    ]


def _per_channel(values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1)


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it is in eval mode.

    None where there is none, or the network does not run on them.
    """
    with undisturbed(model), _first_norm(model) as seen:
        try:
            calling.form(model).of(images).like(model).call(model)
        except _SeenError:
            pass
        except Exception:  # whatever the network raises: others will say what is wrong
            return None
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


@contextmanager
def _first_norm(model: nn.Module) -> Iterator[list[tuple[nn.Module, Tensor]]]:
    """Runs of the network end at its first norm with statistics of its own, which is handed out with its input."""
    seen: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            seen.append((module, args[0]))
            raise _SeenError

    with hooked(norm.register_forward_pre_hook(look) for norm in model.modules() if affine.has_moments(norm)):
        yield seen
