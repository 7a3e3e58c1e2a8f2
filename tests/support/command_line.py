"""Commands as the tests run them: in a folder of their own, with JSON read, and refusals held to
one line.
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
    """Run with --json: stdout is JSON of the keys that --help lists, and nothing else; stderr is
    empty.
    """
    capfd.readouterr()
    assert main([*arguments, "--json"]) == code
    out, err = capfd.readouterr()
    assert err == ""
    return as_documented(out, *arguments)


def made_or_refused(capfd: Capture, folder: Path, *arguments: str) -> Any:
    """What --json prints; None for a refusal, which is one line and leaves the folder empty.

    That the result is wrong is no refusal: it should have been right, or refused before it was
    made.
    """
    capfd.readouterr()
    code = main([*arguments, "--json"])
    out, err = capfd.readouterr()

    assert "Traceback" not in out + err

    if not code:
        return json.loads(out)

    assert (code, err.count("\n"), err[:7], list(folder.iterdir())) == (2, 1, "error: ", []), err

    known = (
        "computes something else|is wrong:|cannot run it|does not take it|does not run on|No such"
        " option"
    )

    assert not re.search(known, err), err

    return None


def as_documented(text: str, *arguments: str) -> Any:
    """What these arguments have printed with --json: it has the keys that --help lists."""
    body = json.loads(text, parse_constant=pytest.fail)
    for one in body if isinstance(body, list) else [body]:
        assert {*one} in documented(arguments)
    return body


def documented(arguments: Sequence[str]) -> list[set[str]]:
    """The keys of --json that the --help of this command lists: of each form that its answer has."""
    keys = importlib.import_module(f"normswap.cli.commands.{arguments[0]}_command").KEYS
    forms = re.sub(r"\([^()]*\)", "", keys).split(";")
    return [{key.strip() for key in form.rpartition(":")[2].split(",")} for form in forms]


def options_of(command: str) -> set[str]:
    names = [
        name for option in load(command).params for name in (*option.opts, *option.secondary_opts)
    ]
    return {name for name in names if name.startswith("--")}


def files(folder: Path) -> dict[str, bytes | None]:
    """All files and folders, by path, but for what Python caches of a module that is imported."""
    paths = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in paths
    }


DEMO = ("convert", MODEL, "--to")


def refused(arguments: tuple[str, ...], said: tuple[str, ...], here: Path, capfd: Capture) -> None:
    """Exit code 2, one line on stderr that says all of `said`, and the same files as before."""
    before = files(here)
    capfd.readouterr()
    assert main(arguments) == 2

    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err

    for text in said:
        assert text in err
    assert files(here) == before


FEW = ("--samples", "60", "--batch-size", "20", "--workers", "0")
# What the reader puts in place of words in capitals; and what makes a command quick.
READER = {
    "IMAGES": "demo",
    "DATA": "demo",
    "MODEL": MODEL,
    "SCHEME": "affine",
    "FILE.onnx": "FILE.pt2",
}
QUICK = {
    "evaluate": FEW,
    "verify": ("--samples", "20", "--workers", "0"),
    "bench": ("--batch-size", "1", "--seconds", "0.01"),
    "recalibrate": FEW,
    "spp": ("--samples", "8", "--workers", "0"),
}


def named_commands(text: str) -> Iterator[list[str]]:
    """Every `normswap ...` of a text, as words, with the reader's in place."""
    for line in re.findall(r"normswap ((?:[^\s`;,()]+ ?)+)", text):
        words = [READER.get(word, word) for word in shlex.split(line.rstrip(" .:"))]
        yield [word.replace(".onnx", ".pt2") for word in words]


def environment() -> dict[str, str]:
    """Of a process that imports what these tests share."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path}
