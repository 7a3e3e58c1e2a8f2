"""`normswap bench`: what is timed, what is not, and the arithmetic between."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command_line import MODEL, Capture, run_json
from torch import Tensor, nn

from normswap.benchmarking import timing
from normswap.benchmarking.timing import Contender
from normswap.cli.app import main
from normswap.cli.commands import bench_command
from normswap.cli.options import Opening
from normswap.errors import OptionError, RefusedError
from normswap.storage import checkpoint
from normswap.surgery import conversion

SMALL = (
    "resnet18",
    "--weights",
    "random",
    "--arch-arg",
    "channels=8,8,16,16",
    "--num-classes",
    "5",
)
SIZE = ("--input-size", "3,32,32")
SHORT = ("--seconds", "0.02")
CPU = torch.device("cpu")
IMAGES = torch.ones(4, 3, 2, 2)
KEYS = {
    "form",
    "runtime",
    "batch",
    "status",
    "reason",
    "verdict",
    "error",
    "ms",
    "ms_low",
    "ms_high",
    "images_per_s",
    "speedup",
}


def bench(capfd: Capture, *arguments: str) -> Any:
    return run_json(capfd, "bench", *arguments, *SHORT)


def times(factor: float, **settings: Any) -> Contender:
    return Contender(f"times {factor}", "torch", lambda x: factor * x, **settings)


def test_figures_of_a_row() -> None:
    """The quartiles of a pass, in milliseconds, and the medians of both for the speedup."""
    row = timing.figures([0.2, 0.9, 0.1, 0.5, 0.4], 4, first=[9.0, 0.8, 0.1])

    assert row == pytest.approx(
        {"ms": 400, "ms_low": 200, "ms_high": 500, "images_per_s": 10, "speedup": 2}
    )


@pytest.mark.parametrize(
    "spoiled",
    [lambda y: y[:, :1], lambda y: y / 0, lambda y: float("nan") * y],
    ids=["another shape", "infinite", "NaN"],
)
def test_answers_that_cannot_be_compared_are_wrong(spoiled: Callable[[Tensor], Tensor]) -> None:
    contenders = [times(2), Contender("spoiled", "torch", lambda x: spoiled(2 * x))]

    _, row = timing.check_contenders(contenders, IMAGES, CPU)

    assert (row["status"], row["error"]) == ("wrong", float("inf"))


def test_nobody_always_runs_first() -> None:
    order: list[int] = []

    def contender(number: int) -> Contender:
        def run(images: Tensor) -> Tensor:
            order.append(number)
            return images

        return Contender(str(number), "torch", run)

    contenders = [contender(number) for number in range(3)]
    rows = timing.run(contenders, IMAGES, device=CPU, threads=1, seconds=1e-9)

    # Each answers once before; a turn is one or more passes in a row.
    assert [row["status"] for row in rows] == ["ok"] * 3
    turns = [number for number, passes in itertools.groupby(order[3:])]
    rounds = {tuple(turns[start : start + 3]) for start in range(0, 36, 3)}
    assert len(rounds) > 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_pass_is_timed_with_the_threads_and_for_the_seconds_that_are_asked_for(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An accelerator has finished its work whenever the clock is read."""
    waits: list[int] = []
    told: list[str] = []
    asked: list[tuple[int, float]] = []
    # The seconds of a pass, by the factor of the contender.
    seconds = {2.0: 0.2, 3.0: 0.1}

    class Timer:
        """torch's, but the passes take what `seconds` says."""

        def __init__(self, statement: str, *, globals: Any, timer: Any, num_threads: int) -> None:
            assert statement == "run(images)"
            self.factor = float(globals["run"](globals["images"]).mean())
            self.threads = num_threads
            self.clock = timer

        def blocked_autorange(self, *, min_run_time: float) -> Any:
            before = len(waits)
            assert self.clock() <= self.clock()
            assert len(waits) - before == (2 if device == "cuda" else 0)
            asked.append((self.threads, min_run_time))
            return SimpleNamespace(times=[seconds[self.factor]])

    monkeypatch.setattr(timing, "Timer", Timer)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: waits.append(1))
    contenders = [times(2), times(1.5, prepare=lambda x: 2 * x, expected=lambda y: 1.5 * y)]

    first, other = timing.run(
        contenders,
        IMAGES,
        device=torch.device(device),
        threads=3,
        seconds=timing.ROUNDS * 0.25,
        progress=told.append,
    )

    assert asked == [(3, 0.25)] * 2 * timing.ROUNDS
    assert len(told) == timing.ROUNDS
    for number, sentence in enumerate(told, start=1):
        assert f"{number} of {timing.ROUNDS}" in sentence
    for row, ms, speedup in ((first, 200, 1), (other, 100, 2)):
        assert [row[name] for name in ("ms", "ms_low", "ms_high")] == pytest.approx([ms] * 3)
        assert (row["speedup"], row["images_per_s"]) == pytest.approx((speedup, 4e3 / ms))
        assert (row["batch"], row["runtime"]) == (4, "torch")


