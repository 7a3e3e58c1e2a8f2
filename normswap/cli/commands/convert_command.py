"""`normswap convert`: a network brought to another scheme, verified, saved.

The options of the schemes are made from their records (`schemes/parts/options.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer

from normswap import schemes
from normswap.cli import conversion_table, progress
from normswap.cli.image_options import ImageOpening, remark_on_images
from normswap.cli.naming import last_part
from normswap.cli.options import Device, Json, Model
from normswap.cli.tables import show
from normswap.errors import OptionError, PlanError, first_line, flag
from normswap.plan import Body, Plan, Step
from normswap.schemes import Options, all_options, purpose_names
from normswap.schemes.parts.options import Option
from normswap.storage import atomic_write, network_folder

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from torch import nn

    from normswap.surgery.carrying_out import Conversion
    from normswap.surgery.network import Batches, Network

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
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False


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


@dataclass(frozen=True)
class Fitting:
    """The images that values are fitted to."""

    GROUP: ClassVar[str] = "Images to fit values to"
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="DATA|synthetic",
            help="Fit values to these images (as --data elsewhere; no labels are needed), or to 128 made from the "
            "statistics of its BatchNorms.",
        ),
    ] = None
    samples: Annotated[int | None, typer.Option(min=2, metavar="N", help="Take this many of them [default: 1000].")] = (
        None
    )
    seed: Annotated[int, typer.Option(metavar="S", help="Which ones.")] = 0
    device: Device = "cpu"

    def on(self, model: nn.Module, advance: Callable[[int, int], None] | None) -> Network:
        """The record of a network whose values are fitted to them."""
        from normswap.images.datasets import make_loader
        from normswap.surgery.network import Network

        images: Batches | str | None = self.calibrate
        if self.calibrate == "synthetic" and self.samples:
            raise OptionError("--samples cannot go with --calibrate synthetic", "128 images are made")
        if self.calibrate not in (None, "synthetic"):
            loader = make_loader(
                model, self.calibrate, split="train", samples=self.samples or 1000, seed=self.seed, labelled=False
            )
            remark_on_images(model, loader)
            images = loader
        return Network(model, seed=self.seed, calibrate=images, progress=advance)


@dataclass(frozen=True)
class Planning:
    """The options of the plan."""

    GROUP: ClassVar[str] = "The plan"
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON.")] = None
    from_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this plan, edited by hand.")] = None


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
    given = {**vars(options), "only": scope.only, "skip": scope.skip}
    scheme_options = {name: value for name, value in given.items() if value not in (None, [])}
    given_plan, dry_run = _given_plan(planning.from_plan, target.to, scope.purpose, scheme_options), planning.dry_run
    if given_plan is None:
        _check_request(target.to, scope.purpose, scheme_options, planning=dry_run or planning.plan is not None)
    scheme = given_plan.steps[-1].scheme if given_plan else str(target.to)
    place = target.output or Path(f"{last_part(model)}-{scheme}")
    if not dry_run:
        network_folder.check_writable(place, force=target.force)
    if planning.plan is not None:
        atomic_write.check_writable(planning.plan, force=target.force)
    net = opening.open(model)
    from normswap.analysis import summary  # torch is there now
    from normswap.models import devices
    from normswap.storage import checkpoint
    from normswap.surgery import conversion
    from normswap.surgery.network import Network

    net = devices.place(net, fitting.device)
    what = f"converting to {scheme}, verifying"
    done: Conversion | None = None
    asked: dict[str, Any] = {"purpose": scope.purpose, **scheme_options}
    with progress.working(what) if fitting.calibrate is None else progress.bar(what) as advance:
        if given_plan is not None:
            done, bodies = _follow(fitting.on(net, advance), given_plan, str(planning.from_plan))
            steps: Sequence[Step] = given_plan.steps
        elif dry_run:
            fits = fitting.calibrate is not None
            planned = [*conversion.plan_steps(Network(net), scheme, measured=fits, **asked)]
            bodies = [summary.of_step(step, builder) for step, builder in planned]
            steps = [step for step, _ in planned]
        else:
            network = fitting.on(net, advance)
            done = conversion.convert(network, scheme, **asked)
            bodies, steps = summary.of_conversion(done, scheme), done.plan.steps[-done.steps :]
    if done is not None and not dry_run:
        with progress.working(f"writing {place}"):
            checkpoint.save(done, place, force=target.force)
    if planning.plan is not None:
        atomic_write.text(planning.plan, Plan(tuple(steps)).to_json(indent=2, about=_ABOUT) + "\n")
    body = {"source": model, "output": None if dry_run else place, "plan": planning.plan, "steps": bodies}
    show(body, json, conversion_table.done)
    return 0


def _given_plan(file: Path | None, to: str | None, purpose: str | None, options: Options) -> Plan | None:
    """Return the plan that --from-plan names, if it does."""
    if file is None:
        return None
    stray = [flag(name) for name in options] + [flag("purpose")] * bool(purpose) + ["--to"] * bool(to)
    if stray:
        raise OptionError(f"{' and '.join(stray)} cannot go with --from-plan", "the plan says it")
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is no text"
        raise PlanError(f"cannot read the plan {file}", why) from None
    plan = Plan.from_json(text, str(file))
    if not any(step.edits for step in plan.steps):
        raise PlanError(f"{file} has no edits", "there is nothing to do")
    return plan


def _check_request(to: str | None, purpose: str | None, options: Options, *, planning: bool) -> None:
    """See, before any work, that scheme, options and purpose exist."""
    if to is None:
        remedy = f"Give --to {'|'.join([*schemes.names(), 'unfold'])}, or --from-plan FILE"
        raise OptionError("nothing says what to convert to", remedy=remedy)
    if to == "unfold":
        if planning:
            raise OptionError("unfold has no plan", "it goes back over the one in the checkpoint")
        return
    schemes.check_target(to)
    schemes.chosen(to, options)
    schemes.check_purpose(purpose)


def _follow(network: Network, plan: Plan, origin: str) -> tuple[Conversion | None, list[Body]]:
    """Carry out a plan that was given; return the last conversion, and what to say of each step."""
    from normswap.analysis import summary
    from normswap.surgery.carrying_out import carry_out

    bodies: list[Body] = []
    done: Conversion | None = None
    images, advance = network.images, network.progress
    for step in plan.steps:
        try:
            done = carry_out(network.fitted_to(images, advance), step)
        except RuntimeError as error:  # torch's, when layers do not fit each other
            raise PlanError(f"{origin} gives a network that does not run", first_line(error)) from error
        network = done.network
        bodies += summary.of_conversion(done)
    return done, bodies
