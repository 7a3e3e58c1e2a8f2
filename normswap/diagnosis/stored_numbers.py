"""Checks of the numbers that norms store.

They find broken numbers, numbers that no training has changed, and channels that are switched off.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from normswap.diagnosis.answers import tells_images_apart
from normswap.diagnosis.findings import (
    Case,
    Certainty,
    Finding,
    Remark,
    StoredNorm,
    count_text,
    paths_of,
    rule,
    with_exception,
)
from normswap.sites.own_forwards import Linearity

# If more than this share of a norm's channels has a gamma of 0, that is a fault.
_SWITCHED_OFF = 0.1
# Variances below this share of eps count as 0.
_TINY = 1e-3
# A filter counts as 0 below this share of the median filter's squared length.
_DECAYED = 1e-6
# The lengths of fewer filters than this say nothing.
_FEWEST_FILTERS = 8
# The variance of the filters' lengths may be so many standard errors above the variance by chance.
_CHANCE = 4.0
# After training in eval mode, the answers differ between images by at least this share of their
# difference under the images' own statistics. Where statistics were wrongly never updated, the
# share is 0.2 to 0.8.
_AS_TRAINED = 0.95
# At most so many norms are named in the evidence.
_NAMED = 4


def _is_broken(value: Tensor | None) -> bool:
    """Whether a tensor holds NaN or infinity."""
    return value is not None and not bool(torch.isfinite(value).all())


def _has_broken_statistics(case: Case, site: StoredNorm) -> bool:
    """Whether the running statistics of a norm that the forward calls hold NaN or infinity."""
    is_broken = _is_broken(site.mean) or _is_broken(site.var)
    return is_broken and case.is_called(site)


def _has_broken_parameters(case: Case, site: StoredNorm) -> bool:
    """Whether gamma or beta of a norm that the forward calls holds NaN or infinity."""
    is_broken = _is_broken(site.gamma) or _is_broken(site.beta)
    return is_broken and case.is_called(site)


def _has_no_root(case: Case, site: StoredNorm) -> bool:
    """Whether variance plus eps is below 0 in a channel, so that it has no square root."""
    return bool((site.var + site.eps < 0).any()) and case.is_called(site)


broken_statistics = rule(
    "not-finite",
    _has_broken_statistics,
    evidence="mean or var holds NaN or infinity in {}",
    cost="every answer is NaN or constant",
)
broken_parameters = rule(
    "not-finite",
    _has_broken_parameters,
    evidence="gamma or beta holds NaN or infinity in {}",
    cost="every answer is NaN or constant",
    mend="load the weights again, from a checkpoint before they broke",
)
negative_variance = rule(
    "negative-variance",
    _has_no_root,
    evidence=(
        "variances are negative in {}: statistics were mixed up, or subtracted from one another"
    ),
    cost="the square root is NaN",
)


def unused_and_broken(case: Case) -> Iterator[Remark]:
    """Remark on norms with NaN or infinity that the recorded forward never calls."""
    unused = [
        site
        for site in case.sites
        if not case.is_called(site)
        and any(map(_is_broken, (site.mean, site.var, site.gamma, site.beta)))
    ]
    if unused:
        yield Remark(
            f"{count_text(unused, case.sites)} hold NaN or infinity, but the forward pass does not"
            f" call them: {', '.join(paths_of(unused)[:_NAMED])}"
        )


def _called_norms(case: Case) -> list[StoredNorm]:
    """Return the norms that the forward calls. The numbers of others change no answer."""
    return [site for site in case.sites if case.is_called(site)]


def never_updated(case: Case) -> Iterator[Finding | str]:
    """Find norms that still have the statistics of a new norm, mean 0 and variance 1.

    A network that was trained in eval mode keeps these statistics and is right with them. If its
    answers to images show that it was trained so, a sentence for the user is yielded, and no fault.
    """
    called = _called_norms(case)
    never_moved = [site for site in called if site.starts_at_init]
    yield from _never_updated_in_part(case)

    # The gammas or betas of these norms were trained, and their statistics were not.
    trained = [site for site in never_moved if not site.is_untouched]
    if trained:
        # If only some norms are concerned, the outputs of a broken network still differ between
        # images, only less. So they must then differ at least as much as with the images' own
        # statistics.
        is_whole = len(trained) == len(called)
        yield _new_statistics(
            case,
            trained,
            evidence=f"mean 0 and variance 1 in {count_text(trained, case.sites)}, with trained"
            " gammas",
            cost="in eval mode they do not normalize; training mode hides it",
            least_share=_AS_TRAINED if is_whole else 1.0,
        )

    # Nothing in these norms was trained, nor were the weights before them.
    fresh = [site for site in never_moved if site.is_untouched and _reads_fresh_weights(case, site)]
    if fresh:
        count = count_text(fresh, case.sites)
        yield Finding(
            "not-loaded",
            paths=paths_of(fresh),
            evidence=(
                f"{count}, and the convolutions before them, are as they were made: they were not"
                " loaded"
            ),
            certainty=Certainty.LIKELY,
            cost="these layers compute noise",
            mend=(
                "load the weights again, with load_state_dict(strict=True): it says which names"
                " differ"
            ),
        )


def _never_updated_in_part(case: Case) -> Iterator[Finding | str]:
    """Find norms with the statistics of a new norm in more than a tenth of their channels.

    If the network's outputs show that these statistics are right, a sentence that says so is
    yielded, and no finding.
    """
    # The number of channels with mean 0 and variance 1, by norm. Norms in which all channels have
    # them are left to `never_updated`.
    counts = {
        site: int(site.at_init.sum()) for site in _called_norms(case) if not site.starts_at_init
    }
    hit = [site for site, count in counts.items() if count > _SWITCHED_OFF * _width(site)]
    if hit:
        new_channels = sum(counts[site] for site in hit)
        all_channels = sum(_width(site) for site in hit)
        # The statistics count as right only if the outputs differ between images at least as much
        # (`least_share`) as with the images' own statistics. With few wrong channels they still
        # differ, only less.
        yield _new_statistics(
            case,
            hit,
            evidence=(
                f"mean 0 and variance 1 in {new_channels} of {all_channels} channels of"
                f" {count_text(hit, case.sites)}, not in the rest"
            ),
            cost="in eval mode these channels are not normalized; training mode hides it",
            least_share=1.0,
        )


def _new_statistics(
    case: Case, sites: list[StoredNorm], *, evidence: str, cost: str, least_share: float
) -> Finding | str:
    """Return the finding for norms that store the statistics of a new norm.

    If the network's outputs for the images show that it was trained with these statistics, a
    sentence that says so is returned instead.

    Args:
        case: The network.
        sites: The norms.
        evidence: What was seen.
        cost: The harm that is done, if the norms were trained in training mode.
        least_share: The stored statistics are right if the answers differ between images by more
            than this share of the difference under the images' own statistics.
    """
    if case.images is not None and tells_images_apart(case, least_share):
        return (
            f"{evidence}. Its answers to the images are as different as they should be, so it was"
            " trained in eval mode: the statistics are right as they are, and new ones would undo"
            " the training"
        )

    unless = "it was trained in eval mode; then new statistics undo the training"
    if case.images is None:
        unless += f" (normswap doctor {case.name} --data {case.data} tells)"
    return Finding(
        "never-updated",
        paths=paths_of(sites),
        evidence=with_exception(evidence, unless),
        certainty=Certainty.LIKELY,
        cost=cost,
        mend=f"{case.recalibrate}, and measure before and after",
    )


def _reads_fresh_weights(case: Case, site: StoredNorm) -> bool:
    """Whether the layer before a norm has weights that no training has moved.

    Fresh weights are independent and of one distribution. Then the squared lengths of the filters,
    of n weights each, differ only by chance: their relative variance is (k - 1) / n, where k is the
    kurtosis of the weights. Training makes some filters many times as long as others.
    """
    layer = case.layer_before(site)
    if layer is None:
        return False
    squares = _filters(layer).square()
    if len(squares) < _FEWEST_FILTERS:
        return False

    # This estimate of the kurtosis gives 3 n / (n + 2) for n normal numbers, whose kurtosis is 3.
    # The factor (n + 2) / n corrects it.
    count = squares.shape[1]
    kurtosis_by_filter = squares.square().mean(1) / squares.mean(1).square().clamp_min(1e-30)
    kurtosis = kurtosis_by_filter.mean() * (count + 2) / count

    lengths = squares.sum(1)
    variance_by_chance = (kurtosis - 1) / count * lengths.mean().square()
    # The variance of m lengths, as measured, is off by about sqrt(2 / m) of itself (one standard
    # error). It may be off by `_CHANCE` times as much.
    margin = 1 + _CHANCE * (2 / len(lengths)) ** 0.5
    return bool(lengths.var() < margin * variance_by_chance)


def zero_variance(case: Case) -> Iterator[Finding]:
    """Find variances of 0, or far below eps, in channels whose input does vary.

    What reaches a channel is measured in eval mode. A channel that is really constant has a
    variance of 0 rightly.
    """
    hit: list[StoredNorm] = []
    for site in _called_norms(case):
        # There is no variance to check, or another check judges it (`never_updated`).
        if not len(site.var) or site.starts_at_init:
            continue
        # A mask of the channels whose variance is stored as 0 although their input varies. A
        # variance far below eps counts as 0. The input's variance must be at least eps, if it can
        # be measured.
        is_wrong = (site.var.abs() < _TINY * site.eps) & _reached(case, site)
        measured = case.input_variances.get(site.path)
        if measured is not None and len(measured) == len(is_wrong):
            is_wrong &= measured.to(is_wrong.device) >= site.eps
        # A few such channels are no fault.
        if float(is_wrong.double().mean()) > _SWITCHED_OFF:
            hit.append(site)

    if hit:
        yield Finding(
            "zero-variance",
            paths=paths_of(hit),
            evidence=(
                f"variances of 0, or below {_TINY:g} eps, in more than {_SWITCHED_OFF:.0%} of the"
                " channels"
            ),
            certainty=Certainty.LIKELY,
            cost="what reaches them is multiplied by 1 / sqrt(eps), some hundred times too much",
            mend=case.recalibrate,
        )


def _reached(case: Case, site: StoredNorm) -> Tensor:
    """Return which channels of a norm have an input that varies, (C,).

    The input of a channel does not vary if one of these holds:

    - Its variance is 0, and its mean is only the bias of the layer before.
    - The norm before and the weights predict the variance 0.
    - Its filter has decayed to 0.
    """
    # A norm that keeps no statistics has as many channels as gammas.
    channel_values = site.var if site.gamma is None else site.gamma
    reached = torch.ones_like(channel_values, dtype=torch.bool)
    # A variance below this counts as 0.
    least_variance = _TINY * site.eps

    if len(site.mean):
        varies = site.var.abs() >= least_variance
        has_mean = (site.mean - case.bias_before(site)).square() >= least_variance
        reached &= varies | has_mean

    if site.path in case.predicted:
        _, predicted_var = case.predicted[site.path]
        reached &= predicted_var.to(channel_values) >= least_variance

    layer = case.layer_before(site)
    if layer is not None:
        lengths = _filters(layer).square().sum(1)
        if len(lengths) == len(channel_values):
            reached &= lengths.to(channel_values) >= _DECAYED * lengths.median()
    return reached


def _filters(layer: Linearity) -> Tensor:
    """Return a layer's weights as a matrix (C, n) in float64: n weights for each output channel."""
    weight = layer.weight.detach().double()
    # Transposed convolutions store (inputs, C / groups, *kernel), and each group has inputs and
    # outputs of its own.
    if isinstance(layer, _ConvNd) and layer.transposed:
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def dead_gammas(case: Case) -> Iterator[Finding]:
    """Find norms with a gamma of 0 in more than a tenth of their channels.

    Norms that start at 0 and are not trained yet are left out, and so are channels that no signal
    reaches.
    """
    # The number of gammas that are 0, by norm.
    zeros: dict[StoredNorm, int] = {}
    for site in _called_norms(case):
        is_new = site.starts_at_init and site.is_untouched
        if site.gamma is not None and not is_new:
            zeros[site] = int(((site.gamma == 0) & _reached(case, site)).sum())

    hit = [site for site, count in zeros.items() if count > _SWITCHED_OFF * _width(site)]
    if hit:
        counts = [f"{zeros[site]} of {_width(site)} at {site.path}" for site in hit]
        named = ", ".join(counts[:_NAMED])
        if len(counts) > _NAMED:
            named += f", and in {len(counts) - _NAMED} more norms"
        yield Finding(
            "dead-gammas",
            paths=paths_of(hit),
            evidence=with_exception(
                f"gammas are 0: {named}", "these channels were pruned on purpose"
            ),
            certainty=Certainty.LIKELY,
            cost=(
                "the channels are constant, and learn slowly or, behind a ReLU with beta <= 0,"
                " never again"
            ),
            mend=(
                "if they were not pruned, go back to a checkpoint before they died, or train on"
                " with a smaller rate and no decay of gammas"
            ),
        )


def _width(site: StoredNorm) -> int:
    """Return the number of a norm's gammas or, if it has none, of its running means."""
    return len(site.mean if site.gamma is None else site.gamma)
