"""Checks of kept statistics against what the weights say they must be."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from normswap.diagnosis import weight_moments
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, share
from normswap.layers.known_norms import Pair

# A correlation over fewer channels says nothing.
_FEWEST = 8
# Means that correlate less with the foretold ones, and are further off, contradict the weights.
_UNLIKE = 0.35
# In deviations: the means of trained networks are nearer (weight_moments).
_FAR = 0.5


def contradicted(case: Case) -> Iterator[Finding]:
    """Running means that the norm before and the weights cannot make: stale, or another norm's."""
    if case.traced is None:
        return
    foretold = weight_moments.foretold(case.traced)
    sites = [
        site
        for site in case.sites
        if site.path in foretold
        and not site.starts_at_init
        and _is_off(site, foretold[site.path], _bias_before(case, site))
    ]
    if not sites:
        return
    exchanged = _exchanged(case, sites, foretold) if len(sites) <= 2 else None
    if exchanged:
        evidence = f"the running means of {exchanged[0].path} and {exchanged[1].path} fit each other's place"
        cost = "eval mode shifts every channel by another's mean"
        yield Finding("swapped-statistics", paths_of(exchanged), evidence, Certainty.LIKELY, cost, case.recalibrate)
        return
    distances = torch.cat([_distances(site, foretold[site.path]) for site in sites])
    evidence = (
        f"the running means of {share(len(sites), len(foretold), 'norms')} contradict the weights before them: "
        f"{float(distances.median()):.1f} deviations off in the median channel"
    )
    cost = "eval mode normalizes by what these weights do not make; training mode hides it"
    yield Finding("stale-statistics", paths_of(sites), evidence, Certainty.LIKELY, cost, case.recalibrate)


def _is_off(site: StoredNorm, foretold: Pair, bias: Tensor) -> bool:
    """Without the bias that stands in both: a convolution that absorbed a norm has its beta there, and little else."""
    if site.mean is None or len(site.mean) < _FEWEST or not bool(torch.isfinite(site.mean).all()):
        return False
    alike = _correlation(foretold[0] - bias, site.mean - bias)
    return alike < _UNLIKE and float(_distances(site, foretold).median()) > _FAR


def _bias_before(case: Case, site: StoredNorm) -> Tensor:
    """The bias that is added right before a norm; 0 where there is none."""
    bias = getattr(case.layer_before(site), "bias", None)
    return bias.detach().double() if isinstance(bias, Tensor) else torch.zeros((), dtype=torch.float64)


def _correlation(first: Tensor, second: Tensor) -> float:
    first, second = first - first.mean(), second - second.mean()
    return float(first @ second / (first.norm() * second.norm()).clamp_min(1e-30))


def _distances(site: StoredNorm, foretold: Pair) -> Tensor:
    """By how many deviations the kept means are off, (C,); the larger of both deviations counts."""
    assert site.mean is not None
    assert site.var is not None
    return (site.mean - foretold[0]).abs() / torch.maximum(site.var, foretold[1]).clamp_min(1e-12).sqrt()


def _exchanged(case: Case, off: list[StoredNorm], foretold: dict[str, Pair]) -> tuple[StoredNorm, StoredNorm] | None:
    """A norm whose foretold means another one keeps, which has the first one's as far as that can be foretold."""
    for first, second in itertools.product(off, case.sites):
        if first.mean is None or second.mean is None or first is second or len(first.mean) != len(second.mean):
            continue
        there = foretold.get(second.path)
        back = 1.0 if there is None else _correlation(there[0], first.mean)
        if min(_correlation(foretold[first.path][0], second.mean), back) > 2 * _UNLIKE:
            return first, second
    return None
