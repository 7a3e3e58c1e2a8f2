"""Checks of what norms are set to: eps and momentum beside the library's own, modes, statistics that are not kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, share
from normswap.layers import affine

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
    rest = ", ".join(f"{one:g}" for one in kept if one != usual)
    evidence = f"eps is {usual:g} in {count} norms, and {rest} in {len(sites)}"
    cost = "small variances are scaled otherwise there, if it is not meant so"
    fault = count >= 4 * len(sites)
    yield Finding("uneven-eps", paths_of(sites), evidence, Certainty.POSSIBLE, cost, set_eps(usual, sites, case), fault)


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
    fixed = [site for site in case.sites if _learns_nothing(site)]
    if not fixed or (len(fixed) == len(case.sites) and not case.model.training):
        return
    now = [site for site in fixed if site in alive and case.model.training]
    evidence = (
        f"gamma and beta are frozen in {share(len(now or fixed), len(case.sites), 'norms')}, their statistics are not"
    )
    cost = "statistics move with every batch" if now else "the next model.train() lets their statistics move"
    only = " ".join(f"--only {site.path}" for site in (now or fixed)[:3])
    mend = f"normswap convert {case.name} --to frozen-bn {only}"
    yield Finding("thawed", paths_of(now or fixed), evidence, Certainty.CERTAIN, cost, mend, fault=bool(now))


def _learns_nothing(site: StoredNorm) -> bool:
    parameters = [*site.module.parameters(recurse=False)]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
