"""Checks of how images are prepared: their normalization, and the order of their colours.

The first BatchNorm keeps the mean and variance that its input had on the training images. Images
that are prepared otherwise give another input. Of several preparations, the right one brings the
norm's input nearest to its statistics.
"""

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normswap.diagnosis.answers import class_scores
from normswap.diagnosis.drift import measured_drifts
from normswap.diagnosis.findings import Case, Certainty, Finding, with_exception
from normswap.diagnosis.image_batches import PARTS, ImageBatches
from normswap.errors import flag
from normswap.models import calling
from normswap.models.modes import hooked, undisturbed
from normswap.models.preprocessing import data_config
from normswap.sites.site import site_of, sites_of

_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_BYTE = 1 / 255
# Usual pairs of mean and standard deviation.
_USUAL = (
    _IMAGENET,
    ((0.5,), (0.5,)),
    ((0.0,), (1.0,)),
    ((0.0,), (_BYTE,)),
    (_IMAGENET[0], (_BYTE,)),
)
# A distance below this, in nats, is within chance.
_FAR = 0.004
# Pairs of a factor and a distance in nats. Another preparation is reported if, for one pair, it is
# nearer by the factor, in all images and in every part, and its distance is below the pair's. The
# right preparation is very near, which the first pair asks. A usual one that is nearly right is
# less near but far nearer than a wrong one, which the second pair asks.
_CLEARLY = ((2.0, 0.01), (5.0, 0.05))
# Pixels may leave 0..1 by so much, because of rounding.
_ROUNDED = 0.02
_BATCH = 32
# Exchanged colours are reported if they lower the entropy by so many nats, and by so many standard
# errors of the mean over images.
_LEAST_GAIN = 0.05
_LEAST_GAIN_ERRORS = 4.0


@dataclass(frozen=True)
class _Preparation:
    """How pixels in 0..1 become the input of a network: (pixel - mean) / std per channel.

    Args:
        mean: The mean of each channel, or of all.
        std: The standard deviation of each channel, or of all.
        reverses: Whether the order of the channels is reversed.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    reverses: bool

    def __str__(self) -> str:
        text = f"mean {_joined(self.mean, '.4g')}, std {_joined(self.std, '.4g')}"
        if self.reverses:
            text += ", channels as BGR"
        return text

    def apply(self, pixels: Tensor) -> Tensor:
        """Return pixels as the network takes them: (pixel - mean) / std per channel.

        If `reverses` is set, the order of the channels is reversed first.

        Args:
            pixels: The pixels (N, C, H, W), in 0..1.
        """
        if self.reverses:
            pixels = pixels.flip(1)
        return (pixels - _as_maps(self.mean, pixels)) / _as_maps(self.std, pixels)

    def undo(self, images: Tensor) -> Tensor:
        """Return the pixels of images that were prepared with this mean and standard deviation.

        The channels stay in the order in which they are given, whatever `reverses` says.
        """
        return images * _as_maps(self.std, images) + _as_maps(self.mean, images)


def _as_maps(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return values per channel as a tensor (C, 1, 1), with the dtype of `like`."""
    return torch.tensor(values, dtype=like.dtype).reshape(-1, 1, 1)


def _joined(values: tuple[float, ...], digits: str) -> str:
    """Return numbers with commas between, each by a format such as `.4g`."""
    return ",".join(f"{value:{digits}}" for value in values)


@dataclass(frozen=True, eq=False)
class _PreparationTrial:
    """A preparation to try on pixels.

    Args:
        preparation: The preparation.
        pixels: The pixels (N, C, H, W).
        given_as: A clause for the report on how the images were given, such as `, given as pixels
            in 0..255`. It is empty if the pixels follow from the preparation that the network
            states.
    """

    preparation: _Preparation
    pixels: Tensor
    given_as: str = ""

    @property
    def prepared(self) -> Tensor:
        """The pixels in this preparation, (N, C, H, W), as the network would take them."""
        return self.preparation.apply(self.pixels)


