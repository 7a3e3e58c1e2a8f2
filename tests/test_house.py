"""The house rules: imports point one way, the terminal stays at the front door, files stay short, names are public."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import normswap

ROOT = Path(normswap.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
LONGEST = 320
TERMINAL = {"typer", "rich", "click"}
FRONT = {"__main__", "cli", "commands", "render", "progress", "demo"}  # and cli_*: the command line
LATE = {"conversion", "checkpoint", "restore", "zoo", "verification"}  # do, prove, and where models come from
SEE = ("affine", "anatomy", "layers", "tracing", "walks", "undress", "dress")
Graph = dict[str, set[str]]


def name_of(file: Path) -> str:
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imported(text: str, everywhere: bool = False) -> set[str]:
    """Absolute names that a file imports: at its top level, or anywhere in it."""
    tree = ast.parse(text)
    found: set[str] = set()
    for node in ast.walk(tree) if everywhere else tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {str(node.module)}
    return found


def graph() -> Graph:
    names = {name_of(file) for file in FILES}
    edges: Graph = {}
    for file in FILES:
        inside = {name.removeprefix("normswap.") for name in imported(file.read_text()) if name.startswith("normswap.")}
        edges[name_of(file)] = inside & names
    return edges


def reach(edges: Graph, start: str) -> set[str]:
    """Everything that importing `start` imports, itself left out unless it is in a circle."""
    seen: set[str] = set()
    ahead = [*edges[start]]
    while ahead:
        name = ahead.pop()
        if name not in seen:
            seen.add(name)
            ahead += edges[name]
    return seen


def circles(edges: Graph) -> list[str]:
    return [name for name in edges if name in reach(edges, name)]


def trespassing(edges: Graph, rooms: Iterable[str], forbidden: set[str]) -> list[str]:
    return [f"{room} -> {name}" for room in rooms for name in sorted(reach(edges, room) & forbidden)]


def front(edges: Graph) -> set[str]:
    return {name for name in edges if name in FRONT or name.startswith("cli_")}


def test_imports_run_in_no_circle() -> None:
    edges = graph()
    edges["cli"] -= front(edges)  # its last line lets cli_* files register their commands
    assert circles(edges) == []


def test_imports_point_one_way() -> None:
    edges = graph()
    schemes = [name for name in edges if name.startswith("schemes.")]
    at_front = front(edges)
    assert reach(edges, "errors") == set()
    assert reach(edges, "plan") == {"errors"}
    assert trespassing(edges, edges.keys() - at_front, at_front) == []
    assert trespassing(edges, [*SEE, *schemes], LATE | {"surgery"}) == []
    assert trespassing(edges, SEE, {"schemes", *schemes}) == []
    assert trespassing(edges, ["surgery"], LATE | {"anatomy", "walks", "undress", "dress", "schemes"}) == []
    assert trespassing(edges, ["verification", "zoo"], {"conversion", "checkpoint", "schemes", *schemes}) == []
    assert trespassing(edges, ["conversion"], {"checkpoint"}) == []


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_the_terminal_stays_at_the_front_door(file: Path) -> None:
    roots = {name.split(".")[0] for name in imported(file.read_text(), everywhere=True)}
    assert not roots & TERMINAL or name_of(file) in front(graph())


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_files_are_short_and_say_what_they_are(file: Path) -> None:
    text = file.read_text()
    assert len(text.splitlines()) <= LONGEST
    assert ast.get_docstring(ast.parse(text))
    assert file.stem not in ("utils", "helpers", "misc", "common")


@pytest.mark.parametrize("module", ["", ".plan", ".errors", ".schemes", ".cli"])
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, normswap{module}; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there() -> None:
    names = dir(normswap)
    assert len(set(names)) == len(names)
    for name in names:
        assert getattr(normswap, name) is not None
    typed = imported((ROOT / "__init__.py").read_text(), everywhere=True)
    assert {name for name in names if name != "__version__"} == {
        name.split(".")[-1] for name in typed
        if name.startswith("normswap.") and name.removeprefix("normswap.") not in graph()}  # fmt: skip
    with pytest.raises(AttributeError, match="nonsense"):
        _ = normswap.nonsense


def test_the_checkers_notice() -> None:
    edges: Graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"c"}, "e": set(), "cli_x": {"e"}}
    assert circles(edges) == ["a", "b", "c"]
    assert trespassing(edges, ["d", "e"], {"b"}) == ["d -> b"]
    assert front(edges) == {"cli_x"}
    assert imported("import rich.table\nfrom normswap import plan\nif x:\n    import typer") == {
        "rich.table", "normswap", "normswap.plan"}  # fmt: skip
    assert "typer" in imported("def f():\n    import typer", everywhere=True)
    code = "import sys, torch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
