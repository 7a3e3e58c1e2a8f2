"""Convert a network in memory: plan every step, carry it out, prove the result."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypedDict

from torch import nn

from normswap import schemes
from normswap.errors import (
    NormswapError,
    OptionError,
    RefusedError,
    VerificationError,
    by_reason,
    spelled,
)
from normswap.folding import norm_free
from normswap.folding.overwriting import aliasing_conflicts
from normswap.folding.plan_builder import ALREADY_THERE, NEVER_CALLED, PlanBuilder
from normswap.graph.anatomy import Anatomy, naming, patterns, restrict
from normswap.models import weight_files
from normswap.models.calling import Inputs
from normswap.models.modes import Progress, full_precision
from normswap.plan import Outcome, Step
from normswap.proof import comparison, doubles, intermediates, verdict
from normswap.schemes import Chosen, Options
from normswap.sites.site import sites_of
from normswap.surgery import applying, carrying_out, likeness, unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Batches, Network, calls_of

if TYPE_CHECKING:
    from typing_extensions import Unpack


class ConvertOptions(TypedDict, total=False):
    """The options of all schemes with their types, which a code editor can complete."""

    only: str | Sequence[str]
    skip: str | Sequence[str]
    purpose: Literal["federated", "opacus"] | None
    alpha: Literal["match", "inv-sqrt-depth"] | float
    bend: float
    branches: Literal["merge", "keep"]
    depthwise: Literal["fit", "keep"]
    dropout: float
    ghost_batch: int
    group_size: int
    groups: int
    factor: Literal["rule"] | float
    init: Literal["keep", "reset", "fixup", "zeros", "scaled"]
    like: str | nn.Module
    mean: Literal["fit", "keep"]
    relative_eps: float
    rule: Literal["balduzzi", "szegedy", "hanin", "arpit", "rescale"]
    stem: Literal["fit", "keep"]
    where: Literal["norms", "activation", "conv"]


def plan_step(anatomy: Anatomy, to: str, **options: object) -> tuple[Step, PlanBuilder]:
    """Plan one step of a conversion, for one scheme.

    Args:
        anatomy: The recorded structure of the network before the step (`Network.anatomy`).
        to: The name of a scheme.
        options: The options of the scheme, by their names in Python.

    Returns:
        The step, and the builder that made it. The builder's `outcomes` say what becomes of each
        norm, and its `notes` are for the user.

    Raises:
        OptionError: The scheme or the option is not known.
        RefusedError: The network cannot be converted, or there is nothing to do.
    """
    schemes.check_target(to)
    return _plan_step(anatomy, schemes.chosen(to, options))


def plan_steps(
    network: Network, to: str, *, measured: bool = False, **options: object
) -> Iterator[tuple[Step, PlanBuilder]]:
    """Yield the steps that `convert` would take, each with the builder that made it.

    Args:
        network: The source.
        to: The name of the target scheme.
        measured: Whether there are images to fit values to.
        options: The options of the target scheme.

    Raises:
        OptionError: The scheme or an option is not known.
        RefusedError: The network cannot be converted, or there is nothing to do.
    """
    schemes.check_target(to)
    step: Step | None = None
    for chosen in scheme_path(network.anatomy, to, options, measured=measured):
        # Each step is planned for the network that the step before it leaves.
        if step:
            network = network.after(carrying_out.applied(network, step))
        step, builder = _plan_step(network.anatomy, chosen)
        yield step, builder


def _plan_step(anatomy: Anatomy, chosen: Chosen) -> tuple[Step, PlanBuilder]:
    """Return the step of a scheme with all its options, and the builder that made it.

    Args:
        anatomy: The recorded structure of the network before the step.
        chosen: The scheme with all its options.

    Raises:
        RefusedError: The network cannot be converted, or there is nothing to do.
    """
    # The scheme sees only the parts of the network that `only` and `skip` leave. `chosen.own` are
    # its other options. The builder has its edits: of linear layers that absorb others (`linears`),
    # and `replacements` of layers.
    scheme = chosen.scheme
    limits = patterns(chosen.options)
    restricted = restrict(anatomy, **limits)
    builder: PlanBuilder = scheme.plan(restricted, **chosen.own)
    # Layers whose replacement would copy memory that is read under another name are refused, too.
    builder.refusals.update(aliasing_conflicts(builder))

    if builder.refusals:
        raise RefusedError(
            f"cannot convert to {scheme.name}",
            by_reason(builder.refusals, "the network itself"),
            _remedy_by_skipping(restricted, chosen, builder),
        )

    if not builder.replacements and not builder.linears and not scheme.may_do_nothing:
        raise _error_of_no_change(restricted, scheme.name, builder)

    return Step(scheme.name, {**chosen.own, **limits}, builder.edits(), builder.outcomes), builder


def _remedy_by_skipping(anatomy: Anatomy, chosen: Chosen, builder: PlanBuilder) -> str:
    """Return a sentence with a `skip` option that leaves out the layers that were refused.

    The sentence is empty if the rest of the network cannot be converted either.

    Args:
        anatomy: The recorded structure, restricted to the parts that are converted.
        chosen: The scheme with all its options.
        builder: The builder of the step that was refused.
    """
    # There are two kinds of patterns. The first may name whole parts of the network (`layer3`),
    # provided that no other norm is inside. They are short, but also leave out the linear layers in
    # these parts, which norms beside them may need. The second kind names the refused layers alone.
    norms = [norm.path for norm in anatomy.norms if anatomy.takes_part(norm.path)]
    other_norms = [path for path in norms if path not in builder.refusals]
    patterns_of_parts = naming(builder.refusals, other_norms)
    other_modules = [
        path for path in anatomy.traced.modules if path and path not in builder.refusals
    ]
    patterns_of_layers = naming(builder.refusals, other_modules)

    remedies: list[str] = []
    for skip in (patterns_of_parts, patterns_of_layers):
        # The scheme may refuse the rest by an error. Then these patterns are no remedy.
        with suppress(NormswapError):
            # The scheme is planned again without these layers. `chosen.own` are its options except
            # `only` and `skip`.
            outside = anatomy.outside | restrict(anatomy, skip=skip).outside
            rest: PlanBuilder = chosen.scheme.plan(replace(anatomy, outside=outside), **chosen.own)
            if rest.refusals or not (rest.replacements or rest.linears):
                continue
            remedy = f"`{spelled('skip', skip)}` leaves these as they are and converts the rest"
            # Patterns with which every norm has the same outcome as before are taken at once.
            if rest.outcomes == builder.outcomes:
                return remedy
            remedies.append(remedy)
    return next(iter(remedies), "")


def _error_of_no_change(anatomy: Anatomy, to: str, builder: PlanBuilder) -> RefusedError:
    """Return the error to raise for a conversion that would change nothing.

    Args:
        anatomy: The recorded structure, restricted to the parts that are converted.
        to: The name of the scheme.
        builder: The builder of the step, which has no edits.
    """
    # Why: the kinds of the norms, and why each of them stays.
    norms = [norm for norm in anatomy.norms if anatomy.takes_part(norm.path)]
    kinds = ", ".join(sorted({norm.kind for norm in norms}))

    # A forward may compute a norm in code of its own, which nobody recognizes.
    why = (
        f"its norms are {kinds}" if kinds else "no norm was recognized among the modules to convert"
    )
    if anatomy.refused_norms and not builder.outcomes:
        why += f" ({anatomy.refused_norms})"
    if builder.outcomes:
        reasons = {path: str(outcome) for path, outcome in builder.outcomes.items()}
        why += f". {by_reason(reasons, 'the network itself')}"

    # Of these remedies the last one that applies is given.
    outcomes = set(builder.outcomes.values())
    remedy = f"The source of `{to}` must have BatchNorm, or scalars of an earlier conversion"
    if outcomes:
        remedy = "Name another scheme"
    of_called = outcomes - {NEVER_CALLED}
    if of_called and of_called <= ALREADY_THERE:
        remedy = f"They are what `{to}` would place. Name another scheme"
    if outcomes == {NEVER_CALLED}:
        remedy = "Forward calls none of them, so the network computes without norms"
    if any(norm.averages for norm in norms):
        images = f"'{spelled('calibrate', metavar='DATA')}' (images, no labels needed)"
        remedy = f"{images} replaces them by what they do on average, on the way to {to}"

    return RefusedError(f"nothing to convert to {to}", why, remedy)


@full_precision()
def convert(
    model: nn.Module | Network | Conversion,
    to: str,
    *,
    inputs: Inputs = None,
    input_size: Sequence[int] | None = None,
    seed: int | None = None,
    calibrate: Batches | str | None = None,
    progress: Progress | None = None,
    **options: Unpack[ConvertOptions],
) -> Conversion:
    """Convert a network to another normalization scheme, and measure the result against it.

    Args:
        model: The network, a `Network` record of it, or the result of an earlier conversion. It is
            not changed.
        to: The name of a scheme (`normswap schemes` lists them).
        inputs: The network's inputs, on which it is recorded and verified: a tensor, a tuple of
            arguments, a dict of keywords, or a list of batches of these. By default it is N(0, 1)
            noise of `input_size`.
        input_size: The size (C, H, W) of the noise. By default it is the size that the network
            states (`network_input.size`).
        seed: The seed of the noise, and of every draw while values are fitted.
        calibrate: Images for a scheme that fits values to data, and for a source whose norms have
            statistics per sample. It is batches of images (N, C, H, W), of (images, labels), or of
            what `inputs` may be, or a function that gives such batches. Entries of a batch beyond
            the network's arguments are left out. "synthetic" makes 128 images from the statistics
            that the network's BatchNorms keep.
        progress: Called while values are fitted, with the layers done and their total.
        options: The options of the scheme. `only` selects the parts that are converted and `skip`
            leaves parts out, both by patterns of module paths (`layer3`, `*.bn2`). `purpose`,
            "opacus" or "federated", adds what private or federated training needs.

    Returns:
        The converted network, in the mode, dtype and device of the source, with what was measured.

    Raises:
        TraceError: The network does not run on the inputs, or its forward cannot be seen.
        OptionError: An option is unknown or out of range, or images are needed and missing.
        RefusedError: The conversion is impossible at some path, or there is nothing to do.
        VerificationError: The conversion was done, and the result is wrong.
    """
    network = Network.of(
        model, inputs=inputs, size=input_size, seed=seed, calibrate=calibrate, progress=progress
    )
    schemes.check_target(to)

    # Folding is done in float64, which MPS has not. There a copy on the CPU is converted, and the
    # result goes back to the device.
    work_on = network.with_double()
    if to == "unfold":
        conversion = _unfolded(work_on, to, dict(options))
    elif to == "batchnorm" and options.get("like"):
        conversion = _to_class_with_batchnorms(work_on, to, dict(options))
    else:
        conversion = _converted(work_on, to, dict(options))

    if work_on is network:
        return conversion
    module = conversion.model.to(network.device)
    return replace(conversion, network=replace(conversion.network, module=module))


convert.__doc__ = (
    f"{convert.__doc__}\n    Options of the schemes, with their"
    f" defaults:\n{schemes.described()}    "
)


def _converted(source: Network, to: str, options: Options) -> Conversion:
    """Carry out the schemes that lead to a target, one step each, and join them to one conversion.

    Args:
        source: The network.
        to: The name of the target scheme.
        options: The options of the target scheme, and the purpose.

    Raises:
        OptionError: There are images, and the only scheme fits nothing to them.
    """
    path = scheme_path(source.anatomy, to, options, measured=source.calibrate is not None)
    images = source.images
    # Each step that fits values reads the images again, and an iterator gives them only once.
    if len(path) > 1 and isinstance(images, Iterator):
        images = list(images)
    # The same record, with these images to fit values to.
    source = source.fitted_to(images, source.progress)

    network = source
    conversions: list[Conversion] = []
    for chosen in path:
        # Each step is planned for the network that the step before it left.
        step, builder = _plan_step(network.anatomy, chosen)
        if len(path) == 1 and source.calibrate is not None and not chosen.fits:
            raise OptionError(
                f"{chosen.scheme.name} has no use for calibration data", "nothing in it is fitted"
            )

        last = carrying_out.carry_out(network, step)
        # Norms that a forward computes by a function, such as `F.layer_norm`, stay.
        functional = [
            f"{module_path or 'the network itself'} keeps its norm: {sentence}"
            for module_path, sentence in network.anatomy.functional_norms.items()
        ]
        notes = (*network.anatomy.traced.remarks, *functional, *builder.notes, *last.notes)
        conversions.append(replace(last, outcomes=builder.outcomes, notes=notes))
        # The record of a result has no images, so the next step is given those of the source.
        network = last.network.fitted_to(source.images, source.progress)

    # The note warns if timm's `forward_intermediates` gives other features than the source's.
    whole = joined(source, conversions)
    if whole.report.exact and (note := intermediates.note(source, whole.model)):
        return replace(whole, notes=(*whole.notes, note))
    return whole


def scheme_path(anatomy: Anatomy, to: str, options: Options, *, measured: bool) -> list[Chosen]:
    """Return the schemes of a conversion with their options, in order.

    The schemes that the target needs come first, then the target itself, then the purpose:

    - With images (`measured`), norms with statistics per sample (LayerNorm and the like) first
      become BatchNorms.
    - If the target puts a scalar at the end of each residual branch, and branches end in a factor
      of the block's own forward (normalizer-free networks), that factor is folded first.
    - If the target needs BatchNorms, and an earlier conversion removed them, they are rebuilt from
      the statistics that the network carries.
    - For `batchnorm` a network that never had norms gets some, if `where` asks for it or there are
      images.

    Args:
        anatomy: The source's recorded structure.
        to: The name of the target scheme.
        options: The options of the target scheme, and the purpose.
        measured: Whether there are images to fit values to.

    Raises:
        OptionError: The scheme, an option or the purpose is unknown, or a pattern names nothing.
    """
    purpose = options.get("purpose")
    schemes.check_purpose(purpose)

    options = {name: value for name, value in options.items() if name != "purpose"}
    target = schemes.chosen(to, options)
    limits = patterns(options)
    anatomy = restrict(anatomy, **limits)

    # Lost norms are those that an earlier conversion removed, and whose statistics are recorded.
    norms = [norm for norm in anatomy.norms if anatomy.takes_part(norm.path)]
    has_batchnorms = any(norm.is_batchnorm for norm in norms)
    has_lost_norms = any(anatomy.takes_part(path) for path in anatomy.provenance.original_paths)
    # Images turn norms with statistics per sample into BatchNorms first. But a target that needs
    # BatchNorms replaces those in the network, and leaves other norms as they are.
    has_what_it_needs = has_batchnorms and target.scheme.starts_from == "batchnorm"
    estimates = measured and not has_what_it_needs and any(norm.averages for norm in norms)

    has_norms = has_batchnorms or estimates
    needs_lost_norms = has_lost_norms and not has_norms
    before = _schemes_before(
        target, anatomy, estimates=estimates, needs_lost_norms=needs_lost_norms
    )
    after = [] if purpose is None else [schemes.chosen(purpose, {})]

    # Only the target `batchnorm` has the option `where`. `norms` means: where norms stand or stood.
    # With any other value, the scheme `measured-batchnorm` places norms with measured statistics,
    # and takes the place of the target.
    where = target.options.get("where", "norms")
    never_had_norms = not (has_norms or has_lost_norms)
    if where == "norms" and to == "batchnorm" and measured and never_had_norms:
        where = "activation"
    if where != "norms":
        path = [schemes.chosen("measured-batchnorm", {**limits, "where": where})]
        # With `ghost_batch`, the target then changes these norms, so that so many samples share
        # statistics in training.
        if target.options["ghost_batch"]:
            path.append(target)
        return path + after

    # If `estimate` makes BatchNorms of a network that had none, they are the ones that the target
    # `batchnorm` asks for.
    path = [schemes.chosen(name, limits) for name in before]
    gets_batchnorms = estimates and to == "batchnorm" and not has_batchnorms
    if not gets_batchnorms or options.get("ghost_batch"):
        path.append(target)

    # The step that merges branches is taken only if some branch can be merged.
    if to == "folded" and target.options["branches"] == "merge":
        merging = schemes.chosen("merged-branches", limits)
        if merging.scheme.plan(anatomy).replacements:
            path.append(merging)

    return path + after


def _schemes_before(
    target: Chosen, anatomy: Anatomy, *, estimates: bool, needs_lost_norms: bool
) -> list[str]:
    """Return the names of the schemes that are carried out before the target, in order.

    Args:
        target: The target scheme, with its options.
        anatomy: The source's recorded structure, restricted to the parts that are converted.
        estimates: Whether norms with statistics per sample are to become BatchNorms first.
        needs_lost_norms: Whether the network has no BatchNorms, and had some that an earlier
            conversion removed.
    """
    before: list[str] = []
    if estimates:
        before.append("estimate")

    # In normalizer-free networks a branch may end in a factor of the block's own forward. Then no
    # module returns the branch's value, and no scalar can be placed at its end. Folding the factor
    # comes first.
    ends_in_factor = target.scheme.on_branches and any(
        norm_free.ends_in_own_factor(anatomy, block) for block in anatomy.included_blocks
    )
    if ends_in_factor:
        before.append("folded")

    if target.scheme.starts_from is not None and needs_lost_norms:
        before.append(target.scheme.starts_from)
    return before


def _to_class_with_batchnorms(network: Network, to: str, options: Options) -> Conversion:
    """Convert a network without norms to a class of networks that has BatchNorms (`likeness`).

    Args:
        network: The network.
        to: The name of the target scheme.
        options: The options that were given. `like` names the class.

    Raises:
        OptionError: Another option is given, `like` is no architecture, or there are no images.
    """
    # `like` goes with no other option.
    like = options["like"]
    for name, value in schemes.changed(to, options).items():
        if name != "like" and value:
            pair = f"{spelled(name, value)} cannot go with {spelled('like', like)}"
            raise OptionError(pair, "the architecture says where norms stand, and which")
    like = _checked_like(like)

    # That scheme needs images, so an error is raised if there are none.
    images = carrying_out.images_for(schemes.chosen("measured-batchnorm", {}), network)
    assert images is not None
    return likeness.batchnorm_like(network, like, calls_of(images, network))


def _checked_like(like: object) -> str | nn.Module:
    """Return the value of the option `like`, if it is a name or a network.

    Raises:
        OptionError: It is neither the name of an architecture nor a network.
    """
    if not isinstance(like, str | nn.Module):
        raise OptionError(f"{spelled('like', like)} is neither an architecture nor a network")
    return like


def joined(source: Network, conversions: Sequence[Conversion]) -> Conversion:
    """Join the conversions of several steps to one, proved and measured from end to end.

    Args:
        source: The network before the first step, with the images that the steps were fitted to.
        conversions: The conversion of each step, in order. A single one is returned as it is.

    Raises:
        VerificationError: The result of all steps is wrong.
    """
    last = conversions[-1]
    if len(conversions) == 1:
        return last

    # The plan of the last network has all steps. Those of these conversions are at its end.
    steps = last.plan.steps[-len(conversions) :]
    earlier = source.provenance.plan.steps
    exact = schemes.are_exact(steps)

    # In float64 all steps are applied to the source anew.
    precise = None
    if exact:
        precise = doubles.compare_double(
            source, lambda: applying.apply(source.module, steps, double=True)
        )

    claims = applying.claims(steps, earlier=earlier)
    report = comparison.compare_networks(
        source, last.model, exact=exact, precise=precise, claims=claims
    )
    report = replace(report, steps_before=len(earlier))

    # Exact steps lose nothing. So if a single step changes the function, its agreement with its own
    # source holds for all steps together. The agreement after two such steps is measured anew.
    changing = [conversion.report for conversion in conversions if not conversion.report.exact]
    if len(changing) == 1:
        report = replace(report, kept=changing[0].kept, unmeasured=changing[0].unmeasured)
    elif changing:
        kept, unmeasured = carrying_out.measured_again(source, last.model, steps)
        report = replace(report, kept=kept, unmeasured=unmeasured)

    verdict.require_passed(report, " and ".join(step.scheme for step in steps))

    # The outcome of a norm is that of the last step that names it.
    outcomes: dict[str, Outcome] = {}
    notes: list[str] = []
    for conversion in conversions:
        outcomes |= conversion.outcomes
        notes += conversion.notes
    return Conversion(
        network=last.network,
        report=report,
        outcomes=outcomes,
        notes=tuple(dict.fromkeys(notes)),
        renames=_renames(source, conversions),
        steps=len(conversions),
    )


def _renames(source: Network, conversions: Sequence[Conversion]) -> tuple[tuple[str, str], ...]:
    """Return the name in the source and in the result of each tensor that some step renames.

    Args:
        source: The network before the first step.
        conversions: The conversion of each step, in order.
    """
    # A tensor that is renamed by two steps goes from its first name to its last.
    renames: dict[str, str] = {}
    for conversion in conversions:
        of_step = dict(conversion.renames)
        # `pop` takes out the renames that go on from an earlier one, and leaves those that are new.
        renames = {old: of_step.pop(new, new) for old, new in renames.items()} | of_step

    # Tensors that a step has added are left out, as the source has none of that name.
    names_of_source = weight_files.state_dict(source.module).keys()
    return tuple((old, new) for old, new in renames.items() if old in names_of_source)


def _only_like(options: Options, to: str) -> str | nn.Module | None:
    """Return the value of the option `like`, or None if it is not given.

    Args:
        options: The options that were given. `like` is the only one that is allowed.
        to: The name of the target, for errors.

    Raises:
        OptionError: Another option is given, or `like` is neither a name nor a network.
    """
    value = options.get("like")
    like = None if value is None else _checked_like(value)
    # An empty `purpose` asks for nothing, so it is not refused.
    others = {
        name for name, given in options.items() if name != "like" and (given or name != "purpose")
    }
    if others:
        raise OptionError(
            f"{to!r} has no option {', '.join(sorted(others))}", "it takes `like` only"
        )
    return like


def _unfolded(network: Network, to: str, options: Options) -> Conversion:
    """Give a converted network the norms of its source back, and prove that the function is kept.

    Args:
        network: The converted network.
        to: The name "unfold", for errors.
        options: The options that were given. Only `like`, the source's class, is taken.

    Raises:
        OptionError: Another option is given.
        RefusedError: The network was not converted, or the source cannot express its changes.
        VerificationError: The source with its norms computes something else.
    """
    like = _only_like(options, to)

    # The source is built by its record, or of the class that the user gives.
    def unfolded(converted: Network) -> Network:
        if like is None:
            return unfolding.unfold(converted)
        return unfolding.unfold(converted, likeness.of_class(converted, like))

    # For an RMSNorm the mean is taken out of the weights that write to the residual stream. Rounded
    # weights keep a small mean, which float64 would show as an error. So it is not compared.
    steps = network.provenance.plan.steps
    are_centred = applying.centres_streams(steps)
    precise = None
    if not are_centred:
        precise = doubles.compare_double(network, lambda: unfolded(network.doubled()).module)

    result = unfolded(network)
    report = comparison.compare_networks(
        network, result.module, precise=precise, claims=applying.claims(steps)
    )
    # If nothing is proved, this raises the error that says so. A wrong result gets an error of its
    # own, as here the source may be unable to compute what the network has learned.
    if report.unproved:
        verdict.require_passed(report, to)
    if not report.passed:
        why = (
            f"the source computes something else (relative L2 error {report.worst.relative_l2:.1e})"
        )
        remedy = (
            "If the network has learned what its source cannot compute (a mean, a bias), keep the"
            " source network"
        )
        if like is not None:
            name = like if isinstance(like, str) else type(like).__name__
            remedy = f"If {name} is not the source's class, give that. {remedy}"
        raise VerificationError("cannot unfold", why, remedy)

    norms = [site.path for site in sites_of(result.module) if site.is_affine_norm]
    return Conversion(result, report, dict.fromkeys(norms, Outcome("restored", "restored")))