def unfit_preprocessing(case: Case) -> Iterator[Finding]:
    """Find another preparation of the images that fits the first norm clearly better.

    The network's preparation of images is their mean and standard deviation, and the order of their
    colours. A finding is yielded if another preparation brings the first norm's input much nearer
    to its statistics, and nothing otherwise.
    """
    # `images.images` is None if the network takes something other than images.
    if case.images is None or case.images.images is None:
        return
    config = data_config(case.model)
    images = case.images.images.cpu()
    channels = images.shape[1]
    # The stated preparation is not for images with this number of channels.
    if len(config["mean"]) != channels:
        return
    present = _Preparation(tuple(config["mean"]), tuple(config["std"]), reverses=False)
    # The first distance is that of all images. Nothing is to be found if the images fit already.
    present_distances = _distances(case.model, images)
    if present_distances is None or present_distances[0] < _FAR:
        return

    # Look for the trial whose distance over all images is least.
    best = _PreparationTrial(present, present.undo(images))
    least = present_distances
    for trial in _trials(present, images):
        distances = _distances(case.model, trial.prepared)
        if distances is not None and distances[0] < least[0]:
            best = trial
            least = distances

    # `_CLEARLY` has pairs of a factor and a distance. The best trial must be nearer than the stated
    # preparation by the factor, in all images and in each part, and nearer than the distance.
    ratios = [
        before / max(after, 1e-9) for after, before in zip(least, present_distances, strict=True)
    ]
    is_clear = any(min(ratios) > factor and least[0] < near for factor, near in _CLEARLY)
    if not is_clear or not _fits_most_norms(case, best.prepared):
        return

    yield _of_preparation(
        case,
        best.preparation,
        evidence=(
            f"the first norm's input on {case.images.count} images{best.given_as} is"
            f" {present_distances[0]:.2g} nats (KL divergence) from its statistics; with"
            f" {best.preparation} it is {least[0]:.2g}"
        ),
        cost="every layer sees other values than in training",
    )


def exchanged_colours(case: Case) -> Iterator[Finding]:
    """Find images whose red and blue are exchanged, by the scores of a classifier.

    The exchange hardly moves the statistics of photographs. But a classifier is surer of its
    answers to images like those that it was trained on: their scores have a lower entropy. A
    finding is yielded if the entropy is clearly lower with red and blue exchanged.
    """
    # `images.images` is None if the network takes something other than images.
    if case.images is None or case.images.images is None:
        return
    images = case.images.images.cpu()
    config = data_config(case.model)
    # Only three channels that differ have an order of colours.
    if images.shape[1] != 3 or len(config["mean"]) not in (1, 3) or case.images.colourless:
        return

    present = _Preparation(tuple(config["mean"]), tuple(config["std"]), reverses=False)
    reversed_order = replace(present, reverses=True)
    # The images are turned back into pixels, and prepared again with red and blue exchanged.
    reversed_images = reversed_order.apply(present.undo(images))
    given_entropy = _entropies(case.model, images)
    reversed_entropy = _entropies(case.model, reversed_images)
    # The network is no classifier.
    if given_entropy is None or reversed_entropy is None:
        return

    # The exchange lowers the entropy of each image by `gain` nats. The mean of the gains must be
    # large by itself, and large beside its standard error.
    gain = given_entropy - reversed_entropy
    standard_error = float(gain.std()) / len(gain) ** 0.5
    if float(gain.mean()) < max(_LEAST_GAIN, _LEAST_GAIN_ERRORS * standard_error):
        return
    yield _of_preparation(
        case,
        reversed_order,
        evidence=with_exception(
            f"with red and blue exchanged (channels as BGR) the answers to {len(gain)} images are"
            f" surer: their entropy is {float(reversed_entropy.mean()):.2f} nats, not"
            f" {float(given_entropy.mean()):.2f}",
            "the network answers most of these images wrongly: how sure it is says nothing then",
        ),
        cost="every layer sees other colours than in training",
    )


def _of_preparation(case: Case, preparation: _Preparation, *, evidence: str, cost: str) -> Finding:
    """Return the finding that images are prepared otherwise than in training.

    Args:
        case: The network and its images.
        preparation: The preparation that the network expects.
        evidence: A sentence with the figures that show it.
        cost: The harm that the present preparation does.
    """
    # The norms behind the first depend on more than the images, so only the first is named.
    return Finding(
        "preprocessing",
        paths=tuple(site.path for site in case.sites[:1]),
        evidence=evidence,
        certainty=Certainty.LIKELY,
        cost=cost,
        mend=_mend(case, preparation),
    )


def _entropies(model: nn.Module, images: Tensor) -> Tensor | None:
    """Return the entropy of a classifier's answer to each image, (N,), in nats.

    The less sure the answer, the higher its entropy. The result is None if the network gives no
    class scores.

    Args:
        model: The network.
        images: The images (N, C, H, W).
    """
    scores = class_scores(model, ImageBatches.of(model, images, _BATCH).calls)
    if scores is None:
        return None
    return -(scores.softmax(1) * scores.log_softmax(1)).sum(1)


