"""Checks of how images are prepared: which normalization, and which order of colours, makes the
stem's statistics fit.

A BatchNorm behind the stem keeps mean and variance of what the training images became there. Images
that are prepared otherwise become something else; of several ways the right one is nearest.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normswap.diagnosis.drift import measured
from normswap.diagnosis.findings import Case, Certainty, Finding
from normswap.diagnosis.image_batches import PARTS, ImageBatches
from normswap.errors import flag
from normswap.layers import affine
from normswap.models import calling
from normswap.models.modes import hooked, undisturbed
from normswap.models.preprocessing import data_config

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_BYTE = 1 / 255
_USUAL = (
    _IMAGENET,
    ((0.5,), (0.5,)),
    ((0.0,), (1.0,)),
    ((0.0,), (_BYTE,)),
    (_IMAGENET[0], (_BYTE,)),
)
# In nats: a nearer fit is as good as chance lets it be.
_FAR = 0.004
# How many times nearer another way must be, in all and in every part, and how near, in nats: the
# right one is very near, and a usual one that is nearly right is far nearer than a wrong one.
_CLEARLY = ((2.0, 0.01), (5.0, 0.05))
# By so much pixels may leave 0..1.
_ROUNDED = 0.02
_BATCH = 32


@dataclass(frozen=True)
class _Way:
    mean: tuple[float, ...]
    std: tuple[float, ...]
    reverses: bool

    def __str__(self) -> str:
        numbers = (
            ",".join(f"{number:.4g}" for number in values) for values in (self.mean, self.std)
        )
        return "mean {}, std {}".format(*numbers) + (", channels as BGR" if self.reverses else "")

    def prepare(self, pixels: Tensor) -> Tensor:
        """Images as a network takes them, of pixels (N, C, H, W)."""
        mean, std = (
            torch.tensor(values, dtype=pixels.dtype).reshape(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return ((pixels.flip(1) if self.reverses else pixels) - mean) / std

    def undo(self, images: Tensor) -> Tensor:
        """Pixels of images that were prepared so, where the order of colours is the usual one."""
        mean, std = (
            torch.tensor(values, dtype=images.dtype).reshape(-1, 1, 1)
            for values in (self.mean, self.std)
        )
        return images * std + mean


def unfit_preprocessing(case: Case) -> Iterator[Finding]:
    """Another way to prepare the images with which the first norm's statistics fit clearly better."""
    if case.images is None or case.images.images is None:
        return
    config = data_config(case.model)
    images = case.images.images.cpu()
    if len(config["mean"]) != images.shape[1]:
        return
    present = _Way(tuple(config["mean"]), tuple(config["std"]), reverses=False)
    pixels = present.undo(images)
    now = _distances(case.model, images)
    if now is None or now[0] < _FAR:
        return
    tried = [(way, pixels, "") for way in _ways(present, images.shape[1])]
    for values, form in _as_pixels(images, present):
        tried += [(way, values, form) for way in _ways(present, images.shape[1], usual=False)]
    best = present
    least = now
    told_as = ""
    read = pixels
    for way, values, form in tried:
        distances = _distances(case.model, way.prepare(values))
        if distances is not None and distances[0] < least[0]:
            best = way
            least = distances
            told_as = form
            read = values
    times = min(current / max(nearest, 1e-9) for nearest, current in zip(least, now, strict=True))
    if not any(times > factor and least[0] < near for factor, near in _CLEARLY):
        return
    if not _fits_all(case, best.prepare(read)):
        return
    evidence = (
        f"the first norm's input on {case.images.count} images{told_as} is {now[0]:.2g} nats (KL"
        f" divergence) from its statistics; with {best} it is {least[0]:.2g}"
    )
    cost = "every layer sees other values than in training"
    paths = tuple(site.path for site in case.sites[:1])
    yield Finding("preprocessing", paths, evidence, Certainty.LIKELY, cost, _mend(case, best))


