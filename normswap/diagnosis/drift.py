"""Checks of stored statistics, against the weights' prediction and against the images' statistics.

With images, the network runs with every norm on the statistics of its batch. So each norm is
measured behind norms that normalize rightly, and one wrong norm does not make the norms behind it
look wrong. The images are measured in parts. The differences between parts show what chance does. A
drift that is not clearly larger is not reported.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normswap import copying
from normswap.calibration import channel_moments
from normswap.diagnosis.answers import outputs, tells_images_apart
from normswap.diagnosis.findings import (
    Case,
    Certainty,
    Finding,
    StoredNorm,
    correlation,
    count_text,
    paths_of,
    python_line,
)
from normswap.diagnosis.image_batches import PARTS, ImageBatches
from normswap.errors import NormswapError
from normswap.sites.known_norms import Pair

# Stored means contradict the weights if they correlate less than this with the predicted means, and
# are further off than _FAR_FROM_PREDICTED.
_UNLIKE = 0.35
# The distance in deviations, in the median channel. In trained networks the predicted means are
# nearer (`weight_moments`).
_FAR_FROM_PREDICTED = 0.5
# The output of a norm, before gamma and beta, may be so large. With statistics of other weights the
# errors multiply from layer to layer, and outputs reach 100 to 100,000. In networks that were
# trained with frozen statistics outputs stay below 10.
_EXPLODED = 30.0
# A norm has drifted if in the median channel the mean is off by so many deviations, or the ratio of
# variances has a logarithm of this size.
_MEAN_DRIFT = 0.3
_LOG_VAR_DRIFT = 0.7
# A difference of so many standard errors is no chance.
_CHANCE = 3.0
# The details of images differ if, in a quarter of the channels, the logarithm of the ratio of
# variances is above this, and above _DETAIL_CHANCE standard errors.
_DETAIL = 0.15
_DETAIL_CHANCE = 4.0
# Many small drifts are reported if together they change the answers by this share, and by
# _BEYOND_HALVES times as much as the answers differ between statistics of the two halves of the
# images.
_ANSWER_CHANGE = 0.2
_BEYOND_HALVES = 2.0
# Stored variances are really deviations if the logarithms of their squares differ from those of the
# measured variances by less than this, and _SQUARES_NEARER times less than without squaring.
_SQUARES_FIT = 0.35
_SQUARES_NEARER = 3.0
# A channel with a variance below this is dead.
_DEAD_VARIANCE = 1e-10
# With fewer images small drifts say nothing.
_ENOUGH_IMAGES = 64
# The statistics of smaller batches are biased, and both halves of the images share the bias.
_ENOUGH_IN_BATCH = 8


@dataclass(frozen=True, eq=False)
class Drift:
    """How far a norm's stored statistics are from the statistics of its input on images.

    Args:
        site: The norm.
        mean: By how many stored deviations the mean is off, in the median channel.
        error: The standard error of `mean`.
        log_var: The size of the logarithm of the ratio of variances, in the median channel.
        log_error: The standard error of `log_var`.
        seen: Mean and variance per channel, each (C,), on the images.
    """

    site: StoredNorm
    mean: float
    error: float
    log_var: float
    log_error: float
    seen: tuple[Tensor, Tensor]

    @property
    def is_off(self) -> bool:
        """Whether mean or variance are further off than augmentation or chance makes them."""
        # What chance may add to the drift is subtracted: `_CHANCE` standard errors.
        has_shifted = self.mean - _CHANCE * self.error > _MEAN_DRIFT
        return has_shifted or self.log_var - _CHANCE * self.log_error > _LOG_VAR_DRIFT

    @property
    def has_other_details(self) -> bool:
        """Whether the means fit and the variances do not.

        That is so if images are blurred, sharpened, noisy or resized in another way than in
        training. A quarter of the channels is enough, because each filter of the first layer sees
        only some frequencies. With statistics of few images or of other weights, the means do not
        fit either.
        """
        shifts, log_ratios = _differences(self.site, *self.seen)
        # Sizes, without sign. A quarter of the channels lies above the quantile 0.75.
        shift = float(shifts.abs().quantile(0.75))
        log_ratio = float(log_ratios.abs().quantile(0.75))
        return shift < _DETAIL and log_ratio > max(_DETAIL, _DETAIL_CHANCE * self.log_error)

    def __str__(self) -> str:
        factor = torch.tensor(self.log_var).exp()
        return (
            f"{self.site.path}: means off by {self.mean:.2f} +- {self.error:.2f} deviations,"
            f" variances {factor:.1f} x"
        )


def measured_drifts(case: Case) -> list[Drift]:
    """Return the drift of every norm that keeps statistics.

    The list is empty if drifts cannot be measured.
    """
    parts = case.estimates
    if not parts:
        return []

    drifts: list[Drift] = []
    for site in case.sites:
        # The norm stores no statistics, or the images give none for it.
        if not len(site.mean) or any(site.path not in part for part in parts):
            continue
        # Every part of the images gives the norm's input a mean and a variance of its own.
        pairs = [part[site.path] for part in parts]
        means = torch.stack([mean for mean, _ in pairs])
        variances = torch.stack([var for _, var in pairs])
        shifts, log_ratios = _differences(site, means, variances)
        mean, error = _median_size(shifts)
        log_var, log_error = _median_size(log_ratios)
        drifts.append(
            Drift(
                site=site,
                mean=mean,
                error=error,
                log_var=log_var,
                log_error=log_error,
                seen=(means.mean(0), variances.mean(0)),
            )
        )
    return drifts


def _differences(site: StoredNorm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Return how far measured statistics are from the statistics that a norm stores.

    Args:
        site: The norm.
        mean: The measured means (..., C).
        var: The measured variances (..., C).

    Returns:
        The difference of the means in stored deviations, and the logarithm of the ratio of
        variances, each (..., C).
    """
    stored_mean = site.mean.cpu()
    stored_var = site.var.cpu().clamp_min(0)
    shifts = (mean - stored_mean) / (stored_var + site.eps).sqrt()
    # The norm divides by the root of variance + eps, so eps is part of each variance here, too.
    log_ratios = ((var + site.eps) / (stored_var + site.eps)).log()
    return shifts, log_ratios


