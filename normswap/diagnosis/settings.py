"""Checks of the settings of norms (eps, momentum, modes, statistics) and of their places."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from torch import fx, nn

from normswap import copying, provenance
from normswap.calibration import population
from normswap.diagnosis.drift import contradicts_weights, measured_drifts
from normswap.diagnosis.findings import (
    Case,
    Certainty,
    Finding,
    Remark,
    StoredNorm,
    count_text,
    paths_of,
    python_line,
    rule,
    with_exception,
)
from normswap.graph.tracing import Traced, inputs
from normswap.models import kinds, zoo
from normswap.sites.activations import is_identity
from normswap.sites.site import site_of

# The eps of torch, and that of TensorFlow and Ultralytics.
_USUAL_EPS = (1e-5, 1e-3)
# Another eps is reported if statistics are at least so far off with the network's eps, and
# _CLEARLY times nearer with the other.
_FAR = 0.1
_CLEARLY = 2.0
# In torch momentum is the share of the new batch. A momentum above this was taken from Keras, where
# it is the share of the old batches.
_LARGEST_MOMENTUM = 0.5


def unlike_builder(case: Case) -> Iterator[Finding | Remark]:
    """Find norms whose eps is not the one with which the library builds the network.

    No checkpoint stores an eps, so it may get lost. If the images fit the network's own eps better,
    a remark is yielded, and no finding.
    """
    # The same architecture as its library builds it. It is None if nobody knows the architecture.
    bare = case.bare
    if bare is None:
        return

    # The key is the eps of the norms, and the eps with which the library builds them. A class may
    # have a method `named_modules` of its own, so torch's is called.
    wrong: dict[tuple[float, float], list[StoredNorm]] = {}
    built = dict(nn.Module.named_modules(bare))
    for site in case.sites:
        norm = built.get(site.path)
        if norm is None or not site_of(norm).is_batchnorm:
            continue
        built_eps = site_of(norm).eps
        if built_eps != site.eps:
            wrong.setdefault((site.eps, built_eps), []).append(site)

    for (eps, built_eps), sites in wrong.items():
        count = count_text(sites, case.sites)
        evidence = f"eps is {eps:g} in {count}; the library builds them with {built_eps:g}"
        if _is_nearer(case, eps, built_eps):
            yield Remark(f"{evidence}. The statistics fit the images better with {eps:g}: keep it")
            continue
        yield Finding(
            "eps",
            paths=paths_of(sites),
            evidence=with_exception(evidence, f"it was trained with {eps:g}"),
            certainty=Certainty.LIKELY,
            cost=_cost_of_eps(eps, built_eps),
            mend=python_line(case, sites, f"norm.eps = {built_eps!r}"),
        )


def _is_nearer(case: Case, eps: float, other_eps: float) -> bool:
    """Whether the norms' statistics fit the images clearly better with one eps than another.

    The result is False if the diagnosis has no images, or if the norms have different eps.

    Args:
        case: The network that is diagnosed.
        eps: The eps that the norms have.
        other_eps: The eps that it is compared with.
    """
    if case.images is None or len({site.eps for site in case.sites}) != 1:
        return False
    # The distance with `eps` must be smaller by the factor `_CLEARLY`.
    return _mean_distance(case) * _CLEARLY < _mean_distance(_with_eps(case, other_eps))


def _cost_of_eps(eps: float, right: float) -> str:
    """Return the harm of a wrong eps, in words: it matters where it is as large as a variance.

    Args:
        eps: The eps that the norms have.
        right: The eps that they should have.
    """
    return f"channels with a variance near {max(eps, right):g} are scaled wrongly"


def fused(case: Case) -> Iterator[Finding]:
    """Find norms of the architecture that another tool than normswap folded into convolutions."""
    record = provenance.of(case.model)
    bare = case.bare
    # A network that has steps of a plan was converted by normswap.
    if record.arch is None or bare is None or record.plan.steps:
        return
    # An architecture that is recorded as fused is built with its norms, to be compared with.
    if record.arch.kwargs.get("fused"):
        bare = zoo.skeleton(replace(record.arch, kwargs={**record.arch.kwargs, "fused": False}))

    # The norms that the architecture has and the network has not.
    built_names = bare.state_dict().keys()
    names = case.model.state_dict().keys()
    gone: list[str] = []
    for name in built_names - names:
        if name.endswith(".running_mean"):
            gone.append(name.removesuffix(".running_mean"))
    gone.sort()

    # The biases that the network has and the architecture has not.
    new_biases: list[str] = []
    for name in names - built_names:
        has_weight = f"{name.removesuffix('bias')}weight" in built_names
        if name.endswith("bias") and has_weight:
            new_biases.append(name)
    if gone and new_biases:
        yield Finding(
            "fused",
            paths=tuple(gone),
            evidence=(
                f"{len(gone)} BatchNorms of {record.arch.name} are gone, {len(new_biases)} layers"
                " have a bias instead. No fault if it only runs, and is not trained"
            ),
            certainty=Certainty.LIKELY,
            cost="it is trained without norms, and its tensors load into no network that has them",
            mend=(
                f"normswap convert {case.name} --to batchnorm --like {kinds.named(record.arch)}"
                f" --calibrate {case.data}"
            ),
        )


def unfit_eps(case: Case) -> Iterator[Finding]:
    """Find another usual eps with which the norms' inputs fit their statistics clearly better.

    An eps that was lost changes the input of every norm behind the first. Nothing is found without
    images, or if the norms have different eps.
    """
    present = {site.eps for site in case.sites}
    if case.images is None or len(present) != 1:
        return
    (present_eps,) = present
    distance = _mean_distance(case)
    # With the norms' own eps, the statistics fit the images already.
    if distance < _FAR:
        return

    # The distance of the statistics from the images' if all norms had another usual eps.
    distances = {
        eps: _mean_distance(_with_eps(case, eps)) for eps in _USUAL_EPS if eps != present_eps
    }
    best = min(distances, key=lambda eps: distances[eps])
    # The other eps must be clearly nearer, as chance alone may make it a little nearer.
    if distances[best] * _CLEARLY > distance:
        return

    yield Finding(
        "eps",
        paths=paths_of(case.sites),
        evidence=(
            f"eps is {present_eps:g}; with {best:g} what reaches the norms is {distances[best]:.2g}"
            f" from their statistics, not {distance:.2g} (deviations and logarithms of variances,"
            f" {case.images.count} images)"
        ),
        certainty=Certainty.LIKELY,
        cost=_cost_of_eps(present_eps, best),
        mend=python_line(case, case.sites, f"norm.eps = {best!r}"),
    )


def _with_eps(case: Case, eps: float) -> Case:
    """Return the same diagnosis (`Case`) for a copy whose norms have another eps."""
    model = copying.duplicate(case.model, memo={})
    for norm in population.norms_of(model).values():
        vars(norm.module)["eps"] = eps
    return replace(case, network=case.network.after(model))


def _mean_distance(case: Case) -> float:
    """Return how far stored statistics are from the images' statistics, averaged over norms.

    The distance of a norm is the shift of its mean, in deviations, plus the logarithm of the ratio
    of its variances. The result is 0 if nothing can be measured.
    """
    drifts = measured_drifts(case)
    return sum(drift.mean + drift.log_var for drift in drifts) / max(len(drifts), 1)


def momentum(case: Case) -> Iterator[Finding | Remark]:
    """Find a momentum with which running statistics cannot follow the training.

    Such a momentum is 0 or less, or so large that the last batches decide alone. It is a fault if
    the weights contradict the stored statistics, or if nothing tells whether these are right.
    Otherwise a remark is yielded.
    """
    unusual = [
        site
        for site in case.sites
        if site.momentum is not None and not 0 < site.momentum <= _LARGEST_MOMENTUM
    ]
    for value in dict.fromkeys(site.momentum for site in unusual):
        sites = [site for site in unusual if site.momentum == value]
        count = count_text(sites, case.sites)
        is_stuck = value is not None and value <= 0
        effect = "the last batches decide alone; torch's is 1 - Keras'"
        cost = "statistics are those of a few images"
        if is_stuck:
            effect = "statistics never change"
            cost = "training leaves statistics of other weights behind"
        evidence = f"momentum is {value:g} in {count}: {effect}"

        # A momentum of 0 or less leaves statistics of earlier weights, which the present weights
        # contradict. A large one leaves statistics of a few images. These are seen with images, in
        # the checks that follow. If an error would be seen and is not, there is no fault.
        has_wrong_statistics = any(contradicts_weights(case, site) for site in sites)
        would_be_seen = is_stuck or case.images is not None
        if would_be_seen and not has_wrong_statistics:
            yield Remark(
                f"{evidence}. This is no fault in eval mode; before training on:"
                f" {python_line(case, sites, 'norm.momentum = 0.1')}"
            )
            continue

        if not is_stuck:
            evidence = with_exception(evidence, "the statistics were measured anew since")
        yield Finding(
            "momentum",
            paths=paths_of(sites),
            evidence=evidence,
            certainty=Certainty.LIKELY,
            cost=cost,
            mend=f"{python_line(case, sites, 'norm.momentum = 0.1')}; then {case.recalibrate}",
        )


def _keeps_no_statistics(case: Case, site: StoredNorm) -> bool:
    """Whether a norm has no running mean and variance."""
    return not site_of(site.module).has_moments


def _trains_alone(case: Case, site: StoredNorm) -> bool:
    """Whether a norm is in training mode while the network is in eval mode."""
    is_training = site.module.training and not site_of(site.module).is_frozen
    return not case.model.training and is_training


def _only_statistics_learn(case: Case, site: StoredNorm) -> bool:
    """Whether a forward now changes a norm's statistics, while its gamma and beta are frozen."""
    is_training = case.model.training and site.module.training
    if not is_training or site_of(site.module).is_frozen:
        return False
    # With a momentum of 0, or without statistics, no forward changes any.
    if site.momentum == 0 or not site_of(site.module).has_moments:
        return False
    # A class may have a method `parameters` of its own, so torch's is called.
    parameters = [*nn.Module.parameters(site.module, recurse=False)]
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


