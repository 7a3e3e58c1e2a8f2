"""`normswap bench`: how fast networks run, as they are and folded. `cli` imports this file to register it."""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress, render
from normswap.cli.app import app
from normswap.cli.options import ArchArgs, ArchName, InChans, Json, NumClasses, Weights
from normswap.errors import OptionError
from normswap.storage import atomic_write

Body = dict[str, Any]


@dataclass(frozen=True)
class Order:
    """What to time, and how: `settings` and `timing` as `runtimes` and `timing` have them."""

    sources: Sequence[Any]
    batches: Sequence[int]
    runtimes: Sequence[str]
    side: int | None
    device: str
    dtype: str
    channels_last: bool
    threads: int | None
    rounds: int
    seconds: float


@app.command("bench")
def bench(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", show_default=False, help="As in `inspect`, or a file that `normswap export` wrote."
        ),
    ],
    batch: Annotated[str, typer.Option(metavar="N,N...", help="Images at a time.")] = "1,8",
    size: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Images of N x N [default: the model's].")
    ] = None,
    runtime: Annotated[
        str, typer.Option(metavar="NAME,...", help="Also fuse, torchscript, compile:reduce-overhead|max-autotune.")
    ] = "eager,compile,onnxruntime,openvino",
    device: Annotated[str, typer.Option(metavar="cpu|cuda|mps")] = "cpu",
    dtype: Annotated[str, typer.Option(metavar="fp32|fp16|bf16", help="Of weights and arithmetic.")] = "fp32",
    channels_last: Annotated[bool, typer.Option("--channels-last", help="NHWC in the runtimes of torch.")] = False,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Of every runtime [default: torch's].")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each contender.")] = 15,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time each for about so long, all turns together.")] = 3.0,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="Picture: .png, .svg ...")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", show_default=False, help="Table, a line per contender.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Time a network as it is and folded, in each runtime.

    Each contender is a process of its own; all take turns, with the same number of threads. The outputs of each are
    compared with eager mode first: a wrong one is reported, not timed. Speed is relative to the unmodified network in
    eager mode, the median over the rounds. An exported file is timed with the MODEL before it.

    The keys of --json: rows (network, form, runtime, batch, status: ok, wrong, failed or skipped, reason, error,
    ms, ms_low, ms_high: median and quartiles, best_ms, cpu_ms, images_per_s, speedup, speedup_low, speedup_high,
    memory_mib, ready_s, runs, rounds: seconds of each run), settings, machine, notes and files.
    """
    from normswap.cli import commands

    sizes = _batches(batch)
    wanted = _runtimes(runtime)
    _check(device, dtype, seconds, output)
    for file in (output, table):
        if file is not None:
            atomic_write.claim(file, force=force)
    sources = [commands.Source(name, weights, arch, arch_arg or [], num_classes, in_chans) for name in models]
    order = Order(sources, sizes, wanted, size, device, dtype, channels_last, threads, rounds, seconds)
    body = _bench(order, output, table)
    print(json_module.dumps(body, indent=2, allow_nan=False)) if json else _tables(body)
    return 0


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise OptionError(f"--batch {text}", "it is a list of whole numbers from 1 up", "For instance 1,8")
    return list(dict.fromkeys(int(part) for part in parts))


def _runtimes(text: str) -> list[str]:
    from normswap.benchmarking import runtimes

    names = list(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        runtimes.find(name)
    return names


def _check(device: str, dtype: str, seconds: float, output: Path | None) -> None:
    from normswap.benchmarking import runtimes

    if device not in runtimes.DEVICES:
        raise OptionError(f"unknown device '{device}'", f"there are {', '.join(runtimes.DEVICES)}")
    if dtype not in runtimes.DTYPES:
        raise OptionError(f"unknown dtype '{dtype}'", f"there are {', '.join(runtimes.DTYPES)}")
    if not (seconds > 0 and math.isfinite(seconds)):
        raise OptionError(f"--seconds {seconds:g}", "it is a positive number")
    if output is not None:
        from normswap.analysis.plots import check_format

        check_format(output)


def _bench(order: Order, output: Path | None, table: Path | None) -> Body:
    import tempfile

    with progress.stages() as say:
        say("starting")
        import torch

        from normswap.analysis import summary
        from normswap.benchmarking import timing, timing_plot
        from normswap.benchmarking.runtimes import Settings
        from normswap.benchmarking.subjects import Making

        timing.demand_device(order.device)
        threads = order.threads or torch.get_num_threads()
        settings = Settings(order.device, order.dtype, order.channels_last, threads)
        before = timing.machine(settings)
        with tempfile.TemporaryDirectory(prefix="normswap-bench-") as name:
            folder = Path(name)
            groups = _open(order, Making(folder, settings, order.batches), say)
            turns = timing.Timing(order.rounds, order.seconds)
            rows = timing.run(
                groups, settings, folder, batches=order.batches, wanted=order.runtimes, timing=turns, say=say
            )
        body: Body = {
            "rows": [asdict(row) for row in rows],
            "settings": {**asdict(settings), **asdict(turns), "sizes": {g.network: list(g.size) for g in groups}},
            "machine": {**before, "load_after": timing.machine(settings)["load"]},
            "notes": [note for group in groups for note in group.notes],
        }
        files = [timing_plot.plot(rows, output, _title(body))] if output else []
        files += [timing_plot.write_csv(rows, table)] if table else []
        body["files"] = [str(file) for file in files]
        return dict(summary.plain(body))


def _open(order: Order, making: Any, say: Any) -> Any:
    import torch

    from normswap.analysis import signal_propagation
    from normswap.benchmarking import subjects

    named: list[tuple[str, str, Any]] = []
    for source in order.sources:
        if subjects.is_file(source.name):
            named.append((source.name, source.name, None))
            continue
        say(f"opening {source.name}")
        torch.manual_seed(0)
        model = source.open()
        # the branches of fresh networks begin at zero, and would hide anything that is wrong in them
        model = signal_propagation.awake(model) if source.weights == "random" else model
        named.append((source.name, _label(source.name, [label for _, label, _ in named]), model))
    say("folding")
    return subjects.groups(named, making, order.side)


def _label(name: str, taken: Sequence[str]) -> str:
    from normswap.cli import commands

    short = commands.last_part(name)
    again = (f"{short} ({i})" for i in range(2, len(taken) + 3))
    return short if short not in taken else next(label for label in again if label not in taken)


# --- what is printed --------------------------------------------------------------------------------------------------


def _title(body: Body) -> str:
    known, machine = body["settings"], body["machine"]
    form = ", channels last" if known["channels_last"] else ""
    threads = f"{known['threads']} thread{'s' if known['threads'] > 1 else ''}"
    return f"{machine['processor']} ({known['device']}), {known['dtype']}{form}, {threads}"


def _tables(body: Body) -> None:
    """A table per network and batch size, then what was not timed."""
    out = render._out()
    known, machine = body["settings"], body["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"{machine['load'][0]:.2f} before, {machine['load_after'][0]:.2f} after" if machine["load"] else None
    turns = f"{known['rounds']} rounds of about {known['seconds'] / known['rounds']:.2g} s each"
    out.print(render._facts((("machine", _title(body)), ("load", load), ("versions", versions), ("turns", turns))))
    for (network, batch), group in groupby(body["rows"], lambda row: (row["network"], row["batch"])):
        rows = list(group)
        size = " x ".join(str(side) for side in known["sizes"][network])
        title = f"{network}, batch {batch} of {size}"
        timed = [_row(row) for row in rows if row["status"] == "ok"]
        columns = ("form, runtime", "ms", "quartiles", "images/s", "x eager", "MiB", "ready s", "error")
        out.print(render._table(title, columns, timed, right=",".join(columns[1:])))
        render._say(out, "not timed", (
            f"{row['form']} in {row['runtime']}: {row['status']}: {row['reason']}" for row in rows
            if row["status"] != "ok"))  # fmt: skip
    render._say(out, "note", body["notes"])
    for file in body["files"]:
        render._line(out, f"written to {file}")


def _row(row: Body) -> Sequence[Any]:
    memory = None if row["memory_mib"] is None else f"{row['memory_mib']:.0f}"
    quartiles = f"{_figure(row['ms_low'])} .. {_figure(row['ms_high'])}"
    speeds = (f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}")
    name = f"{row['form']}, {row['runtime']}"
    return name, _figure(row["ms"]), quartiles, *speeds, memory, f"{row['ready_s']:.1f}", f"{row['error']:.0e}"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
