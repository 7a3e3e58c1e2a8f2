"""What each command does: open, work, and hand the record to `render`, or print it as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normswap.cli import progress, render
from normswap.errors import OptionError, OutputError, PlanError
from normswap.plan import Plan, Step
from normswap.storage import atomic_write

Body = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A MODEL and the options that go with it."""

    name: str
    weights: str = "pretrained"
    arch: str | None = None
    arch_args: list[str] = field(default_factory=list)
    num_classes: int | None = None
    in_chans: int | None = None

    def open(self) -> Any:
        """The network.

        Raises:
            SourceError, OptionError: it cannot be had.
        """
        args = dict(_pair(text) for text in self.arch_args)
        return _open(
            self.name, weights=self.weights, arch=self.arch, arch_args=args,
            num_classes=self.num_classes, in_chans=self.in_chans,
        )  # fmt: skip


@dataclass(frozen=True)
class Images:
    """Labelled images and how to load them."""

    data: str
    batch_size: int
    workers: int
    samples: int | None
    split: str

    def loader(self, model: Any) -> Any:
        from normswap.images.datasets import make_loader

        rest = {"batch_size": self.batch_size, "workers": self.workers, "samples": self.samples, "split": self.split}
        return make_loader(model, self.data, **rest)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Wanted:
    """What `convert` shall do."""

    to: str | None
    options: dict[str, Any]
    from_plan: Path | None
    output: Path | None
    plan: Path | None
    dry_run: bool
    force: bool
    calibrate: str | None = None
    samples: int = 1000
    seed: int = 0
    purpose: str | None = None

    def fitting(self, model: Any, advance: Callable[[int, int], None]) -> Body:
        """The arguments of `conversion.convert` that say what to fit values to."""
        if self.calibrate is None or self.calibrate == "noise":
            return {"calibrate": self.calibrate, "seed": self.seed, "progress": advance}
        from normswap.images.datasets import make_loader
        from normswap.models import zoo

        config = zoo.data_config(model)  # no word of classes: labels are not needed
        images = make_loader(config, self.calibrate, split="train", samples=self.samples, seed=self.seed)
        return {"calibrate": images, "seed": self.seed, "progress": advance}


