"""Mutants drawn at random in the rooms of the package: how many of them do the room's tests notice?

    python tests/lab/mutation/mutants.py --rooms folding layers surgery storage --count 200 -o mutants.md

A mutant is one change of one expression or statement of a function: an operator, a comparison, a number, a condition,
a statement that is left out. It is written into a temporary copy of the checkout. There first run, without a mutant,
the tests of its room and those of `ALSO`, and coverage.py notes which come by which line, and how long each takes
(`--baseline FOLDER` keeps both); then those that come by the mutant's lines, quick ones first, up to the first that
fails, or to `--limit` seconds, which counts as noticed. Some mutants change nothing; the table lists every survivor.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import math
import multiprocessing
import os
import random
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import timm
import torch
from coverage import CoverageData

# They are loaded once, and every run of pytest is a fork of this process, in which normswap must not be loaded yet.
__all__ = ["timm", "torch"]

ROOT = Path(__file__).resolve().parents[3]
ALSO = (
    "tests/surgery/test_wrong_results.py", "tests/schemes/test_exact_schemes.py", "tests/schemes/test_hidden_by_eval.py",
    "tests/calibration/test_shift_and_scale.py", "tests/cli/test_another_door.py", "tests/exporting/test_options_beside.py",
)  # fmt: skip
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Pow: ast.Mult,
}  # fmt: skip
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
Change = Callable[[ast.AST], None]


@dataclass(frozen=True)
class Mutant:
    """One change of one file, which is named from the root of the repository; `text` is the whole file with the change.

    Tests that come by the lines from `line` to `end` matter; with a `reader`, those that come by any line of the package
    in which this regular expression is found.
    """

    file: Path
    line: int
    end: int
    before: str
    after: str
    text: str
    reader: str = ""


def changes_of(node: ast.AST) -> list[Change]:
    """The changes that can be made to a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return [lambda n: setattr(n, "op", OPERATORS[type(n.op)]())]  # type: ignore[attr-defined]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return [lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())]  # type: ignore[attr-defined]
    if isinstance(node, ast.BoolOp):
        return [lambda n: setattr(n, "op", ast.And() if isinstance(n.op, ast.Or) else ast.Or())]  # type: ignore[attr-defined]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return [lambda n: setattr(n, "op", ast.UAdd())]
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))]  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [lambda n: setattr(n, "value", not n.value)]  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return [lambda n: setattr(n, "value", n.value + 1), lambda n: setattr(n, "value", n.value - 1)]  # type: ignore[attr-defined]
    return []


def shown(node: ast.AST) -> str:
    """The node's source on one line."""
    return " ".join(ast.unparse(node).split())[:90]


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def sites(tree: ast.Module) -> list[tuple[ast.AST, Change]]:
    """Every change that can be made within the functions of a file; annotations and docstrings stay as they are."""
    found: dict[int, list[tuple[ast.AST, Change]]] = {}
    for function in functions(tree):
        body = function.body[1:] if ast.get_docstring(function) else function.body
        for statement in body:
            for node in ast.walk(statement):
                found[id(node)] = [(node, change) for change in changes_of(node)]
                if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # a call for its effect
                    found[id(node)].append((node, lambda n: setattr(n, "value", ast.Constant(None))))
    return [site for each in found.values() for site in each]


def drawn(files: Sequence[Path], count: int, seed: int) -> Iterator[Mutant]:
    """So many mutants; every site of all files is as likely as any other."""
    dice = random.Random(seed)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in files}
    every = [(file, index) for file, text in texts.items() for index in range(len(sites(ast.parse(text))))]
    for file, index in dice.sample(every, min(count, len(every))):
        tree = ast.parse(texts[file])
        node, change = sites(tree)[index]
        before = copy.deepcopy(node)
        change(node)
        ast.fix_missing_locations(tree)
        end = node.test if isinstance(node, ast.If | ast.While) else node  # not the statements below it
        lines = getattr(node, "lineno", 0), getattr(end, "end_lineno", 0)
        yield Mutant(file, *lines, shown(before), shown(node), ast.unparse(tree))


