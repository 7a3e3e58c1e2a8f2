"""Commands as the tests run them: in a folder of their own, with JSON that is read.

A refusal is one line on stderr.
"""

import importlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from normswap import shipped
from normswap.cli.app import load, main

MODEL = str(shipped.FOLDER)


Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, for the tests of a folder whose conftest names this."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_json(capfd: Capture, *arguments: str, code: int = 0) -> Any:
    """Run with --json and return what it prints: JSON with the keys that --help lists.

    Nothing else is printed, and nothing on stderr.
    """
    capfd.readouterr()
    assert main([*arguments, "--json"]) == code
    out, err = capfd.readouterr()
    assert err == ""
    return as_documented(out, *arguments)


# A message that says one of these comes too late, or from a wrong call.
_TOO_LATE = (
    "computes something else|is wrong:|cannot run it|does not take it|does not run on|No such"
    " option"
)


def made_or_refused(capfd: Capture, folder: Path, *arguments: str) -> Any:
    """What --json prints, or None for a refusal.

    A refusal is one line and leaves the folder empty. "The result is wrong" is no refusal: it
    should have been right, or refused before it was made.
    """
    capfd.readouterr()
    code = main([*arguments, "--json"])
    out, err = capfd.readouterr()

    assert "Traceback" not in out + err

    if not code:
        return json.loads(out)

    assert code == 2, err
    assert err.startswith("error: ")
    assert err.count("\n") == 1, err
    assert list(folder.iterdir()) == []
    assert not re.search(_TOO_LATE, err), err
    return None


def as_documented(text: str, *arguments: str) -> Any:
    """The JSON that these arguments have printed; it must have the keys that --help lists."""
    body = json.loads(text, parse_constant=pytest.fail)
    records = body if isinstance(body, list) else [body]
    for record in records:
        assert {*record} in documented(arguments)
    return body


def documented(arguments: Sequence[str]) -> list[set[str]]:
    """The keys of --json that the --help of a command lists, for each form of its answer."""
    keys = importlib.import_module(f"normswap.cli.commands.{arguments[0]}_command").KEYS

    forms: list[set[str]] = []
    for form in re.sub(r"\([^()]*\)", "", keys).split(";"):
        _, _, listed = form.rpartition(":")
        forms.append({key.strip() for key in listed.split(",")})
    return forms


def options_of(command: str) -> set[str]:
    """The long names of a command's options."""
    names: list[str] = []
    for option in load(command).params:
        names += [*option.opts, *option.secondary_opts]
    return {name for name in names if name.startswith("--")}


def files(folder: Path) -> dict[str, bytes | None]:
    """The contents of all files by path; None for a folder. Python's own caches are left out."""
    contents: dict[str, bytes | None] = {}
    for path in folder.rglob("*"):
        if "__pycache__" not in path.parts:
            content = path.read_bytes() if path.is_file() else None
            contents[str(path.relative_to(folder))] = content
    return contents


DEMO = ("convert", MODEL, "--to")


def refused(
    arguments: tuple[str, ...],
    parts: tuple[str, ...],
    here: Path,
    capfd: Capture,
    *,
    code: int = 2,
) -> None:
    """Run a command that must be refused.

    Its exit code is `code` (2 for bad input, 1 for a wrong result), stderr is one line that has
    all of `parts`, and no file has changed.
    """
    before = files(here)
    capfd.readouterr()
    assert main(arguments) == code

    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err

    for part in parts:
        assert part in err
    assert files(here) == before


FEW = ("--samples", "60", "--batch-size", "20", "--workers", "0")
# What a reader puts in the place of words in capitals.
READER = {
    "IMAGES": "demo",
    "DATA": "demo",
    "MODEL": MODEL,
    "SCHEME": "affine",
    "FILE.onnx": "FILE.pt2",
}
# Options that make a command quick.
QUICK = {
    "evaluate": FEW,
    "verify": ("--samples", "20", "--workers", "0"),
    "bench": ("--batch-size", "1", "--seconds", "0.01"),
    "recalibrate": FEW,
    "spp": ("--samples", "8", "--workers", "0"),
}


def named_commands(text: str) -> Iterator[list[str]]:
    """Yield every `normswap ...` of a text, as words, with those of `READER` in place."""
    for line in re.findall(r"normswap ((?:[^\s`;,()]+ ?)+)", text):
        words = [READER.get(word, word) for word in shlex.split(line.rstrip(" .:"))]
        yield [word.replace(".onnx", ".pt2") for word in words]


def environment() -> dict[str, str]:
    """The environment of a process that imports tests/support."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