def _median_size(by_part: Tensor) -> tuple[float, float]:
    """Return the size of a difference in the median channel, and its standard error there.

    A channel's difference is the mean over the parts of the images. Its standard error follows from
    how much the parts differ.

    Args:
        by_part: The difference in each part of the images and each channel, (P, C).
    """
    size = by_part.mean(0).abs().median()
    error = (by_part.std(0) / PARTS**0.5).median()
    return float(size), float(error)


def roots_for_variances(case: Case) -> Iterator[Finding | str]:
    """Find standard deviations that are stored as variances.

    One finding is yielded if the squares of the stored numbers are the variances that the images
    show.
    """
    drifts = measured_drifts(case)
    if not drifts:
        return

    stored_var = torch.cat([drift.site.var.cpu() for drift in drifts])
    seen_var = torch.cat([drift.seen[1] for drift in drifts])
    # Dead channels are left out: their variance is about 0, and so is its square.
    is_alive = (stored_var > _DEAD_VARIANCE) & (seen_var > _DEAD_VARIANCE)
    stored_log = stored_var[is_alive].log()
    seen_log = seen_var[is_alive].log()

    # The distance of the measured variances from the stored numbers, and from their squares.
    distance = (seen_log - stored_log).abs().median()
    squares_distance = (seen_log - 2 * stored_log).abs().median()

    # The squares must be near by themselves, and clearly nearer than the stored numbers.
    if squares_distance < _SQUARES_FIT and squares_distance * _SQUARES_NEARER < distance:
        sites = [drift.site for drift in drifts]
        line = python_line(case, sites, "norm.running_var.square_()")
        yield Finding(
            "deviations-for-variances",
            paths=paths_of(sites),
            evidence=(
                f"in all {len(drifts)} norms the squares of the kept variances are the variances"
                " that images show"
            ),
            certainty=Certainty.LIKELY,
            cost="channels are scaled by the fourth root of their variance",
            mend=f"{line}; or {case.recalibrate}",
        )


