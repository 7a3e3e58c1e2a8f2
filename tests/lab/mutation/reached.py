"""Which tests reach a line of the package, and how long each takes: measured by coverage.py in one run of the suite.

python tests/lab/mutation/reached.py        # once; writes runs/reached/
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cache

import coverage
from workplace import ROOT

PLACE = ROOT / "runs" / "reached"
_SETTINGS = f"[run]\nsource = normswap\nbranch = true\nparallel = true\ndata_file = {PLACE / 'data'}\n"
_SAID = PLACE / "said.txt"
_DURATION = re.compile(r"^([\d.]+)s (?:call|setup)\s+(\S.*)$", re.MULTILINE)


def measure() -> int:
    """Run the default tests under coverage.py; returns pytest's exit code."""
    shutil.rmtree(PLACE, ignore_errors=True)
    PLACE.mkdir(parents=True)
    (PLACE / "settings").write_text(_SETTINGS, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "--cov=normswap", "--cov-context=test", "--cov-branch",
               f"--cov-config={PLACE / 'settings'}", "--cov-report=term", "--durations=0",
               "--durations-min=0.05"]  # fmt: skip
    with _SAID.open("w", encoding="utf-8") as said:
        return subprocess.run(command, cwd=ROOT, stdout=said, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode


@cache
def _data() -> coverage.CoverageData:
    found = next(iter(sorted(PLACE.glob("data*"))), None)
    if found is None:
        raise SystemExit("nothing is known of what tests reach: run tests/lab/mutation/reached.py")
    data = coverage.CoverageData(str(found))
    data.read()
    return data


@cache
def _seconds() -> dict[str, float]:
    total: dict[str, float] = defaultdict(float)
    for seconds, test in _DURATION.findall(_SAID.read_text(encoding="utf-8")):
        total[test] += float(seconds)
    return total


@cache
def _contexts(file: str) -> dict[int, list[str]]:
    measured = next((name for name in _data().measured_files() if name.endswith(f"/{file}")), None)
    return _data().contexts_by_lineno(measured) if measured else {}


def _is_there(test: str) -> bool:
    """Whether the test is still where it was measured."""
    file, _, name = test.partition("::")
    return f"def {name.partition('[')[0]}(" in _text(file)


@cache
def _text(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""


def tests(file: str, first: int, last: int, budget: float) -> list[str]:
    """Tests that run one of these lines, the quickest first, of as many functions as `budget` seconds allow.

    Lines that only run while the file is imported count as run by whatever runs any of the file's functions.
    """
    by_line = _contexts(file)
    found = {one for line in range(first, last + 1) for one in by_line.get(line, ()) if one}
    found = found or {one for contexts in by_line.values() for one in contexts if one}
    known = {test for one in found if _is_there(test := one.partition("|")[0])}
    groups: dict[str, list[str]] = defaultdict(list)
    for test in sorted(known, key=lambda test: (_seconds()[test], test)):
        groups[test.partition("[")[0]].append(test)
    chosen: list[str] = []
    spent = 0.0
    while any(groups.values()):  # one test of each function, then a second one of each
        for waiting in groups.values():
            if waiting:
                test = waiting.pop(0 if not chosen else -1)
                if not chosen or spent + _seconds()[test] <= budget:
                    chosen.append(test)
                    spent += _seconds()[test] + 0.05
    return sorted(chosen, key=lambda test: _seconds()[test])


if __name__ == "__main__":
    sys.exit(measure())