def _trials(present: _Preparation, images: Tensor) -> Iterator[_PreparationTrial]:
    """Yield every pair of pixels and preparation that is worth a trial.

    The pixels are first those that the stated preparation was applied to. Then they are those of
    images that were given in another way, such as pixels in 0..255.

    Args:
        present: The preparation that the network states.
        images: The images as they were given, (N, C, H, W).
    """
    channels = images.shape[1]
    stated_pixels = present.undo(images)
    for preparation in _preparations(present, channels):
        yield _PreparationTrial(preparation, stated_pixels)
    # Other pixels are a guess by themselves, so they are tried with the stated preparation alone.
    for pixels, given_as in _as_pixels(images, present):
        for preparation in _preparations(present, channels, usual=False):
            yield _PreparationTrial(preparation, pixels, given_as)


def _as_pixels(images: Tensor, present: _Preparation) -> Iterator[tuple[Tensor, str]]:
    """Yield the pixels in 0..1 of images that were not prepared as the network states.

    The images may not have been normalized, or with another mean and standard deviation. Each way
    that leads to pixels in 0..1 is yielded.

    Args:
        images: The images as they were given, (N, C, H, W).
        present: The preparation that the network states.

    Yields:
        The pixels (N, C, H, W), and a clause for the report on how the images were given.
    """
    least, most = images.aminmax()
    if least >= 0 and most <= 1:
        yield images, ", given as pixels in 0..1"
    elif least >= 0 and most <= 255:
        yield images * _BYTE, ", given as pixels in 0..255"

    # Somebody may have applied only the means, which divides by 1, or only the deviations, which
    # subtracts 0.
    half_done = ((present.mean, (1.0,)), ((0.0,), present.std))
    for mean, std in (*_USUAL, *half_done):
        preparation = _Preparation(mean, std, reverses=False)
        # A pair for another number of channels does not apply. The stated pair is no other way.
        if len(mean) not in (1, images.shape[1]) or preparation == present:
            continue
        pixels = preparation.undo(images)
        if pixels.min() > -_ROUNDED and pixels.max() < 1 + _ROUNDED:
            yield pixels, f", given with {preparation}"


def _preparations(
    present: _Preparation, channels: int, *, usual: bool = True
) -> Iterator[_Preparation]:
    """Yield preparations to try, each with both orders of colours.

    Args:
        present: The preparation that the network states.
        channels: The number of channels of the images.
        usual: Whether the usual preparations are tried beside the stated one.
    """
    pairs = [(present.mean, present.std)]
    if usual:
        pairs += [pair for pair in _USUAL if len(pair[0]) in (1, channels)]

    orders = (False, True) if channels == 3 else (False,)
    for mean, std in pairs:
        for reverses in orders:
            yield _Preparation(mean, std, reverses)


def _fits_most_norms(case: Case, images: Tensor) -> bool:
    """Whether the stored statistics of at least half of the norms fit images.

    If fewer fit although the preparation is another one, the fault is not in the preparation.

    Args:
        case: The network that is diagnosed.
        images: The images in the preparation that is tried, (N, C, H, W).
    """
    batches = ImageBatches.read(case.model, images.split(_BATCH))
    drifts = measured_drifts(replace(case, images=batches))
    return 2 * sum(drift.is_off for drift in drifts) <= len(drifts)


def _mend(case: Case, preparation: _Preparation) -> str:
    """Return the advice on how to give the network images in another preparation.

    The advice is a command line with options. If the order of the colours is wrong, for which there
    is no option, the advice is to change the stem or the images.

    Args:
        case: The network that is diagnosed.
        preparation: The preparation that the images should have.
    """
    mean = _joined(preparation.mean, ".6g")
    std = _joined(preparation.std, ".6g")
    options = f"{flag('image_mean')} {mean} {flag('image_std')} {std}"
    if preparation.reverses:
        return (
            "reverse the colours of the stem, its weight becomes weight.flip(1), or those of the"
            f" images; with {options}"
        )

    # `case.name` is the MODEL as it was typed, with its options: `resnet50 --image-mean 0.5`. Here
    # the new options take the place of those that were typed.
    typed_without_options = re.sub(r" --image-(mean|std) \S+", "", case.name)
    return f"say it wherever images are read: {typed_without_options} {options}"


