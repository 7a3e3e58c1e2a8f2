"""Every pair of options of convert and export and of keys of a recipe, run once: how many are right together?

    python tests/lab/pairs.py -o tests/lab/pairs.md                # resumes
    python tests/lab/pairs.py --minutes 5                          # a part of it

The pairs are the cases of three tests, of which the default run has a few. What is known of a commit is kept in
runs/pairs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parent / "mutation"))
from workplace import ROOT, circumstance

TABLES = {
    "options of `convert`": "tests/cli/test_option_pairs.py::test_two_options_of_convert",
    "options of `export`": "tests/exporting/test_export_pairs.py::test_two_options_of_export",
    "keys of a recipe": "tests/training/test_recipe_pairs.py::test_two_keys_of_a_recipe",
}
KNOWN = ROOT / "runs" / "pairs.jsonl"
AT_ONCE = 120  # pairs in one process


def pytest(*words: str) -> subprocess.CompletedProcess[str]:
    """Run pytest over tests of every mark.

    Raises:
        SystemExit: pytest itself could not run.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ran.returncode not in (0, 1):
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-2000:])
    return ran


def pairs(test: str) -> list[str]:
    """The cases of a test, as pytest names them."""
    return [line for line in pytest("--collect-only", test).stdout.splitlines() if line.startswith(f"{test}[")]


def tried(cases: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run some cases: what came of each, and how long it took in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        pytest(f"--junitxml={report}", "-o", "junit_family=xunit1", *cases)
        for one in ElementTree.parse(report).iter("testcase"):
            failed = one.find("failure") is not None or one.find("error") is not None
            refused = any(entry.get("name") == "refused" for entry in one.iter("property"))
            outcome = "failed" if failed else "refused" if refused else "right"
            case = f"{one.attrib['file']}::{one.attrib['name']}"
            yield {"case": case, "outcome": outcome, "seconds": round(float(one.attrib["time"]), 1)}


def known(commit: str) -> dict[str, dict[str, Any]]:
    """What is known of this commit, by case."""
    lines = KNOWN.read_text(encoding="utf-8").splitlines() if KNOWN.exists() else []
    return {row["case"]: row for row in map(json.loads, lines) if row["commit"] == commit}


def measure(missing: Sequence[str], commit: str, minutes: float) -> None:
    """Run cases until none is missing or the time is over, and add what came of them to what is known."""
    end = time.monotonic() + 60 * minutes
    KNOWN.parent.mkdir(exist_ok=True)
    for first in range(0, len(missing), AT_ONCE):
        if time.monotonic() > end:
            return
        rows = list(tried(missing[first : first + AT_ONCE]))
        with KNOWN.open("a", encoding="utf-8") as out:
            out.writelines(json.dumps({**row, "commit": commit}) + "\n" for row in rows)
        print("".join(f"failed: {row['case']}\n" for row in rows if row["outcome"] == "failed"), end="", flush=True)


def table(cases: dict[str, list[str]], rows: dict[str, dict[str, Any]]) -> str:
    """What came of it, in Markdown."""
    lines = [
        "# Pairs of options", "",
        *circumstance().lines("python tests/lab/pairs.py -o tests/lab/pairs.md", "cpu"),
        "Right: the file or the network answers as an independent computation says. Refused: one line says why not,"
        " and nothing was written.", "",
        "| pairs of | pairs | tried | right | refused | failed | seconds |", "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for name, test in TABLES.items():
        done = [rows[case] for case in cases[test] if case in rows]
        counts = [sum(row["outcome"] == outcome for row in done) for outcome in ("right", "refused", "failed")]
        seconds = sum(row["seconds"] for row in done)
        lines.append(f"| {' | '.join(map(str, (name, len(cases[test]), len(done), *counts, f'{seconds:.0f}')))} |")
    failed = [row["case"] for row in rows.values() if row["outcome"] == "failed"]
    lines += ["", "Failed:", "", *(f"- `{case}`" for case in failed)] if failed else []
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no more pairs after so long")
    parser.add_argument("-o", "--output", type=Path, help="write the table to this file")
    args = parser.parse_args()
    commit = circumstance().commit()
    cases = {test: pairs(test) for test in TABLES.values()}
    done = known(commit)
    missing = [case for test in cases.values() for case in test if case not in done]
    random.Random(0).shuffle(missing)  # a part of the time is a sample of every table
    measure(missing, commit, args.minutes)
    text = table(cases, known(commit))
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