def drifted(case: Case) -> Iterator[Finding | str]:
    """Find norms whose stored statistics do not fit the images.

    Either the images are of another domain, or the statistics are of other weights.

    Yields:
        A finding. If training may have frozen the statistics, a sentence is yielded instead, which
        asks the user whether it has.
    """
    # If no norm by itself is far off, many small drifts together may be a fault.
    drifts = measured_drifts(case)
    off = [drift for drift in drifts if drift.is_off]
    findings = [_far_off(case, drifts, off)] if off else [*_many_small_drifts(case, drifts)]

    # Images without colours may change nothing but the variances of the first norm.
    if not findings and drifts and case.images is not None and case.images.colourless:
        findings = [*_without_colours(case, drifts[0])]

    for finding in findings:
        named = _with_cause(case, finding)
        if _is_explained_by_freezing(case, named, drifts):
            yield frozen_or_stale(case, named.evidence)
        else:
            yield named


def _is_explained_by_freezing(case: Case, finding: Finding, drifts: list[Drift]) -> bool:
    """Whether the statistics may drift because training froze them and went on with the weights.

    Then they belong to earlier weights, and the network is right with them.

    Args:
        case: The network.
        finding: The finding on the drift.
        drifts: The drift of every norm.
    """
    # Another cause is known, such as images without colours.
    if finding.name not in ("wrong-statistics", "drifted-domain"):
        return False
    # A drift that begins at the first norm is laid to the images (`_far_off`).
    if drifts[0].is_off:
        return False
    # The stored means must be those of other weights, and the answers those of a trained network.
    return case.of_other_weights and tells_images_apart(case)


def frozen_or_stale(case: Case, evidence: str) -> str:
    """Return a sentence for statistics of other weights that training may have frozen.

    The sentence asks the user which is true: that they were frozen, or that they were not measured
    after the weights changed.

    Args:
        case: The network.
        evidence: What was seen. The sentence begins with it.
    """
    remark = ""
    if case.images is None:
        remark = f" (normswap doctor {case.name} --data {case.data} tells more)"
    return (
        f"{evidence}. Either the training ended with frozen statistics, and they are right as they"
        f" are, or they were not measured after the weights changed{remark}. If you know the"
        f" latter: {case.recalibrate}, and measure before and after"
    )


def _images(case: Case) -> ImageBatches:
    """Return the images of a case that is known to have some."""
    assert case.images is not None
    return case.images


def _without_colours(case: Case, first: Drift) -> Iterator[Finding]:
    """Yield a finding if the first norm stores the variances of images with colours.

    It is called if the images have no colours. On them, a norm that was trained with colours finds
    the means that it stores, and other variances.

    Args:
        case: The network.
        first: The drift of the first norm.
    """
    # The stored means fit, and the stored variances do not.
    if first.has_other_details:
        yield Finding(
            "grey-images",
            paths=(first.site.path,),
            evidence="the first norm finds other variances than it keeps, at the same means",
            certainty=Certainty.LIKELY,
            cost="filters of colours see nothing",
            mend=case.recalibrate,
        )


def _with_cause(case: Case, finding: Finding) -> Finding:
    """Return a finding of drift under the name of its cause, if that is known.

    Two causes are known: images without colours, and betas of 0 although the gammas were trained.
    """
    if case.images is not None and case.images.colourless:
        cause = "the three channels of all images are one picture, as of a camera without colours"
        return replace(
            finding,
            name="grey-images",
            evidence=f"{cause}; {finding.evidence}",
            mend=f"give it images with colours; for a use without them: {case.recalibrate}",
        )

    # Betas count as lost if most norms have none beside their trained gammas.
    zero_betas = [site for site in case.sites if _has_trained_gamma(site) and _has_zero_beta(site)]
    if 2 * len(zero_betas) > len(case.sites):
        count = count_text(zero_betas, case.sites)
        cause = f"beta is 0 in every channel of {count}, whose gammas were trained"
        return replace(
            finding,
            name="zero-betas",
            evidence=f"{cause}; {finding.evidence}",
            mend=(
                "load the betas (the norms' bias) again; if there never were any:"
                f" {case.recalibrate}"
            ),
        )
    return finding


def _has_trained_gamma(site: StoredNorm) -> bool:
    """Whether the gammas of a norm differ from channel to channel. New ones are all equal."""
    return site.gamma is not None and bool((site.gamma != site.gamma[0]).any())


def _has_zero_beta(site: StoredNorm) -> bool:
    """Whether a norm has betas, and all of them are 0."""
    return site.beta is not None and not bool(site.beta.any())


