"""Errors drawn at random from all that cosmic-ray can make of the package: does any test notice?

    pip install cosmic-ray pytest-cov
    python tests/lab/mutation/reached.py                                   # which tests reach which line
    python tests/lab/mutation/drawn.py --seed 1 --count 25 -o tests/lab/mutation/drawn_1.md        # resumes
    python tests/lab/mutation/numbers_of_errors.py                                   # all drawings in one table

In every room places are drawn (a place is a node of the source that an operator of
cosmic-ray changes, annotations apart: they are never evaluated), then one of the operators at each. The error is
planted in a copy, where tests that reach its line run until one fails: of each test function one case, the quickest
first, as long as they fit the budget. What is known is kept in runs/drawn.jsonl for the text of the file as it is.
Who survives is given more time with `--again`; what cannot be told from the right program is named in
`equivalents.py`, with the reason; `noticed.py` names tests to run first.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import itertools
import json
import multiprocessing
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import reached
from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from equivalents import EQUIVALENTS, UNNOTICED, Reason
from noticed import NOTICED
from workplace import ROOT, check_the_copy, circumstance, compile_all, copied, outcome_of, written

ROOMS = (
    "graph", "folding", "schemes", "surgery", "layers", "storage", "calibration", "training", "exporting", "models",
    "images", "diagnosis", "analysis", "benchmarking", "reporting", "cli",
)  # fmt: skip
KNOWN = ROOT / "runs" / "drawn.jsonl"
RECORDS = (
    "tests/house/test_house.py::test_records_do_not_change_but_those_that_grow"  # reads the source: reaches no line
)


class Mutant(NamedTuple):
    """One error.

    Args:
        file: from the root of the repository.
        operator: cosmic-ray's name.
        occurrence: the operator's how-manieth place in the file.
        first, last: the lines of the place.
        inside: the function or class.
    """

    file: str
    operator: str
    occurrence: int
    first: int
    last: int
    inside: str

    def text(self) -> str:
        """The file with the error in it."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        return str(mutate_code(source, get_operator(self.operator)(), self.occurrence))

    def change(self) -> str:
        """The line as it is and as it becomes."""
        before = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        lines = [line for line in difflib.ndiff(before, self.text().splitlines()) if line[:1] in "+-"]
        return " ".join(f"{line[0]} {line[1:].strip()}" for line in lines)[:300]

    def key(self) -> str:
        """Of the error and of all the text of its file."""
        source = (ROOT / self.file).read_text(encoding="utf-8")
        return hashlib.sha256("\0".join([*map(str, self), source]).encode()).hexdigest()[:16]


def annotations(source: str) -> set[tuple[int, int]]:
    """Where annotations stand: every (line, column) that they cover."""
    covered: set[tuple[int, int]] = set()
    for node in ast.walk(ast.parse(source)):
        found = [getattr(node, name, None) for name in ("annotation", "returns")]
        for one in filter(None, found):
            for inner in ast.walk(one):
                if hasattr(inner, "col_offset"):
                    end = inner.end_col_offset if inner.end_lineno == inner.lineno else inner.col_offset + 200
                    covered |= {(inner.lineno, column) for column in range(inner.col_offset, end)}
    return covered


def drawn(room: str, count: int, seed: int) -> list[Mutant]:
    """`count` errors of a room, at different places, in the order in which they were drawn.

    A place is drawn by what stands there, not by how many stand before it: what changes elsewhere draws no other.
    """
    places: dict[str, list[Mutant]] = defaultdict(list)
    for file in sorted((ROOT / "normswap" / room).rglob("*.py")):
        for place, mutant in mutants_of(str(file.relative_to(ROOT))):
            places[place].append(mutant)
    ordered = sorted(places, key=lambda place: _lot(seed, place))
    choices = (sorted(places[place], key=lambda mutant: _lot(seed, place, mutant.operator)) for place in ordered)
    made = (next(filter(_can_be_made, mutants), None) for mutants in choices)
    return list(itertools.islice(filter(None, made), count))


def mutants_of(name: str) -> Iterator[tuple[str, Mutant]]:
    """Every error of a file (from the root of the repository), and in words the place where it is."""
    source = (ROOT / name).read_text(encoding="utf-8")
    lines, unseen = source.splitlines(), annotations(source)
    for item in _all_work_items([ROOT / name], {}):
        spec = item.mutations[0]
        (first, start), (last, end) = spec.start_pos, spec.end_pos
        if (first, start) not in unseen:
            inside = spec.definition_name or "the file"
            alike = lines[: first - 1].count(lines[first - 1])
            words = (name, inside, lines[first - 1], alike, start, last - first, end)
            mutant = Mutant(name, spec.operator_name, spec.occurrence, first, last, inside)
            yield "\0".join(map(str, words)), mutant


def _can_be_made(mutant: Mutant) -> bool:
    """Whether cosmic-ray knows how: it changes no exception with a dot in its name."""
    try:
        mutant.text()
    except AttributeError:
        return False
    return True


def _lot(seed: int, *words: str) -> str:
    """What decides where a place, or an operator there, stands in the order of a drawing."""
    return hashlib.sha256("\0".join([str(seed), *words]).encode()).hexdigest()


def known() -> dict[str, dict[str, Any]]:
    """What is known, by key; of several tries the last."""
    lines = KNOWN.read_text(encoding="utf-8").splitlines() if KNOWN.exists() else []
    return {row["key"]: row for row in map(json.loads, lines)}


