"""One step of a conversion: carried out, fitted to data if it asks for that, and proved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from normswap import provenance, schemes
from normswap.errors import RefusedError, TraceError, VerificationError, first_line
from normswap.graph import inspection
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.models import calling, network_input
from normswap.models.calling import Example, Inputs
from normswap.models.modes import Progress, evaluating
from normswap.plan import Outcome, Plan, Step
from normswap.provenance import Provenance
from normswap.surgery import applying, comparison, fitting, keeping, made_images, running
from normswap.surgery.comparison import Report
from normswap.surgery.held_out import Dealt
from normswap.surgery.made_images import Batches


@dataclass(frozen=True)
class Conversion:
    """A converted network.

    Args:
        model: the result, in the mode, dtype and device of the source.
        plan: everything done since the bare architecture; its last steps are this conversion.
        report: what was measured.
        outcomes: for every norm, by path, what happened to it.
        notes: what the user should know (a branch whose alpha could not be matched ...).
        renames: (old, new) names of tensors that live on under another name.
        steps: how many of the plan's steps this conversion took.
    """

    model: nn.Module
    plan: Plan
    report: Report
    outcomes: dict[str, Outcome]
    notes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    steps: int = 1


def carry_out(
    model: nn.Module,
    step: Step,
    seen: Anatomy | None = None,
    *,
    inputs: Inputs = None,
    size: Sequence[int] | None = None,
    seed: int = 0,
    calibrate: Batches | str | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Apply one step, also one edited by hand, fit its values to data if it asks for that, and measure the result.

    Raises:
        OptionError: the scheme needs data and there are none, or the other way round.
        SourceError: the calibration data are unusable.
        PlanError: the step does not fit the model.
        VerificationError: the result is wrong.
    """
    seen = seen or inspection.inspect(model, given(model, inputs, size))
    batches, described = examples(model, inputs, size, seed, seen)
    exact = schemes.exact(step)
    calibrate = stand_ins(model, calibrate, seen, size=batches[0].size, seed=seed, progress=progress)
    fitted = fitting.wanted(step, calibrate)
    result = applying.apply_step(model, step)
    precise = _precise(model, result, step, batches) if exact else None  # others differ by far more than float32 does
    if not exact:
        _demand_runs(result, batches[0].first(1), step.scheme)
    notes: tuple[str, ...] = ()
    dealt: Dealt | None = None
    if fitted and calibrate is not None:
        form = seen.traced.form
        notes, dealt = fitting.fit(model, result, step, calibrate, form=form, seed=seed, progress=progress)
    report = comparison.compare(model, result, batches, exact=exact, anatomy=seen, precise=precise, described=described)
    if dealt and dealt.held:
        kept = keeping.measured(model, result, dealt.held, dealt.others)
        report = replace(
            report, kept=kept and kept.of_made() if isinstance(calibrate, made_images.MadeImages) else kept
        )
    demand(report, step.scheme)
    applying.demand_gone(model, result, step)
    origin = record(model, step)
    provenance.attach(result, origin)
    return Conversion(result, origin.plan, report, {}, notes, tuple(applying.renames(model, step)))


def stand_ins(
    model: nn.Module,
    calibrate: Batches | str | None,
    seen: Anatomy | None = None,
    *,
    inputs: Inputs = None,
    size: Sequence[int] | None = None,
    seed: int = 0,
    progress: Progress | None = None,
) -> Batches | None:
    """What a word or a record says is to be made in place of images, from the network as it is before the first of
    several steps; images as they are.

    Raises:
        OptionError: an unknown word.
        TraceError: the network takes more than images.
    """
    calibrate = made_images.named(calibrate)
    if not isinstance(calibrate, made_images.ImageMaker):
        return calibrate
    seen = seen or inspection.inspect(model, given(model, inputs, size))
    if not seen.traced.form.only_images:
        remedy = "Calibrate on batches of what it takes: `normswap.convert(model, ..., calibrate=[...])`"
        raise TraceError("the network takes more than images", "only those can be made up", remedy)
    shape = size or examples(model, inputs, size, seed, seen)[0][0].size
    return calibrate.made(model, seen.traced.form, shape, seed=seed, progress=progress)


def _precise(model: nn.Module, result: nn.Module, step: Step, batches: Sequence[Example]) -> comparison.Precise | None:
    def parts(example: Example) -> running.Outputs | None:
        return running.by_parts(result, example, *applying.doubles(model, result, step))

    return comparison.compare_double(model, lambda: applying.in_double(model, [step]), batches, parts)


def examples(
    model: nn.Module, inputs: Inputs, size: Sequence[int] | None, seed: int, seen: Anatomy | None = None
) -> tuple[list[Example], str]:
    """What to compare on, and how reports call it. One size is enough where the way does not depend on the input."""
    if inputs is not None:
        return calling.batches(inputs), "given inputs"
    ran = seen.traced.recorded if seen else ()
    noise = comparison.noise(model, size or network_input.size(model), seed=seed, ran=ran)
    one_way = seen is not None and seen.traced.one_way
    return calling.batches(noise[:1] if one_way else noise), comparison.described(seed)


def given(model: nn.Module, inputs: Inputs, size: Sequence[int] | None) -> Inputs:
    """What to look at the network with, if anything was said about it."""
    return network_input.noise(model, size, batch=2) if inputs is None and size else inputs


def demand(report: Report, scheme: str) -> None:
    if report.passed:
        return
    worst = max(report.logits, key=lambda error: error.relative_l2 / report.tolerance[error.precision])
    raise VerificationError(
        f"the result of {scheme} is wrong: relative L2 error {worst.relative_l2:.1e} at the logits ({worst.precision})",
        f"allowed: {report.tolerance[worst.precision]:.0e}" if report.exact else "it is not finite",
        "Nothing was written; if the plan was not edited by hand, this is a bug of normswap",
    )


@torch.no_grad()
def _demand_runs(model: nn.Module, example: Example, scheme: str) -> None:
    """Raises:
    RefusedError: a norm does not take what reaches it; names the norm.
    """
    at = ["the network"]

    def watch(path: str, norm: nn.Module) -> RemovableHandle:
        return norm.register_forward_pre_hook(lambda _, args: at.append(f"{path} on {tuple(args[0].shape)}"))

    handles = [watch(path, module) for path, module in model.named_modules() if affine.is_norm(module)]
    try:
        with evaluating(model):
            example.call(model)
    except (RuntimeError, ValueError) as error:
        why = first_line(error)
        remedy = "A norm cannot take its statistics from one element: give larger inputs, or leave it out with '--skip'"
        size = tuple(example.images.shape[1:])
        raise RefusedError(f"{scheme} does not run on {size}", f"{at[-1]}: {why}", remedy) from None
    finally:
        for handle in handles:
            handle.remove()


def record(model: nn.Module, step: Step) -> Provenance:
    """The provenance of the result: the model's own, one step longer, with the norms that are gone now."""
    origin = provenance.of(model) or Provenance(source=type(model).__name__)
    norms, seats = dict(origin.norms), {edit.path for edit in step.edits}
    for path, module in model.named_modules():
        if path in seats:
            norms.update({f"{path}.{name}": tensor for name, tensor in affine.tensors(module).items()})
    return replace(origin, plan=origin.plan.then(step), norms=norms)
