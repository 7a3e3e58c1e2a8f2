"""The main job: plan, carry out, prove; for a model in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from normswap import provenance, schemes
from normswap.calibration import norm_estimate
from normswap.errors import OptionError, RefusedError
from normswap.folding.draft import Draft
from normswap.folding.outcomes import counts
from normswap.folding.overwriting import torn
from normswap.graph import inspection, selection
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.models.calling import Inputs
from normswap.models.modes import Progress
from normswap.plan import Outcome, Plan, Step
from normswap.schemes import Options
from normswap.surgery import applying, carrying_out, comparison, fitting, route, unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.made_images import Batches


def draft(seen: Anatomy, to: str, **options: object) -> tuple[Step, Draft]:
    """What `convert` would do: the step, and the draft with its outcomes and notes.

    Raises:
        OptionError: unknown scheme or option.
        RefusedError: something cannot be converted, or there is nothing to do.
    """
    schemes.demand_target(to)
    return _draft(seen, to, options)


def drafts(
    model: nn.Module, to: str, purpose: str | None = None, *, measured: bool = False, **options: object
) -> Iterator[tuple[Step, Draft]]:
    """All the steps that `convert` would take, without their values from data.

    Args:
        measured: whether there will be images to fit values to.

    Raises:
        OptionError, RefusedError: as `draft`.
    """
    seen = inspection.inspect(model)
    before: Step | None = None
    for scheme, given in route.legs(seen, to, options, purpose, measured=measured):
        if before:
            model = provenance.attach(applying.apply_step(model, before), carrying_out.record(model, before))
            seen = inspection.inspect(model)
        before, sketch = _draft(seen, scheme, given)
        yield before, sketch


def _draft(seen: Anatomy, to: str, options: Options) -> tuple[Step, Draft]:
    own, chosen = schemes.own(schemes.resolve(to, options)), selection.patterns(options)
    part = selection.restrict(seen, **chosen)
    scheme = schemes.get(to)
    sketch: Draft = scheme.plan(part, **own)
    sketch.refusals.update(torn(sketch))
    if sketch.refusals:
        listed = [f"{path}: {why}" for path, why in list(sketch.refusals.items())[:3]]
        more = f"; and {len(sketch.refusals) - 3} more" if len(sketch.refusals) > 3 else ""
        raise RefusedError(f"cannot convert to {to}", "; ".join(listed) + more)
    if not sketch.seats and not sketch.takes and not scheme.may_do_nothing:
        raise _nothing(part, to, sketch)
    return Step(to, {**own, **chosen}, sketch.edits(), sketch.outcomes), sketch


def _nothing(seen: Anatomy, to: str, sketch: Draft) -> RefusedError:
    norms = [norm for norm in seen.norms if seen.takes_part(norm.path)]
    kinds = sorted({norm.kind for norm in norms})
    where = "what is chosen" if seen.outside else "the network"
    steps = seen.provenance.plan.steps
    why = f"the norms of {where} are {', '.join(kinds)}" if kinds else f"{where} has no norm"
    remedy = f"The source of `{to}` must have BatchNorm, or scalars of an earlier conversion"
    if sketch.outcomes:
        what = ", ".join(f"{count} {fate}" for fate, count in counts(sketch.outcomes.values()).items())
        why, remedy = f"the norms of {where} stay as they are: {what}", "`normswap schemes` lists what else there is"
    if steps and steps[-1].scheme == to:
        why, remedy = f"{where} is that already", "`normswap schemes` lists what else there is"
    if per_sample := sum(norm_estimate.fits(seen, norm.path) for norm in norms):
        why += f", {per_sample} with statistics per sample" if sketch.outcomes else ""
        remedy = f"{norm_estimate.REMEDY}, in the way to {to}"
    return RefusedError(f"nothing to convert to {to}", why, remedy)


def convert(
    model: nn.Module | Conversion,
    to: str,
    *,
    purpose: str | None = None,
    inputs: Inputs = None,
    size: Sequence[int] | None = None,
    seed: int = 0,
    calibrate: Batches | str | None = None,
    progress: Progress | None = None,
    **options: object,
) -> Conversion:
    """Convert `model`, which is not changed, to another normalization scheme, and measure the result against it.

    Args:
        model: the network, or an earlier conversion's result.
        to: a scheme (`normswap schemes` lists them).
        purpose: "opacus" or "federated": add what private or federated training needs (`purposes`).
        calibrate: batches of images (N, C, H, W), of (images, labels), or of what `inputs` may be, or a function that
            gives them, for a scheme that fits values to data, and for a source whose norms have statistics per sample.
            What a batch has beyond the network's arguments is left out. "synthetic": images made from the statistics
            that the network's BatchNorms keep, `Synthetic(count)` so many; "noise": N(0, 1) images, a poor substitute.
        progress: called while fitting, with the layers done and their total.
        inputs: what the network takes, to look at it and to verify: a tensor, a tuple of arguments, a dict of keywords,
            or a list of batches of these; by default N(0, 1) noise of `size`.
        size: (C, H, W); by default what the model says of itself (`network_input.size`).
        options: those of the scheme, and `only` and `skip`, patterns of what is converted and what is not
        (`selection`).

    Raises:
        TraceError, OptionError, RefusedError: it cannot be done; says where and why.
        VerificationError: it was done and the result is wrong.
    """
    model = model.model if isinstance(model, Conversion) else model
    if to == "unfold":
        return _unfold(model, inputs, size, seed, {**options, **({"purpose": purpose} if purpose else {})})
    given = carrying_out.given(model, inputs, size)
    seen: Anatomy | None = inspection.inspect(model, given)
    assert seen is not None
    legs = route.legs(seen, to, options, purpose, measured=calibrate is not None)
    calibrate = carrying_out.stand_ins(model, calibrate, seen, inputs=inputs, size=size, seed=seed, progress=progress)
    data = fitting.repeatable(calibrate) if len(legs) > 1 else calibrate
    done: list[Conversion] = []
    for scheme, chosen in legs:
        source = done[-1].model if done else model
        seen = seen or inspection.inspect(source, given)
        step, sketch = _draft(seen, scheme, chosen)
        own = data if fitting.fits(step) or len(legs) == 1 else None
        last = carrying_out.carry_out(
            source, step, seen, inputs=inputs, size=size, seed=seed, calibrate=own, progress=progress
        )
        done.append(replace(last, outcomes=sketch.outcomes, notes=(*seen.traced.remarks, *sketch.notes, *last.notes)))
        seen = None
    return done[0] if len(done) == 1 else _joined(model, done, inputs, size, seed)


def _joined(
    model: nn.Module, done: list[Conversion], inputs: Inputs, size: Sequence[int] | None, seed: int
) -> Conversion:
    """Several steps as one conversion, measured from end to end."""
    last = done[-1]
    steps = last.plan.steps[-len(done) :]
    batches, described = carrying_out.examples(model, inputs, size, seed)
    exact = all(schemes.exact(step) for step in steps)
    precise = comparison.compare_double(model, lambda: applying.in_double(model, steps), batches) if exact else None
    seen = inspection.inspect(model, carrying_out.given(model, inputs, size))
    report = comparison.compare(
        model, last.model, batches, exact=exact, precise=precise, described=described, anatomy=seen
    )
    fitted = [one.report.kept for one in done if not one.report.exact]
    report = replace(report, kept=fitted[0] if len(fitted) == 1 else None)  # the exact ones add nothing to it
    carrying_out.demand(report, " and ".join(step.scheme for step in steps))
    outcomes = {path: outcome for one in done for path, outcome in one.outcomes.items()}
    renames: dict[str, str] = {}
    for one in done:
        later = dict(one.renames)
        renames = {old: later.pop(new, new) for old, new in renames.items()} | later
    known = model.state_dict().keys()
    kept = tuple((old, new) for old, new in renames.items() if old in known)
    notes = tuple(dict.fromkeys(note for one in done for note in one.notes))
    return Conversion(last.model, last.plan, report, outcomes, notes, kept, len(done))


def _steps(model: nn.Module) -> tuple[Step, ...]:
    record = provenance.of(model)
    return record.plan.steps if record else ()


def _unfold(model: nn.Module, inputs: Inputs, size: Sequence[int] | None, seed: int, options: Options) -> Conversion:
    if options:
        raise OptionError(f"'unfold' has no option {', '.join(sorted(options))}", "it takes no options")
    batches, described = carrying_out.examples(model, inputs, size, seed)
    # A stream that was centred for an RMSNorm has the mean that rounding its weights left: no matter for float64.
    rounded = any(edit.args.get("centred") for step in _steps(model) for edit in step.edits)
    precise = None
    if not rounded:
        precise = comparison.compare_double(model, lambda: unfolding.unfold(applying.to_double(model), inputs), batches)
    result = unfolding.unfold(model, inputs)
    seen = inspection.inspect(model, batches)
    report = comparison.compare(model, result, batches, anatomy=seen, precise=precise, described=described)
    carrying_out.demand(report, "unfold")
    norms = [path for path, module in result.named_modules() if affine.is_affine_norm(module)]
    return Conversion(result, Plan(), report, dict.fromkeys(norms, Outcome("restored", "restored")))
