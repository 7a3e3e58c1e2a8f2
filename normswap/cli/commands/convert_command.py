"""`normswap convert`: a network brought to another scheme, verified, saved.

The options of the schemes are made from their records (`schemes/parts/options.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import progress
from normswap.cli.fitting_images import Fitting
from normswap.cli.grouped_options import spread
from normswap.cli.naming import last_part
from normswap.cli.options import Json, Model, Opening
from normswap.cli.printing import show
from normswap.cli.proof_table import proof
from normswap.cli.tables import cell, counts, facts, line, listing, table
from normswap.errors import OptionError, OutputError, PlanError, first_line
from normswap.plan import Body, Plan, Step
from normswap.schemes import Options, all_options, changed, get, purpose_names
from normswap.schemes.parts.options import Option
from normswap.storage import atomic_write

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from normswap.surgery.carrying_out import Conversion
    from normswap.surgery.network import Network

ORDER = 20


@dataclass(frozen=True)
class Wanted:
    """What shall be done: a scheme with its options, or a plan."""

    to: str | None
    options: Options
    purpose: str | None
    from_plan: Path | None


def register(app: typer.Typer) -> None:
    app.command("convert")(spread(run, options=_scheme_options()))


def _scheme_options() -> dict[str, object]:
    """As `spread` takes them: of the type that the scheme takes, or text where it takes a word or a number."""
    return {
        option.name: Annotated[
            str | None if option.kind is object else option.kind | None,
            typer.Option(
                metavar=option.placeholder,
                help=_help(option, names),
                parser=_number if option.kind is object else None,
            ),
        ]
        for option, names in all_options().values()
    }


def _help(option: Option, names: Sequence[str]) -> str:
    return f"{', '.join(names)}: {option.help} [default: {option.default}]."


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def run(
    model: Model,
    *,
    to: Annotated[
        str | None, typer.Option(metavar="SCHEME", show_default=False, help="See `normswap schemes`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Directory to write [default: ./NAME-SCHEME].")
    ] = None,
    options: dict[str, object],
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Convert these parts: layer3, *.bn1 (repeatable).")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Leave these parts as they are.")] = None,
    purpose: Annotated[
        str | None, typer.Option("--for", metavar="|".join(purpose_names()), help="Add what such training needs.")
    ] = None,
    fitting: Fitting,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON.")] = None,
    from_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this plan, edited by hand.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Convert a network, verify the result, save it.

    The keys of --json: source, output (null for a dry run), plan (file, or null) and steps, each with scheme, options,
    edits (of the plan), verdicts (what happens to each norm), alphas, notes, renames and report (null for a dry run;
    kept: of an approximate one, what held-out images say; null where none were given: then it is not known).
    """
    from normswap.storage import checkpoint
    from normswap.surgery.network import Network

    parts = {name: value for name, value in (("only", only), ("skip", skip)) if value}
    wanted = Wanted(to, {**options, **parts}, purpose, from_plan)
    given = _given_plan(wanted)
    if given is None:
        _demand(wanted, planning=dry_run or plan is not None)
    scheme = given.steps[-1].scheme if given else str(to)
    place = output or Path(f"{last_part(model)}-{scheme}")
    if not dry_run:
        checkpoint.claim(place, force=force)
    if plan is not None and plan.exists() and not force:
        raise OutputError(f"{plan} exists", remedy="Give another --plan, or --force to replace it")
    net = opening.open(model, mapped=fitting.calibrate is None)  # a fit takes so long that somebody may write the file
    what = f"converting to {scheme}, verifying"
    with progress.working(what) if fitting.calibrate is None else progress.bar(what) as advance:
        if given is not None:
            done, bodies, steps = _follow(fitting.on(net, advance), given, str(from_plan))
        elif dry_run:
            done, bodies, steps = _sketch(Network(net), wanted, measured=fitting.calibrate is not None)
        else:
            done, bodies, steps = _convert(fitting.on(net, advance), wanted)
    if done is not None and not dry_run:
        with progress.working(f"writing {place}"):
            checkpoint.save(done, place, force=force)
    if plan is not None:
        atomic_write.text(plan, Plan(tuple(steps)).to_json(indent=2) + "\n")
    show({"source": model, "output": None if dry_run else place, "plan": plan, "steps": bodies}, json, _say)
    return 0