untracked = rule(
    "no-statistics",
    _keeps_no_statistics,
    evidence="{} keep no running statistics (track_running_stats=False)",
    cost="an image's answer depends on the batch that it comes in, also in eval mode",
    mend="build them with track_running_stats=True, then normswap recalibrate {} --data IMAGES",
    unless="it is always used on batches like those of its training",
)
in_training = rule(
    "training-mode",
    _trains_alone,
    evidence="{} are in training mode, the network is in eval mode",
    cost="answers depend on the batch, and each call changes the statistics",
    mend="model.eval()",
    unless="it adapts to its batches on purpose",
)
thawed = rule(
    "thawed",
    _only_statistics_learn,
    evidence="gamma and beta are frozen in {}, their statistics are not",
    cost="statistics move with every batch",
    mend="normswap convert {} --to frozen-bn (with --only PATH where others are to learn)",
    unless="its statistics are to follow new images",
)


def shared(case: Case) -> Iterator[Finding]:
    """Find one norm, or one tensor of statistics, that serves several places of the network."""
    serving_several = [site for site in case.sites if _serves_several_layers(case, site)]

    # Different norms may hold the same tensor as their running mean.
    by_memory: dict[int, list[StoredNorm]] = {}
    for site in case.sites:
        running_mean = getattr(site.module, "running_mean", None)
        if running_mean is not None:
            by_memory.setdefault(running_mean.data_ptr(), []).append(site)
    aliased: list[StoredNorm] = []
    for sites in by_memory.values():
        if len(sites) > 1:
            aliased += sites

    paths = tuple(dict.fromkeys(paths_of([*serving_several, *aliased])))
    if paths:
        yield Finding(
            "shared-norm",
            paths=paths,
            evidence=(
                f"{len(paths)} norms serve several places: one set of statistics for what differs."
                " No fault if the network was trained with these statistics, in eval mode"
            ),
            certainty=Certainty.LIKELY,
            cost=(
                "each place is normalized by the mixture; training mode, which takes each apart,"
                " hides it"
            ),
            mend=(
                "share the weights, not the norms: give each place its own (nn.BatchNorm2d per"
                " level), then train on"
            ),
        )