def _far_off(case: Case, drifts: list[Drift], off: list[Drift]) -> Finding:
    """Return the finding for norms that each have drifted far.

    Args:
        case: The network.
        drifts: The drift of every norm.
        off: The drifts that are far off.
    """
    # The norm with the largest drift of mean and variance together is named.
    worst = max(off, key=lambda drift: drift.mean + drift.log_var)

    # Images of another domain already change what the first norm reads. It then drifts far, or only
    # its variances do not fit, as with blurred images. If the norm fits, the images are no cause.
    by_images = off[0] is drifts[0] or drifts[0].has_other_details
    cause = (
        "the stem fits these images, so the statistics are wrong, or the gammas and weights before"
        " these norms"
    )
    if by_images:
        cause = "the network was trained on other images than these"
    evidence = (
        f"{count_text(off, drifts)} keep other statistics than {_images(case).count} images have,"
        f" most at {worst}; {cause}"
    )
    return _drift_finding(
        case,
        off,
        evidence=evidence,
        cost="eval mode normalizes by other statistics",
        by_images=by_images,
    )


def _drift_finding(
    case: Case, drifts: list[Drift], *, evidence: str, cost: str, by_images: bool
) -> Finding:
    """Return the finding that stored statistics do not fit the images, named by its cause.

    Args:
        case: The network.
        drifts: The drifts of the norms that have the fault.
        evidence: What was seen.
        cost: What the fault does.
        by_images: Whether the images are of another domain. If not, the statistics are wrong.
    """
    name = "wrong-statistics"
    mend = case.recalibrate_and_measure
    if by_images:
        name = "drifted-domain"
        mend = f"{case.recalibrate} (images like those of its use), and measure before and after"
    return Finding(
        name,
        paths=paths_of(drift.site for drift in drifts),
        evidence=evidence,
        certainty=Certainty.LIKELY,
        cost=cost,
        mend=mend,
    )


@torch.no_grad()
def _many_small_drifts(case: Case, drifts: list[Drift]) -> Iterator[Finding]:
    """Find statistics that are each a little off, and together change the network's outputs.

    Pruning the weights, or measuring the statistics on few images, has this effect.

    Args:
        case: The network that is diagnosed.
        drifts: The drift of each norm.
    """
    if case.images is None or not drifts:
        return
    calls = case.images.calls
    if case.images.count < _ENOUGH_IMAGES or calls[0].count < _ENOUGH_IN_BATCH:
        return

    # The outputs for the first batch: with the stored statistics, with those of all images, and
    # with those of either half of the images.
    with_stored = outputs(case.model, calls[0])
    with_renewed = outputs(case.renewed(calls), calls[0])
    by_first_half = outputs(case.renewed(calls[::2]), calls[0])
    by_second_half = outputs(case.renewed(calls[1::2]), calls[0])

    # The change must be large by itself, and larger than the choice of images alone makes it.
    size = with_renewed.norm().clamp_min(1e-30)
    change = float((with_stored - with_renewed).norm() / size)
    chance = float((by_first_half - by_second_half).norm() / size)
    if change < _ANSWER_CHANGE or change < _BEYOND_HALVES * chance:
        return

    by_images = drifts[0].has_other_details
    evidence = (
        f"with the statistics of these {case.images.count} images in all {len(drifts)} norms"
        f" answers change by {change:.0%}, and by {chance:.0%} from one half of the images to the"
        " other; no norm by itself is far off"
    )
    if by_images:
        evidence += (
            "; the first one finds the means that it keeps and other variances: other details, blur"
            " or noise"
        )
    yield _drift_finding(
        case,
        drifts,
        evidence=evidence,
        cost=(
            "eval mode normalizes by statistics of other weights or of few images; or these are"
            " other images"
        ),
        by_images=by_images,
    )


