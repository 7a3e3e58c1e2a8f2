"""Which eps the images speak for: with another one than in training every norm behind sees values of another size."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import nn

from normswap.calibration import channel_moments
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of
from normswap.diagnosis.settings import set_eps
from normswap.errors import NormswapError

_USUAL = (1e-5, 1e-3)  # torch's; TensorFlow's and Ultralytics'
_CLEARLY, _FAR = 2.0, 0.01  # times nearer; nats of distance that chance does not make


def unfit_eps(case: Case) -> Iterator[Finding]:
    """Another usual eps with which what reaches the norms fits their statistics clearly better."""
    sites = [site for site in case.sites if site.mean is not None and site.var is not None]
    present = {site.eps for site in sites}
    if case.images is None or len(present) != 1 or not any(_matters(site) for site in sites):
        return
    try:
        now = _distance(case, sites, None)
        nearest = {eps: _distance(case, sites, eps) for eps in _USUAL if eps not in present}
    except NormswapError:
        return
    if not nearest:
        return
    eps = min(nearest, key=lambda one: nearest[one])
    if now < _FAR or nearest[eps] * _CLEARLY > now:
        return
    evidence = (
        f"eps is {present.pop():g}; with {eps:g} what reaches the norms is {nearest[eps]:.2g} nats from their "
        f"statistics, not {now:.2g} ({case.images.count} images)"
    )
    cost = f"channels with a variance near {max(eps, sites[0].eps):g} are scaled wrongly"
    yield Finding("eps", paths_of(sites), evidence, Certainty.LIKELY, cost, set_eps(eps, sites, case))


def _matters(site: StoredNorm) -> bool:
    """Whether some variance is small enough for an eps to be seen."""
    return site.var is not None and bool((site.var < 100 * max(_USUAL)).any())


def _distance(case: Case, sites: list[StoredNorm], eps: float | None) -> float:
    """KL divergence per norm between its statistics and those of its input in eval mode; the mean of the medians."""
    assert case.images is not None
    model = copy.deepcopy(case.model)
    norms: dict[str, nn.Module] = {site.path: model.get_submodule(site.path) for site in sites}
    for norm in norms.values() if eps is not None else ():
        vars(norm)["eps"] = eps
    seen = channel_moments.measure(model, norms, case.images.calls).moments
    total = 0.0
    for site in sites:
        if site.path not in seen or site.mean is None or site.var is None:
            continue
        mean, var = seen[site.path].mean.to(site.mean), seen[site.path].variance.to(site.var)
        ratio = (var + 1e-12) / (site.var + 1e-12)
        shift = (mean - site.mean).square() / (site.var + 1e-12)
        total += float(((ratio - 1 - ratio.log() + shift) / 2).quantile(0.75))
    return total / len(sites)