def _serves_several_layers(case: Case, site: StoredNorm) -> bool:
    """Whether one forward calls a norm behind several layers.

    Calls behind one layer are no fault: two branches of the network then share layer and norm.
    """
    if case.traced is None or case.traced.called(site.module) < 2:
        return False

    layers: set[int] = set()
    for call in case.calls(site):
        modules = [case.traced.module(node) for node in inputs(call)]
        layers.update(id(module) for module in modules if module is not None)
    return len(layers) > 1


def in_a_row(case: Case) -> Iterator[Finding]:
    """Find norms whose only input is the output of another norm."""
    pairs = [*_norm_pairs(case)]
    if not pairs:
        return

    first, second = pairs[0]
    evidence = f"{second} normalizes what {first} has normalized, with nothing between"
    if len(pairs) > 1:
        evidence += f"; there are {len(pairs)} such pairs"
    evidence = with_exception(evidence, "it was built and trained so; then one of them is idle")
    firsts = dict.fromkeys(pair[0] for pair in pairs)
    only = " ".join(f"--only {path}" for path in firsts)
    yield Finding(
        "double-norm",
        paths=tuple(dict.fromkeys(itertools.chain.from_iterable(pairs))),
        evidence=evidence,
        certainty=Certainty.LIKELY,
        cost=(
            "the first one's gamma and beta have no effect in training mode; another function than"
            " in eval mode"
        ),
        mend=f"normswap convert {case.name} --to folded {only}",
    )


def _norm_pairs(case: Case) -> Iterator[tuple[str, str]]:
    """Yield the paths (first, second) of two norms, if only the second reads the first's output.

    Identities between the two do not count. Nothing is yielded without a recorded forward.
    """
    if case.traced is None:
        return
    for site in case.sites:
        for call in case.calls(site):
            source = _source(case.traced, call)
            # The norm that gives the source, if it comes from a module at all.
            norm = None if source is None else case.traced.module(source)
            if source is None or norm is None or not _is_bare_batchnorm(norm):
                continue
            if len(case.traced.users[source]) == 1:
                yield str(source.target), site.path


def _is_bare_batchnorm(module: nn.Module) -> bool:
    """Whether a module is a BatchNorm without an activation in it."""
    site = site_of(module)
    return site.is_batchnorm and site.activation is None


def _source(traced: Traced, call: fx.Node) -> fx.Node | None:
    """Return the node of the recorded forward that computes the input of a call.

    Modules between the two that return their input unchanged are skipped. The result is None if the
    call, or a module that is skipped, reads several values.
    """
    sources = inputs(call)
    while len(sources) == 1 and is_identity(traced.module(sources[0])):
        sources = inputs(sources[0])
    return sources[0] if len(sources) == 1 else None
