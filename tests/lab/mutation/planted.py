"""Errors, planted one by one in a copy of the package: which tests notice?

    python tests/lab/mutation/planted.py [--only PART_OF_A_NAME] [--minutes 30] [-o tests/lab/mutation/planted.md]

The errors are those of the files `errors_of_*.py`. Each is patched into a temporary copy, never into the checkout,
where the tests that must notice it then run; unpatched they have to pass first. What is known is kept in
runs/planted.jsonl and taken from there as long as the patched file, the patch and the tests are the same. The table is
what is known of all errors; those that it did not have come first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import errors_of_additions
import errors_of_changes
import errors_of_constants
import errors_of_devices
import errors_of_fitting
import errors_of_layers
import errors_of_proof
import errors_of_rescaling
import errors_of_runs
import errors_of_survivors
from planted_error import Planted
from workplace import LIMIT, ROOT, check_the_copy, circumstance, copied, outcome_of, written

FILES = (
    errors_of_proof, errors_of_constants, errors_of_devices, errors_of_fitting, errors_of_rescaling,
    errors_of_layers, errors_of_runs, errors_of_survivors, errors_of_additions, errors_of_changes,
)  # fmt: skip
ERRORS = tuple(error for file in FILES for error in file.ERRORS)
KNOWN = ROOT / "runs" / "planted.jsonl"
AT_ONCE = 40  # errors whose tests are run without any, in one process
SAID = "| killed |", "| **survived** |"  # in a row


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
    with written(file, patched(error, file.read_text(encoding="utf-8"))):
        yield


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
    parser.add_argument("--minutes", type=float, default=float("inf"), help="plant no more errors after so long")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    rows = known()
    missing = [error for error in ERRORS if args.only in error.name and digest(error) not in rows]
    before = args.output.read_text(encoding="utf-8") if args.output and args.output.exists() else ""
    missing.sort(key=lambda error: f"| {error.name} |" in before)
    if missing:
        measure(missing, args.minutes)
    rows = known()
    text = table([(error, rows.get(digest(error))) for error in ERRORS], before)
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


def measure(errors: Sequence[Planted], minutes: float) -> None:
    """Plant each, until the time is over, and add what came of them to what is known."""
    for error in errors:
        patched(error, (ROOT / error.file).read_text(encoding="utf-8"))
    end = time.monotonic() + 60 * minutes
    KNOWN.parent.mkdir(exist_ok=True)
    with copied() as place:  # the checkout may change while this goes on
        check_the_copy(place)
        commit = circumstance().commit()  # the first to import the package, here
        for first in range(0, len(errors), AT_ONCE):
            some = errors[first : first + AT_ONCE]
            tests = list(dict.fromkeys(test for error in some for test in error.tests))
            if time.monotonic() < end and (sound := outcome_of(place, tests, limit=6 * LIMIT)).killed:
                raise SystemExit(f"{sound.first} fails without any error planted")
            for error in some:
                if time.monotonic() > end:
                    return
                _measure_one(error, place, commit)


def _measure_one(error: Planted, place: Path, commit: str) -> None:
    start, name = time.perf_counter(), digest(error, place)
    with planted(error, place):
        outcome = outcome_of(place, error.tests)
    row = {"digest": name, "name": error.name, **outcome._asdict(), "commit": commit,
           "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip
    with KNOWN.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")
    print(f"{'killed' if outcome.killed else 'SURVIVED'}: {error.name} {outcome.first}", file=sys.stderr, flush=True)


def table(rows: Sequence[tuple[Planted, dict[str, Any] | None]], before: str) -> str:
    """What came of each error, in Markdown.

    Args:
        before: the table that there was: its rows stay, with their commits, where nothing later is known.
    """
    lines: list[str] = []
    older = {line.split(" | ")[0]: line for line in before.splitlines() if any(said in line for said in SAID)}
    kept = 0
    for error, row in rows:
        if row is None and f"| {error.name}" in older:
            lines.append(older[f"| {error.name}"])
            kept += 1
            continue
        said = ("killed" if row["killed"] else "**survived**") if row else "not planted"
        first = f"`{row['first']}`" if row and row["first"] else ""
        cells = [error.name, f"`{error.file}`", said, first]
        lines.append(f"| {' | '.join(cells)} | {row['seconds'] if row else ''} | {row['commit'] if row else ''} |")
    killed, survived = (sum(said in line for line in lines) for said in SAID)
    missing = len(lines) - killed - survived
    return "\n".join([
        "# Planted errors", "",
        f"{killed} of {killed + survived} were noticed by the tests that must notice them"
        + (f"; {missing} were not planted" if missing else "") + "."
        + (f" {kept} rows are of an earlier commit, which they name, and were not planted again."
           if kept else ""), "",
        *circumstance().lines("python tests/lab/mutation/planted.py -o tests/lab/mutation/planted.md", "cpu"),
        "| error | file | outcome | first test to fail | seconds | commit |", "|---|---|---|---|---|---|", *lines, "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
