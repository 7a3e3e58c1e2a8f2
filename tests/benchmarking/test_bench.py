"""`normswap bench`: what is timed, what is not, and the arithmetic between."""

from __future__ import annotations

import csv
import os
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import MODEL, Capture, run_json
from matplotlib.figure import Figure
from onnx import TensorProto, helper
from torch import Tensor, nn

from normswap import demo_files
from normswap.benchmarking import runtimes, timing, timing_plot
from normswap.benchmarking.forms import Form, Group, Making, groups, of_file, of_model, original
from normswap.benchmarking.runtimes import Settings
from normswap.benchmarking.timing import Benchmark, Quartiles, TimedRow, quartiles, speedup
from normswap.benchmarking.worker import Burst, Ready, Worker, begin, reason
from normswap.cli.app import main
from normswap.errors import OptionError, RefusedError
from normswap.exporting import exporter
from normswap.exporting import sidecar as sidecars
from normswap.models import network_input, source_names
from normswap.storage import checkpoint
from normswap.surgery import conversion

SMALL = ("resnet18", "--weights", "random", "--arch-arg", "channels=8,8,16,16", "--num-classes", "5")
SHORT = ("--rounds", "2", "--seconds", "0.02")
KEYS = {
    "network", "form", "runtime", "batch", "status", "reason", "error", "ms", "ms_low", "ms_high", "best_ms", "cpu_ms",
    "images_per_s", "speedup", "speedup_low", "speedup_high", "memory_mib", "ready_s", "runs", "rounds",
}  # fmt: skip


def bench(capfd: Capture, *arguments: str) -> Any:
    return run_json(capfd, "bench", *arguments, *SHORT)


def making(folder: Path, settings: Settings, batches: list[int]) -> Making:
    """As the command hands it in."""
    return Making(folder, settings, batches, exporter.export, sidecars.read)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], Quartiles(3.0, 3.0, 3.0)),
        ([1.0, 2.0], Quartiles(1.25, 1.5, 1.75)),
        ([5.0, 1.0, 3.0, 2.0, 4.0], Quartiles(2.0, 3.0, 4.0)),
        ([1.0, 1.0, 1.0, 9.0], Quartiles(1.0, 1.0, 3.0)),
    ],
)
def test_quartiles(values: list[float], expected: Quartiles) -> None:
    assert quartiles(values) == expected


def test_speedup_pairs_what_ran_in_the_same_round() -> None:
    base = [[2.0, 2.0, 9.0], [4.0], [40.0]]  # medians 2, 4, 40: the machine got slower
    own = [[1.0], [3.0, 1.0, 2.0], [10.0, 30.0]]  # medians 1, 2, 20
    assert speedup(base, own) == Quartiles(2.0, 2.0, 2.0)
    assert speedup(own, base) == Quartiles(0.5, 0.5, 0.5)
    assert speedup([[1.0], [6.0]], [[1.0], [2.0]]) == Quartiles(1.5, 2.0, 2.5)
    with pytest.raises(ValueError, match="shorter"):
        speedup(base, own[:2])


class Listed:
    """A worker that notes who ran when."""

    def __init__(self, i: int, order: list[int]) -> None:
        self.i, self.order = i, order

    def ask(self, function: Any, *arguments: Any) -> Burst:
        self.order.append(self.i)
        return Burst([1.0], 1, 1.0)


