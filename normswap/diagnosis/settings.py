"""Checks of what norms are set to (eps and momentum, modes, statistics that are not kept) and where they stand."""

from __future__ import annotations

import copy
from collections.abc import Iterator

from torch import fx, nn

from normswap.calibration import channel_moments
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, rule, share
from normswap.errors import NormswapError
from normswap.graph.tracing import Traced, inputs
from normswap.layers import affine
from normswap.layers.activations import is_identity

# The eps of torch, and that of TensorFlow and Ultralytics.
_USUAL = (1e-5, 1e-3)
# An eps fits clearly better if it is so many times nearer, by a distance in nats that chance does not make.
_CLEARLY, _FAR = 2.0, 0.01
# Momentum is the share of the new batch; one above this is Keras', the share of the old.
_LARGEST = 0.5


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


def momentum(case: Case) -> Iterator[Finding]:
    """A momentum with which running statistics cannot follow: 0 and less, or nearly the whole batch."""
    hit = [site for site in case.sites if site.momentum is not None and not 0 < site.momentum <= _LARGEST]
    for value in dict.fromkeys(site.momentum for site in hit):
        sites = [site for site in hit if site.momentum == value]
        stuck = value is not None and value <= 0
        why, cost = "the last batches decide alone; torch's is 1 - Keras'", "statistics are those of a few images"
        if stuck:
            why, cost = "statistics never change", "training leaves statistics of other weights behind"
        evidence = f"momentum is {value:g} in {share(len(sites), len(case.sites), 'norms')}: {why}"
        mend = f"set norm.momentum = 0.1 for every norm; then {case.recalibrate}"
        yield Finding("momentum", paths_of(sites), evidence, Certainty.CERTAIN, cost, mend)


def _in_training(case: Case, site: StoredNorm) -> bool:
    return not case.model.training and site.module.training and not affine.is_frozen(site.module)


def _only_statistics_learn(case: Case, site: StoredNorm) -> bool:
    parameters = [*site.module.parameters(recurse=False)]
    alive = case.model.training and site.module.training and not affine.is_frozen(site.module)
    return alive and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


untracked = rule(
    "no-statistics",
    lambda case, site: site.mean is None,
    "{} keep no running statistics (track_running_stats=False)",
    "an image's answer depends on the batch that it comes in, also in eval mode",
    "build them with track_running_stats=True, then normswap recalibrate {} --data IMAGES",
)
in_training = rule(
    "training-mode",
    _in_training,
    "{} are in training mode, the network is in eval mode",
    "answers depend on the batch, and each call changes the statistics",
    "model.eval()",
)
thawed = rule(
    "thawed",
    _only_statistics_learn,
    "gamma and beta are frozen in {}, their statistics are not",
    "statistics move with every batch",
    "normswap convert {} --to frozen-bn (with --only PATH where others are to learn)",
)


def unfit_eps(case: Case) -> Iterator[Finding]:
    """Another usual eps with which what reaches the norms fits their statistics clearly better."""
    sites = [site for site in case.sites if site.mean is not None and site.var is not None]
    present = {site.eps for site in sites}
    # An eps is seen in the outputs only where a variance is small.
    is_seen = any(bool((site.var < 100 * max(_USUAL)).any()) for site in sites if site.var is not None)
    if case.images is None or len(present) != 1 or not is_seen:
        return
    try:
        now = _distance(case, sites, None)
        nearest = {eps: _distance(case, sites, eps) for eps in _USUAL if eps not in present}
    except NormswapError:
        return
    if not nearest:
        return
    eps = min(nearest, key=lambda usual_eps: nearest[usual_eps])
    if now < _FAR or nearest[eps] * _CLEARLY > now:
        return
    evidence = (
        f"eps is {present.pop():g}; with {eps:g} what reaches the norms is {nearest[eps]:.2g} nats from their "
        f"statistics, not {now:.2g} ({case.images.count} images)"
    )
    cost = f"channels with a variance near {max(eps, sites[0].eps):g} are scaled wrongly"
    yield Finding("eps", paths_of(sites), evidence, Certainty.LIKELY, cost, set_eps(eps, sites, case))


def _distance(case: Case, sites: list[StoredNorm], eps: float | None) -> float:
    """KL divergence per norm between its statistics and those of its input in eval mode; the mean of the medians."""
    assert case.images is not None
    model = copy.deepcopy(case.model)
    norms: dict[str, nn.Module] = {site.path: model.get_submodule(site.path) for site in sites}
    for norm in norms.values() if eps is not None else ():
        vars(norm)["eps"] = eps
    observed = channel_moments.measure(model, norms, case.images.calls).moments
    total = 0.0
    for site in sites:
        if site.path not in observed or site.mean is None or site.var is None:
            continue
        mean, var = observed[site.path].mean.to(site.mean), observed[site.path].variance.to(site.var)
        ratio = (var + 1e-12) / (site.var + 1e-12)
        shift = (mean - site.mean).square() / (site.var + 1e-12)
        total += float(((ratio - 1 - ratio.log() + shift) / 2).quantile(0.75))
    return total / len(sites)


def shared(case: Case) -> Iterator[Finding]:
    """One norm, or one tensor of statistics, for several places."""
    twice = [site for site in case.sites if _serves_several_layers(case, site)]
    owners: dict[int, list[StoredNorm]] = {}
    for site in case.sites:
        buffer = getattr(site.module, "running_mean", None)
        if buffer is not None:
            owners.setdefault(buffer.data_ptr(), []).append(site)
    aliased = [site for sites in owners.values() if len(sites) > 1 for site in sites]
    paths = tuple(dict.fromkeys(site.path for site in [*twice, *aliased]))
    if paths:
        evidence = f"{len(paths)} norms serve several places: one set of statistics for what differs"
        cost = "each place is normalized by the mixture; training mode, which takes each apart, hides it"
        mend = "share the weights, not the norms: give each place its own (nn.BatchNorm2d per level), then train on"
        yield Finding("shared-norm", paths, evidence, Certainty.CERTAIN, cost, mend)


def _serves_several_layers(case: Case, site: StoredNorm) -> bool:
    """Whether one forward calls a norm behind several layers; two arms with one body call it behind the same."""
    if case.traced is None or case.traced.called(site.module) < 2:
        return False
    before = [case.traced.module(node) for call in case.calls(site) for node in inputs(call)]
    return len({id(module) for module in before if module is not None}) > 1


def in_a_row(case: Case) -> Iterator[Finding]:
    """A norm that reads nothing but what another norm has just normalized."""
    if case.traced is None:
        return
    paths = []
    for site in case.sites:
        for call in case.calls(site):
            before = _source(case.traced, call)
            norm = None if before is None else case.traced.module(before)
            if before is None or norm is None or not affine.is_batchnorm(norm) or affine.activation(norm) is not None:
                continue
            if len(case.traced.users[before]) == 1:
                paths += [str(before.target), site.path]
    if paths:
        evidence = f"{paths[1]} normalizes what {paths[0]} has normalized, with nothing between"
        cost = "the first one's gamma and beta have no effect in training mode; another function than in eval mode"
        mend = f"normswap convert {case.name} --to folded --only {paths[0]}"
        yield Finding("double-norm", tuple(dict.fromkeys(paths)), evidence, Certainty.CERTAIN, cost, mend)


def _source(traced: Traced, call: fx.Node) -> fx.Node | None:
    """Find the value that the call reads, past what does nothing in eval mode."""
    before = inputs(call)
    while len(before) == 1 and is_identity(traced.module(before[0])):
        before = inputs(before[0])
    return before[0] if len(before) == 1 else None
