"""Checks of kept statistics against what the weights foretell, and against those of images: beyond
what chance does.

With images, the network runs with every norm on the statistics of its batch, so that a norm is held
against what reaches it when all before it normalize rightly: one wrong norm does not make those
behind it look wrong. In parts of the images the estimates differ by chance; what does not stand out
from that is not said.
"""

import copy
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from normswap.calibration import channel_moments
from normswap.diagnosis.findings import (
    Case,
    Certainty,
    Finding,
    StoredNorm,
    correlation,
    paths_of,
    share,
)
from normswap.diagnosis.image_batches import PARTS
from normswap.errors import NormswapError
from normswap.layers.known_norms import Pair
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import undisturbed

# Means that correlate less with the foretold ones, and are further off, contradict the weights.
_UNLIKE = 0.35
# In deviations: the means of trained networks are nearer (weight_moments).
_FAR = 0.5
# By so many kept deviations what reaches a norm exceeds 1 where statistics of other weights have
# multiplied: 100 to 100,000 behind some layers. Trained with frozen statistics, networks stay below
# 10.
_EXPLODED = 30.0
# A mean that is so many deviations off, or a variance whose ratio has this logarithm, in the median
# channel.
_MEAN = 0.3
_LOG_VAR = 0.7
# A difference of so many standard errors is no chance.
_CHANCE = 3.0
# The same for a quarter of the channels: the logarithm of a ratio of variances, and standard
# errors.
_DETAIL = 0.15
_BEYOND_CHANCE = 4.0
# The share of answers that changes together, and how many times one half's difference from the
# other that is.
_TOGETHER = 0.2
_BEYOND = 2.0
# A network works with its statistics where its answers vary from image to image by so much of what
# they vary with those of the images. After a training with frozen statistics: 0.97 to 1.7; with
# statistics of other weights: 0.1 to 0.9.
_AS_VARIED = 0.95
# Logarithms of variances: those of the roots are off by less than this, and by so many times less
# than those kept.
_ROOTS = 0.35
_CLEARLY = 3.0
# Variances below this are those of dead channels.
_NOTHING = 1e-10
# Fewer images say nothing; the statistics of smaller batches are biased, which no half shows.
_ENOUGH = 64
_BATCH = 8


@dataclass(frozen=True, eq=False)
class Drift:
    """How far the statistics of a norm are from those of images.

    Args:
        mean: by how many kept deviations the mean is off in the median channel; error: its standard
            error.
        log_var: of the ratio of variances, its size in the median channel; log_error: its standard
            error.
        seen: mean and variance per channel on the images.
    """

    site: StoredNorm
    mean: float
    error: float
    log_var: float
    log_error: float
    seen: tuple[Tensor, Tensor]

    @property
    def is_off(self) -> bool:
        """Whether that is more than augmentation or chance makes of it."""
        shifted = self.mean - _CHANCE * self.error > _MEAN
        return shifted or self.log_var - _CHANCE * self.log_error > _LOG_VAR

    @property
    def has_other_details(self) -> bool:
        """Whether the means fit and the variances do not: blurred or sharpened images, noise,
        another way to resize.

        So in a quarter of the channels, as a filter of the first layer sees some frequencies only.
        Statistics of few images, or of other weights, have other means, too.
        """
        shifts, ratios = _compared(self.site, *self.seen)
        mean, log_var = (float(values.abs().quantile(0.75)) for values in (shifts, ratios))
        return mean < _DETAIL and log_var > max(_DETAIL, _BEYOND_CHANCE * self.log_error)

    def __str__(self) -> str:
        factor = torch.tensor(self.log_var).exp()
        return (
            f"{self.site.path}: means off by {self.mean:.2f} +- {self.error:.2f} deviations,"
            f" variances {factor:.1f} x"
        )