def test_nobody_always_runs_first_or_after_the_same_one(here: Path) -> None:
    order: list[int] = []
    contenders: list[Any] = [timing.Contender(TimedRow("n", "x", "eager", 1)) for _ in range(4)]
    for i, contender in enumerate(contenders):
        contender.worker, contender.ready = Listed(i, order), (i != 2 and Ready(np.zeros(1), 1.0, None)) or None
    Benchmark(Settings(rounds=12, seconds=1.0), here, ["eager"]).time(contenders, "")
    turns = [tuple(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert len(turns) == 12
    assert all(sorted(turn) == [0, 1, 3] for turn in turns)
    assert {turn[0] for turn in turns} == {0, 1, 3}
    assert len({pair for turn in turns for pair in (turn[:2], turn[1:])}) == 6


def test_relative_l2() -> None:
    assert timing.relative_l2(np.array([3.0, 4.5]), np.array([3.0, 4.0])) == pytest.approx(0.1)
    for other in (np.array([1.0]), np.array([np.nan, 4.0]), np.array([np.inf, 4.0])):
        assert timing.relative_l2(other, np.array([3.0, 4.0])) == float("inf")
    assert timing.relative_l2(np.ones(2), np.zeros(2)) == float("inf")


def test_figures_of_a_row() -> None:
    rows = [timing.Contender(TimedRow("n", form, "eager", 4)) for form in ("original", "folded")]
    for contender, times in zip(rows, ([[0.2, 0.4], [0.4, 0.2]], [[0.1], [0.1]]), strict=True):
        contender.ready = Ready(np.zeros(1), 5.0, 7.0)
        contender.bursts = [Burst(seconds, 10 * len(seconds), 0.5) for seconds in times]
    base, folded = timing.finished_rows(rows)
    assert (base.ms, base.best_ms, base.images_per_s, base.speedup) == pytest.approx((300, 200, 4 / 0.3, 1))
    assert (base.ms_low, base.ms_high, base.runs, base.cpu_ms) == pytest.approx((200, 400, 40, 500))
    assert (folded.ms, folded.speedup, folded.memory_mib, folded.ready_s) == pytest.approx((100, 3, 7, 5))
    assert folded.rounds == [[0.1], [0.1]]


# --- on the command line ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_table_picture_and_json(here: Path, capfd: Capture) -> None:
    body = bench(
        capfd, MODEL, "--batch", "2", "--runtime", "eager,fuse,torchscript,onnxruntime,openvino",
        "-o", "a.png", "--csv", "a.csv", "--threads", "1",
    )  # fmt: skip
    rows = body["rows"]
    forms = Counter((row["form"], row["batch"]) for row in rows)
    assert forms == {("original", 2): 5, ("folded", 2): 4}  # in which there is nothing to fuse
    for row in rows:
        assert row.keys() == KEYS
        assert (row["status"], row["reason"]) == ("ok", "")
        assert row["error"] < 1e-5
        assert row["best_ms"] <= row["ms_low"] <= row["ms"] <= row["ms_high"]
        assert row["images_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"])
        assert len(row["rounds"]) == 2
        assert 2 <= sum(map(len, row["rounds"])) <= row["runs"]
        assert row["best_ms"] == pytest.approx(1e3 * min(map(min, row["rounds"])))
        assert row["memory_mib"] > 1 or sys.platform != "linux"
    assert [row["speedup"] for row in rows if (row["form"], row["runtime"]) == ("original", "eager")] == [1]
    assert body["settings"]["threads"] == 1
    assert body["settings"]["sizes"] == {demo_files.FOLDER.name: list(network_input.size(checkpoint.open_model(MODEL)))}
    assert body["machine"]["versions"]["torch"]
    assert body["files"] == ["a.png", "a.csv"]
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")
    with (here / "a.csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert [float(line["ms"]) for line in table] == pytest.approx([row["ms"] for row in rows], rel=1e-6)
    assert table[0].keys() == KEYS - {"rounds"}


def test_what_is_missing_is_named(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    assert main(["bench", *SMALL, "--size", "32", "--batch", "1,3", "--runtime", "openvino", *SHORT]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "not timed: original in openvino: skipped: openvino is not installed" in out
    assert "not timed: folded in openvino: skipped: openvino is not installed" in out
    assert out.count("original, eager") == 2  # what the others are measured by, at each batch size
    assert "resnet18, batch 3 of 3 x 32 x 32" in out
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    rows = bench(capfd, *SMALL, "--size", "32", "--batch", "1", "--runtime", "onnxruntime")["rows"]
    assert [row["reason"] for row in rows] == ["", *2 * ["onnxscript is not installed"]]


@pytest.mark.slow
def test_a_converted_network_and_its_exports(here: Path, capfd: Capture) -> None:
    assert main(["convert", *SMALL, "--to", "skipinit", "-o", "skip"]) == 0
    assert main(["export", "skip", "-o", "a.onnx", "--input-size", "3,32,32", "--normalize", "--softmax"]) == 0
    assert main(["export", "skip", "-o", "a.pt2", "--input-size", "3,32,32"]) == 0
    names = ("skip", "a.onnx", "a.pt2")
    rows = bench(capfd, *names, "--size", "32", "--batch", "2", "--runtime", "eager,onnxruntime")["rows"]
    found = {(row["form"], row["runtime"]): row for row in rows}
    assert {key: row["status"] for key, row in found.items()} == {
        ("original", "eager"): "ok", ("original", "onnxruntime"): "ok", ("skipinit", "eager"): "ok",
        ("skipinit", "onnxruntime"): "ok", ("folded", "eager"): "ok", ("folded", "onnxruntime"): "ok",
        ("a.onnx", "onnxruntime"): "failed", ("a.pt2", "eager"): "failed"}  # fmt: skip
    assert "Expected: 1" in found["a.onnx", "onnxruntime"]["reason"]  # they take one image at a time
    rows = bench(capfd, *names, "--size", "32", "--batch", "1", "--runtime", "eager,onnxruntime")["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 8
    alone = bench(capfd, "a.onnx", "--batch", "1", "--runtime", "eager,onnxruntime,openvino")
    assert [(row["network"], row["form"], row["status"]) for row in alone["rows"]] == [("a.onnx", "a.onnx", "ok")] * 2
    assert alone["settings"]["sizes"] == {"a.onnx": [3, 32, 32]}
    assert main(["bench", "a.onnx", "--batch", "1", "--runtime", "onnxruntime"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "next: normswap evaluate a.onnx --data IMAGES"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--runtime", "eager,tensorrt"], "unknown runtime 'tensorrt': there are eager, fuse, compile, torchscript"),
        (["--runtime", "compile:fast"], "compile has no mode 'fast': there are compile:default"),
        (["--runtime", "eager:fast"], "eager has no mode 'fast': it has none"),
        (["--batch", "0"], "--batch-size 0: it is a list of whole numbers from 1 up"),
        (["--batch", "1,x"], "--batch-size 1,x: it is a list"),
        (["--size", "0"], "Invalid value for '--size'"),
        (["--precision", "fp8"], "unknown precision 'fp8': there are fp32, fp16, bf16"),
        (["--dtype", "fp8"], "unknown precision 'fp8': there are fp32, fp16, bf16"),
        (["--device", "tpu"], "unknown device 'tpu': there are cpu, cuda, mps"),
        (["--seconds", "0"], "--seconds 0: it is a positive number"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--rounds", "0"], "Invalid value for '--rounds'"),
        (["-o", "a.nonsense"], "a.nonsense: no picture format 'nonsense'"),
        (["-o", "nowhere/a.png"], "cannot write nowhere/a.png: there is no directory nowhere"),
        (["nothing.onnx"], "nothing.onnx does not exist"),
        (["there.onnx"], "there.onnx is no file"),
    ],
)
def test_bad_input_gives_one_line(here: Path, capfd: Capture, arguments: list[str], line: str) -> None:
    (here / "there.onnx").mkdir()
    models = [MODEL] if arguments[0].startswith("-") else []
    assert main(["bench", *models, *arguments]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"error: {line}")
    assert err.count("\n") == 1
    assert [path.name for path in here.iterdir()] == ["there.onnx"]


def test_sizes_and_devices_that_are_not_there(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", MODEL, "--device", "cuda"]) == 2
    assert capfd.readouterr().err == "error: --device cuda: torch finds none on this machine\n"
    vit = ("vit_tiny_patch16_224", "--weights", "random")
    assert main(["bench", *vit, "--size", "64"]) == 2
    err = capfd.readouterr().err
    assert err.startswith("error: vit_tiny_patch16_224 rejects images of 64 x 64: ")
    assert err.count("\n") == 1


def test_files_that_do_not_fit(here: Path) -> None:
    (here / "a.onnx").write_text("no graph")
    sidecar = {"input": {"size": [3, 48, 48]}, "normalize": {}, "output": {"name": "logits"}}
    group = Group("net", [], (3, 32, 32))
    with pytest.raises(OptionError, match=r"takes images of \(3, 48, 48\).*net is timed on \(3, 32, 32\)"):
        of_file(Path("a.onnx"), group, sidecar, None)
    assert of_file(Path("a.onnx"), None, sidecar, None)[1] == (3, 48, 48)


# --- what is not timed ------------------------------------------------------------------------------------------------


class Times(nn.Module):
    """y = factor * x"""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * x


def scripted(model: nn.Module, file: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch no longer recommends it
        torch.jit.save(torch.jit.script(model), file)
    return file


def test_a_wrong_contender_is_caught(here: Path) -> None:
    right, slightly, wrong = (Times(factor) for factor in (2.0, 2.00001, 2.01))

    def subject(name: str, model: nn.Module) -> Form:
        return Form(name, {"torchscript": lambda: scripted(model, here / f"{name}.ts")}, answers=right)

    group = Group("x", [subject("right", right), subject("slightly", slightly), subject("wrong", wrong)], (3, 8, 8))
    rows = Benchmark(Settings(rounds=2, seconds=0.01), here, ["torchscript"]).run([group])
    assert [row.status for row in rows] == ["ok", "ok", "wrong"]
    assert rows[2].error == pytest.approx(0.005, rel=1e-3)
    assert "differ by 5.0e-03" in rows[2].reason
    assert (rows[2].ms, rows[2].rounds) == (None, [])
    assert rows[1].speedup is not None


def test_the_wrong_network_behind_a_command_is_caught(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way: what is folded is not what was given."""
    real = checkpoint.save

    def save(result: Any, directory: Any, **options: Any) -> Path:
        if Path(directory).name == "folded":
            with torch.no_grad():
                result.model.conv1.weight.mul_(1.01)
        return real(result, directory, **options)

    monkeypatch.setattr(checkpoint, "save", save)
    body = bench(capfd, *SMALL, "--size", "32", "--batch", "1", "--runtime", "eager")
    assert [(row["form"], row["status"]) for row in body["rows"]] == [("original", "ok"), ("folded", "wrong")]


def test_what_fails_is_a_row(here: Path) -> None:
    good = Form("good", {"torchscript": lambda: scripted(Times(1), here / "good.ts")}, answers=Times(1))

    def refuse() -> Path:
        raise OptionError("no such luck")

    (here / "bad.ts").write_bytes(b"nothing")
    refused = Form("refused", {"torchscript": refuse}, answers=Times(1))
    broken = Form("broken", {"torchscript": lambda: here / "bad.ts"}, answers=Times(1))
    group = Group("x", [refused, good, broken], (3, 8, 8))
    rows = Benchmark(Settings(rounds=1, seconds=0.01), here, ["torchscript"]).run([group])
    assert [row.status for row in rows] == ["failed", "ok", "failed"]
    assert rows[0].reason == "no such luck"
    assert rows[1].speedup == 1  # the first that runs, where the first does not
    assert "\n" not in rows[2].reason
    rows = Benchmark(Settings(device="mps"), here, ["torchscript"]).run([group])
    assert {(row.status, row.reason) for row in rows} == {("skipped", "it does not run on mps here")}


def test_a_process_that_dies_is_a_row(here: Path) -> None:
    good = Form("good", {"torchscript": lambda: scripted(Times(1), here / "good.ts")}, answers=Times(1))
    benchmark, group = Benchmark(Settings(rounds=2, seconds=0.01), here, []), Group("x", [good], (3, 8, 8))
    with ExitStack() as stack:
        first, second = (benchmark.start(group, 1, good, "torchscript", stack) for _ in range(2))
        assert first.worker is not None
        assert second.worker is not None
        os.kill(first.worker.process.pid, signal.SIGKILL)
        benchmark.time([first, second], "")
    assert first.row.reason == "its process died (SIGKILL)"
    assert [row.status for row in timing.finished_rows([first, second])] == ["failed", "ok"]
    assert not second.worker.process.is_alive()


def test_a_network_that_cannot_be_folded(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise RefusedError("nothing to convert to folded", "the network has no norm")

    monkeypatch.setattr(conversion, "convert", refuse)
    group = of_model("demo", checkpoint.open_model(MODEL), making(here / "files", Settings(), [1]))
    rows = Benchmark(Settings(rounds=1, seconds=0.01), here, ["eager"]).run([group])
    assert [(row.form, row.status) for row in rows] == [("original", "ok"), ("folded", "failed")]
    assert rows[1].reason == "nothing to convert to folded: the network has no norm"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what the peak was")
def test_memory_is_that_of_the_network(here: Path) -> None:
    peaks = []
    for outputs in (8, 24 * 1024):  # the weights take 32 KiB, 96 MiB
        file, example = here / f"{outputs}.pt2", (torch.zeros(1, 1024),)
        torch.export.save(torch.export.export(nn.Linear(1024, outputs), example), file)
        worker = Worker(here)
        images = np.zeros((1, 1024), np.float32)
        peaks.append(worker.ask(begin, "eager", file, "pt2", Settings(), images).memory or 0)
        worker.close()
    assert peaks[1] - peaks[0] == pytest.approx(96, rel=0.1)


@pytest.fixture
def two_threads() -> Iterator[Settings]:
    before = torch.get_num_threads()
    yield Settings(threads=2)
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="OpenVINO takes no more threads than there are cores")
def test_threads_are_those_that_are_asked_for(here: Path, two_threads: Settings) -> None:
    model = checkpoint.open_model(MODEL)
    made = original(model, network_input.size(model), making(here, two_threads, [1])).make
    images = np.zeros((1, *network_input.size(model)), np.float32)
    runtimes.RUNTIMES["eager"].start(made["directory"](), "directory", "", two_threads, images)
    assert torch.get_num_threads() == 2
    in_ort: Any = runtimes.RUNTIMES["onnxruntime"].start(made["onnx"](), "onnx", "", two_threads, images).engine
    options = in_ort.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    in_openvino: Any = runtimes.RUNTIMES["openvino"].start(made["onnx"](), "onnx", "", two_threads, images).engine
    assert in_openvino.get_property("INFERENCE_NUM_THREADS") == 2
    assert in_openvino.get_property("INFERENCE_PRECISION_HINT").to_string() == "f32"


# --- the runtimes -----------------------------------------------------------------------------------------------------


def test_runtimes_are_found_by_name() -> None:
    assert runtimes.find("compile:max-autotune") == (runtimes.RUNTIMES["compile"], "max-autotune")
    assert runtimes.find("eager") == (runtimes.RUNTIMES["eager"], "")
    opened = {kind for runtime in runtimes.RUNTIMES.values() for kind in runtime.opens}
    assert opened == {"directory", *source_names.EXPORTED.values()} - {"coreml"}


def test_a_file_that_no_wanted_runtime_opens_is_timed_in_its_own(here: Path) -> None:
    of_file = Form("a.ts", {"torchscript": lambda: here / "a.ts"})
    network = Form("original", {"directory": lambda: here, "onnx": lambda: here / "a.onnx"}, foldable=True)
    asked = Benchmark(Settings(), here, ["onnxruntime", "openvino"])
    pairs = [(form.name, name) for form, name in asked._pairs(Group("x", [network, of_file], (3, 8, 8)))]
    assert pairs == [
        ("original", "eager"), ("original", "onnxruntime"), ("original", "openvino"), ("a.ts", "torchscript"),
    ]  # fmt: skip
    own = {kind: runtimes.own({kind}) for kind in ("directory", *source_names.EXPORTED.values())}
    assert own == {
        "directory": [], "onnx": ["onnxruntime"], "openvino": ["openvino"], "pt2": ["eager"],
        "torchscript": ["torchscript"], "ncnn": ["ncnn"], "executorch": ["executorch"], "litert": ["litert"],
        "coreml": [],
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "wanted"), [("fp16", ["eager"]), ("bf16", ["eager", "torchscript"])])
def test_half_precision(here: Path, dtype: str, wanted: list[str]) -> None:
    settings = Settings(dtype=dtype, channels_last=True, rounds=1, seconds=0.01)
    model = checkpoint.open_model(MODEL)
    found = groups([(MODEL, "demo", model)], making(here, settings, [2]))
    rows = Benchmark(settings, here, wanted, [2]).run(found)
    assert [row.status for row in rows] == ["ok"] * 2 * len(wanted)
    assert all(1e-5 < (row.error or 0) < timing.BOUNDS[dtype] for row in rows)  # it was no float32 that ran


def test_a_plot_of_what_was_not_timed(here: Path) -> None:
    rows = [TimedRow("n", "original", "eager", 1, "failed", "no"), TimedRow("n", "folded", "eager", 1, "skipped", "no")]
    assert timing_plot.plot(rows, here / "a.svg").read_text().count("<svg") == 1


@pytest.mark.slow
def test_compiled_networks_agree_and_say_how_long_they_took(here: Path, capfd: Capture) -> None:
    rows = bench(capfd, *SMALL, "--size", "32", "--batch", "2", "--runtime", "compile")["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 3
    eager, *compiled = (row["ready_s"] for row in rows)
    assert all(seconds > eager for seconds in compiled)


@pytest.mark.gpu
def test_on_a_gpu(capfd: Capture) -> None:
    names = "eager,compile,compile:reduce-overhead,compile:max-autotune,torchscript"
    rows = bench(
        capfd, *SMALL, "--size", "64", "--batch", "1,16", "--runtime", names, "--device", "cuda", "--dtype", "bf16",
        "--channels-last",
    )["rows"]  # fmt: skip
    assert [row["status"] for row in rows] == ["ok"] * 20
    assert all(row["memory_mib"] > 0 for row in rows)


@pytest.mark.slow
def test_original_is_exported_by_torch_alone(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain export keeps what our own would fold away, so the comparison is with what others get."""
    onnx = pytest.importorskip("onnx")
    torch.manual_seed(0)
    model = checkpoint.open_model("nf_resnet26", weights="random", arch_args={"num_classes": 2})
    file = original(model, (3, 32, 32), making(here, Settings(), [1])).make["onnx"]()
    assert any(node.op_type == "BatchNormalization" for node in onnx.load(file, load_external_data=False).graph.node)


def test_bars_are_as_long_as_their_speeds() -> None:
    rows = [
        TimedRow("n", form, "eager", 4, ms=ms, ms_low=ms - 0.5, ms_high=ms + 0.5, speedup=2 / ms)
        for form, ms in (("original", 2.0), ("folded", 1.0))
    ]
    axes = Figure().subplots()
    timing_plot._panel(axes, rows, ["original", "folded"])
    widths = {
        str(bars.get_label()): bars.patches[0].get_width() for bars in axes.containers if hasattr(bars, "patches")
    }
    assert widths["folded"] == pytest.approx(2 * widths["original"])
    assert [text.get_text() for text in axes.texts] == ["1.00 x", "2.00 x"]


def test_the_innermost_cause_is_told() -> None:
    outer = RuntimeError("outer")
    outer.__cause__ = KeyError("inner")
    assert reason(outer) == "KeyError: 'inner'"
    assert reason(ValueError("alone")) == "ValueError: alone"
    assert reason(OptionError("a file takes one", remedy="Give one")) == "a file takes one. Give one"


@pytest.mark.parametrize(("batches", "dynamic"), [([1], False), ([2], True), ([1, 2], True)])
def test_a_file_for_one_image_is_not_dynamic(here: Path, batches: list[int], dynamic: bool) -> None:
    assert making(here, Settings(), batches).dynamic is dynamic


def test_a_file_without_description_is_given_images_of_the_size_asked_for(here: Path) -> None:
    scripted(Times(1), here / "net.ts")
    assert of_file(here / "net.ts", None, None, 64)[1] == (3, 64, 64)
    assert of_file(here / "net.ts", None, None, None)[1] == (3, 224, 224)


def test_where_nobody_knows_what_is_right_the_first_is_compared_with(here: Path) -> None:
    group = Group("x", [Form("a", {}), Form("b", {})], (3, 8, 8))
    images = group.images(1).numpy()
    contenders = [
        timing.Contender(TimedRow("x", form, "eager", 1), ready=Ready(factor * images, 0.0, None))
        for form, factor in (("a", 1), ("b", 3))
    ]
    Benchmark(Settings(), here, [])._check(contenders, group, 1)
    assert [contender.row.status for contender in contenders] == ["ok", "wrong"]
    assert contenders[1].row.error == pytest.approx(2)


def test_onnxruntime_gives_the_answer_of_the_images_that_it_was_opened_with(here: Path) -> None:
    shaped = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (2, 3, 4, 4)) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "net", shaped[:1], shaped[1:])
    opset = [helper.make_opsetid("", 18)]
    (here / "net.onnx").write_bytes(helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString())
    images = np.random.default_rng(0).normal(size=(2, 3, 4, 4)).astype(np.float32)
    session = runtimes._onnxruntime(here / "net.onnx", "onnx", "", Settings(), images)
    session.run()
    assert np.array_equal(session.read(), 2 * images)


@pytest.mark.parametrize(
    ("device", "off", "status"), [("cpu", 5e-3, "wrong"), ("cuda", 5e-3, "ok"), ("cuda", 2e-2, "wrong")]
)
def test_a_gpu_may_round_what_it_convolves(here: Path, device: str, off: float, status: str) -> None:
    """Ten bits of mantissa (TF32) are allowed there, and no more."""
    form = Form("net", {}, answers=Times(1))
    group = Group("x", [form], (3, 8, 8))
    output = group.images(1).numpy() * (1 + off)
    contender = timing.Contender(TimedRow("x", "net", "eager", 1), ready=Ready(output, 0.0, None))
    Benchmark(Settings(device=device), here, [])._check([contender], group, 1)
    assert contender.row.status == status
