"""The command line: options, exit codes and nothing else. What a command does is in `commands`, imported when it runs.

Exit codes: 0 done; 1 a comparison failed (`verify`, `demo`); 2 bad input, said in one line on stderr; 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

import normswap
from normswap.cli.options import (
    ArchArgs,
    ArchName,
    BatchSize,
    Data,
    InChans,
    Json,
    Model,
    NumClasses,
    Samples,
    Split,
    Weights,
    Workers,
)
from normswap.errors import NormswapError

# typer's errors derive from click's, which newer versions of typer no longer import under that name.
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # ClickException

app = typer.Typer(
    name="normswap",
    help="Move a pretrained vision network to another normalization scheme, keeping the function it learned.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code. Errors that are the input's fault become one line on stderr."""
    try:
        with _quiet():
            arguments = sys.argv[1:] if argv is None else list(argv)
            result = app(arguments or ["--help"], prog_name="normswap", standalone_mode=False)
            sys.stdout.flush()
    except _UsageError as error:
        return _fail(error.format_message())  # type: ignore[attr-defined]
    except NormswapError as error:
        return _fail(str(error))
    except OSError as error:
        _abandon_stdout()
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else error.strerror or str(error))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    return result if isinstance(result, int) else 0


def _abandon_stdout() -> None:
    """If stdout takes nothing any more (disk full, pipe closed), do not let the interpreter fail on it again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> int:
    print("error:", " ".join(message.split()), file=sys.stderr)
    return 2


@contextmanager
def _quiet() -> Iterator[None]:
    """Neither warnings nor log lines of the libraries underneath."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _number(text: str | None) -> float | str | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return text


def _version(wanted: bool) -> None:
    if wanted:
        print(f"normswap {normswap.__version__}")
        raise typer.Exit


