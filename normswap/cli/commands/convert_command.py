"""`normswap convert`: convert a network to another scheme, verify the result, save it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from typer import Option

from normswap import schemes
from normswap.cli import tables
from normswap.cli.options import (
    Device,
    Force,
    ImageOpening,
    Images,
    Json,
    Model,
    last_part,
    output_option,
    trust_words,
)
from normswap.cli.progress import bar, working
from normswap.cli.tables import show
from normswap.cli.terminal import remark
from normswap.cli.words import values_typed
from normswap.errors import OptionError, PlanError, first_line, flag
from normswap.plan import Body, Plan
from normswap.storage import atomic_write, network_folder

if TYPE_CHECKING:
    from torch import nn

    from normswap.plan import Step
    from normswap.surgery.carrying_out import Conversion
    from normswap.surgery.network import Batches, Network

KEYS = (
    "source, output (null for a dry run), plan (file, or null), steps (scheme, options, edits,"
    " verdicts and outcomes of each norm, alphas, notes, renames, report: null for a dry run; its"
    " kept is what held-out images say)"
)
EXAMPLES = (
    "convert demo --to skipinit",
    "convert resnet50 --to groupnorm --calibrate IMAGES -o resnet50-gn",
)
_TO = (
    "`normswap schemes` lists them. `normswap convert --to SCHEME --help` shows the options of one."
)
_CALIBRATE = (
    "Fit values to these images (as --data elsewhere; no labels are needed), or to 128 made from"
    " the statistics of its BatchNorms."
)


@dataclass(frozen=True)
class Request:
    """The options that say what to convert to, which modules, for what use, and what to write."""

    to: Annotated[str | None, Option(metavar="SCHEME", show_default=False, help=_TO)] = None
    output: Annotated[
        Path | None, output_option("DIR", "Directory to write [default: ./NAME-SCHEME].")
    ] = None
    force: Force = False
    only: Annotated[
        list[str] | None,
        Option(metavar="PATTERN", help="Convert these parts: layer3, *.bn1 (repeatable)."),
    ] = None
    skip: Annotated[
        list[str] | None, Option(metavar="PATTERN", help="Leave these parts as they are.")
    ] = None
    purposes: Annotated[
        list[str] | None,
        Option("--for", metavar="|".join(schemes.PURPOSES), help="Add what such training needs."),
    ] = None
    dry_run: Annotated[bool, Option("--dry-run", help="Print the plan, write nothing.")] = False
    plan: Annotated[Path | None, Option(metavar="FILE", help="Save the plan as JSON.")] = None
    from_plan: Annotated[
        Path | None, Option(metavar="FILE", help="Apply this plan, edited by hand.")
    ] = None

    @property
    def purpose(self) -> str | None:
        """The one purpose that --for names, such as training with privacy, or None.

        Raises:
            OptionError: --for is given several times.
        """
        purposes = self.purposes or []
        if len(purposes) > 1:
            named = " and ".join(f"--for {purpose}" for purpose in purposes)
            why = "a network is prepared for one purpose"
            raise OptionError(f"{named} cannot go together", why)
        return next(iter(purposes), None)


@dataclass(frozen=True)
class Fitting:
    """Options on the images to which a conversion fits values that it cannot compute exactly."""

    GROUP: ClassVar[str] = "Images to fit values to"
    calibrate: Annotated[str | None, Option(metavar="DATA|synthetic", help=_CALIBRATE)] = None
    samples: Annotated[
        int | None, Option(min=2, metavar="N", help="Take this many of them [default: 1000].")
    ] = None
    seed: Annotated[int, Option(metavar="S", help="Seed of the draw.")] = 0
    device: Device = "cpu"

    def check(self) -> None:
        """Raise OptionError if --samples is given without --calibrate, which names the images."""
        if self.samples and self.calibrate is None:
            raise OptionError("--samples without --calibrate", "no images are read")

    def record(self, model: nn.Module, progress: Callable[[int, int], None]) -> Network:
        """Return a `Network` that holds the module and the images to fit values to.

        Args:
            model: The network to convert.
            progress: Called while values are fitted, with the layers done and their total.
        """
        from normswap.surgery.network import Network

        images: Batches | str | None = self.calibrate
        if self.calibrate == "synthetic" and self.samples:
            raise OptionError(
                "--samples cannot go with --calibrate synthetic", "128 images are made"
            )
        if self.calibrate not in (None, "synthetic"):
            data = Images(data=self.calibrate, split="train", samples=self.samples or 1000)
            images = data.loader(model, seed=self.seed, labelled=False)
        return Network(model, seed=self.seed, calibrate=images, progress=progress)


def _scheme_options() -> type[Any]:
    """Make a dataclass of the options of all schemes from the schemes' records.

    An option whose kind is `object` takes a word or a number, and is read as text here.
    """
    fields = []
    for option, names in schemes.all_options().values():
        description = f"{', '.join(names)}: {option.help}"
        if option.default != "":
            description += f" [default: {option.default}]"
        info = Option(metavar=option.placeholder, help=f"{description}.")
        kind = str if option.kind is object else option.kind
        fields.append((option.name, Annotated[kind | None, info], None))
    return make_dataclass("SchemeOptions", fields, namespace={"GROUP": "Options of the schemes"})


if TYPE_CHECKING:
    SchemeOptions = Any
else:
    SchemeOptions = _scheme_options()


def left_out_of_help(words: Sequence[str]) -> set[str]:
    """Return the names of the options that --help leaves out.

    They are the options of other schemes than the one that the command line names.

    Args:
        words: The words of the command line. Without --to no scheme's options are shown.
    """
    # If --to is typed several times, the last one counts, as in the parser.
    values = values_typed("--to", words)
    named = values[-1] if values else ""
    options = schemes.all_options().values()
    return {option.name for option, owners in options if named not in owners}


def run(
    model: Model,
    *,
    request: Request,
    options: SchemeOptions,
    fit: Fitting,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Convert a network, verify the result, save it."""
    # Check what is asked for, before anything is opened. An option that is not given is None, or an
    # empty list.
    values = {
        **vars(options),
        "only": request.only,
        "skip": request.skip,
        "purpose": request.purpose,
    }
    asked = {name: value for name, value in values.items() if value not in (None, [])}
    fit.check()
    plan = _requested_plan(request, asked)
    scheme = plan.steps[-1].scheme if plan else str(request.to)

    # Whether the files may be written is known before any work.
    directory = request.output or Path(f"{last_part(model)}-{scheme}")
    if not request.dry_run:
        network_folder.check_writable(directory, force=request.force)
    if request.plan is not None:
        atomic_write.check_writable(request.plan, force=request.force)

    # Convert, by a plan from a file or to a scheme. A dry run to a scheme only plans.
    net = opening.open(model, device=fit.device)
    from normswap.analysis import summary
    from normswap.storage import checkpoint
    from normswap.surgery import conversion

    converted: Conversion | None = None
    with bar(f"converting to {scheme}, verifying", in_logs=not json) as progress:
        if plan:
            network = fit.record(net, progress)
            converted, bodies = _carry_out(network, plan, str(request.from_plan), model)
            steps = plan.steps
        elif request.dry_run:
            steps, bodies = _planned(net, scheme, asked, measured=fit.calibrate is not None)
        else:
            converted = conversion.convert(fit.record(net, progress), scheme, **asked)
            bodies = summary.of_conversion(converted, scheme)
            # The network may have been converted before. Its plan ends with the steps of today.
            steps = converted.plan.steps[-converted.steps :]

    # Write the network and the plan.
    if converted is not None and not request.dry_run:
        with working(f"writing {directory}"):
            checkpoint.save(converted, directory, force=request.force)
    if request.plan is not None:
        text = Plan(steps, made_for=model).to_json(indent=2)
        atomic_write.text(request.plan, f"{text}\n")

    body = {
        "source": model,
        "output": None if request.dry_run else directory,
        "plan": request.plan,
        "steps": bodies,
    }
    next_command: tuple[object, ...] = ()
    if not request.dry_run:
        next_command = ("verify", directory, *trust_words(net), "--data", "IMAGES")
    show(body, json, tables.print_conversion, *next_command)
    return 0