def parse(text: str) -> Any:
    """An option's value: int, float, true, false, none, a comma list of those, or the text itself."""
    if "," in text:
        return [parse(part.strip()) for part in text.split(",") if part.strip()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def _pair(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign or not key.isidentifier():
        raise OptionError(f"--arch-arg {text!r} is not KEY=VALUE", remedy="For instance channels=16,32,64,128")
    return key, parse(value)


def _open(name: str, **options: Any) -> Any:
    # downloads show a bar of their own
    local = Path(name.removeprefix("local-dir:")).exists() or options.get("weights") == "random"
    with progress.working(f"opening {name}", spin=local):
        from normswap.storage import checkpoint

        return checkpoint.open_model(name, **options)


def show(body: Body | list[Body], as_json: bool, human: Callable[[Any], None]) -> None:
    """Print what a command found: as JSON, or for people by `human`."""
    from normswap.analysis import summary

    if as_json:
        print(json.dumps(summary.plain(body), indent=2, allow_nan=False))
    else:
        human(body)


def inspect(source: Source, as_json: bool) -> int:
    model = source.open()
    from normswap.analysis import summary

    with progress.working("inspecting"):
        body = summary.of_network(model, source.name)
    show(body, as_json, render.network)
    return 0


def convert(source: Source, wanted: Wanted, as_json: bool) -> int:
    from normswap.storage import checkpoint

    plan = _planned(wanted)
    scheme = plan.steps[-1].scheme if plan else str(wanted.to)
    place = wanted.output or Path(f"{last_part(source.name)}-{scheme}")
    if not wanted.dry_run:
        checkpoint.claim(place, force=wanted.force)
    if wanted.plan is not None and wanted.plan.exists() and not wanted.force:
        raise OutputError(f"{wanted.plan} exists", remedy="Give another --plan, or --force to replace it")
    model = source.open()
    what = f"converting to {scheme}, verifying"
    with progress.working(what) if wanted.calibrate is None else progress.bar(what) as advance:
        done, steps, todo = _carry_out(model, wanted, plan, advance)
    if done is not None:
        with progress.working(f"writing {place}"):
            checkpoint.save(done, place, force=wanted.force)
    if wanted.plan is not None:
        atomic_write.text(wanted.plan, Plan(tuple(todo)).to_json(indent=2) + "\n")
    body = {
        "source": source.name,
        "output": None if done is None else str(place),
        "plan": None if wanted.plan is None else str(wanted.plan),
        "steps": steps,
    }
    show(body, as_json, render.conversion)
    return 0


def _planned(wanted: Wanted) -> Plan | None:
    """The plan that --from-plan names, if it does; else see that scheme and options exist."""
    from normswap import schemes

    if wanted.from_plan is None:
        if wanted.to is None:
            raise OptionError("convert to what?", remedy=f"--to {'|'.join(schemes.names())}, or --from-plan FILE")
        if wanted.to == "unfold" and (wanted.dry_run or wanted.plan):
            raise OptionError("unfold has no plan", "it goes back over the one in the checkpoint")
        if wanted.to != "unfold":
            schemes.demand_target(wanted.to)
            schemes.resolve(wanted.to, wanted.options)
            schemes.demand_purpose(wanted.purpose)
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


def _carry_out(model: Any, wanted: Wanted, plan: Plan | None, advance: Any) -> tuple[Any, list[Body], list[Step]]:
    """The conversion (None for a dry run), what to say of each step, and the steps."""
    from normswap.analysis import summary
    from normswap.surgery import fitting
    from normswap.surgery.conversion import carry_out, drafts
    from normswap.surgery.conversion import convert as run

    if plan is not None:
        steps: list[Body] = []
        for step in plan.steps:
            try:
                done = carry_out(model, step, **(wanted.fitting(model, advance) if fitting.fits(step) else {}))
            except RuntimeError as error:  # torch's, when layers do not fit each other
                why = str(error).split("\n")[0]
                raise PlanError(f"{wanted.from_plan} gives a network that does not run", why) from error
            model = done.model
            steps += summary.of_conversion(done)
        return None if wanted.dry_run else done, steps, list(plan.steps)
    scheme = str(wanted.to)
    if wanted.dry_run:
        ways = [*drafts(model, scheme, wanted.purpose, measured=wanted.calibrate is not None, **wanted.options)]
        return None, [summary.of_step(step, sketch) for step, sketch in ways], [step for step, _ in ways]
    done = run(model, scheme, purpose=wanted.purpose, **wanted.fitting(model, advance), **wanted.options)
    return done, summary.of_conversion(done, scheme), list(done.plan.steps[-done.steps :])


def last_part(name: str) -> str:
    """What a network is called: the last part of its source."""
    prefix, _, rest = name.partition(":")
    if prefix in ("hf-hub", "hf_hub"):
        return rest.partition("@")[0].rpartition("/")[2]
    path = Path(rest if prefix == "local-dir" else name)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else path.name


def verify(directory: Path, against: str | None, images: Images | None, as_json: bool) -> int:
    with progress.working(f"loading {directory}"):
        from normswap.analysis import summary
        from normswap.storage import checkpoint
        from normswap.surgery import reverification

        result = checkpoint.load(directory)
    name = against or reverification.recorded(result, directory)
    source = _open(name, **({} if against else reverification.how(result)))
    with progress.working("comparing"):
        report = reverification.again(source, result)
    body: Body = {
        "directory": str(directory),
        "against": name,
        "passed": report.passed,
        "source_unchanged": None if against else reverification.unchanged(source, result),
        "report": summary.of_report(report),
        "data": None,
    }
    if images is not None:
        loader = images.loader(result)
        with progress.bar("comparing on images") as advance:
            body["data"] = reverification.on_images(source, result, loader, advance)
    show(body, as_json, render.verification)
    return 0 if report.passed else 1


def evaluate(source: Source, images: Images, as_json: bool) -> int:
    model = source.open()
    from normswap.images.accuracy import evaluate as run

    loader = images.loader(model)
    with progress.bar(f"evaluating {source.name}") as advance:
        result = run(model, loader, progress=advance)
    show({"source": source.name, "data": images.data, **dataclasses.asdict(result)}, as_json, render.evaluation)
    return 0


def schemes(as_json: bool) -> int:
    with progress.working("looking"):
        from normswap.analysis import summary

        body = list(summary.of_schemes())
    show(body, as_json, render.schemes)
    return 0


def demo(as_json: bool) -> int:
    with progress.working("starting"):
        from normswap.reporting import demo as shipped
    with progress.stages() as say:
        result = shipped.run(say)
    body: Mapping[str, Any] = dataclasses.asdict(result)
    show(dict(body), as_json, render.demo)
    return 0 if result.passed else 1
