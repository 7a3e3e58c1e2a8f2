"""What a command says last: the verdict, the next command, and the traceback of an error."""

import math
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.command_line import Capture
from support.small_trainings import network

from normswap.cli import app
from normswap.cli.app import main
from normswap.cli.commands import convert_command, export_command, verify_command
from normswap.surgery import reverification


def deviation(what: str, distance: float) -> dict[str, Any]:
    """An output or gradient under torch.compile: 2 is allowed, and rounding may explain 4."""
    return {"what": what, "relative_l2": distance, "allowed": 2.0, "rounding": 4.0}


NEAR = deviation("output", 1.0)
UNCLEAR = deviation("output", 3.0)
FAR = deviation("gradient", 5.0)
NOT_A_NUMBER = deviation("gradient", math.nan)


@pytest.mark.parametrize(
    ("passed", "compiled", "unproved", "verdict"),
    [
        (True, None, "", "PROVED"),
        (True, [NEAR], "", "PROVED"),
        (True, [NEAR, UNCLEAR], "", "NOT PROVED: under torch.compile the output"),
        (True, [UNCLEAR, FAR], "", "WRONG: under torch.compile the gradient"),
        (True, [NOT_A_NUMBER], "", "WRONG: under torch.compile the gradient"),
        (False, [UNCLEAR], "", "WRONG: they differ"),
        (False, None, "", "WRONG: they differ"),
        (True, None, "the outputs are constant", "NOT PROVED: the outputs are constant"),
    ],
)
def test_the_last_line_of_verify_says_what_is_proved(
    passed: bool, compiled: list[Any] | None, unproved: str, verdict: str
) -> None:
    report = {"exact": True, "unproved": unproved}
    body = {"passed": passed, "compiled": compiled, "report": report, "enough": True, "place": ""}

    assert verify_command._conclusion(body).startswith(verdict)
    assert bool(verify_command._unproved(body)) == verdict.startswith("NOT PROVED")


def test_a_recorded_source_is_opened_as_its_result_records_it_and_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = network("skipinit")
    given: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(
        verify_command, "open_model", lambda name, **options: given.append((name, options))
    )

    verify_command._recorded_source("net", result, "cuda")

    assert given == [("net", {"device": "cuda", **reverification.how(result)})]


@pytest.mark.parametrize(
    ("figures", "inputs", "command"),
    [
        (None, (), []),
        ((20, 20), (), ["evaluate", "net.onnx", "--data", "IMAGES"]),
        ((180, 20), (), ["verify", "net.onnx", "--against", "net", "--data", "IMAGES"]),
        ((20, 20), ("x: 1x2",), ["verify", "net.onnx", "--against", "net", "--data", "IMAGES"]),
    ],
)
def test_a_file_that_answers_each_image_is_evaluated_next_and_any_other_is_verified(
    figures: tuple[int, int] | None, inputs: tuple[str, ...], command: list[str]
) -> None:
    """Figures are of 20 images, for each of which a file gives one answer or nine."""
    measured = figures and SimpleNamespace(answers=figures[0], count=figures[1])
    exported: Any = SimpleNamespace(file="net.onnx", figures=measured, inputs=inputs)

    assert export_command._next_command(exported, ["net"]) == command


def test_the_last_scheme_that_is_typed_has_its_options_in_the_help() -> None:
    groupnorm = convert_command.left_out_of_help(["--to", "groupnorm"])
    skipinit = convert_command.left_out_of_help(["--to", "skipinit"])

    found = convert_command.left_out_of_help(["--to", "skipinit", "--to", "groupnorm"])

    assert found == groupnorm != skipinit


def test_the_traceback_of_a_bug_is_printed_as_python_prints_it(capfd: Capture) -> None:
    try:
        raise ValueError("a bug")
    except ValueError as error:
        expected = traceback.format_exc()
        app._print_traceback(error)

    assert len(expected.splitlines()) > 2
    assert capfd.readouterr().err == expected


def test_a_bug_is_no_wrong_result(capfd: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 says that a result is wrong, and 2 that the input is. Within Python a bug is raised."""
    monkeypatch.setattr(app, "app", _raising(ValueError("a bug")))
    monkeypatch.setattr(sys, "argv", ["normswap", "inspect", "demo"])

    assert app.main() == 3
    assert "Traceback (most recent call last):" in capfd.readouterr().err
    with pytest.raises(ValueError, match="a bug"):
        app.main(["inspect", "demo"])


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), "the memory does not"),
        (MemoryError("Unable to allocate 9 GiB"), "the memory does not suffice: Unable"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error."), "--workers 0"),
    ],
)
def test_too_little_memory_is_one_line(
    error: Exception, said: str, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "app", _raising(error))

    assert app.main(["inspect", "demo"]) == 2

    (line,) = capfd.readouterr().err.splitlines()
    assert said in line


def _raising(error: Exception) -> Callable[..., int]:
    def command(*_: object, **__: object) -> int:
        raise error

    return command


def test_debug_prints_the_traceback_in_lines(capfd: Capture, here: Path) -> None:
    assert main(["inspect", "nonsense", "--debug"]) == 2

    lines = capfd.readouterr().err.splitlines()
    assert "Traceback (most recent call last):" in lines
    assert any(line.startswith('  File "') and "normswap" in line for line in lines)
    assert lines[-1].startswith("error: ")
    assert sys.exc_info() == (None, None, None)
