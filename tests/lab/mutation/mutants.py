"""Mutants drawn at random in the rooms of the package: how many of them do the room's tests notice?

    python tests/lab/mutation/mutants.py --rooms folding layers surgery storage --count 200 -o mutants.md

A mutant is one change of one expression or statement of a function: an operator, a comparison, a number, a condition,
a statement that is left out. It is written into a temporary copy of the checkout. There first run, without a mutant,
the tests of its room and those of `ALSO`, and coverage.py notes which of them come by which line; then, with the
mutant, those that come by its lines, up to the first that fails. A mutant whose tests take longer than `--limit` seconds
counts as noticed. Some mutants change nothing that the program says or writes; the table lists every survivor, so that a
person can tell.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from coverage import CoverageData

ROOT = Path(__file__).resolve().parents[3]
ALSO = ("tests/surgery/test_wrong_results.py", "tests/schemes/test_exact_schemes.py")
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
    """One change of one file.

    Args:
        file: from the root of the repository.
        line: where.
        end: its last line.
        before: the node's source, on one line.
        after: what stands there instead.
        text: the whole file with the change.
    """

    file: Path
    line: int
    end: int
    before: str
    after: str
    text: str


def changes_of(node: ast.AST) -> list[Change]:
    """The changes that can be made to a node."""
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return [lambda n: setattr(n, "op", OPERATORS[type(n.op)]())]  # type: ignore[attr-defined]
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        return [lambda n: n.ops.__setitem__(0, COMPARISONS[type(n.ops[0])]())]  # type: ignore[attr-defined]
    if isinstance(node, ast.BoolOp):
        return [lambda n: setattr(n, "op", ast.And() if isinstance(n.op, ast.Or) else ast.Or())]  # type: ignore[attr-defined]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub):
        return [lambda n: setattr(n, "op", ast.UAdd())] if isinstance(node.op, ast.USub) else []
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        return [lambda n: setattr(n, "test", ast.UnaryOp(ast.Not(), n.test))]  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        return [lambda n: setattr(n, "value", not n.value)]  # type: ignore[attr-defined]
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return [lambda n: setattr(n, "value", n.value + 1), lambda n: setattr(n, "value", n.value - 1)]  # type: ignore[attr-defined]
    return []


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
        words = [" ".join(ast.unparse(part).split())[:90] for part in (before, node)]
        end = node.test if isinstance(node, ast.If | ast.While) else node  # not the statements below it
        yield Mutant(file, getattr(node, "lineno", 0), getattr(end, "end_lineno", 0), *words, ast.unparse(tree))


def tests_of(room: str) -> list[str]:
    """The test files of a room."""
    return [str(test.relative_to(ROOT)) for test in sorted((ROOT / "tests" / room).rglob("test_*.py"))]


def fails(place: Path, tests: Sequence[str], limit: float | None, *options: str) -> bool:
    """Whether one of the tests fails, or they take too long."""
    listed = place / "tests.txt"
    listed.write_text("\n".join(tests), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--tb=no", "-p", "no:cacheprovider", *options, f"@{listed}"]
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(command, cwd=place, env=environment, timeout=limit, check=False, capture_output=True)
    except subprocess.TimeoutExpired:
        return True
    if done.returncode not in (0, 1, 2):
        raise SystemExit(done.stdout.decode()[-500:])
    return done.returncode != 0


def tests_by_line(place: Path, tests: Sequence[str]) -> CoverageData:
    """Which tests come by which line of the package; none of them may fail."""
    if fails(place, tests, None, "--cov=normswap", "--cov-context=test", "--cov-report="):
        raise SystemExit("the tests fail without a mutant")
    data = CoverageData(str(place / ".coverage"))
    data.read()
    return data


def noticed(mutant: Mutant, place: Path, data: CoverageData, limit: float) -> bool:
    """Whether a test that comes by the mutant's lines fails; those of a file that is named like the mutant's go first."""
    file = place / mutant.file
    contexts = data.contexts_by_lineno(str(file))
    lines = range(mutant.line, mutant.end + 1)
    tests = sorted({name.partition("|")[0] for line in lines for name in contexts.get(line, ()) if name})
    tests.sort(key=lambda test: mutant.file.stem not in test.partition("::")[0])
    before = file.read_text(encoding="utf-8")
    file.write_text(mutant.text, encoding="utf-8")
    try:
        return bool(tests) and fails(place, tests, limit)
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=["folding", "layers", "surgery", "storage"])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=600, help="seconds for the tests of a mutant")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    files = sorted(file for room in args.rooms for file in (ROOT / "normswap" / room).rglob("*.py"))
    files = [file.relative_to(ROOT) for file in files]
    rows: list[str] = []
    survivors = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        place = Path(folder)
        for name in ("normswap", "tests", "recipes", "README.md", "pyproject.toml"):
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, place / name)
        tests = [test for room in args.rooms for test in tests_of(room)]
        data = tests_by_line(place, list(dict.fromkeys([*tests, *ALSO])))
        for mutant in drawn(files, args.count, args.seed):
            seen = noticed(mutant, place, data, args.limit)
            survivors += not seen
            cells = [f"`{mutant.file}:{mutant.line}`", f"`{mutant.before}`", f"`{mutant.after}`",
                     "noticed" if seen else "**survived**"]  # fmt: skip
            rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
            print(rows[-1], flush=True)
            head = f"{len(rows) - survivors} of {len(rows)} mutants were noticed (rooms {' '.join(args.rooms)}; seed {args.seed})."
            table = ["| where | it was | it became | outcome |", "|---|---|---|---|", *rows]
            args.output.write_text("\n".join(["# Mutants drawn at random", "", head, "", *table]) + "\n")


if __name__ == "__main__":
    main()