def test_a_first_contender_without_numbers_is_wrong() -> None:
    (row,) = timing.check_contenders([times(float("nan"))], IMAGES, CPU)

    assert (row["status"], row["verdict"]) == ("wrong", "WRONG")


def test_what_is_wrong_or_fails_is_a_row_and_is_not_timed() -> None:
    def fails(x: Tensor) -> Tensor:
        raise RuntimeError("no such luck\nand more")

    contenders = [
        Contender("fails", "torch", fails),
        times(2),
        times(2.00001),
        times(2.01),
        times(4, expected=lambda y: 2 * y),
    ]

    rows = timing.run(contenders, IMAGES, device=CPU, threads=1, seconds=0.01)

    assert [row["status"] for row in rows] == ["failed", "ok", "ok", "wrong", "ok"]
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == [None, None, "MEASURED", "WRONG", "MEASURED"]
    assert rows[0]["reason"] == "no such luck"
    assert rows[3]["error"] == pytest.approx(0.005, rel=1e-3)
    assert "differ by 5.0e-03" in rows[3]["reason"]
    assert rows[3]["ms"] is None
    assert rows[1]["speedup"] == 1  # the first that runs
    assert rows[2]["speedup"] is not None


@pytest.mark.parametrize(
    ("device", "precision", "off", "status"),
    [
        ("cpu", "fp32", 5e-3, "wrong"),
        ("cuda", "fp32", 5e-3, "ok"),
        ("cuda", "fp32", 2e-2, "wrong"),
        ("cpu", "int8", 0.3, "ok"),
    ],
)
def test_a_gpu_and_int8_may_be_further_off(
    device: str, precision: str, off: float, status: str
) -> None:
    rows = timing.check_contenders(
        [times(1), times(1 + off, precision=precision)], IMAGES, torch.device(device)
    )
    assert [row["status"] for row in rows] == ["ok", status]


@pytest.mark.slow
def test_a_converted_network_and_its_exports(here: Path, capfd: Capture) -> None:
    """Files for one image, with pixels in and probabilities out, or not, beside the source."""
    assert main(["convert", *SMALL, "--to", "skipinit", "-o", "skip"]) == 0
    assert main(["export", "skip", "-o", "a.onnx", *SIZE, "--normalize", "--softmax"]) == 0
    assert main(["export", "skip", "-o", "a.pt2", *SIZE]) == 0

    body = bench(capfd, "skip", "a.onnx", "a.pt2", *SIZE, "--batch-size", "2,1")

    assert body["settings"]["size"] == [3, 32, 32]
    found = [(row["form"], row["runtime"], row["batch"], row["status"]) for row in body["rows"]]
    forms = [("skipinit", "torch"), ("folded", "torch"), ("a.onnx", "onnx"), ("a.pt2", "pt2")]
    assert found == [(*form, batch, "ok") for batch in (2, 1) for form in forms]
    for row in body["rows"]:
        assert row.keys() == KEYS
        assert row["error"] < 1e-4
        assert row["ms_low"] <= row["ms"] <= row["ms_high"]
    assert body["rows"][0]["speedup"] == 1

    assert main(["bench", "a.onnx", "--batch-size", "1", *SHORT]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == "next: normswap evaluate a.onnx --data IMAGES"

    assert main(["bench", "demo", "a.onnx"]) == 2
    message = " ".join(capfd.readouterr().err.split())
    assert "3x32x32" in message
    assert "3x64x64" in message

    assert main(["bench", "demo", "resnet18"]) == 2
    assert "resnet18 is no exported file" in capfd.readouterr().err


def test_a_wrong_folded_network_is_caught_and_one_that_is_refused_is_noted(
    capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = conversion.convert

    def wrong(*args: Any, **options: Any) -> Any:
        result = convert(*args, **options)
        with torch.no_grad():
            result.model.conv1.weight.mul_(1.01)
        return result

    def refuse(*args: Any, **options: Any) -> Any:
        raise RefusedError("nothing to fold")

    monkeypatch.setattr(conversion, "convert", wrong)

    body = bench(capfd, *SMALL, *SIZE, "--batch-size", "1")
    assert [row["form"] for row in body["rows"]] == ["original", "folded"]
    assert [row["status"] for row in body["rows"]] == ["ok", "wrong"]

    monkeypatch.setattr(conversion, "convert", refuse)

    body = bench(capfd, MODEL, "--batch-size", "1")
    assert [row["form"] for row in body["rows"]] == ["original"]
    assert "is not folded: nothing to fold" in body["notes"][0]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--batch-size", "0"], "--batch-size 0: it is a list of whole numbers from 1 up"),
        (["--batch-size", "1,x"], "--batch-size 1,x: it is a list"),
        (["--device", "tpu"], "device 'tpu': torch does not know it"),
    ],
)
def test_bad_input_gives_one_line(capfd: Capture, arguments: list[str], line: str) -> None:
    assert main(["bench", MODEL, *arguments]) == 2
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"error: {line}")