def _distances(model: nn.Module, images: Tensor) -> list[float] | None:
    """Return how far the first norm's statistics are from the statistics of its input.

    A distance is the KL divergence of normal distributions, in nats, averaged over the middle 80 %
    of the channels.

    Args:
        model: The network.
        images: The images (N, C, H, W).

    Returns:
        The distance for all images, then for each of `PARTS` parts. None says that there are no
        usable statistics, or that the network does not run on such images.
    """
    norm: nn.Module | None = None
    moments_by_batch: list[Tensor] = []
    for batch in images.split(_BATCH):
        observed = input_of_first_norm(model, batch)
        if observed is None:
            return None
        norm, norm_input = observed
        # The first axis must be the images, the second the norm's channels, and the rest positions.
        if norm_input.ndim < 3 or norm_input.shape[1] != site_of(norm).channels:
            return None
        values = norm_input.double().flatten(2)
        moments_by_batch.append(torch.stack([values.mean(2), values.square().mean(2)]))

    assert norm is not None, "there are images"
    mean, var = site_of(norm).input_moments
    is_usable = bool(torch.isfinite(mean).all() and (var > 0).all())
    # A norm that is new, or was never updated, has the mean 0 in every channel.
    has_no_mean = bool((mean == 0).all())
    if has_no_mean or not is_usable:
        return None

    # Mean and mean square of each channel in each image, (2, N, C). The parts take turns.
    image_moments = torch.cat(moments_by_batch, 1)
    parts = [image_moments[:, start::PARTS] for start in range(PARTS)]
    return [_divergence(subset, mean, var) for subset in (image_moments, *parts)]


def _divergence(image_moments: Tensor, mean: Tensor, var: Tensor) -> float:
    """Return how far the images' channels are from N(mean, var), as a KL divergence.

    KL = (r - 1 - log r + (m - mean)^2 / var) / 2 with r = v / var, where m and v are the mean and
    variance of a channel over all images. It is averaged over the channels, without the tenth that
    differs least and the tenth that differs most.

    Args:
        image_moments: Mean and mean square of each channel in each image, (2, N, C).
        mean: The stored mean (C,).
        var: The stored variance (C,).
    """
    mean = mean.to(image_moments.device)
    var = var.to(image_moments.device)
    observed_mean, observed_square = image_moments.mean(1)
    observed_var = (observed_square - observed_mean.square()).clamp_min(0) + 1e-12
    ratio = observed_var / (var + 1e-12)
    shift = (observed_mean - mean).square() / (var + 1e-12)
    # The divergence of each channel, in ascending order, so that both ends can be cut off.
    divergences = ((ratio - 1 - ratio.log() + shift) / 2).sort().values

    tenth = len(divergences) // 10
    return float(divergences[tenth : len(divergences) - tenth].mean())


class _NormReachedError(Exception):
    """Raised by a hook, to end a forward when it reaches the first norm."""


@torch.inference_mode()
def input_of_first_norm(model: nn.Module, images: Tensor) -> tuple[nn.Module, Tensor] | None:
    """Return the first norm that keeps statistics, and its input in eval mode.

    Args:
        model: The network.
        images: The images (N, C, H, W) on which it runs.

    Returns:
        The norm and its input. None says that there is no such norm, or that the network does not
        run on these images.
    """
    reached: list[tuple[nn.Module, Tensor]] = []

    def note_and_stop(module: nn.Module, args: tuple[object, ...]) -> None:
        """Note a norm and its input, and end the forward by an error.

        It is a hook, which torch calls before the norm's own forward.

        Args:
            module: The norm.
            args: The positional arguments that it is called with.
        """
        if args and isinstance(args[0], Tensor):
            reached.append((module, args[0]))
            raise _NormReachedError

    # The forward ends at whichever of these norms it reaches first.
    norms = [site.module for site in sites_of(model) if site.has_moments]
    hooks = hooked(norm.register_forward_pre_hook(note_and_stop) for norm in norms)
    # The user's forward may raise anything, which other checks report. It also raises the error by
    # which the hook ends it.
    with suppress(Exception), undisturbed(model), hooks:
        # The images are put into the arguments of the network's forward (`of`), and moved to its
        # device and dtype (`like`). The forward runs on copies, as it may write into its input.
        calling.form(model).of(images).like(model).call_on_copies(model)
    return reached[0] if reached else None
