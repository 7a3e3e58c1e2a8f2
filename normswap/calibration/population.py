"""Estimate the population statistics of BatchNorm anew, from images.

The network runs with each norm on the statistics of the batch, as in training. For each norm and
channel, with m values in a batch of mean mu_B and variance sigma_B^2:

    E[x] = mean over batches of mu_B,      Var[x] = m / (m - 1) * mean over batches of sigma_B^2

If batches have different sizes, each is weighted by its number of images.

Source: Ioffe & Szegedy 2015 (arXiv:1502.03167), algorithm 2, lines 8 to 10.
"""

import math
import operator
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration.checked_batches import checked, count_without_copies, run
from normswap.errors import RefusedError, SourceError, VerificationError
from normswap.models.modes import Progress, evaluating, hooked
from normswap.sites.site import Site, sites_of

# The largest standard error of a channel's mean that is allowed, in standard deviations of the
# channel. Of each norm the median channel counts. With 2 to 8 images, four trained networks lost 2
# to 20 points of top-1 above this error, and 0 to 4 below it.
MOST_ERROR = 0.3
# Copies are looked for among the first images, until so many different ones were found. With more
# of them, the error is far below `MOST_ERROR`.
_ENOUGH = 512
_MISFIT = "the network does not run on these images as in training"

# For each norm, by its path: three sums over images (3, C) in float64, and the number of images.
# Each image adds the mean of its batch, the batch's unbiased variance, and the mean square of the
# means of the batch's images.
_Sums = dict[str, tuple[Tensor, int]]


class _OneValueError(SourceError):
    """The error that a norm gets one value per channel in a batch, which has no variance."""


def norms_of(model: nn.Module) -> dict[str, Site]:
    """Return the norms whose running statistics can be estimated, by path.

    They are the norms that take statistics of the batch in training.

    Raises:
        RefusedError: There are none, two norms share their statistics, or it is unknown what the
            class of a norm does in training.
    """
    norms: dict[str, Site] = {}
    for site in sites_of(model):
        if not site.learns_statistics:
            continue
        if site.refusal_to_measure is not None:
            raise RefusedError(f"cannot estimate {site.path}", site.refusal_to_measure)
        norms[site.path] = site

    # Two norms that share a tensor of statistics cannot each have their own.
    holders: dict[int, str] = {}
    for path, site in norms.items():
        other = holders.setdefault(id(site.module.running_mean), path)
        if other != path:
            remedy = "Give each a clone of running_mean and running_var"
            raise RefusedError(
                f"{other} and {path} share their running statistics",
                "each reads other values",
                remedy,
            )

    if not norms:
        remedy = "Only norms that take statistics of the batch in training have some to estimate"
        raise RefusedError("the network has no BatchNorm with running statistics", remedy=remedy)

    return norms


@torch.no_grad()
def estimate_population(
    model: nn.Module,
    batches: Iterable[object],
    progress: Progress | None = None,
    *,
    most_error: float = float("inf"),
) -> str:
    """Set the running mean and variance of every BatchNorm of a network, in place.

    Args:
        model: The network, whose norms get new statistics.
        batches: Images as the network takes them. See `checked`. A batch in which a norm sees one
            value per channel is left out, if there are others.
        progress: Called with the number of batches that are done, and the number of all batches.
        most_error: The largest allowed standard error of a channel's mean, in deviations
            (`MOST_ERROR`). Copies of an image count as one. Any error is allowed by default.

    Returns:
        A note that says how many norms and images there were.

    Raises:
        RefusedError: There is no norm whose statistics can be estimated. See `norms_of`.
        SourceError: The images are unusable or too few, or a norm sees one value per channel.
        VerificationError: The network gives values that are not finite.
    """
    norms = norms_of(model)
    total = operator.length_hint(batches)

    # The numbers of batches, of images in them, of different ones among these, and of images in
    # batches that were left out because a norm sees one value per channel there. `unusable` is the
    # error of the first of the latter.
    count = 0
    images = 0
    different = 0
    seen: set[bytes] = set()
    left_out = 0
    unusable: _OneValueError | None = None
    sums: _Sums = {}
    # The norms take statistics as in training. Each adds the moments of its input to the dict.
    with _as_in_training(model, norms) as sums_of_batch:
        for example in checked(model, batches):
            sums_of_batch.clear()
            try:
                run(model, example, _MISFIT)
            except _OneValueError as error:
                unusable = unusable or error
                left_out += example.count
                continue

            _add(sums, sums_of_batch)
            count += 1
            images += example.count
            if math.isfinite(most_error) and different < _ENOUGH:
                different += count_without_copies(example, seen)
            else:
                different += example.count
            if progress is not None:
                progress(count, total)

    if unusable is not None and not count:
        raise unusable
    if not count:
        raise SourceError("0 calibration images", "at least one is needed")

    _set_statistics(norms, sums, different, most_error)
    note = f"{len(norms)} norms, {images} images in {count} batches"
    if left_out:
        note += f"; {left_out} images in batches that give one value per channel are left out"

    return note


