"""Checks of what norms are set to (eps and momentum, modes, statistics that are not kept) and where
they stand.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace

from torch import fx

from normswap import provenance
from normswap.calibration import population
from normswap.diagnosis.drift import measured
from normswap.diagnosis.findings import Case, Certainty, Finding, StoredNorm, paths_of, rule, share
from normswap.graph.tracing import Traced, inputs
from normswap.layers import affine
from normswap.layers.activations import is_identity
from normswap.models import kinds, zoo

# The eps of torch, and that of TensorFlow and Ultralytics.
_USUAL_EPS = (1e-5, 1e-3)
# Another eps is named if statistics are at least so far off with this one, and so many times nearer
# with the other.
_FAR = 0.1
_CLEARLY = 2.0
# Momentum is the share of the new batch; one above this is Keras', the share of the old.
_LARGEST = 0.5
_SET_ALL = "set norm.eps = {:g} for every norm in model.modules()"


def unlike_builder(case: Case) -> Iterator[Finding]:
    """An eps that is not the one with which the architecture is built: no checkpoint stores it."""
    bare = case.bare
    if bare is None:
        return
    built = dict(bare.named_modules())
    pairs = [
        (site, built[site.path])
        for site in case.sites
        if affine.is_batchnorm(built.get(site.path) or case.model)
    ]
    wrong: dict[tuple[float, float], list[StoredNorm]] = {}
    for site, norm in pairs:
        if affine.epsilon(norm) != site.eps:
            wrong.setdefault((site.eps, affine.epsilon(norm)), []).append(site)
    for (eps, right), sites in wrong.items():
        evidence = (
            f"eps is {eps:g} in {share(sites, case.sites)}; the library builds them with {right:g}"
        )
        cost = f"channels with a variance near {max(eps, right):g} are scaled wrongly"
        mend = "; ".join(
            f"model.get_submodule({site.path!r}).eps = {right:g}" for site in sites[:4]
        )
        if len(sites) == len(case.sites):
            mend = _SET_ALL.format(right)
        yield Finding("eps", paths_of(sites), evidence, Certainty.CERTAIN, cost, mend)


def fused(case: Case) -> Iterator[Finding]:
    """Norms of the architecture that its convolutions have absorbed, which normswap did not do."""
    record = provenance.of(case.model)
    bare = case.bare
    if record.arch is None or bare is None or record.plan.steps:
        return
    if record.arch.kwargs.get("fused"):
        bare = zoo.skeleton(replace(record.arch, kwargs={**record.arch.kwargs, "fused": False}))
    built = bare.state_dict().keys()
    here = case.model.state_dict().keys()
    gone = sorted(
        name.removesuffix(".running_mean")
        for name in built - here
        if name.endswith(".running_mean")
    )
    biases = [
        name
        for name in here - built
        if name.endswith("bias") and f"{name.removesuffix('bias')}weight" in built
    ]
    if gone and biases:
        evidence = (
            f"{len(gone)} BatchNorms of {record.arch.name} are gone, {len(biases)} layers have a"
            " bias instead"
        )
        cost = "it is trained without norms, and its tensors load into no network that has them"
        mend = (
            f"normswap convert {case.name} --to batchnorm --like {kinds.named(record.arch)}"
            f" --calibrate {case.data}"
        )
        yield Finding("fused", tuple(gone), evidence, Certainty.CERTAIN, cost, mend)


def unfit_eps(case: Case) -> Iterator[Finding]:
    """Another usual eps, with which what reaches the norms fits their statistics clearly better."""
    present = {site.eps for site in case.sites}
    if case.images is None or len(present) != 1:
        return
    (present_eps,) = present
    distance = _mean_distance(case)
    if distance < _FAR:
        return
    distances = {
        eps: _mean_distance(_with_eps(case, eps)) for eps in _USUAL_EPS if eps != present_eps
    }
    best = min(distances, key=lambda eps: distances[eps])
    if distances[best] * _CLEARLY > distance:
        return
    evidence = (
        f"eps is {present_eps:g}; with {best:g} what reaches the norms is {distances[best]:.2g}"
        f" from their statistics, not {distance:.2g} (deviations and logarithms of variances,"
        f" {case.images.count} images)"
    )
    cost = f"channels with a variance near {max(present_eps, best):g} are scaled wrongly"
    yield Finding(
        "eps", paths_of(case.sites), evidence, Certainty.LIKELY, cost, _SET_ALL.format(best)
    )


def _with_eps(case: Case, eps: float) -> Case:
    model = copy.deepcopy(case.model)
    for norm in population.norms_of(model).values():
        norm.eps = eps
    return replace(case, network=case.network.after(model))


def _mean_distance(case: Case) -> float:
    """How far a norm's statistics are from those of images, the mean over norms; 0 where that
    cannot be measured.
    """
    drifts = measured(case)
    return sum(drift.mean + drift.log_var for drift in drifts) / max(len(drifts), 1)


def momentum(case: Case) -> Iterator[Finding]:
    """A momentum with which running statistics cannot follow: 0 and less, or nearly the whole
    batch.
    """
    hit = [
        site
        for site in case.sites
        if site.momentum is not None and not 0 < site.momentum <= _LARGEST
    ]
    for value in dict.fromkeys(site.momentum for site in hit):
        sites = [site for site in hit if site.momentum == value]
        stuck = value is not None and value <= 0
        why, cost = (
            "the last batches decide alone; torch's is 1 - Keras'",
            "statistics are those of a few images",
        )
        if stuck:
            why = "statistics never change"
            cost = "training leaves statistics of other weights behind"
        evidence = f"momentum is {value:g} in {share(sites, case.sites)}: {why}"
        mend = f"set norm.momentum = 0.1 for every norm; then {case.recalibrate}"
        yield Finding("momentum", paths_of(sites), evidence, Certainty.CERTAIN, cost, mend)


def _only_statistics_learn(case: Case, site: StoredNorm) -> bool:
    parameters = [*site.module.parameters(recurse=False)]
    alive = case.model.training and site.module.training and not affine.is_frozen(site.module)
    return (
        alive and bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
    )


untracked = rule(
    "no-statistics",
    lambda case, site: not affine.has_moments(site.module),
    "{} keep no running statistics (track_running_stats=False)",
    "an image's answer depends on the batch that it comes in, also in eval mode",
    "build them with track_running_stats=True, then normswap recalibrate {} --data IMAGES",
)
in_training = rule(
    "training-mode",
    lambda case, site: (
        not case.model.training and site.module.training and not affine.is_frozen(site.module)
    ),
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
        evidence = (
            f"{len(paths)} norms serve several places: one set of statistics for what differs"
        )
        cost = (
            "each place is normalized by the mixture; training mode, which takes each apart,"
            " hides it"
        )
        mend = (
            "share the weights, not the norms: give each place its own (nn.BatchNorm2d per level),"
            " then train on"
        )
        yield Finding("shared-norm", paths, evidence, Certainty.CERTAIN, cost, mend)


def _serves_several_layers(case: Case, site: StoredNorm) -> bool:
    """Whether one forward calls a norm behind several layers; two arms with one body call it behind
    the same.
    """
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
            if (
                before is None
                or norm is None
                or not affine.is_batchnorm(norm)
                or affine.activation(norm) is not None
            ):
                continue
            if len(case.traced.users[before]) == 1:
                paths += [str(before.target), site.path]
    if paths:
        evidence = f"{paths[1]} normalizes what {paths[0]} has normalized, with nothing between"
        cost = (
            "the first one's gamma and beta have no effect in training mode; another function than"
            " in eval mode"
        )
        mend = f"normswap convert {case.name} --to folded --only {paths[0]}"
        yield Finding(
            "double-norm", tuple(dict.fromkeys(paths)), evidence, Certainty.CERTAIN, cost, mend
        )


def _source(traced: Traced, call: fx.Node) -> fx.Node | None:
    """Find the value that the call reads, past what does nothing in eval mode."""
    before = inputs(call)
    while len(before) == 1 and is_identity(traced.module(before[0])):
        before = inputs(before[0])
    return before[0] if len(before) == 1 else None