def judged(mutant: Mutant, place: Path, budget: float) -> dict[str, Any]:
    """Plant it at `place` and run tests of `budget` seconds that reach it."""
    start = time.perf_counter()
    change = mutant.change()
    tests = [one.test for one in NOTICED if mutant.file.endswith(one.file) and one.change in change]
    tests += reached.tests(mutant.file, mutant.first, mutant.last, budget)
    tests += [RECORDS] * ("- @dataclass" in change)
    outcome = None
    if tests:
        with written(place / mutant.file, mutant.text()):
            outcome = outcome_of(place, tests, limit=60 + 6 * budget)
    return {"key": mutant.key(), **mutant._asdict(), "change": mutant.change(), "tests": len(tests),
            "killed": bool(outcome and outcome.killed), "by": outcome.first if outcome else "",
            "seconds": round(time.perf_counter() - start, 1)}  # fmt: skip


def judge(mutants: Sequence[Mutant], budget: float) -> None:
    """In a copy of its own, in the order given; what comes of each is kept at once."""
    with copied() as place:
        check_the_copy(place)
        compile_all(place)
        for mutant in mutants:
            row = judged(mutant, place, budget)
            with KNOWN.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{'killed' if row['killed'] else 'SURVIVED'} {row['file']} {row['change']}", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=50, help="errors of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--budget", type=float, default=45, help="seconds of tests for one error, as they took before")
    parser.add_argument("--again", action="store_true", help="those that have survived, too, but for what is named")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="plant nothing, write the table of what is known")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    KNOWN.parent.mkdir(exist_ok=True)
    by_room = {room: drawn(room, args.count, args.seed) for room in ROOMS}
    rows = known()
    missing = [] if args.table else [mutant for turn in zip(*by_room.values(), strict=False) for mutant in turn]
    missing = [mutant for mutant in missing if not settled(mutant, rows.get(mutant.key()), args.again)]
    parts = [missing[at :: args.workers] for at in range(args.workers)]
    processes = [multiprocessing.Process(target=judge, args=(part, args.budget)) for part in parts if part]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    rows = known()
    check_that_they_pass({row["by"] for row in rows.values() if "::" in row["by"]})
    text = table(by_room, rows, args)
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


def check_that_they_pass(tests: set[str]) -> None:
    """Raises:
    SystemExit: a test that noticed an error fails without it, too.
    """
    rest = set(tests)
    with copied() as place:
        compile_all(place)
        while (outcome := outcome_of(place, sorted(rest))).killed:
            if outcome.first not in rest or outcome_of(place, [outcome.first]).killed:
                raise SystemExit(f"{outcome.first} fails without any error")
            rest.remove(outcome.first)  # by itself it passes: all of them in one process are not what noticed


def settled(mutant: Mutant, row: dict[str, Any] | None, again: bool) -> bool:
    """Whether there is nothing more to find out."""
    if row is None or row["killed"] or not again:
        return row is not None
    return reason(row) is not None or unnoticed(row) is not None


def reason(row: dict[str, Any]) -> str | None:
    """Why nothing could notice it, if somebody has said so."""
    return _named(EQUIVALENTS, row)


def unnoticed(row: dict[str, Any]) -> str | None:
    """Why no test notices it, if somebody has said so."""
    return _named(UNNOTICED, row)


def _named(reasons: Sequence[Reason], row: dict[str, Any]) -> str | None:
    found = (one.why for one in reasons if row["file"].endswith(one.file) and one.change in row["change"])
    return next(found, None)


def table(by_room: dict[str, list[Mutant]], rows: dict[str, dict[str, Any]], args: argparse.Namespace) -> str:
    """By room, then every survivor."""
    options = (
        f"--count {args.count} --seed {args.seed} --budget {args.budget:g} -o tests/lab/mutation/drawn_{args.seed}.md"
    )
    command = f"python tests/lab/mutation/drawn.py {options}"
    lines = ["# Errors drawn at random", "", *circumstance().lines(command, "cpu"),
             "Equivalent: nothing that the program says or writes is another. Killed: of those that are not. For each, tests"
             f" that reach its line run until one fails or {args.budget:g} s of them are over; that tells who survives and"
             " would be noticed by a longer test, not who is killed.", "",
             "| room | drawn | tried | killed | equivalent | survived | killed, % |",
             "|---|---|---|---|---|---|---|"]  # fmt: skip
    total = [0, 0, 0, 0]
    for room, mutants in by_room.items():
        done = [rows[key] for mutant in mutants if (key := mutant.key()) in rows]
        killed = sum(row["killed"] for row in done)
        same = sum(not row["killed"] and reason(row) is not None for row in done)
        total = [a + b for a, b in zip(total, (len(mutants), len(done), killed, same), strict=True)]
        lines.append(room_line(room, len(mutants), len(done), killed, same))
    lines += [room_line("all", *total), "", "| survivor | in | change | why |", "|---|---|---|---|"]
    lines += [survivor_line(row) for row in survivors(by_room, rows)]
    return "\n".join([*lines, ""])


def survivor_line(row: dict[str, Any]) -> str:
    """A row of the table of survivors."""
    why = reason(row)
    said = f"equivalent: {why}" if why else unnoticed(row) or "no test notices"
    change = row["change"].replace("|", "\\|")
    return f"| `{row['file']}` | `{row['inside']}` | `{change}` | {said} |"


def survivors(by_room: dict[str, list[Mutant]], rows: dict[str, dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """What no test noticed, room by room."""
    for mutants in by_room.values():
        for mutant in mutants:
            row = rows.get(mutant.key())
            if row is not None and not row["killed"]:
                yield row


def room_line(room: str, count: int, done: int, killed: int, same: int) -> str:
    share = f"{100 * killed / (done - same):.0f}" if done > same else ""
    return f"| {room} | {count} | {done} | {killed} | {same} | {done - killed - same} | {share} |"


if __name__ == "__main__":
    main()