def measured(case: Case) -> list[Drift]:
    """The drift of every norm that keeps statistics; none where they cannot be measured."""
    parts = case.estimates
    if not parts:
        return []
    drifts = []
    for site in case.sites:
        if not len(site.mean) or any(site.path not in part for part in parts):
            continue
        means, variances = (
            torch.stack([estimate[site.path][i] for estimate in parts]) for i in (0, 1)
        )
        shifts, ratios = _compared(site, means, variances)
        mean, error = _typical(shifts)
        log_var, log_error = _typical(ratios)
        drifts.append(
            Drift(site, mean, error, log_var, log_error, (means.mean(0), variances.mean(0)))
        )
    return drifts


def _compared(site: StoredNorm, mean: Tensor, var: Tensor) -> tuple[Tensor, Tensor]:
    """Means less those that are kept, in kept deviations, and the logarithms of the ratios of
    variances, (..., C).
    """
    mean_there = site.mean.cpu()
    var_there = site.var.cpu().clamp_min(0)
    return (mean - mean_there) / (var_there + site.eps).sqrt(), (
        (var + site.eps) / (var_there + site.eps)
    ).log()


def _typical(parts: Tensor) -> tuple[float, float]:
    """Size in the median channel, of the mean over parts (P, C), and the standard error of that."""
    return float(parts.mean(0).abs().median()), float((parts.std(0) / PARTS**0.5).median())


def roots_for_variances(case: Case) -> Iterator[Finding | str]:
    """Standard deviations where variances belong: in all norms their squares are what the images
    show.
    """
    drifts = measured(case)
    if not drifts:
        return
    kept_var = torch.cat([drift.site.var.cpu() for drift in drifts])
    seen_var = torch.cat([drift.seen[1] for drift in drifts])
    varies = (kept_var > _NOTHING) & (seen_var > _NOTHING)
    kept_log = kept_var[varies].log()
    seen_log = seen_var[varies].log()
    as_variances, as_roots = ((seen_log - factor * kept_log).abs().median() for factor in (1, 2))
    if as_roots < _ROOTS and as_roots * _CLEARLY < as_variances:
        evidence = (
            f"in all {len(drifts)} norms the squares of the kept variances are the variances that"
            " images show"
        )
        cost = "channels are scaled by the fourth root of their variance"
        mend = (
            f"norm.running_var.square_() for every norm in model.modules(); or {case.recalibrate}"
        )
        paths = paths_of(drift.site for drift in drifts)
        yield Finding("deviations-for-variances", paths, evidence, Certainty.LIKELY, cost, mend)


def drifted(case: Case) -> Iterator[Finding | str]:
    """Norms whose statistics are not those of the images: another domain, or statistics of other
    weights.
    """
    drifts = measured(case)
    hit = [drift for drift in drifts if drift.is_off]
    findings = [*(_far_off(case, drifts, hit) if hit else _little_by_little(case, drifts))]
    if not findings and case.images is not None and case.images.colourless and drifts[:1]:
        findings = [*_without_colours(case, drifts[0])]
    for finding in findings:
        named = _with_cause(case, finding)
        # What has a name of its own, or begins with what the images make of the first norm, is no
        # matter of training.
        of_statistics = (
            named.name in ("wrong-statistics", "drifted-domain") and not drifts[0].is_off
        )
        if of_statistics and case.of_other_weights and tells_images_apart(case):
            yield frozen_or_stale(case, named.evidence)
        else:
            yield named


def frozen_or_stale(case: Case, evidence: str) -> str:
    """What to say of statistics that are not of these weights, where the network may have been
    trained with them.
    """
    how_to_tell = (
        ""
        if case.images is not None
        else f" (normswap doctor {case.name} --data {case.data} tells more)"
    )
    return (
        f"{evidence}. Either the training ended with frozen statistics, and they are right as they"
        f" are, or they were not measured after the weights changed{how_to_tell}. If you know the"
        f" latter: {case.recalibrate}, and measure before and after"
    )


def tells_images_apart(case: Case) -> bool:
    """Whether answers vary from image to image about as much as with the statistics of these
    images.
    """
    assert case.images is not None
    models = case.model, case.renewed(case.images.calls)
    now, then = (_variation(model, case.images.calls) for model in models)
    return now > _AS_VARIED * then > 0