@pytest.mark.parametrize("forward", ["images, other", "images"])
def test_what_takes_or_gives_something_else_is_not_timed(
    forward: str, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = f"""
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    def forward(self, {forward}):
        return [self.norm(self.conv(images))]
"""
    (here / "own_to_time.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    monkeypatch.delitem(sys.modules, "own_to_time", raising=False)

    body = bench(capfd, "own_to_time:Own", "--weights", "random", *SIZE, "--batch-size", "1")

    assert {row["status"] for row in body["rows"]} == {"failed"}


@pytest.mark.gpu
def test_on_a_gpu(capfd: Capture) -> None:
    rows = bench(capfd, *SMALL, *SIZE, "--batch-size", "1,16", "--device", "cuda")["rows"]
    assert [row["status"] for row in rows] == ["ok"] * 4


def exported(name: str, side: int = 16, *, softmax: bool = False) -> Any:
    """An exported file of a network whose images have this side, which takes pixels."""
    settings = SimpleNamespace(softmax=softmax)
    return SimpleNamespace(
        file=Path(name),
        form=SimpleNamespace(name="onnx"),
        shape=(None, (3, side, side + 8)),
        precision="fp16",
        network=nn.Identity,
        request=lambda _: SimpleNamespace(raw=pixels, settings=settings),
    )


def pixels(images: Tensor) -> Tensor:
    return images * 255


@pytest.mark.parametrize("softmax", [False, True])
def test_a_file_is_given_its_own_input_and_compared_with_its_own_answers(softmax: bool) -> None:
    logits = torch.randn(2, 5)

    found = bench_command._file_contender(exported("a.onnx", softmax=softmax), nn.Identity())
    alone = bench_command._file_contender(exported("a.onnx", softmax=softmax), None)

    assert (found.form, found.runtime, found.precision) == ("a.onnx", "onnx", "fp16")
    assert found.prepare is pixels
    expected = logits.softmax(-1).log() if softmax else logits
    torch.testing.assert_close(found.expected(logits), expected)
    assert alone.prepare(logits) is logits
    assert alone.expected(logits) is logits


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], torch.Size]]:
    """What would be timed: the forms of all contenders, and the size of the images."""
    calls: list[tuple[list[str], torch.Size]] = []

    def note(contenders: list[Contender], images: Tensor, **_: object) -> list[Any]:
        calls.append(([each.form for each in contenders], images.shape))
        return []

    monkeypatch.setattr(timing, "run", note)
    return calls


def test_files_without_their_network_are_timed_on_images_of_the_first(
    timed: list[tuple[list[str], torch.Size]],
    here: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sides = {"a.onnx": 16, "b.onnx": 16, "other.onnx": 24}
    for name in sides:
        (here / name).touch()
    monkeypatch.setattr(bench_command, "exported_file", lambda name: exported(name, sides[name]))

    assert main(["bench", "a.onnx", "b.onnx", "--batch-size", "2,3"]) == 0

    forms = ["a.onnx", "b.onnx"]
    assert timed == [(forms, (2, 3, 16, 24)), (forms, (3, 3, 16, 24))]
    assert capfd.readouterr().out.splitlines()[-1] == "next: normswap evaluate a.onnx --data IMAGES"
    with pytest.raises(OptionError, match=r"other\.onnx takes images of 3x24x32"):
        bench_command._contenders("a.onnx", ["other.onnx"], Opening(), CPU)


def test_a_network_is_timed_with_its_folded_copy_and_exported_next(
    timed: list[tuple[list[str], torch.Size]], capfd: Capture
) -> None:
    assert main(["bench", MODEL, "--batch-size", "4"]) == 0

    assert timed == [(["original", "folded"], (4, 3, 64, 64))]
    assert capfd.readouterr().out.splitlines()[-1] == (
        f"next: normswap export {MODEL} -o FILE.onnx"
    )


@pytest.mark.parametrize(("weights", "gamma"), [("random", 1.0), ("pretrained", 0.0)])
def test_branches_of_an_untrained_network_are_switched_on(
    weights: str, gamma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a trained one stay: a branch that was trained to nothing is what it computes."""
    model: Any = checkpoint.open_model("demo")
    for name, parameter in model.named_parameters():
        if name.endswith("bn2.weight"):
            nn.init.zeros_(parameter)
    monkeypatch.setattr(Opening, "open", lambda *_, **__: model)

    opened, _, _ = bench_command._networks("net", Opening(weights=weights), CPU)

    for name, parameter in opened.named_parameters():
        if name.endswith("bn2.weight"):
            assert torch.equal(parameter, torch.full_like(parameter, gamma)), name