def _set_statistics(norms: Mapping[str, Site], sums: _Sums, images: int, most_error: float) -> None:
    """Set running means and variances of norms, in place, from sums over images.

    Args:
        norms: The norms, by path.
        sums: The sums of each norm, by its path.
        images: The number of different images.
        most_error: The largest allowed standard error of a channel's mean, in deviations.

    Raises:
        SourceError: The images are too few for that error.
        VerificationError: A sum is not finite.
    """
    for path, (moments, count) in sums.items():
        norm: Any = norms[path].module
        if not bool(moments.isfinite().all()):
            raise VerificationError(f"the statistics of {path} are not finite on these images")
        _require_enough(path, moments / count, images, most_error)
        # The first two rows of the moments are the sums of means and of unbiased variances.
        norm.running_mean.copy_(moments[0] / count)
        norm.running_var.copy_(moments[1] / count)


def _add(sums: _Sums, more: _Sums) -> None:
    """Add sums over further images to those so far, in place.

    Args:
        sums: The sums so far, by norm.
        more: The sums of further images, by norm.
    """
    for path, (moments, number) in more.items():
        if path in sums:
            earlier, count = sums[path]
            sums[path] = (earlier + moments, count + number)
        else:
            sums[path] = (moments, number)


def _require_enough(path: str, moments: Tensor, count: int, most: float) -> None:
    """Raise SourceError if the images are too few for the mean of a norm's input.

    They are too few if the mean's standard error, sqrt(Var[image mean] / N), exceeds `most`
    deviations in the median channel.

    Args:
        path: The path of the norm.
        moments: Mean, variance and mean square of the images' means, (3, C).
        count: The number of different images N.
        most: The largest allowed standard error, in deviations.
    """
    if count < 2 and math.isfinite(most):
        why = f"how far the mean of {path} is off is not known from one image, or copies of it"
        raise SourceError("1 image is too few", why)

    # The variance of the images' means is E[mean^2] - E[mean]^2, and that of their average is
    # estimated by a division by N - 1. Relative to the channel's variance, it is in deviations.
    mean, var, square = moments
    error = float(
        ((square - mean.square()).clamp_min(0) / max(count - 1, 1) / (var + 1e-12)).sqrt().median()
    )

    # The error falls with the root of the number of images.
    if error > most:
        why = (
            f"at {path} the standard error of a channel's mean is {error:.2f} deviations, more than"
            f" {most:g}"
        )
        remedy = (
            f"Give {math.ceil(count * (error / most) ** 2)} or more; then 'normswap verify OUTPUT"
            " --data OTHERS' measures on other images what is kept"
        )
        raise SourceError(f"{count} different images are too few", why, remedy)


@contextmanager
def _as_in_training(model: nn.Module, norms: Mapping[str, Site]) -> Iterator[_Sums]:
    """Context manager: put the norms into training mode, and all other modules into eval mode.

    It yields a dict, to which each norm adds the sums of its input's moments whenever it runs. The
    caller clears the dict before each batch. At the end the modes and the norms' buffers are
    restored.

    Args:
        model: The network.
        norms: The norms, by path.
    """
    sums: _Sums = {}
    before: dict[Tensor, Tensor] = {}
    for site in norms.values():
        before |= {
            buffer: buffer.clone() for buffer in nn.Module.buffers(site.module, recurse=False)
        }
    handles = (
        site.module.register_forward_pre_hook(partial(_add_input, sums, site))
        for site in norms.values()
    )

    try:
        with evaluating(model), hooked(handles):
            for site in norms.values():
                site.module.training = True
            yield sums
    finally:
        for buffer, value in before.items():
            buffer.copy_(value)


def _add_input(sums: _Sums, site: Site, norm: nn.Module, args: tuple[Tensor, ...]) -> None:
    """Add the moments of a norm's input to its sums, in place: a forward pre-hook.

    Args:
        sums: The sums of all norms.
        site: The norm and its path.
        norm: The norm itself, as a hook gets it.
        args: The arguments of the norm's forward.

    Raises:
        SourceError: The norm sees one value per channel.
    """
    path = site.path
    # A norm may take its statistics over a part of the batch only (`Site.together`).
    for batch in args[0].split(site.together(len(args[0]))):
        values = batch.detach().double().transpose(0, 1).flatten(1)
        if values.shape[1] < 2:
            raise _OneValueError(
                f"{path} sees one value per channel in a batch", "its variance is not defined"
            )

        # The mean of each image is squared, and the squares are averaged over the images. From them
        # follows by how much the images' means vary.
        square_of_means = values.unflatten(1, (len(batch), -1)).mean(2).square().mean(1)
        moments = torch.stack([values.mean(1), values.var(1), square_of_means])
        # The moments are weighted by the number of images, which stands beside them in the sums.
        _add(sums, {path: (len(batch) * moments, len(batch))})