@torch.no_grad()
def _variation(model: nn.Module, calls: tuple[Example, ...]) -> float:
    """The share of the size of answers (N, numbers) that differs from image to image; 0 without
    answers.
    """
    answers = torch.cat([_outputs(model, call) for call in calls])
    return float((answers - answers.mean(0)).norm() / answers.norm().clamp_min(1e-30))


def _without_colours(case: Case, first: Drift) -> Iterator[Finding]:
    """Images whose channels are one picture, before a first norm that was trained on colours."""
    if first.has_other_details:
        evidence = "the first norm finds other variances than it keeps, at the same means"
        cost = "filters of colours see nothing"
        yield Finding(
            "grey-images", (first.site.path,), evidence, Certainty.LIKELY, cost, case.recalibrate
        )


def _with_cause(case: Case, finding: Finding) -> Finding:
    """The same, under the name of what is seen to be wrong besides, and alone would make statistics
    fit no more.
    """
    if case.images is not None and case.images.colourless:
        why = "the three channels of all images are one picture, as of a camera without colours"
        mend = f"give it images with colours; for a use without them: {case.recalibrate}"
        return replace(
            finding, name="grey-images", evidence=f"{why}; {finding.evidence}", mend=mend
        )
    trained = [
        site
        for site in case.sites
        if site.gamma is not None and bool((site.gamma != site.gamma[0]).any())
    ]
    unset = [site for site in trained if site.beta is not None and not bool(site.beta.any())]
    if 2 * len(unset) > len(case.sites):
        why = f"beta is 0 in every channel of {share(unset, case.sites)}, whose gammas were trained"
        mend = (
            f"load the betas (the norms' bias) again; if there never were any: {case.recalibrate}"
        )
        return replace(finding, name="zero-betas", evidence=f"{why}; {finding.evidence}", mend=mend)
    return finding


def _far_off(case: Case, drifts: list[Drift], hit: list[Drift]) -> Iterator[Finding]:
    assert case.images is not None
    worst = max(hit, key=lambda drift: drift.mean + drift.log_var)
    # Other images are other from the first norm on; where the first ones fit, the images are not
    # the cause.
    by_images = hit[0] is drifts[0] or drifts[0].has_other_details
    why = (
        "the stem fits these images, so the statistics are wrong, or the gammas and weights before"
        " these norms"
    )
    if by_images:
        why = "the network was trained on other images than these"
    norms = share(hit, drifts)
    evidence = (
        f"{norms} keep other statistics than {case.images.count} images have, most at {worst};"
        f" {why}"
    )
    yield _of_statistics(
        case, hit, evidence, "eval mode normalizes by other statistics", by_images=by_images
    )


def _of_statistics(
    case: Case, drifts: list[Drift], evidence: str, cost: str, *, by_images: bool
) -> Finding:
    name = "wrong-statistics"
    mend = case.recalibrate_and_measure
    if by_images:
        name = "drifted-domain"
        mend = f"{case.recalibrate} (images like those of its use), and measure before and after"
    return Finding(
        name, paths_of(drift.site for drift in drifts), evidence, Certainty.LIKELY, cost, mend
    )


@torch.no_grad()
def _little_by_little(case: Case, drifts: list[Drift]) -> Iterator[Finding]:
    """Statistics that are each a little off, and together change the answers: of pruned weights, of
    few images.
    """
    if (
        case.images is None
        or not drifts
        or case.images.count < _ENOUGH
        or case.images.calls[0].count < _BATCH
    ):
        return
    halves = case.images.calls[::2], case.images.calls[1::2]
    renewed = [
        _outputs(case.renewed(calls), case.images.calls[0])
        for calls in (case.images.calls, *halves)
    ]
    size = renewed[0].norm().clamp_min(1e-30)
    change = float((_outputs(case.model, case.images.calls[0]) - renewed[0]).norm() / size)
    chance = float((renewed[1] - renewed[2]).norm() / size)
    if change < _TOGETHER or change < _BEYOND * chance:
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
    cost = (
        "eval mode normalizes by statistics of other weights or of few images; or these are other"
        " images"
    )
    yield _of_statistics(case, drifts, evidence, cost, by_images=by_images)


