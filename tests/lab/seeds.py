"""Tests of generated cases, with seeds of their own for a time: does any case that the default run never met fail?

    python tests/lab/seeds.py --minutes 30 -o tests/lab/seeds.md      # once for each release

Each round is one run of pytest over every file that uses hypothesis, with a seed that is written down. A case that
fails is kept twice: hypothesis writes a patch that adds it to its test as an `@example` (`.hypothesis/patches`, where
libcst is installed), and the table has the command that shows it again.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent / "mutation"))
from workplace import ROOT, circumstance

OUTCOMES = re.compile(r"(\d+) (passed|failed|error)")
EXAMPLES = re.compile(r"- (\d+) passing,")


class Round(NamedTuple):
    """One run.

    Args:
        seed: hypothesis's.
        tests, examples: how many were run.
        failed: the paths of tests that failed.
    """

    seed: int
    tests: int
    examples: int
    failed: tuple[str, ...]


def generated() -> list[str]:
    """The files of tests that hypothesis makes cases for, from the root of the repository."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if "from hypothesis import" in file.read_text("utf-8")]


def command(seed: int, tests: list[str]) -> list[str]:
    """What runs the tests with a seed: those that hypothesis makes cases for."""
    return ["pytest", "-q", "-m", "hypothesis", f"--hypothesis-seed={seed}",
            "--hypothesis-show-statistics", "-p", "no:cacheprovider", *tests]  # fmt: skip


def run(seed: int, tests: list[str]) -> Round:
    """One round.

    Raises:
        SystemExit: pytest itself could not run.
    """
    ran = subprocess.run([sys.executable, "-m", *command(seed, tests)], capture_output=True, text=True, cwd=ROOT)
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-2000:])
    failed = tuple(sorted(set(re.findall(r"^FAILED (\S+)", ran.stdout, re.M))))
    count = sum(int(number) for number, _ in OUTCOMES.findall(ran.stdout.splitlines()[-1]))
    return Round(seed, count, sum(map(int, EXAMPLES.findall(ran.stdout))), failed)


def rounds(minutes: float, first: int) -> Iterator[Round]:
    """Rounds with seeds from `first` on until the time is over; at least one."""
    end, tests = time.monotonic() + 60 * minutes, generated()
    seed = first
    while seed == first or time.monotonic() < end:
        yield run(seed, tests)
        seed += 1


def table(done: list[Round], minutes: float) -> str:
    """What came of it, in Markdown."""
    failed = [one for one in done if one.failed]
    lines = [
        "# Generated cases with fresh seeds", "",
        f"{sum(one.examples for one in done):,} cases in {len(done)} rounds of {len(generated())} files; "
        + (f"{len(failed)} rounds failed." if failed else "none failed."), "",
        *circumstance().lines(f"python tests/lab/seeds.py --minutes {minutes:g} -o tests/lab/seeds.md", "cpu"),
        "| seeds | tests | cases | failed |", "|---|---|---|---|",
    ]  # fmt: skip
    good = [one for one in done if not one.failed]
    if good:
        lines.append(f"| {good[0].seed} to {good[-1].seed} ({len(good)}) | {sum(one.tests for one in good)} | "
                     f"{sum(one.examples for one in good):,} | |")  # fmt: skip
    for one in failed:
        again = f"`{' '.join(command(one.seed, list(one.failed)))}`"
        lines.append(f"| {one.seed} | {one.tests} | {one.examples:,} | {again} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="how long")
    parser.add_argument("--first", type=int, default=int(time.time()) % 10**6, help="the first seed")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    done = []
    for one in rounds(args.minutes, args.first):
        done.append(one)
        print(f"seed {one.seed}: {one.tests} tests, {one.examples} cases; failed: {', '.join(one.failed) or 'none'}",
              file=sys.stderr)  # fmt: skip
    text = table(done, args.minutes)
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")
    if any(one.failed for one in done):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