@app.callback()
def _normswap(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command("inspect")
def _inspect(
    model: Model,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Show the residual blocks and norms of a network.

    For every norm, what folding would do with it, or why it cannot be folded.

    The keys of --json: source, class, architecture, parameters, input_size, plan, classifier, dropout, norms (counts
    by class), roles (counts), blocks (path, stage, skip, order, tail, norms, last, gate, drop_path, alpha), sites (one
    per norm: path, class, channels, role, block, mean, std: the smallest and largest of any channel, folding, refused)
    and refusals (path, reason).
    """
    from normswap.cli import commands

    return commands.inspect(commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans), json)


@app.command("convert")
def _convert(
    model: Model,
    to: Annotated[
        str | None, typer.Option(metavar="SCHEME", show_default=False, help="See `normswap schemes`.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="Directory to write [default: ./NAME-SCHEME].")
    ] = None,
    alpha: Annotated[
        str | None, typer.Option(metavar="match|inv-sqrt-depth|NUMBER", help="What the branches' scalars start from.")
    ] = None,
    dropout: Annotated[float | None, typer.Option(metavar="P", help="Dropout before the classifier.")] = None,
    ghost_batch: Annotated[
        int | None, typer.Option(metavar="N", help="batchnorm: statistics over N samples in training.")
    ] = None,
    init: Annotated[str | None, typer.Option(metavar="keep|fixup", help="fixup: `fixup` resets the weights.")] = None,
    rule: Annotated[
        str | None, typer.Option(metavar="balduzzi|szegedy|hanin|arpit|rescale", help="residual-scale: which factors.")
    ] = None,
    groups: Annotated[int | None, typer.Option(metavar="N", help="groupnorm: groups of channels [default: 1].")] = None,
    steady: Annotated[
        float | None, typer.Option(metavar="SHARE", help="groupnorm: share of the variance that is no sample's own.")
    ] = None,
    mean: Annotated[str | None, typer.Option(metavar="fit|keep", help="nf: what to do with filters' means.")] = None,
    stem: Annotated[str | None, typer.Option(metavar="fit|keep", help="nf: the same, first convolution.")] = None,
    only: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Convert these parts: layer3, *.bn1 (repeatable).")
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="Leave these parts as they are.")] = None,
    purpose: Annotated[
        str | None, typer.Option("--for", metavar="opacus|federated", help="Add what such training needs.")
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(metavar="DATA|noise", help="Fit values to these images (as --data elsewhere).")
    ] = None,
    samples: Annotated[int, typer.Option(min=2, metavar="N", help="Take this many of them.")] = 1000,
    seed: Annotated[int, typer.Option(metavar="S", help="Which ones.")] = 0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan, write nothing.")] = False,
    plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the plan as JSON.")] = None,
    from_plan: Annotated[Path | None, typer.Option(metavar="FILE", help="Apply this plan, edited by hand.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an output that exists.")] = False,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Convert a network, verify the result, save it.

    The keys of --json: source, output (null for a dry run), plan (file, or null) and steps, each with scheme, options,
    edits (of the plan), verdicts (what happens to each norm), alphas, notes, renames and report (null for a dry run).
    """
    from normswap.cli import commands

    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    given: dict[str, Any] = {"alpha": _number(alpha), "dropout": dropout}
    given |= {"ghost_batch": ghost_batch, "init": init, "rule": rule}
    given |= {"groups": groups, "steady": steady, "mean": mean, "stem": stem}
    given |= {"only": only or None, "skip": skip or None}
    options = {name: value for name, value in given.items() if value is not None}
    wanted = commands.Wanted(to, options, from_plan, output, plan, dry_run, force, calibrate, samples, seed, purpose)
    return commands.convert(source, wanted, json)


@app.command("verify")
def _verify(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Written by `normswap convert`.")],
    against: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Compare with this network [default: the recorded source].")
    ] = None,
    data: Data = None,
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    samples: Samples = None,
    split: Split = "validation",
    json: Json = False,
) -> int:
    """Compare a converted network with its source.

    The exit code is 1 if they differ.

    The keys of --json: directory, against, passed, source_unchanged (null if not known), report, data (null, or top1
    of source and result in percent, agreement and count).
    """
    from normswap.cli import commands

    images = None if data is None else commands.Images(data, batch_size, workers, samples, split)
    return commands.verify(directory, against, images, json)


@app.command("evaluate")
def _evaluate(
    model: Model,
    data: Annotated[str, typer.Option(metavar="PATH", help="Class folders, a tar of them, or PREFIX/NAME[:ROOT].")],
    batch_size: BatchSize = 64,
    workers: Workers = 2,
    samples: Samples = None,
    split: Split = "validation",
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Accuracy, loss and speed on labelled images.

    The keys of --json: source, data, top1, top5 (percent), loss, count, images_per_s.
    """
    from normswap.cli import commands

    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    return commands.evaluate(source, commands.Images(data, batch_size, workers, samples, split), json)


@app.command("schemes")
def _schemes(json: Json = False) -> int:
    """List the schemes, their papers and options.

    The keys of --json: one object per scheme with name, summary, paper, options (defaults) and exact_only_with (the
    options that must keep their default for the conversion to be exact).
    """
    from normswap.cli import commands

    return commands.schemes(json)


@app.command("demo")
def _demo(json: Json = False) -> int:
    """Convert a shipped network; measure it before and after.

    Offline, in seconds. The exit code is 1 if any figure disagrees.
    The keys of --json: passed, seconds, images (how many), anatomy (as `inspect` gives it, without blocks and sites)
    and rows, each with network, norms, parameters, top1, agreement, relative_l2 and speed (relative to the source).
    """
    from normswap.cli import commands

    return commands.demo(json)


from normswap.cli import (  # noqa: E402 (they register their commands here)
    advise_command,  # noqa: F401
    bench_command,  # noqa: F401
    export_command,  # noqa: F401
    finetune_command,  # noqa: F401
    recalibrate_command,  # noqa: F401
    recipes_command,  # noqa: F401
    report_command,  # noqa: F401
    spp_command,  # noqa: F401
)