def _as_pixels(images: Tensor, present: _Way) -> Iterator[tuple[Tensor, str]]:
    """Images that nobody normalized, or that were normalized otherwise, as pixels in 0..1, and how
    they were given.
    """
    least, most = images.aminmax()
    if least >= 0 and most <= 255:
        yield (
            (images, ", given as pixels in 0..1")
            if most <= 1
            else (images * _BYTE, ", given as pixels in 0..255")
        )
    half_done = ((present.mean, (1.0,)), ((0.0,), present.std))
    for mean, std in (*_USUAL, *half_done):
        way = _Way(mean, std, reverses=False)
        if len(mean) in (1, images.shape[1]) and way != present:
            pixels = way.undo(images)
            if pixels.min() > -_ROUNDED and pixels.max() < 1 + _ROUNDED:
                yield pixels, f", given with {way}"


def _ways(present: _Way, channels: int, *, usual: bool = True) -> Iterator[_Way]:
    further = [pair for pair in _USUAL if len(pair[0]) in (1, channels)] if usual else []
    values = ((present.mean, present.std), *further)
    for mean, std in values:
        for reverses in (False, True) if channels == 3 else (False,):
            yield _Way(mean, std, reverses)


def _fits_all(case: Case, images: Tensor) -> bool:
    """Whether most norms fit images that are prepared otherwise: else not their preparation is
    wrong.
    """
    drifts = measured(replace(case, images=ImageBatches.read(case.model, images.split(_BATCH))))
    return 2 * sum(drift.is_off for drift in drifts) <= len(drifts)


def _mend(case: Case, way: _Way) -> str:
    mean, std = (",".join(f"{number:.6g}" for number in values) for values in (way.mean, way.std))
    numbers = f"{flag('image_mean')} {mean} {flag('image_std')} {std}"
    if not way.reverses:
        # What was said before is replaced.
        name = re.sub(r" --image-(mean|std) \S+", "", case.name)
        return f"say it wherever images are read: {name} {numbers}"
    return (
        "reverse the colours of the stem, its weight becomes weight.flip(1), or those of the"
        f" images; with {numbers}"
    )


def _distances(model: nn.Module, images: Tensor) -> list[float] | None:
    """How far the first norm's statistics are from those of its input, of all images and of each of
    some parts.

    KL divergence of normal distributions, in nats, the mean of the middle 80 % of channels; None
    without statistics.
    """
    rows = []
    for batch in images.split(_BATCH):
        observed = at_first_norm(model, batch)
        if (
            observed is None
            or observed[1].ndim < 3
            or observed[1].shape[1] != affine.channels(observed[0])
        ):
            return None
        norm = observed[0]
        values = observed[1].double().flatten(2)
        rows.append(torch.stack([values.mean(2), values.square().mean(2)]))
    sums = torch.cat(rows, 1)
    mean, var = affine.statistics(norm)
    if bool((mean == 0).all()) or not bool(torch.isfinite(mean).all() and (var > 0).all()):
        return None
    return [
        _divergence(subset, mean, var)
        for subset in (sums, *(sums[:, start::PARTS] for start in range(PARTS)))
    ]


def _divergence(sums: Tensor, mean: Tensor, var: Tensor) -> float:
    mean = mean.to(sums.device)
    var = var.to(sums.device)
    observed, square = sums.mean(1)
    spread = (square - observed.square()).clamp_min(0) + 1e-12
    ratio = spread / (var + 1e-12)
    divergences = (
        ((ratio - 1 - ratio.log() + (observed - mean).square() / (var + 1e-12)) / 2).sort().values
    )
    cut = len(divergences) // 10
    return float(divergences[cut : len(divergences) - cut].mean())


class _SeenError(Exception):
    """Ends a forward at the first norm."""


@torch.inference_mode()
def at_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """The first norm with statistics of its own, and what reaches it of images (N, C, H, W), as it
    is in eval mode.

    None where there is none, or the network does not run on them.
    """
    reached: list[tuple[nn.Module, Tensor]] = []

    def look(module: nn.Module, args: tuple[object, ...]) -> None:
        if args and isinstance(args[0], Tensor):
            reached.append((module, args[0]))
            raise _SeenError

    norms = [module for module in model.modules() if affine.has_moments(module)]
    hooks = hooked(norm.register_forward_pre_hook(look) for norm in norms)
    # The end at the norm is suppressed, and whatever the network raises: others will say it.
    with suppress(Exception), undisturbed(model), hooks:
        calling.form(model).of(images).like(model).call(model)
    return next(iter(reached), None)
