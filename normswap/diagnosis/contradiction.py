"""Checks of kept statistics against what the weights say they must be."""

import copy
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from normswap.calibration import channel_moments
from normswap.diagnosis import drift
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, correlation, paths_of, share
from normswap.errors import NormswapError
from normswap.layers.known_norms import Pair

# Means that correlate less with the foretold ones, and are further off, contradict the weights.
_UNLIKE = 0.35
# In deviations: the means of trained networks are nearer (weight_moments).
_FAR = 0.5
# By so many kept deviations what reaches a norm exceeds 1 where statistics of other weights have multiplied: 100 to
# 100,000 behind some layers. Trained with frozen statistics, networks stay below 10.
_EXPLODED = 30.0


def contradicted(case: Case) -> Iterator[Finding | str]:
    """Running means that the norm before and the weights cannot make: stale, another norm's, or frozen in training."""
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
        evidence = f"the running means of {exchanged[0].path} and {exchanged[1].path} fit each other's place"
        cost = "eval mode shifts every channel by another's mean"
        yield Finding("swapped-statistics", paths_of(exchanged), evidence, Certainty.LIKELY, cost, case.recalibrate)
        return
    distances = torch.cat([_distances(site, foretold[site.path]) for site in sites])
    evidence = (
        f"the running means of {share(sites, foretold)} contradict the weights before them: "
        f"{float(distances.median()):.1f} deviations off in the median channel"
    )
    if case.of_other_weights and _may_be_frozen(case):
        yield drift.frozen_or_stale(case, evidence)
        return
    cost = "eval mode normalizes by what these weights do not make; training mode hides it"
    yield Finding("stale-statistics", paths_of(sites), evidence, Certainty.LIKELY, cost, case.recalibrate_and_measure)


def _may_be_frozen(case: Case) -> bool:
    """Whether answers vary from image to image; without images, whether what norms give does not grow by layers."""
    if case.images is not None:
        return drift.tells_images_apart(case)
    model = copy.deepcopy(case.model)
    norms = {site.path: model.get_submodule(site.path) for site in case.sites}
    try:
        moments = channel_moments.measure(model, norms, case.network.examples[:1]).moments
    except NormswapError:
        return False
    for site in case.sites:
        if site.path in moments and site.mean is not None and site.var is not None:
            mean, var = moments[site.path].mean.to(site.mean), moments[site.path].variance.to(site.mean)
            squares = ((mean - site.mean).square() + var) / (site.var + site.eps)
            if float(squares.median()) > _EXPLODED**2:
                return False
    return True


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
        back = 1.0 if there is None else correlation(there[0], first.mean)
        if min(correlation(foretold[first.path][0], second.mean), back) > 2 * _UNLIKE:
            return first, second
    return None