def _given_plan(wanted: Wanted) -> Plan | None:
    """The plan that --from-plan names, if it does."""
    if wanted.from_plan is None:
        return None
    given = [f"--{name.replace('_', '-')}" for name in wanted.options]
    given += ["--for"] if wanted.purpose else []
    given += ["--to"] if wanted.to is not None else []
    if given:
        raise OptionError(f"{' and '.join(given)} cannot go with --from-plan", "the plan says it")
    try:
        text = wanted.from_plan.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is no text"
        raise PlanError(f"cannot read the plan {wanted.from_plan}", why) from None
    plan = Plan.from_json(text, str(wanted.from_plan))
    if not any(step.edits for step in plan.steps):
        raise PlanError(f"{wanted.from_plan} has no edits", "there is nothing to do")
    return plan


def _demand(wanted: Wanted, *, planning: bool) -> None:
    """See, before any work, that scheme, options and purpose exist."""
    from normswap import schemes

    if wanted.to is None:
        remedy = f"Give --to {'|'.join([*schemes.names(), 'unfold'])}, or --from-plan FILE"
        raise OptionError("nothing says what to convert to", remedy=remedy)
    if wanted.to == "unfold":
        if planning:
            raise OptionError("unfold has no plan", "it goes back over the one in the checkpoint")
        return
    schemes.demand_target(wanted.to)
    schemes.resolve(wanted.to, dict(wanted.options))
    schemes.demand_purpose(wanted.purpose)


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


def _sketch(network: Network, wanted: Wanted, *, measured: bool) -> Outcome:
    """Plan only."""
    from normswap.analysis import summary
    from normswap.surgery.conversion import drafts

    ways = [*drafts(network, str(wanted.to), measured=measured, purpose=wanted.purpose, **wanted.options)]
    return None, [summary.of_step(step, draft) for step, draft in ways], [step for step, _ in ways]


def _convert(network: Network, wanted: Wanted) -> Outcome:
    from normswap.analysis import summary
    from normswap.surgery.conversion import convert

    done = convert(network, str(wanted.to), purpose=wanted.purpose, **wanted.options)
    return done, summary.of_conversion(done, str(wanted.to)), list(done.plan.steps[-done.steps :])


# --- what is printed --------------------------------------------------------------------------------------------------


def _say(body: Body) -> None:
    """What was done, or with a dry run would be done."""
    for step in body["steps"]:
        _say_step(body["source"], step, dry=body["output"] is None)
    for said, what in (("plan saved to", "plan"), ("written to", "output")):
        if body[what]:
            line(f"{said} {body[what]}")
    if not body["output"]:
        line("dry run: no network was written")


def _say_step(source: str, step: Body, *, dry: bool) -> None:
    options = ", ".join(f"{name} {value}" for name, value in changed(step["scheme"], step["options"]).items())
    layers = Counter(edit["layer"] for edit in step["edits"])
    facts(
        (
            "would convert" if dry else "converted",
            f"{source} to {step['scheme']}" + (f" ({options})" if options else ""),
        ),
        ("norms", counts(step["outcomes"])),
        ("edits", f"{sum(layers.values())} ({counts(layers)})" if layers else ""),
    )
    if dry:
        table("Plan", ("seat", "layer", "arguments", "reads"), [_edit_row(edit) for edit in step["edits"]])
    elif step["alphas"]:
        table("Scalars", ("seat", "alpha"), step["alphas"].items(), right=("alpha",))
    listing("note", step["notes"])
    listing("renamed", (f"{old} -> {new}" for old, new in step["renames"]))
    if step["report"]:
        proof(step["report"])
        if not step["report"]["exact"] and not step["report"]["kept"] and get(step["scheme"]).fit is not None:
            facts(("kept", "not known: give --calibrate DATA, 25 images of anything; it fits and measures"))


def _edit_row(edit: Body) -> Sequence[str]:
    args = ", ".join(f"{name} {cell(value) if not isinstance(value, list) else ' '.join(map(str, value))}"
                     for name, value in edit["args"].items())  # fmt: skip
    ways = [_take(take) for take in edit["takes"]] or [""] * len(edit["reads"])
    reads = ", ".join(f"{way} {path}".strip() for way, path in zip(ways, edit["reads"], strict=True))
    return edit["path"], edit["layer"], args, reads


def _take(take: Body) -> str:
    """A way, and the channels it is about: `after 16:32`."""
    part = take["part"]
    return str(take["way"]) + (f" {part[0]}:{part[1]}" if part else "")