def _requested_plan(request: Request, asked: schemes.Options) -> Plan | None:
    """Return the plan of --from-plan. Without --from-plan, check the target and return None.

    Args:
        request: The target and the files.
        asked: The options that are given, by name.

    Raises:
        OptionError: The target does not exist or does not take the options, or --from-plan is given
            with options that the plan itself says.
        PlanError: The file is no plan, or has no edits.
    """
    file = request.from_plan
    if file is None:
        _check_target(request, asked)
        return None

    stated_by_plan = [flag(name) for name in asked]
    if request.to:
        stated_by_plan.append("--to")
    if stated_by_plan:
        raise OptionError(
            f"{' and '.join(stated_by_plan)} cannot go with --from-plan", "the plan says it"
        )

    plan = Plan.from_file(file)
    if not any(step.edits for step in plan.steps):
        raise PlanError(f"{file} has no edits", "there is nothing to do")
    return plan


def _check_target(request: Request, asked: schemes.Options) -> None:
    """Check the target and its options before the network is opened.

    Args:
        request: The target and the files.
        asked: The options that are given, by name.

    Raises:
        OptionError: There is no target, or it does not take the options.
    """
    if request.to is None:
        remedy = f"Give --to {'|'.join([*schemes.names(), 'unfold'])}, or --from-plan FILE"
        raise OptionError("nothing says what to convert to", remedy=remedy)

    if request.to == "unfold":
        refused = "--dry-run" if request.dry_run else "--plan"
        if request.dry_run or request.plan is not None:
            raise OptionError(
                f"unfold takes no {refused}", "it reverses the plan that the checkpoint holds"
            )
        return

    schemes.check_target(request.to)
    # `purpose` is no option of a scheme. It is checked by itself.
    schemes.chosen(request.to, {name: value for name, value in asked.items() if name != "purpose"})
    schemes.check_purpose(request.purpose)


