"""Carry out one step of a conversion: apply it, fit its values to images, and prove the result."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from normswap import provenance, schemes
from normswap.calibration.synthetic_images import COUNT, SyntheticImages
from normswap.errors import OptionError, RefusedError, first_line, spelled
from normswap.graph.anatomy import patterns, restrict
from normswap.models import kinds, network_input
from normswap.models.calling import Example
from normswap.models.modes import full_precision
from normswap.plan import Outcome, Plan, Step
from normswap.proof import comparison, doubles, held_out, running, verdict
from normswap.proof.verdict import Report
from normswap.schemes import Chosen
from normswap.schemes.scheme import FitTask
from normswap.sites.site import site_of
from normswap.surgery import applying, learning
from normswap.surgery.network import Batches, Network, calls_of

_NONE_HELD_OUT = "no calibration image was held out to measure on"


@dataclass(frozen=True, repr=False)
class Conversion:
    """A converted network.

    Args:
        network: The result, in the mode, dtype and device of the source, with the source's inputs.
        report: The measurements and the verdict.
        outcomes: The outcome for each norm, by path.
        notes: Sentences that the user should read, such as that a branch's alpha could not be
            matched.
        renames: The old and the new name of each tensor that got another name.
        steps: The number of steps that this conversion took. They are the last ones of the plan.
    """

    network: Network
    report: Report
    outcomes: dict[str, Outcome]
    notes: tuple[str, ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    steps: int = 1

    def __repr__(self) -> str:
        steps = " -> ".join(step.scheme for step in self.plan.steps[-self.steps :])
        word = "exact" if self.report.exact else "approximate"
        measured = f"{self.report.verdict}, {word}, relative L2 {self.report.worst.relative_l2:.1e}"
        return f"Conversion({measured}: {type(self.model).__name__} -> {steps or 'unfolded'})"

    @property
    def model(self) -> nn.Module:
        return self.network.module

    @property
    def plan(self) -> Plan:
        """The plan of the result: every step since the bare architecture was built.

        The steps of this conversion are its last ones.
        """
        return self.network.provenance.plan


@full_precision()
def carry_out(network: Network, step: Step) -> Conversion:
    """Carry out one step of a plan: apply it, fit its values, and prove or measure the result.

    The `outcomes` of the conversion that is returned are empty. The caller sets them from the plan.

    Args:
        network: The network before the step.
        step: The step, which may have been edited by hand.

    Raises:
        OptionError: The scheme needs data, and there are none.
        SourceError: The data cannot be used.
        PlanError: The step does not fit the network.
        RefusedError: A norm cannot process its input.
        VerificationError: The result is wrong.
    """
    scheme = schemes.of(step)
    images = images_for(scheme, network)
    result = applied(network, step)
    fitted = fit(scheme, network, result, step, images)

    # If the scheme prepares for private or federated training, a run in training mode checks that.
    # It comes before the proof of the step: a norm over the batch gives NaN for a single sample,
    # which is no fault of the step.
    if scheme.scheme.training is not None:
        # Imported here, as only such a step needs it.
        from normswap.surgery import sample_leaks

        sample_leaks.check(network, result, scheme.scheme.training, step.scheme)

    # A forward may ask a layer for an attribute that the new layer lacks, and then raises one of
    # these errors. `_check_runs` raises a RefusedError that explains it.
    try:
        report = prove(network, result, step, fitted)
    except (AssertionError, AttributeError, TypeError):
        _check_runs(network, result, step.scheme)
        raise

    placed = applying.placed(result, step)
    notes = (
        *network.provenance.remarks,
        *fitted.notes,
        *learning.notes(network.module, step.edits, placed),
    )
    return Conversion(
        network=network.after(result),
        report=report,
        outcomes={},
        notes=notes,
        renames=tuple(applying.renames(network.module, step)),
    )


def images_for(chosen: Chosen, network: Network) -> Batches | None:
    """Return the images that the values of a step are fitted to.

    The result is None if the step fits nothing, or if there are no images and the step can do
    without.

    Args:
        chosen: The step's scheme, with all its options.
        network: The network before the step, with the images to fit values to.

    Raises:
        OptionError: The step needs images and there are none. Or it needs real images, and these
            are synthetic.
    """
    if not chosen.fits:
        return None

    # A step that measures statistics needs real images. Any other step can also be fitted to
    # synthetic ones.
    images = network.images
    remedy = f"Give `{spelled('calibrate', metavar='DATA')}` (images, no labels needed)"
    if chosen.measures and (images is None or isinstance(images, SyntheticImages)):
        why = "there are none"
        if images is not None:
            why = "statistics of synthetic images are no starting point for training"
        raise OptionError(f"{chosen.scheme.name} measures statistics on images", why, remedy)

    if images is None and chosen.scheme.needs_data:
        remedy += f", or `{spelled('calibrate', 'synthetic')}`, which makes some"
        remedy += "".join(f", or `{option}`, which is exact" for option in _exact_options(chosen))
        raise OptionError(
            f"{chosen.scheme.name} fits its values to images", "there are none", remedy
        )

    return images


def _exact_options(chosen: Chosen) -> list[str]:
    """Return the options that would make the scheme exact, each as the user writes it.

    Each option is enough by itself. With it, `mean=keep` for instance, the scheme fits nothing to
    images, so it needs none.
    """
    exact: list[str] = []
    for option in chosen.scheme.options:
        for word in option.choices:
            if chosen.scheme.is_exact({**chosen.options, option.name: word}):
                exact.append(spelled(option.name, word))
    return exact


@dataclass(frozen=True)
class Fitted:
    """What a fit leaves for the proof and for the user.

    Args:
        held: The calls that were held out of the fit, on which source and result are compared.
        unmeasured: Why no call was held out although there were images. Empty otherwise.
        notes: Sentences for the user.
    """

    held: tuple[Example, ...] = ()
    unmeasured: str = ""
    notes: tuple[str, ...] = ()


def fit(
    chosen: Chosen, network: Network, result: nn.Module, step: Step, images: Batches | None
) -> Fitted:
    """Let the step's scheme fit values of `result` to images, in place.

    Every fourth of the user's images is held out, unless the scheme needs all of them.

    Args:
        chosen: The step's scheme, with all its options.
        network: The network before the step.
        result: The network after the step, whose values are set.
        step: The step.
        images: The images to fit to. None if there are none.

    Returns:
        The calls that were held out, and notes for the user.

    Raises:
        SourceError: The images cannot be used, or are too few.
    """
    if not chosen.fits:
        return Fitted()

    # The split hands the scheme three of four images, and keeps the fourth in `split.held`.
    batches = None if images is None else calls_of(images, network)
    split: held_out.HeldOutSplit | None = None
    if batches is not None and not _fits_to_all(chosen, images):
        batches = split = _split(batches, network)

    assert chosen.scheme.fit is not None
    task = FitTask(
        source=network.module,
        result=result,
        step=step,
        batches=batches,
        example=network.examples[0],
        # The function with which the scheme itself can apply another step to the source.
        after=partial(applying.apply_step, network.module),
        takes_part=restrict(network.anatomy, **patterns(step.options)).takes_part,
        seed=network.seed,
        progress=network.progress,
    )
    notes = tuple(chosen.scheme.fit(task) or ())

    if isinstance(images, SyntheticImages):
        synthetic_note = (
            f"fitted to {COUNT} images made from the network's own statistics: real ones may"
            " keep less, or more"
        )
        notes += (synthetic_note,)

    if split is None:
        return Fitted((), "" if images is None else _NONE_HELD_OUT, notes)

    # The fit has gone through its batches, so the split knows how many images are copies.
    if split.copies:
        notes += (f"{split.copies} of the held-out images are copies of others, and do not count",)
    return Fitted(tuple(split.held), "" if split.held else held_out.TOO_FEW, notes)


def _fits_to_all(chosen: Chosen, images: Batches | None) -> bool:
    """Whether a scheme fits its values to all images, so that none of them is held out.

    To synthetic images every scheme fits in this way.

    Args:
        chosen: The scheme with its options.
        images: The images.
    """
    return chosen.scheme.takes_all_images or isinstance(images, SyntheticImages)


def _split(batches: Iterable[Example], network: Network) -> held_out.HeldOutSplit:
    """Return an iterable over the calls to fit values to, which holds out every fourth image.

    Args:
        batches: All calls. Those of an iterator, which can be read only once, are kept in a list.
        network: The network that runs on them.
    """
    calls = list(batches) if isinstance(batches, Iterator) else batches
    whole = not running.runs_on_one(network.module, network.examples[0])
    return held_out.HeldOutSplit(calls, network.device, whole=whole)


def measured_again(
    source: Network, result: nn.Module, steps: Sequence[Step]
) -> tuple[held_out.Kept | None, str]:
    """Measure how well the outputs agree after several steps, on images that no step was fitted to.

    Args:
        source: The network before the first step, with the images that the steps were fitted to.
        result: The network after the last step.
        steps: The steps.

    Returns:
        The agreement, and the reason why it could not be measured. The agreement is None if it
        could not be measured. The reason is empty if it was measured, or if there were no images.
    """
    fitted = [chosen for step in steps if (chosen := schemes.of(step)).fits]
    images = source.images
    if images is None or not fitted:
        return None, ""
    # An image that one of the steps was fitted to says nothing about other images.
    if any(_fits_to_all(chosen, images) for chosen in fitted):
        return None, _NONE_HELD_OUT

    # The split is the same as in the steps. An iteration to its end fills `split.held`.
    split = _split(calls_of(images, source), source)
    for _ in split:
        pass
    kept = held_out.measured(source.module, result, split.held, source.anatomy)
    return kept, "" if split.held else held_out.TOO_FEW


def prove(network: Network, result: nn.Module, step: Step, fitted: Fitted) -> Report:
    """Compare a step's result with its source, on the source's inputs and on held-out images.

    Args:
        network: The network before the step.
        result: The network after the step, with all values fitted.
        step: The step.
        fitted: The outcome of the fit, with the calls that were held out.

    Raises:
        VerificationError: The result is wrong.
    """
    exact = schemes.of(step).exact
    settle = schemes.of(step).scheme.settle

    # The comparison in float64. An approximate result differs by far more than float32 rounding, so
    # there float64 would show nothing.
    # An exact scheme that measures statistics on images has a function `settle`, which computes the
    # result's other tensors (gamma and beta) from the statistics. No plan has the statistics, so
    # the result is copied to float64 with them, and `settle` computes the other tensors there.
    # Any other exact result is built anew from the plan: by parts, which costs less, or as a whole.
    precise = None
    if exact and settle is not None:
        double = network.after(result).doubled().module
        settle(network.module, double, step)
        precise = doubles.compare_double(network, lambda: double)
    elif exact:
        precise = doubles.compare_double(
            network,
            lambda: applying.apply_step(network.module, step, double=True),
            lambda example: running.by_parts(
                result, example, *applying.doubles(network.module, result, step)
            ),
        )

    # At which residual blocks the result claims to have the source's values.
    claims = applying.claims([step], earlier=network.provenance.plan.steps)
    report = comparison.compare_networks(
        network, result, exact=exact, precise=precise, claims=claims
    )
    verdict.require_passed(report, step.scheme)
    agreement = held_out.measured(network.module, result, fitted.held, network.anatomy)

    return replace(
        report,
        kept=agreement,
        unmeasured=fitted.unmeasured,
        steps_before=len(network.provenance.plan.steps),
    )


def applied(network: Network, step: Step) -> nn.Module:
    """Return the network after a step, before any value is fitted, with the step in its record.

    The record (`provenance`) has the plan so far, and the tensors of the norms that were replaced.

    Args:
        network: The network before the step.
        step: The step.

    Raises:
        PlanError: The step does not fit the network.
        RefusedError: The result of an approximate step does not run.
    """
    result = applying.apply_step(network.module, step)
    applying.check_gone(network.module, result, step)
    if not schemes.of(step).exact:
        _check_runs(network, result, step.scheme)

    # The tensors of the norms that the step replaced, by their names in the network before.
    edited = {edit.path for edit in step.edits}
    norms = {}
    for path, module in nn.Module.named_modules(network.module):
        if path in edited:
            recorded = site_of(module).recorded_tensors()
            norms.update({f"{path}.{name}": tensor for name, tensor in recorded.items()})

    # A network of transformers is told that it was converted, so that its own `save_pretrained`
    # writes the conversion, too.
    provenance.attach(result, network.provenance.after(step, norms))
    kinds.mark_converted(result)
    return result


def _check_runs(network: Network, result: nn.Module, scheme: str) -> None:
    """Run the result of a step once, and raise RefusedError if it fails.

    Args:
        network: The network before the step.
        result: The network after the step.
        scheme: The name of the scheme in errors.

    Raises:
        RefusedError: A norm cannot process its input, or a forward asks for attributes of the
            layers that are gone.
    """
    # The short example costs less. A forward that fixes its number of images takes the whole batch
    # only.
    example = network.short_example
    whole = network.examples[0]
    if example is not whole and not network_input.runs(network.module, example):
        example = whole
    # A norm whose input is too small for it raises one of the first two errors. A forward that
    # reads an attribute of a layer raises one of the others.
    try:
        running.run(result, example)
    except (RuntimeError, ValueError) as error:
        remedy = (
            "Give larger inputs, or leave a norm of one element out by"
            f" '{spelled('skip', metavar='PATTERN')}'"
        )
        size = tuple(example.images.shape[1:])
        raise RefusedError(f"{scheme} does not run on {size}", first_line(error), remedy) from None
    except (AssertionError, AttributeError, TypeError) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        remedy = (
            "Let it only call its layers, or leave the layer out by"
            f" '{spelled('skip', metavar='PATTERN')}'"
        )
        raise RefusedError(
            "forward asks a layer for something that the new layer does not have", why, remedy
        ) from None
