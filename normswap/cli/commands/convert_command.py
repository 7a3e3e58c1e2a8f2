"""`normswap convert`: a network brought to another scheme, verified, saved.

The options of the schemes are made from their records (`schemes/parts/options.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from normswap.cli import conversion_table, progress
from normswap.cli.fitting_images import Fitting
from normswap.cli.image_options import ImageOpening
from normswap.cli.naming import last_part
from normswap.cli.options import Json, Model
from normswap.cli.printing import show
from normswap.errors import OptionError, PlanError, first_line, flag
from normswap.plan import Body, Plan, Step
from normswap.schemes import Options, all_options, purpose_names
from normswap.schemes.parts.options import Option
from normswap.storage import atomic_write, network_folder

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from normswap.surgery.carrying_out import Conversion
    from normswap.surgery.network import Network

KEYS = (
    "source, output (null for a dry run), plan (file, or null), steps (each with scheme, options, edits: of the plan, "
    "verdicts: what happens to each norm, outcomes: how many of each, alphas, notes, renames and report: null for a "
    "dry run; its kept is what held-out images say, null where that is not known)"
)
EXAMPLES = (
    "convert demo --to skipinit",
    "convert resnet50 --to groupnorm --calibrate IMAGES -o resnet50-gn",
)
_ABOUT = (
    "Edits may be taken out, added or changed by hand: path, layer, args, reads, takes. Outcomes are for reading, the "
    "digest is worked out anew by `normswap convert MODEL --from-plan FILE`, which proves the result."
)


@dataclass(frozen=True)
class Target:
    """The options of the target, and where it goes."""

    to: Annotated[str | None, typer.Option(metavar="SCHEME", show_default=False, help="See `normswap schemes`.")] = None
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Directory to write [default: ./NAME-SCHEME].")
    ] = None


@dataclass(frozen=True)
class Scope:
    """Which parts of it are converted, and for what use."""

    GROUP: ClassVar[str] = "What is converted, and for what"
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Convert these parts: layer3, *.bn1 (repeatable).")
    ] = None
    skip: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Leave these parts as they are.")] = None
    purpose: Annotated[
        str | None, typer.Option("--for", metavar="|".join(purpose_names()), help="Add what such training needs.")
    ] = None

    @property
    def patterns(self) -> Options:
        """The patterns as options of a scheme."""
        return {name: value for name, value in (("only", self.only), ("skip", self.skip)) if value}


@dataclass(frozen=True)
class Planning:
    """The options of the plan, and of files that stand in the way."""

    GROUP: ClassVar[str] = "The plan"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON.")] = None
    from_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this plan, edited by hand.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False

    def check_writable(self) -> None:
        """Check that the plan can be written.

        Raises:
            OutputError: the plan's file exists, or its folder does not.
        """
        if self.plan is not None:
            atomic_write.check_writable(self.plan, force=self.force)


@dataclass(frozen=True)
class ConversionRequest:
    """A request: a scheme with its options, or a plan."""

    to: str | None
    options: Options
    purpose: str | None
    from_plan: Path | None


def _scheme_options() -> type[Any]:
    """Return a dataclass of the options of all schemes: of the scheme's type, or text for a word or a number."""
    fields = [
        (
            option.name,
            Annotated[
                str | None if option.kind is object else option.kind | None,
                typer.Option(
                    metavar=option.placeholder,
                    help=_help(option, names),
                    parser=_number if option.kind is object else None,
                ),
            ],
            None,
        )
        for option, names in all_options().values()
    ]
    return make_dataclass("SchemeOptions", fields, namespace={"GROUP": "Options of the schemes"})


def _help(option: Option, names: Sequence[str]) -> str:
    return f"{', '.join(names)}: {option.help} [default: {option.default}]."


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


if TYPE_CHECKING:
    SchemeOptions = Any
else:
    SchemeOptions = _scheme_options()


