"""Checks of what norms are set to: eps and momentum, modes, statistics that are not kept."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator

from torch import nn

from normswap.calibration import channel_moments
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, share
from normswap.errors import NormswapError
from normswap.layers import affine

_USUAL = (1e-5, 1e-3)  # torch's eps; TensorFlow's and Ultralytics'
_CLEARLY, _FAR = 2.0, 0.01  # times nearer; nats of distance that chance does not make
_MOST_NORMS = 4  # times as many norms have the usual eps as have another: fewer may be meant so
_LARGEST = 0.5  # momentum is the share of the new batch; one above this is Keras', the share of the old


def unlike_builder(case: Case) -> Iterator[Finding]:
    """An eps that is not the one with which the architecture is built: no checkpoint stores it."""
    bare = case.bare
    if bare is None:
        return
    built = dict(bare.named_modules())
    pairs = [(site, built[site.path]) for site in case.sites if affine.is_batchnorm(built.get(site.path) or case.model)]
    wrong: dict[tuple[float, float], list[StoredNorm]] = {}
    for site, norm in pairs:
        if affine.epsilon(norm) != site.eps:
            wrong.setdefault((site.eps, affine.epsilon(norm)), []).append(site)
    for (eps, right), sites in wrong.items():
        evidence = (
            f"eps is {eps:g} in {share(len(sites), len(case.sites), 'norms')}; the library builds them with {right:g}"
        )
        cost = f"channels with a variance near {max(eps, right):g} are scaled wrongly"
        yield Finding("eps", paths_of(sites), evidence, Certainty.CERTAIN, cost, set_eps(right, sites, case))


def set_eps(value: float, sites: list[StoredNorm], case: Case) -> str:
    """How to set an eps, in Python."""
    if len(sites) == len(case.sites):
        return f"set norm.eps = {value:g} for every norm in model.modules()"
    return "; ".join(f"model.get_submodule({site.path!r}).eps = {value:g}" for site in sites[:4])


def uneven_eps(case: Case) -> Iterator[Finding]:
    """A few norms with another eps than the rest, where no library says that it must be so."""
    kept = Counter(site.eps for site in case.sites if site.mean is not None)
    if len(kept) < 2 or case.bare is not None:
        return
    usual, count = kept.most_common(1)[0]
    sites = [site for site in case.sites if site.eps != usual and site.mean is not None]
    if count < _MOST_NORMS * len(sites):
        return
    rest = ", ".join(f"{one:g}" for one in kept if one != usual)
    evidence = f"eps is {usual:g} in {count} norms, and {rest} in {len(sites)}"
    cost = "small variances are scaled otherwise there, if it is not meant so"
    yield Finding("uneven-eps", paths_of(sites), evidence, Certainty.POSSIBLE, cost, set_eps(usual, sites, case))


def momentum(case: Case) -> Iterator[Finding]:
    """A momentum with which running statistics cannot follow: 0 and less, or nearly the whole batch."""
    hit = [site for site in case.sites if site.momentum is not None and not 0 < site.momentum <= _LARGEST]
    for value in dict.fromkeys(site.momentum for site in hit):
        sites = [site for site in hit if site.momentum == value]
        stuck = value is not None and value <= 0
        why = "statistics never change" if stuck else "the last batches decide alone; torch's is 1 - Keras'"
        evidence = f"momentum is {value:g} in {share(len(sites), len(case.sites), 'norms')}: {why}"
        cost = "training leaves statistics of other weights behind" if stuck else "statistics are those of a few images"
        mend = f"set norm.momentum = 0.1 for every norm; then {case.recalibrate}"
        yield Finding("momentum", paths_of(sites), evidence, Certainty.CERTAIN, cost, mend)


def untracked(case: Case) -> Iterator[Finding]:
    """Norms that keep no statistics: eval mode depends on what else is in the batch."""
    hit = [site for site in case.sites if site.mean is None]
    if hit:
        evidence = f"{share(len(hit), len(case.sites), 'norms')} keep no running statistics (track_running_stats=False)"
        cost = "an image's answer depends on the batch that it comes in, also in eval mode"
        mend = f"build them with track_running_stats=True, then {case.recalibrate}"
        yield Finding("no-statistics", paths_of(hit), evidence, Certainty.CERTAIN, cost, mend)


def thawed(case: Case) -> Iterator[Finding]:
    """Norms in training mode that were meant to be frozen, or in a network in eval mode."""
    alive = [site for site in case.sites if site.module.training and not affine.is_frozen(site.module)]
    if not case.model.training and alive:
        evidence = f"{share(len(alive), len(case.sites), 'norms')} are in training mode, the network is in eval mode"
        cost = "answers depend on the batch, and each call changes the statistics"
        yield Finding("training-mode", paths_of(alive), evidence, Certainty.CERTAIN, cost, "model.eval()")
    fixed = [site for site in alive if case.model.training and _learns_nothing(site)]
    if fixed:
        evidence = (
            f"gamma and beta are frozen in {share(len(fixed), len(case.sites), 'norms')}, their statistics are not"
        )
        only = " ".join(f"--only {site.path}" for site in fixed[:3])
        mend = f"normswap convert {case.name} --to frozen-bn {only}"
        cost = "statistics move with every batch"
        yield Finding("thawed", paths_of(fixed), evidence, Certainty.CERTAIN, cost, mend)


def _learns_nothing(site: StoredNorm) -> bool:
    parameters = [*site.module.parameters(recurse=False)]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


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
