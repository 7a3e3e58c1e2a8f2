"""`normswap bench`: how fast networks run, as they are and folded."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.cli import progress
from normswap.cli.naming import label, last_part
from normswap.cli.options import Drawn, Json, Opening
from normswap.cli.printing import show
from normswap.cli.tables import facts, listing, next_step, table, written
from normswap.errors import OptionError
from normswap.plan import Body

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from torch import nn

KEYS = (
    "rows (network, form, runtime, batch, status: ok, wrong, failed or skipped, reason, error, ms, ms_low, ms_high: "
    "median and quartiles, best_ms, cpu_ms, images_per_s, speedup, speedup_low, speedup_high, memory_mib, ready_s, "
    "runs, rounds: seconds of a pass in each block of passes), settings, machine, notes, files"
)
EXAMPLES = (
    "bench demo demo.onnx",
    "bench resnet50 --batch-size 1,8 --runtime onnxruntime,openvino",
)
_COLUMNS = ("form, runtime", "ms", "quartiles", "images/s", "x eager", "MiB", "ready s", "error")
_SPARE = ("ready s", "MiB", "quartiles")


@dataclass(frozen=True)
class Setting:
    """The options of what is timed, and how."""

    batch_size: Annotated[str, typer.Option(metavar="N,N...", help="Images at a time.")] = "1,8"
    batch: Annotated[str | None, typer.Option(metavar="N,N...", hidden=True)] = None  # as it was called
    size: Annotated[int | None, typer.Option(min=1, metavar="N", hidden=True)] = None  # before --input-size
    runtime: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="Also fuse, torchscript, ncnn, executorch, litert, compile:reduce-overhead|max-autotune.",
        ),
    ] = "eager,compile,onnxruntime,openvino"
    device: Annotated[str, typer.Option(metavar="cpu|cuda|mps")] = "cpu"
    dtype: Annotated[
        str, typer.Option("--precision", "--dtype", metavar="fp32|fp16|bf16", help="Of weights and arithmetic.")
    ] = "fp32"
    channels_last: Annotated[bool, typer.Option("--channels-last", help="NHWC in the runtimes of torch.")] = False
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", show_default=False, help="Of every runtime [default: torch's].")
    ] = None
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="Turns of each contender.")] = 15
    seconds: Annotated[float, typer.Option(metavar="S", help="Time each for about so long, all turns together.")] = 3.0

    @property
    def batches(self) -> list[int]:
        listed = self.batch_size if self.batch is None else self.batch
        parts = [part.strip() for part in listed.split(",")]
        if not all(part.isdecimal() and int(part) > 0 for part in parts):
            raise OptionError(f"--batch-size {listed}", "it is a list of whole numbers from 1 up", "For instance 1,8")
        return list(dict.fromkeys(map(int, parts)))

    @property
    def runtimes(self) -> list[str]:
        return list(dict.fromkeys(part.strip() for part in self.runtime.split(",")))

    def check(self) -> None:
        """Check that everything in it is known.

        Raises:
            OptionError: something is not.
        """
        from normswap.benchmarking import runtimes

        _ = self.batches
        for name in self.runtimes:
            runtimes.find(name)
        for option, value, known in (
            ("device", self.device, runtimes.DEVICES),
            ("precision", self.dtype, runtimes.DTYPES),
        ):
            if value not in known:
                raise OptionError(f"unknown {option} '{value}'", f"there are {', '.join(known)}")
        if not (self.seconds > 0 and math.isfinite(self.seconds)):
            raise OptionError(f"--seconds {self.seconds:g}", "it is a positive number")


def run(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...", show_default=False, help="As in `inspect`, or a file that `normswap export` wrote."
        ),
    ],
    *,
    setting: Setting,
    drawn: Drawn,
    opening: Opening,
    json: Json = False,
) -> int:
    """Time a network as it is and folded, in each runtime.

    Each contender is a process of its own; all take turns, with the same number of threads. The outputs of each are
    compared with eager mode first: a wrong one is reported, not timed. Speed is relative to the unmodified network in
    eager mode, the median over the rounds. An exported file is timed with the MODEL before it.
    """
    setting.check()
    drawn.check_writable()
    with progress.stages() as say:
        say("starting")
        body = _bench(models, opening, setting, drawn, say)
    show(body, json, _print)
    return 0


def _bench(names: Sequence[str], opening: Opening, setting: Setting, drawn: Drawn, say: Callable[[str], None]) -> Body:
    import torch

    from normswap.benchmarking import forms, timing, timing_plot
    from normswap.benchmarking.runtimes import Settings
    from normswap.exporting import exporter, sidecar

    timing.check_device(setting.device)
    threads = setting.threads or torch.get_num_threads()
    settings = Settings(setting.device, setting.dtype, setting.channels_last, threads, setting.rounds, setting.seconds)
    before = timing.machine(settings)
    with tempfile.TemporaryDirectory(prefix="normswap-bench-") as name:
        named = _open(names, opening, say)
        say("folding")
        making = forms.Making(Path(name), settings, setting.batches, exporter.export, sidecar.read)
        groups = forms.groups(named, making, setting.size)
        benchmark = timing.Benchmark(settings, Path(name), setting.runtimes, setting.batches, say)
        rows = benchmark.run(groups)
    body: Body = {
        "rows": [asdict(row) for row in rows],
        "settings": {**asdict(settings), "sizes": {g.network: list(g.size) for g in groups}},
        "machine": {**before, "load_after": timing.machine(settings)["load"]},
        "notes": [note for group in groups for note in group.notes],
    }
    plot, table = partial(timing_plot.plot, rows, title=_title(body)), partial(timing_plot.write_csv, rows)
    return {**body, "files": drawn.write(plot, table)}


def _open(
    names: Sequence[str], opening: Opening, say: Callable[[str], None]
) -> list[tuple[str, str, nn.Module | None]]:
    """Open each MODEL; gives (MODEL, label, network or None for a file)."""
    import torch

    from normswap.analysis import signal_propagation
    from normswap.benchmarking.forms import is_file

    named: list[tuple[str, str, nn.Module | None]] = []
    for name in names:
        if is_file(name):
            named.append((name, name, None))
            continue
        say(f"opening {name}")
        torch.manual_seed(0)
        model = opening.open(name)
        # the branches of fresh networks begin at zero, and would hide anything that is wrong in them
        model = signal_propagation.awake(model) if opening.weights == "random" else model
        named.append((name, label(last_part(name), [taken for _, taken, _ in named]), model))
    return named


# --- what is printed --------------------------------------------------------------------------------------------------


def _title(body: Body) -> str:
    known, machine = body["settings"], body["machine"]
    form = ", channels last" if known["channels_last"] else ""
    threads = f"{known['threads']} thread{'s' if known['threads'] > 1 else ''}"
    return f"{machine['processor']} ({known['device']}), {known['dtype']}{form}, {threads}"


def _print(body: Body) -> None:
    """A table per network and batch size, then what was not timed."""
    from normswap.benchmarking.forms import is_file

    known, machine = body["settings"], body["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    load = f"{machine['load'][0]:.2f} before, {machine['load_after'][0]:.2f} after" if machine["load"] else None
    turns = f"{known['rounds']} rounds of about {known['seconds'] / known['rounds']:.2g} s each"
    facts(("machine", _title(body)), ("load", load), ("versions", versions), ("turns", turns))
    for (network, batch), group in groupby(body["rows"], lambda row: (row["network"], row["batch"])):
        rows = list(group)
        size = " x ".join(str(side) for side in known["sizes"][network])
        timed = [_row(row) for row in rows if row["status"] == "ok"]
        table(f"{network}, batch {batch} of {size}", _COLUMNS, timed, right=_COLUMNS[1:], spare=_SPARE)
        untimed = [row for row in rows if row["status"] != "ok"]
        listing(
            "not timed", (f"{row['form']} in {row['runtime']}: {row['status']}: {row['reason']}" for row in untimed)
        )
    listing("note", body["notes"])
    written(body["files"])
    first = body["rows"][0]["network"] if body["rows"] else "MODEL"
    if is_file(first):
        next_step("evaluate", first, "--data", "IMAGES")
    else:
        next_step("export", first, "-o", "FILE.onnx")


def _row(row: Body) -> Sequence[object]:
    memory = None if row["memory_mib"] is None else f"{row['memory_mib']:.0f}"
    quartiles = f"{_figure(row['ms_low'])} .. {_figure(row['ms_high'])}"
    speeds = (f"{row['images_per_s']:.1f}", f"{row['speedup']:.2f}")
    name = f"{row['form']}, {row['runtime']}"
    return name, _figure(row["ms"]), quartiles, *speeds, memory, f"{row['ready_s']:.1f}", f"{row['error']:.0e}"


def _figure(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"
