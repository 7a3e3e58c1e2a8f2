"""Checks of the numbers that norms keep: broken ones, ones that no training left, channels that are
switched off.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.modules.conv import _ConvNd

from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, rule, share
from normswap.layers.planned_layer import Linearity

# From this share of a norm's channels on, gammas of 0 are a fault.
_SWITCHED_OFF = 0.1
# Variances below this share of eps count as 0.
_TINY = 1e-3
# Below this share of the median filter's squared length a filter counts as 0.
_DECAYED = 1e-6
# The fewest filters whose lengths say something, and standard errors of their variance.
_FILTERS = 8
_CHANCE = 4.0


def _is_broken(value: Tensor | None) -> bool:
    return value is not None and not bool(torch.isfinite(value).all())


broken_statistics = rule(
    "not-finite",
    lambda case, site: _is_broken(site.mean) or _is_broken(site.var),
    "mean or var holds NaN or infinity in {}",
    "every answer is NaN or constant",
)
broken_parameters = rule(
    "not-finite",
    lambda case, site: _is_broken(site.gamma) or _is_broken(site.beta),
    "gamma or beta holds NaN or infinity in {}",
    "every answer is NaN or constant",
    "load the weights again, from a checkpoint before they broke",
)
negative_variance = rule(
    "negative-variance",
    lambda case, site: bool((site.var < 0).any()),
    "variances are negative in {}: statistics were mixed up, or subtracted from one another",
    "the square root is NaN, or of the wrong number",
)


def never_updated(case: Case) -> Iterator[Finding]:
    """Statistics as a norm is made with, mean 0 and variance 1."""
    yield from _never_updated_in_part(case)
    hit = [site for site in case.sites if site.starts_at_init]
    trained = [site for site in hit if not site.is_untouched]
    if trained:
        evidence = f"mean 0 and variance 1 in {share(trained, case.sites)}, with trained gammas"
        cost = "in eval mode they do not normalize; training mode hides it"
        yield Finding(
            "never-updated", paths_of(trained), evidence, Certainty.CERTAIN, cost, case.recalibrate
        )
    fresh = [site for site in hit if site.is_untouched and _reads_fresh_weights(case, site)]
    if fresh:
        where = share(fresh, case.sites)
        evidence = (
            f"{where}, and the convolutions before them, are as they were made: they were not"
            " loaded"
        )
        mend = (
            "load the weights again, with load_state_dict(strict=True): it says which names differ"
        )
        yield Finding(
            "not-loaded",
            paths_of(fresh),
            evidence,
            Certainty.LIKELY,
            "these layers compute noise",
            mend,
        )


def _never_updated_in_part(case: Case) -> Iterator[Finding]:
    counts = {site: int((site.at_init).sum()) for site in case.sites if not site.starts_at_init}
    hit = [site for site, count in counts.items() if count > _SWITCHED_OFF * _width(site)]
    if hit:
        channels = (
            f"{sum(counts[site] for site in hit)} of {sum(_width(site) for site in hit)} channels"
        )
        evidence = (
            f"mean 0 and variance 1 in {channels} of {share(hit, case.sites)}, not in the rest"
        )
        cost = "in eval mode these channels are not normalized; training mode hides it"
        yield Finding(
            "never-updated", paths_of(hit), evidence, Certainty.CERTAIN, cost, case.recalibrate
        )


def _reads_fresh_weights(case: Case, site: StoredNorm) -> bool:
    """Whether the layer before a norm has weights that no training has moved.

    Fresh weights are independent and of one distribution. The squared lengths of the C filters, of
    n weights each, differ by what chance makes then: their relative variance is (k - 1) / n, where
    k is the kurtosis of the weights. Training makes some filters many times as long as others.
    """
    layer = case.layer_before(site)
    squares = torch.zeros(0, 1) if layer is None else _filters(layer).square()
    if len(squares) < _FILTERS:
        return False
    count = squares.shape[1]
    lengths = squares.sum(1)
    within = (squares.square().mean(1) / squares.mean(1).square().clamp_min(1e-30)).mean()
    # The kurtosis of n normal numbers is expected as 3 n / (n + 2).
    kurtosis = within * (count + 2) / count
    by_chance = (kurtosis - 1) / count * lengths.mean().square()
    return bool(lengths.var() < (1 + _CHANCE * (2 / len(lengths)) ** 0.5) * by_chance)


def zero_variance(case: Case) -> Iterator[Finding]:
    """A variance of 0, or far below eps, where the weights before it say that something varies."""
    hit = []
    for site in case.sites:
        if not len(site.var) or site.starts_at_init:
            continue
        missing = (site.var.abs() < _TINY * site.eps) & _reached(case, site)
        if float(missing.double().mean()) > _SWITCHED_OFF:
            hit.append(site)
    if hit:
        evidence = (
            f"variances of 0, or below {_TINY:g} eps, in more than {_SWITCHED_OFF:.0%} of the"
            " channels"
        )
        cost = "what reaches them is multiplied by 1 / sqrt(eps), some hundred times too much"
        yield Finding(
            "zero-variance", paths_of(hit), evidence, Certainty.LIKELY, cost, case.recalibrate
        )


def _reached(case: Case, site: StoredNorm) -> Tensor:
    """Which channels something reaches, (C,).

    Nothing does where mean and variance are 0 but for a bias, where the norm before and the weights
    foretell the variance 0, and where the weights have decayed to 0.
    """
    values = site.var if site.gamma is None or len(site.var) else site.gamma
    reached = torch.ones_like(values, dtype=torch.bool)
    if len(site.mean):
        varies = site.var.abs() >= _TINY * site.eps
        reached &= varies | ((site.mean - case.bias_before(site)).square() >= _TINY * site.eps)
    if site.path in case.foretold:
        reached &= case.foretold[site.path][1].to(values) >= _TINY * site.eps
    layer = case.layer_before(site)
    lengths = torch.zeros(0) if layer is None else _filters(layer).square().sum(1)
    if len(lengths) == len(values):
        reached &= lengths.to(values) >= _DECAYED * lengths.median()
    return reached


def _filters(layer: Linearity) -> Tensor:
    """The weights that make each output channel, (C, n) float64."""
    weight = layer.weight.detach().double()
    if isinstance(layer, _ConvNd) and layer.transposed:
        weight = weight.unflatten(0, (layer.groups, -1)).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def dead_gammas(case: Case) -> Iterator[Finding]:
    """More than a tenth of a norm's channels with a gamma of 0."""
    zeros = {
        site: int(((site.gamma == 0) & _reached(case, site)).sum())
        for site in case.sites
        if site.gamma is not None
    }
    hit = [site for site, count in zeros.items() if count > _SWITCHED_OFF * _width(site)]
    hit = [site for site in hit if not (site.starts_at_init and site.is_untouched)]
    if hit:
        counts = ", ".join(f"{zeros[site]} of {_width(site)} at {site.path}" for site in hit[:4])
        cost = (
            "the channels are constant, and learn slowly or, behind a ReLU with beta <= 0, never"
            " again"
        )
        mend = (
            "go back to a checkpoint before they died, or train on with a smaller rate and no decay"
            " of gammas"
        )
        yield Finding(
            "dead-gammas", paths_of(hit), f"gammas are 0: {counts}", Certainty.CERTAIN, cost, mend
        )


def _width(site: StoredNorm) -> int:
    return len(site.mean if site.gamma is None else site.gamma)
