"""Errors, planted one by one in a copy of the package: which tests notice?

    python tests/mutation/planted.py [--only PART_OF_A_NAME] [-o tests/mutation/planted.md]

The errors are those of the files `errors_of_*.py`. Each is patched into a temporary copy, never into the checkout,
where the tests that must notice it then run; unpatched they have to pass first. What is known is kept in
runs/planted.jsonl and taken from there as long as the patched file, the patch and the tests are the same. The table is
what is known of all errors.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import errors_of_constants
import errors_of_proof
import errors_of_runs
from planted_error import Planted

ERRORS = (*errors_of_proof.ERRORS, *errors_of_constants.ERRORS, *errors_of_runs.ERRORS)
ROOT = Path(__file__).resolve().parents[2]
KNOWN = ROOT / "runs" / "planted.jsonl"
_SERVER = multiprocessing.get_context("forkserver")  # imports what takes long once, and forks
_SERVER.set_forkserver_preload(["pytest", "hypothesis", "timm", "torchvision", "accelerate"])
_CODES = {0: 0, 1: 100}  # pytest's for tests that passed and failed; a process that breaks ends with 1, too
_LIMIT = 900  # seconds for the tests of one error: a test that then still runs has noticed
_FIRST = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(NamedTuple):
    """What the tests said: did they fail, and which of them first?"""

    killed: bool
    first: str


@contextmanager
def copied() -> Iterator[Path]:
    """A temporary copy of what git knows or would add: package, tests, recipes."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        place = Path(name)
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                (place / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, place / file)
        yield place


def patched(error: Planted, text: str) -> str:
    """The file's text with the error in it.

    Raises:
        SystemExit: the text that it replaces is not there, or there more than once.
    """
    count = text.count(error.old)
    if count != 1:
        raise SystemExit(f"{error.name}: {error.file} has its old text {count} times; it must be there once")
    return text.replace(error.old, error.new)


@contextmanager
def planted(error: Planted, place: Path) -> Iterator[None]:
    """For a while, the copy at `place` has the error."""
    file = place / error.file
    before = file.read_text(encoding="utf-8")
    file.write_text(patched(error, before), encoding="utf-8")
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")


def outcome_of(place: Path, tests: Sequence[str]) -> Outcome:
    """Run some tests in the copy, up to the first that fails, in a process of their own.

    Raises:
        SystemExit: they cannot be run: no such test, or a file that cannot be imported.
    """
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder) / "said"
        process = _SERVER.Process(target=_run, args=(place, list(tests), said))
        process.start()
        process.join(_LIMIT)
        if process.exitcode is None:
            process.kill()
            process.join()
            return Outcome(True, f"none in {_LIMIT} s")
        text = said.read_text(encoding="utf-8")
    found = _FIRST.search(text)
    if process.exitcode not in _CODES.values():
        raise SystemExit(f"{' '.join(tests)} cannot be run: {text[-300:].strip()}")
    return Outcome(process.exitcode == _CODES[1], found.group(1) if found else "")


def _run(place: Path, tests: list[str], said: Path) -> None:
    """In a process that has imported what takes long, but nothing of the package."""
    with said.open("w", encoding="utf-8") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    assert "normswap" not in sys.modules
    os.chdir(place)
    os.environ.update(PYTHONPATH=str(place), OMP_NUM_THREADS="1", COLUMNS="1000")
    sys.path[:] = [str(place), *(one for one in sys.path if ROOT not in (Path(one), *Path(one).parents))]
    sys.dont_write_bytecode = True
    import pytest

    # plugins that are there already have nothing to be rewritten
    quiet = ["-p", "no:cacheprovider", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    sys.exit(_CODES.get(int(pytest.main(["-x", "-q", *quiet, *tests])), 2))


def demand_the_copy(place: Path) -> None:
    """Raises:
    SystemExit: Python finds another package than the copy.
    """
    code = "import normswap; print(normswap.__file__)"
    env = {**os.environ, "PYTHONPATH": str(place)}
    found = subprocess.run([sys.executable, "-c", code], cwd=place, env=env, capture_output=True, text=True, check=True)
    if place.resolve() not in Path(found.stdout.strip()).resolve().parents:
        raise SystemExit(f"tests would not see what is planted: Python finds {found.stdout.strip()}")


def digest(error: Planted, place: Path = ROOT) -> str:
    """Of all that decides the outcome, but for the rest of the package."""
    files = [error.file, *sorted({test.partition("::")[0] for test in error.tests})]
    parts = [*map(str, error), *((place / file).read_text(encoding="utf-8") for file in files)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def known() -> dict[str, dict[str, Any]]:
    """What is known, by digest."""
    lines = KNOWN.read_text(encoding="utf-8").splitlines() if KNOWN.exists() else []
    return {row["digest"]: row for row in map(json.loads, lines)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="errors whose name has this in it")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    rows = known()
    missing = [error for error in ERRORS if args.only in error.name and digest(error) not in rows]
    if missing:
        measure(missing)
    rows = known()
    text = table([(error, rows.get(digest(error))) for error in ERRORS])
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


def measure(errors: Sequence[Planted]) -> None:
    """Plant each, and add what came of it to what is known."""
    for error in errors:
        patched(error, (ROOT / error.file).read_text(encoding="utf-8"))
    KNOWN.parent.mkdir(exist_ok=True)
    with copied() as place:  # the checkout may change while this goes on
        demand_the_copy(place)
        commit = circumstance().commit()  # the first to import the package, here
        sound = outcome_of(place, list(dict.fromkeys(test for error in errors for test in error.tests)))
        if sound.killed:
            raise SystemExit(f"{sound.first} fails without any error planted")
        for error in errors:
            start, name = time.perf_counter(), digest(error, place)
            with planted(error, place):
                outcome = outcome_of(place, error.tests)
            row = {"digest": name, "name": error.name, **outcome._asdict(), "commit": commit,
                   "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
            with KNOWN.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{'killed' if outcome.killed else 'SURVIVED'}: {error.name} {outcome.first}", file=sys.stderr)


def circumstance() -> Any:
    """Of all tables of the repository."""
    sys.path.insert(0, str(ROOT / "tests" / "benchmarks"))
    import circumstances

    return circumstances


def table(rows: Sequence[tuple[Planted, dict[str, Any] | None]]) -> str:
    """What came of each error, in Markdown."""
    done = [row for _, row in rows if row]
    killed = sum(row["killed"] for row in done)
    lines = [
        "# Planted errors", "",
        f"{killed} of {len(done)} were noticed by the tests that must notice them"
        + (f"; {len(rows) - len(done)} were not planted" if len(done) < len(rows) else "") + ".", "",
        *circumstance().lines("python tests/mutation/planted.py -o tests/mutation/planted.md", "cpu"),
        "| error | file | outcome | first test to fail | seconds | commit |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for error, row in rows:
        said = ("killed" if row["killed"] else "**survived**") if row else "not planted"
        first = f"`{row['first']}`" if row and row["first"] else ""
        cells = [error.name, f"`{error.file}`", said, first]
        lines.append(f"| {' | '.join(cells)} | {row['seconds'] if row else ''} | {row['commit'] if row else ''} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
