"""Words that a reader of torch, torch.fx and timm has already: none of our own, one name for one thing."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

import normswap

ROOT = Path(normswap.__file__).parent
HERE = ROOT.parent
FILES = sorted(ROOT.rglob("*.py"))
TOP = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")
DOCUMENTS = [*sorted(HERE.glob("docs/*.md")), *(HERE / name for name in TOP)]
# What was said once, and what is said now.
PRIVATE = {
    r"seat|seats|seated": "path, or place",
    r"undress\w*|dress|dressed|dresses": "fold, insert",
    r"draft|drafts": "builder (PlanBuilder)",
    r"intake|takes in|taken in": "absorb",
    r"vacate|vacated": "remove",
    r"fate|fates": "outcome",
    r"walker|walkers|march|shelf|shelves|slip|slips|spool|unspool": "interpreter, lockstep, activation cache",
    r"strangers|adopted": "untracked, alternatives",
    r"leg|legs": "step",
    r"demand_\w+|claim\(": "check_...",
    r"gauges?|regauge": "rescaling, equalization",
}
# Kept on purpose. A saved plan, a stored report and `--json` mean what they meant.
# So do the fields `takes`, `way` and `part` of an edit, the layers that a plan names (Vacant, SiteNorm, Steadied), the
# arguments `steady`, `flips`, `leans` and `lead`, and the options `--steady` and `--bend`.
KEPT = {
    "takes in": {"graph/selection.py", "calibration/lockstep.py", "docs/deploy.md"},  # `fnmatch` takes in; in its place
    "strangers": {"models/weight_files.py"},  # keys of a file that is no state dict
    # a key of `export --json`, and a column of a recorded table
    "gauge": {"exporting/quantizing.py", "cli/commands/export_command.py", "docs/results.md", "docs/deploy.md"},
    "claim": {"storage/model_card.py"},  # what a card claims
}
# Variables whose names do not tell what they hold. The number only goes down.
EMPTY = {"given", "said", "told", "found", "own", "others", "theirs", "ours"}
MOST = 50


def lines() -> list[tuple[str, int, str]]:
    """(file, line number, text) of all that is read: code, docstrings, help and documents."""
    every = [(str(file.relative_to(ROOT)), file) for file in FILES]
    every += [(str(file.relative_to(HERE)), file) for file in DOCUMENTS]
    return [(name, i, text) for name, file in every for i, text in enumerate(file.read_text().splitlines(), 1)]


@pytest.mark.parametrize("words", PRIVATE)
def test_private_words_are_gone(words: str) -> None:
    pattern = re.compile(rf"(?<![\w-])(?:{words})(?!\w)", re.I)
    found = [f"{file}:{i}: {hit.group()}" for file, i, text in lines() for hit in pattern.finditer(text)
             if file not in KEPT.get(hit.group().lower().rstrip("("), ())]  # fmt: skip
    assert found == [], f"say {PRIVATE[words]}"


def classes(files: list[Path]) -> Counter[str]:
    """How many classes have a name, of those that stand in a file for all to see."""
    trees = [ast.parse(file.read_text()) for file in files]
    return Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def test_a_class_name_has_one_meaning() -> None:
    assert [name for name, count in classes(FILES).items() if count > 1] == []
    assert len(classes(FILES)) > 150


def test_no_docstring_begins_with_what() -> None:
    """No sentence begins with "What" to mean "that which"."""
    assert [f"{file}:{i}" for file, i, text in lines() if file.endswith(".py") and '"""What ' in text] == []


def bound(text: str) -> list[str]:
    """The names that a file binds: variables and parameters."""
    nodes = list(ast.walk(ast.parse(text)))
    stored = [node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return stored + [node.arg for node in nodes if isinstance(node, ast.arg)]


def test_variables_tell_what_they_hold() -> None:
    empty = [f"{file.relative_to(ROOT)}: {name}" for file in FILES for name in bound(file.read_text()) if name in EMPTY]
    assert len(empty) <= MOST, empty
    assert bound("def f(given, *, b):\n    own, c = given, b\n") == ["own", "c", "given", "b"]