def _planned(
    model: nn.Module, scheme: str, asked: schemes.Options, *, measured: bool
) -> tuple[tuple[Step, ...], list[Body]]:
    """Return the steps that a conversion would take, and each one's record for --json.

    Nothing is converted.

    Args:
        model: The network.
        scheme: The target.
        asked: The options that are given, by name.
        measured: Whether there are images to fit values to.
    """
    from normswap.analysis import summary
    from normswap.surgery import conversion
    from normswap.surgery.network import Network

    # Each step comes with its builder, which knows what becomes of each norm.
    planned = [*conversion.plan_steps(Network(model), scheme, measured=measured, **asked)]
    bodies = [summary.of_step(step, builder) for step, builder in planned]
    return tuple(step for step, _ in planned), bodies


def _carry_out(
    network: Network, plan: Plan, origin: str, name: str
) -> tuple[Conversion, list[Body]]:
    """Carry out the steps of a plan from a file.

    Args:
        network: The network to convert.
        plan: The plan.
        origin: The plan's file, as an error names it.
        name: The network's name, as its user typed it.

    Returns:
        All steps as one conversion, and each step's record for --json.

    Raises:
        PlanError: A step does not fit the network, or gives a network that does not run.
    """
    from normswap.analysis import summary
    from normswap.surgery import conversion, edited_plans
    from normswap.surgery.carrying_out import carry_out

    # A plan of another network may fit this one. If it does not, the error says so.
    source = network
    conversions: list[Conversion] = []
    elsewhere = ""
    if plan.made_for not in ("", name):
        elsewhere = f"{origin} was made for {plan.made_for}; this is {name}"
        remark([elsewhere])

    # The plan may have been edited by hand, so each step is checked. What its edits mean for the
    # norms is found out anew.
    for step in plan.steps:
        edited_plans.check(step)
        try:
            notes = edited_plans.notes(network, step)
            outcomes = edited_plans.outcomes(network, step)
            # The record of a network that a step has made has no images, so it is given them again.
            done = carry_out(network.fitted_to(source.images, source.progress), step)
            conversions.append(replace(done, notes=(*notes, *done.notes), outcomes=outcomes))
        except PlanError as error:
            raise PlanError(error.what, error.why, error.remedy or elsewhere) from None
        except RuntimeError as error:
            raise PlanError(
                f"{origin} gives a network that does not run", first_line(error)
            ) from error
        network = done.network

    converted = conversion.joined(source, conversions)
    return converted, summary.of_conversion(converted)