def _outputs(model: nn.Module, call: Example) -> Tensor:
    with undisturbed(model):
        outputs = named_tensors(call.map(torch.clone).call(model))
    floats = [
        value
        for _, value in outputs
        if value.is_floating_point() and value.shape[:1] == (call.count,)
    ]
    rows = [value.double().cpu().reshape(call.count, -1) for value in floats]
    return torch.cat([torch.zeros(call.count, 0, dtype=torch.float64), *rows], 1)


def contradicted(case: Case) -> Iterator[Finding | str]:
    """Running means that the norm before and the weights cannot make: stale, another norm's, or
    frozen in training.
    """
    foretold = case.foretold
    sites = [
        site
        for site in case.sites
        if (likeness := case.likeness(site)) is not None
        and likeness < _UNLIKE
        and float(_distances(site, foretold[site.path]).median()) > _FAR
    ]
    if not sites:
        return
    exchanged = _exchanged(case, sites, foretold) if len(sites) <= 2 else None
    if exchanged:
        evidence = (
            f"the running means of {exchanged[0].path} and {exchanged[1].path} fit each other's"
            " place"
        )
        cost = "eval mode shifts every channel by another's mean"
        yield Finding(
            "swapped-statistics",
            paths_of(exchanged),
            evidence,
            Certainty.LIKELY,
            cost,
            case.recalibrate,
        )
        return
    distances = torch.cat([_distances(site, foretold[site.path]) for site in sites])
    evidence = (
        f"the running means of {share(sites, foretold)} contradict the weights before them: "
        f"{float(distances.median()):.1f} deviations off in the median channel"
    )
    if case.of_other_weights and _may_be_frozen(case):
        yield frozen_or_stale(case, evidence)
        return
    cost = "eval mode normalizes by what these weights do not make; training mode hides it"
    yield Finding(
        "stale-statistics",
        paths_of(sites),
        evidence,
        Certainty.LIKELY,
        cost,
        case.recalibrate_and_measure,
    )


def _may_be_frozen(case: Case) -> bool:
    """Whether answers vary from image to image; without images, whether what norms give does not
    grow by layers.
    """
    if case.images is not None:
        return tells_images_apart(case)
    model = copy.deepcopy(case.model)
    norms = {site.path: model.get_submodule(site.path) for site in case.sites}
    try:
        moments = channel_moments.measure(model, norms, case.network.examples[:1]).moments
    except NormswapError:
        return False
    for site in case.sites:
        if site.path in moments and len(site.mean):
            mean = moments[site.path].mean.to(site.mean)
            var = moments[site.path].variance.to(site.mean)
            squares = ((mean - site.mean).square() + var) / (site.var + site.eps)
            if float(squares.median()) > _EXPLODED**2:
                return False
    return True


def _distances(site: StoredNorm, foretold: Pair) -> Tensor:
    """By how many deviations the kept means are off, (C,); the larger of both deviations counts."""
    return (site.mean - foretold[0]).abs() / torch.maximum(site.var, foretold[1]).clamp_min(
        1e-12
    ).sqrt()


def _exchanged(
    case: Case, off: list[StoredNorm], foretold: dict[str, Pair]
) -> tuple[StoredNorm, StoredNorm] | None:
    """A norm whose foretold means another one keeps, which has the first one's as far as that can
    be foretold.
    """
    for first, second in itertools.product(off, case.sites):
        if first is second or len(first.mean) != len(second.mean):
            continue
        there = foretold.get(second.path)
        back = 1.0 if there is None else correlation(there[0], first.mean)
        if min(correlation(foretold[first.path][0], second.mean), back) > 2 * _UNLIKE:
            return first, second
    return None