def contradicted(case: Case) -> Iterator[Finding | str]:
    """Find running means that the norm before and the weights between cannot produce.

    Such means are stale, belong to another norm, or were frozen in training. For the last case the
    question whether they were frozen is yielded, as a sentence for the user, and no finding.
    """
    sites = [site for site in case.sites if contradicts_weights(case, site)]
    if not sites:
        return

    # An exchange of means between two norms makes two contradicted norms at most.
    swapped = _swapped(case, sites) if len(sites) <= 2 else None
    if swapped:
        first, second = swapped
        yield Finding(
            "swapped-statistics",
            paths=paths_of(swapped),
            evidence=f"the running means of {first.path} and {second.path} fit each other's place",
            certainty=Certainty.LIKELY,
            cost="eval mode shifts every channel by another's mean",
            mend=case.recalibrate,
        )
        return

    distances = torch.cat([_distances(site, case.predicted[site.path]) for site in sites])
    evidence = (
        f"the running means of {count_text(sites, case.predicted)} contradict the weights before"
        f" them: {float(distances.median()):.1f} deviations off in the median channel"
    )
    # Statistics of other weights are no fault if training froze them and went on.
    if case.of_other_weights and _may_be_frozen(case):
        yield frozen_or_stale(case, evidence)
        return
    yield Finding(
        "stale-statistics",
        paths=paths_of(sites),
        evidence=evidence,
        certainty=Certainty.LIKELY,
        cost="eval mode normalizes by what these weights do not make; training mode hides it",
        mend=case.recalibrate_and_measure,
    )


def contradicts_weights(case: Case, site: StoredNorm) -> bool:
    """Whether a norm's running means contradict the means that the weights before it predict.

    They do if the two hardly correlate over the channels, and differ much in the median channel.
    Means that cannot be compared do not contradict the weights.

    Args:
        case: The network that is diagnosed.
        site: The norm.
    """
    likeness = case.likeness(site)
    if likeness is None or likeness >= _UNLIKE:
        return False
    distances = _distances(site, case.predicted[site.path])
    return float(distances.median()) > _FAR_FROM_PREDICTED


def _may_be_frozen(case: Case) -> bool:
    """Whether the network works with its statistics, so that training may have frozen them.

    With images, the network's outputs must differ between them as in a trained network. Without
    images, the outputs of the norms must not grow from layer to layer.
    """
    if case.images is not None:
        return tells_images_apart(case)

    # Measure mean and variance of each norm's input on the network's own example, in a copy.
    model = copying.duplicate(case.model, memo={})
    norms = {site.path: model.get_submodule(site.path) for site in case.sites}
    try:
        moments = channel_moments.measure(model, norms, case.network.examples[:1]).moments
    # A network that does not run has not been seen to work.
    except NormswapError:
        return False

    for site in case.sites:
        if site.path not in moments or not len(site.mean):
            continue
        # The mean square, per channel, of the norm's output before gamma and beta.
        mean = moments[site.path].mean.to(site.mean)
        var = moments[site.path].variance.to(site.mean)
        output_squares = ((mean - site.mean).square() + var) / (site.var + site.eps)
        # With statistics of other weights, errors multiply from layer to layer.
        if float(output_squares.median()) > _EXPLODED**2:
            return False
    return True


def _distances(site: StoredNorm, predicted: Pair) -> Tensor:
    """Return how far a norm's running means are from the predicted means, (C,).

    The unit is a standard deviation: the larger one of the stored and the predicted.

    Args:
        site: The norm.
        predicted: Mean and variance of its input, each (C,), as the weights predict them.
    """
    predicted_mean, predicted_var = predicted
    deviation = torch.maximum(site.var, predicted_var).clamp_min(1e-12).sqrt()
    return (site.mean - predicted_mean).abs() / deviation


def _swapped(case: Case, off: list[StoredNorm]) -> tuple[StoredNorm, StoredNorm] | None:
    """Return two norms that store each other's means, or None.

    The second norm must store the means that are predicted for the first. If means can be predicted
    for the second, the first must store these.

    Args:
        case: The network.
        off: The norms whose means contradict the weights.
    """
    for first, second in itertools.product(off, case.sites):
        if first is second or len(first.mean) != len(second.mean):
            continue
        first_predicted, _ = case.predicted[first.path]
        likeness = correlation(first_predicted, second.mean)
        # If no means are predicted for the second norm, the first likeness decides alone.
        likeness_back = 1.0
        if second.path in case.predicted:
            second_predicted, _ = case.predicted[second.path]
            likeness_back = correlation(second_predicted, first.mean)
        # Means contradict the weights if their correlation is below `_UNLIKE`. Two norms count as
        # swapped only if the means that one stores and those that are predicted for the other
        # correlate by more than twice that.
        if min(likeness, likeness_back) > 2 * _UNLIKE:
            return first, second
    return None
