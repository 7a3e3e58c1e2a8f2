"""Read what a module says of itself without running it: what schemes compute with takes seconds to import."""

from __future__ import annotations

import ast
import builtins
import importlib.util
from collections.abc import Mapping
from pathlib import Path


class _Names(dict[str, object]):
    """The names in a record: those that the file imports or defines stand for nothing, as nobody calls them here."""

    def __missing__(self, name: str) -> object:
        return getattr(builtins, name, None)


def docstring(module: str) -> str:
    """The docstring of a module."""
    return ast.get_docstring(_tree(module)) or ""


def record(module: str, name: str, known: Mapping[str, object]) -> object:
    """The value that a module gives to `name`, made with these names and none of its own."""
    assignments = (node for node in _tree(module).body if isinstance(node, ast.Assign))
    value = next(node.value for node in assignments if ast.unparse(node.targets[0]) == name)
    return eval(compile(ast.Expression(value), module, "eval"), {}, _Names(known))


def _tree(module: str) -> ast.Module:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return ast.parse(Path(str(spec.origin)).read_text(encoding="utf-8"))