def run(
    model: Model,
    *,
    target: Target,
    options: SchemeOptions,
    scope: Scope,
    fitting: Fitting,
    planning: Planning,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Convert a network, verify the result, save it."""
    wanted = ConversionRequest(target.to, {**_given(options), **scope.patterns}, scope.purpose, planning.from_plan)
    plan_from_file, dry_run = _given_plan(wanted), planning.dry_run
    if plan_from_file is None:
        _check_request(wanted, planning=dry_run or planning.plan is not None)
    scheme = plan_from_file.steps[-1].scheme if plan_from_file else str(target.to)
    place = target.output or Path(f"{last_part(model)}-{scheme}")
    if not dry_run:
        network_folder.check_writable(place, force=planning.force)
    planning.check_writable()
    with nullcontext() if dry_run else network_folder.one_writer(place):
        net = opening.open(model)
        from normswap.models import devices  # torch is there now
        from normswap.storage import checkpoint
        from normswap.surgery.network import Network

        net = devices.place(net, fitting.device)
        what = f"converting to {scheme}, verifying"
        with progress.working(what) if fitting.calibrate is None else progress.bar(what) as advance:
            if plan_from_file is not None:
                done, bodies, steps = _follow(
                    fitting.on(net, advance),
                    plan_from_file,
                    str(planning.from_plan),
                )
            elif dry_run:
                done, bodies, steps = _plan_only(Network(net), wanted, measured=fitting.calibrate is not None)
            else:
                done, bodies, steps = _convert(fitting.on(net, advance), wanted)
        if done is not None and not dry_run:
            with progress.working(f"writing {place}"):
                checkpoint.save(done, place, force=planning.force)
    if planning.plan is not None:
        atomic_write.text(planning.plan, Plan(tuple(steps)).to_json(indent=2, about=_ABOUT) + "\n")
    show(
        {"source": model, "output": None if dry_run else place, "plan": planning.plan, "steps": bodies},
        json,
        conversion_table.done,
    )
    return 0


def _given(options: SchemeOptions) -> Options:
    return {name: value for name, value in vars(options).items() if value is not None}


def _given_plan(wanted: ConversionRequest) -> Plan | None:
    """The plan that --from-plan names, if it does."""
    if wanted.from_plan is None:
        return None
    options = [flag(name) for name in wanted.options]
    options += [flag("purpose")] if wanted.purpose else []
    options += ["--to"] if wanted.to is not None else []
    if options:
        raise OptionError(f"{' and '.join(options)} cannot go with --from-plan", "the plan says it")
    try:
        text = wanted.from_plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is no text"
        raise PlanError(f"cannot read the plan {wanted.from_plan}", why) from None
    plan = Plan.from_json(text, str(wanted.from_plan))
    if not any(step.edits for step in plan.steps):
        raise PlanError(f"{wanted.from_plan} has no edits", "there is nothing to do")
    return plan


def _check_request(wanted: ConversionRequest, *, planning: bool) -> None:
    """See, before any work, that scheme, options and purpose exist."""
    from normswap import schemes

    if wanted.to is None:
        remedy = f"Give --to {'|'.join([*schemes.names(), 'unfold'])}, or --from-plan FILE"
        raise OptionError("nothing says what to convert to", remedy=remedy)
    if wanted.to == "unfold":
        if planning:
            raise OptionError("unfold has no plan", "it goes back over the one in the checkpoint")
        return
    schemes.check_target(wanted.to)
    schemes.chosen(wanted.to, wanted.options)
    schemes.check_purpose(wanted.purpose)


Outcome = tuple["Conversion | None", list[Body], list[Step]]
"""The conversion (None for a dry run), what to say of each step, and the steps."""


def _follow(network: Network, plan: Plan, origin: str) -> Outcome:
    """Carry out a plan that was given."""
    from normswap.analysis import summary
    from normswap.surgery.carrying_out import carry_out

    bodies: list[Body] = []
    done: Conversion | None = None
    images, progress = network.images, network.progress
    for step in plan.steps:
        try:
            done = carry_out(network.fitted_to(images, progress), step)
        except RuntimeError as error:  # torch's, when layers do not fit each other
            raise PlanError(f"{origin} gives a network that does not run", first_line(error)) from error
        network = done.network
        bodies += summary.of_conversion(done)
    return done, bodies, list(plan.steps)


def _plan_only(network: Network, wanted: ConversionRequest, *, measured: bool) -> Outcome:
    """Plan only."""
    from normswap.analysis import summary
    from normswap.surgery.conversion import plan_steps

    ways = [*plan_steps(network, str(wanted.to), measured=measured, purpose=wanted.purpose, **wanted.options)]
    return None, [summary.of_step(step, builder) for step, builder in ways], [step for step, _ in ways]


def _convert(network: Network, wanted: ConversionRequest) -> Outcome:
    from normswap.analysis import summary
    from normswap.surgery.conversion import convert

    done = convert(network, str(wanted.to), purpose=wanted.purpose, **wanted.options)
    return done, summary.of_conversion(done, str(wanted.to)), list(done.plan.steps[-done.steps :])
