"""The survivors of a drawing, planted once more in the code as it is now: which of them are noticed since?

    python tests/lab/mutation/revisited.py tests/lab/mutation/drawn_1.md --budget 20          # rewrites the table

A survivor is found again by its file, its function and the text of its change. Where that text is gone, the error does
not count as tried any more. What was noticed when it was drawn is not planted again. Who has a reason in
`equivalents.py` keeps it.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from drawn import Mutant, judged, mutants_of, reason, room_line, survivor_line, unnoticed
from workplace import ROOT, check_the_copy, circumstance, compile_all, copied

_ROOM = re.compile(r"^\| (\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|", re.MULTILINE)
_SURVIVOR = re.compile(r"^\| `(normswap/[^`]+)` \| `([^`]+)` \| `(.*)` \| (.*) \|$", re.MULTILINE)
_DRAWN = re.compile(r"Drawn at commit (\w+)|^On .*commit (\w+)", re.MULTILINE)


class Survivor(NamedTuple):
    """One row: where, in which function or class, the line as it was and became, why nothing noticed."""

    file: str
    inside: str
    change: str
    why: str

    @property
    def room(self) -> str:
        return self.file.split("/")[1]

    def row(self) -> dict[str, Any]:
        """As `drawn.py` keeps what it knows."""
        return {"file": self.file, "inside": self.inside, "change": self.change}

    def mutant(self) -> Mutant | None:
        """The error in the file as it is now; None where its place is gone."""
        if not (ROOT / self.file).is_file():
            return None
        lines = (ROOT / self.file).read_text(encoding="utf-8").splitlines()
        return next(
            (mutant for _, mutant in mutants_of(self.file)
             if mutant.inside == self.inside and lines[mutant.first - 1].strip() in self.change
             and mutant.change() == self.change), None,
        )  # fmt: skip


def survivors_of(text: str) -> list[Survivor]:
    """Those of a table of `drawn.py`."""
    return [
        Survivor(file, inside, change.replace("\\|", "|"), why) for file, inside, change, why in _SURVIVOR.findall(text)
    ]


def looked_at(survivors: list[Survivor], budget: float) -> dict[Survivor, str]:
    """What each is now: noticed, gone, equivalent or survived."""
    states: dict[Survivor, str] = {}
    with copied() as place:
        check_the_copy(place)
        compile_all(place)
        for one in survivors:
            mutant = one.mutant()
            if mutant is None:
                states[one] = "gone"
            elif reason(one.row()):
                states[one] = "equivalent"
            elif unnoticed(one.row()):
                states[one] = "survived"
            else:
                row = judged(mutant, place, budget)
                states[one] = "noticed" if row["killed"] else "survived"
                print(
                    f"{states[one]} {row['seconds']} s {one.file} {one.change} {row['by']}", file=sys.stderr, flush=True
                )
    return states


def table(text: str, states: dict[Survivor, str], command: str) -> str:
    """The table of a drawing, with what became of its survivors."""
    moved: dict[str, Counter[str]] = defaultdict(Counter)
    for one, state in states.items():
        moved[one.room]["equivalent" if one.why.startswith("equivalent") else "survived"] -= 1
        moved[one.room][state] += 1
    commits = [one or other for one, other in _DRAWN.findall(text)]
    lines = [
        "# Errors drawn at random", "",
        *circumstance().lines(command, "cpu"),
        f"Drawn at commit {commits[-1]}; who had survived was planted again at the commit"
        " above. Equivalent: nothing that the program says or writes is another. Killed: of those that are not. Tried:"
        " their place is still there.", "",
        "| room | drawn | tried | killed | equivalent | survived | killed, % |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    total = [0, 0, 0, 0]
    for room, *counts in _ROOM.findall(text):
        if room != "all":
            drawn, tried, killed, same, _ = map(int, counts)
            change = moved[room]
            now = (drawn, tried - change["gone"], killed + change["noticed"], same + change["equivalent"])
            total = [a + b for a, b in zip(total, now, strict=True)]
            lines.append(room_line(room, *now))
    left = [one for one, state in states.items() if state in ("equivalent", "survived")]
    lines += [room_line("all", *total), "", "| survivor | in | change | why |", "|---|---|---|---|"]
    return "\n".join([*lines, *(survivor_line(one.row()) for one in left), ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="a table of drawn.py")
    parser.add_argument("--budget", type=float, default=45, help="seconds of tests for one error, as they took before")
    args = parser.parse_args()
    text = args.file.read_text(encoding="utf-8")
    states = looked_at(survivors_of(text), args.budget)
    file = args.file.resolve().relative_to(ROOT)
    command = f"python tests/lab/mutation/revisited.py {file} --budget {args.budget:g}"
    args.file.write_text(table(text, states, command), encoding="utf-8")


if __name__ == "__main__":
    main()
