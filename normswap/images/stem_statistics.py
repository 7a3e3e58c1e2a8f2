"""Whether images are normalized as a network was trained on them, read off the statistics of its first norm.

A BatchNorm keeps mean and variance of what the stem made of the training images. Of images that are normalized
otherwise the stem makes something else; the distance tells the usual ways apart (0.5 and 0.5 from ImageNet's, pixels in
0..1 or 0..255 from both), and nothing finer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import evaluating, hooked
from normswap.models.preprocessing import data_config
from normswap.models.stated_images import Preprocessing

COUNT = 64  # images
_USUAL = (
    Preprocessing((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    Preprocessing((0.5,), (0.5,)),
    Preprocessing((0.0,), (1.0,)),
    Preprocessing((0.0,), (1 / 255,)),
)
_CLEARLY = 2.0  # so many times nearer, or nothing is said
_FAR = 0.5  # nats: noise is nearer to a trained network than that, and pixels in 0..1 are not


@dataclass(frozen=True)
class StemFit:
    """How far what the first norm sees is from its statistics.

    Args:
        values: mean and std of the images' normalization.
        distance: KL divergence per channel between the two normal distributions, in nats; the median.
    """

    values: Preprocessing
    distance: float


class _SeenError(Exception):
    """Ends a forward at the first norm."""


def better(model: nn.Module, images: Tensor) -> tuple[StemFit, StemFit] | None:
    """A usual normalization that fits the first norm clearly better than the one in force, and that one.

    Args:
        images: (N, C, H, W), as the network's record has them normalized.

    Returns:
        The better fit and the present one; None where there is none, or no norm that can tell.
    """
    config = data_config(model)
    mean, std = (torch.tensor(config[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    now = _distance(model, images)
    if now is None:
        return None
    present = StemFit(Preprocessing(tuple(config["mean"]), tuple(config["std"])), now)
    pixels = images * std + mean
    best = _nearest(model, pixels, _USUAL)
    return (best, present) if best.distance * _CLEARLY < now else None


def _nearest(model: nn.Module, pixels: Tensor, ways: Iterable[Preprocessing]) -> StemFit:
    """The way to normalize pixels (N, C, H, W) that fits the first norm best; infinitely bad where none can tell."""
    ways = [way for way in ways if len(way.mean or ()) in (1, pixels.shape[1])]
    distances = [_distance(model, _normalized(pixels, way)) for way in ways]
    fits = [StemFit(way, math.inf if far is None else far) for way, far in zip(ways, distances, strict=True)]
    return min(fits, key=lambda fit: fit.distance)


def doubt(model: nn.Module, images: Tensor) -> list[str]:
    """A sentence that says so, if images are pixels in 0..1 or 0..255 and the network wants them normalized.

    Args:
        images: (N, C, H, W), as somebody gave them.
    """
    now = _distance(model, images[:COUNT]) if images.ndim == 4 and images.is_floating_point() else None
    if now is None or now < _FAR:
        return []
    config = data_config(model)
    ways = [Preprocessing(tuple(config["mean"]), tuple(config["std"])), *_USUAL[:2]]
    fits = {white: _nearest(model, images[:COUNT] / white, ways) for white in (1, 255)}
    white, best = min(fits.items(), key=lambda pair: pair[1].distance)
    if best.distance * 2 * _CLEARLY > now:
        return []
    mean, std = (_listed(part) for part in (best.values.mean, best.values.std))
    return [
        f"the images look like pixels in 0..{white}, not normalized: they are {now:.2g} nats from the statistics of "
        f"its first norm, {best.distance:.2g} with mean {mean} and std {std}"
    ]


def advice(model: nn.Module, images: Tensor) -> list[str]:
    """A sentence that names the better normalization, if there is one."""
    pair = better(model, images)
    if pair is None:
        return []
    (best, present), (mean, std) = pair, (_listed(part) for part in (pair[0].values.mean, pair[0].values.std))
    return [
        f"the statistics of its first norm say otherwise: the images are {present.distance:.2g} nats from them, "
        f"{best.distance:.2g} with mean {mean} and std {std}"
    ]


def _listed(numbers: tuple[float, ...] | None) -> str:
    return ",".join(f"{number:.4g}" for number in numbers or ())


def _normalized(pixels: Tensor, values: Preprocessing) -> Tensor:
    mean, std = (torch.tensor(part).reshape(-1, 1, 1) for part in (values.mean, values.std))
    return (pixels - mean) / std


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it is in eval mode.

    None where there is none, or the network does not run on them.
    """
    with evaluating(model), _first_norm(model) as seen:
        try:
            calling.form(model).of(images).like(model).call(model)
        except _SeenError:
            pass
        except Exception:  # whatever the network raises: others will say what is wrong
            return None
    return seen[0] if seen else None


def _distance(model: nn.Module, images: Tensor) -> float | None:
    """Between statistics that the first norm keeps and those of what reaches it; None where it keeps none."""
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