def run_tests(place: Path, tests: Sequence[str], limit: int | None, options: Sequence[str]) -> None:
    """In a process of its own: pytest in the copy, up to the first failure, with at most `limit` seconds of a processor."""
    os.chdir(place)
    Path("tests.txt").write_text("\n".join(tests), encoding="utf-8")
    os.environ.update(PYTHONPATH=str(place), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.path.insert(0, str(place))
    torch.set_num_threads(1)
    with open("pytest.log", "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if limit is not None:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    # A plugin of pytest is among what was imported before.
    quiet = ["-q", "--tb=no", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    arguments = ["-x", *quiet, "-p", "no:cacheprovider", *options, "@tests.txt"]
    os._exit(pytest.main(arguments))


def fails(place: Path, tests: Sequence[str], limit: int | None, *options: str) -> bool:
    """Whether one of the tests fails, or they take too long."""
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(place, tests, limit, options))
    process.start()
    process.join()
    if process.exitcode in (3, 4, 5):
        raise SystemExit((place / "pytest.log").read_text(encoding="utf-8")[-500:])
    return process.exitcode != 0


@dataclass(frozen=True)
class Baseline:
    """Which tests come by which line of the package, and the seconds that each takes."""

    coverage: CoverageData
    seconds: dict[str, float]

    @classmethod
    def read(cls, folder: Path) -> Baseline:
        data, log = CoverageData(str(folder / ".coverage")), (folder / "pytest.log").read_text(encoding="utf-8")
        data.read()
        slow = re.findall(r"^([\d.]+)s (?:call|setup) +(.+?) *$", log, re.M)
        return cls(data, {test: float(seconds) for seconds, test in reversed(slow)})

    def tests_at(self, file: Path, lines: Sequence[int]) -> set[str]:
        measured = [name for name in self.coverage.measured_files() if name.endswith(f"/{file}")]
        contexts = self.coverage.contexts_by_lineno(measured[0]) if measured else {}
        return {name.partition("|")[0] for line in lines for name in contexts.get(line, ()) if name}

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Those that come by its lines: quick ones first, and of these those of a file that is named like its file."""
        tests = self.tests_at(mutant.file, range(mutant.line, mutant.end + 1))
        if mutant.reader:
            tests = set()
            for file in below("normswap", "*.py"):
                lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
                reading = [i for i, line in enumerate(lines, 1) if re.search(rf"{mutant.reader}\b", line)]
                tests |= self.tests_at(file, reading)

        def order(test: str) -> tuple[object, ...]:
            seconds, path = self.seconds.get(test, 0.0), test.partition("::")[0]
            return seconds > 5, seconds > 0.5, mutant.file.stem not in path, path, seconds

        return sorted(tests, key=order)


def noticed(mutant: Mutant, place: Path, baseline: Baseline, limit: int, seconds: float) -> bool:
    """Whether a test that comes by the mutant's lines fails: first the 60 quickest alone, as pytest imports their files."""
    file, tests = place / mutant.file, baseline.tests_of(mutant)
    ends = itertools.accumulate(baseline.seconds.get(test, 0.0) for test in tests)
    tests = [test for test, end in zip(tests, ends, strict=True) if end <= seconds]
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.text, encoding="utf-8")
    try:
        return any(part and fails(place, part, limit) for part in (tests[:60], tests[60:]))
    finally:
        file.write_text(before, encoding="utf-8")


def below(folder: str, pattern: str) -> list[Path]:
    """The files of a folder of the checkout, from its root."""
    return [file.relative_to(ROOT) for file in sorted((ROOT / folder).rglob(pattern))]


def main(title: str, doc: str | None, draw: Callable[[Sequence[Path], int, int], Iterator[Mutant]]) -> None:
    """The command: draw mutants, try each, and write the table after each."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=["folding", "layers", "surgery", "storage"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=int, default=1200, help="seconds of a processor for the tests of a mutant")
    parser.add_argument("--seconds", type=float, default=math.inf, help="of tests for a mutant, as they took without")
    parser.add_argument("--baseline", type=Path, help="a folder with what a run without a mutant says, or for it")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    files = [file for room in args.rooms for file in below(f"normswap/{room}", "*.py")]
    rows: list[str] = []
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        for name in ("normswap", "tests", "recipes", "README.md", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
        if args.baseline is None or not (args.baseline / ".coverage").is_file():
            of_rooms = (str(test) for room in args.rooms for test in below(f"tests/{room}", "test_*.py"))
            tests = list(dict.fromkeys([*of_rooms, *ALSO]))
            if fails(place, tests, None, "--cov=normswap", "--cov-context=test", "--cov-report=", "--durations=0"):
                raise SystemExit("without a mutant: " + (place / "pytest.log").read_text(encoding="utf-8")[-500:])
            if args.baseline is not None:
                args.baseline.mkdir(parents=True, exist_ok=True)
                for name in (".coverage", "pytest.log"):
                    shutil.copy(place / name, args.baseline / name)
        baseline = Baseline.read(args.baseline or place)
        for mutant in draw(files, args.count, args.seed):
            failed = noticed(mutant, place, baseline, args.limit, args.seconds)
            survivors += not failed
            cells = [f"`{mutant.file}:{mutant.line}`", f"`{mutant.before}`", f"`{mutant.after}`",
                     "noticed" if failed else "**survived**"]  # fmt: skip
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
            print(rows[-1], flush=True)
            count = f"{len(rows) - survivors} of {len(rows)} were noticed"
            head = f"# {title}\n\n{count} (rooms {' '.join(args.rooms)}; seed {args.seed}).\n"
            table = [head, "| where | it was | it became | outcome |", "|---|---|---|---|", *rows]
            args.output.write_text("\n".join(table) + "\n")


if __name__ == "__main__":
    main("Mutants drawn at random", __doc__, drawn)
