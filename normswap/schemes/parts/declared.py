"""What options the schemes declare, read off their files without running them: help must not wait for torch."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from normswap import schemes

_KINDS = {"int": int, "float": float, "str": str, "bool": bool}


@dataclass(frozen=True)
class Option:
    """An option of one scheme or several.

    Args:
        name: as Python spells it.
        kind: int, float, bool, str, or object: a number or a word.
        default: where the schemes have it in common.
        metavar: what stands for its value: the text in `Annotated[kind, "..."]`, or the kind.
        help: the line about it in the docstring of `plan`.
        schemes: who has it.
    """

    name: str
    kind: type
    default: object
    metavar: str
    help: str
    schemes: tuple[str, ...]


def declared_options() -> list[Option]:
    """Every option of every scheme, each once, in the order of the schemes' names."""
    found: dict[str, Option] = {}
    for one in (*_of_files(), *_of_others()):
        known = found.get(one.name)
        found[one.name] = one if known is None else replace(known, schemes=(*known.schemes, *one.schemes))
        if known is not None and known.help.startswith("as in"):
            found[one.name] = replace(found[one.name], help=one.help)
    return list(found.values())


def _of_files() -> Iterator[Option]:
    folder = Path(importlib.import_module("normswap.schemes").__path__[0])
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        plans = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "plan"]
        for plan in plans:
            yield from _declared(file.stem.replace("_", "-"), plan)


def _declared(scheme: str, plan: ast.FunctionDef) -> Iterator[Option]:
    said = _said(ast.get_docstring(plan) or "")
    for arg, default in zip(plan.args.kwonlyargs, plan.args.kw_defaults, strict=True):
        kind, metavar = _annotated(arg.annotation)
        value = None if default is None else ast.literal_eval(default)
        yield Option(arg.arg, kind, value, metavar, said.get(arg.arg, ""), (scheme,))


def _annotated(annotation: ast.expr | None) -> tuple[type, str]:
    metavar = ""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        annotation, word = annotation.slice.elts[:2]
        metavar = str(ast.literal_eval(word))
    words = set(re.findall(r"\w+", ast.unparse(annotation))) if annotation else set()
    kind = _KINDS[words.pop()] if len(words) == 1 and words <= _KINDS.keys() else object
    return kind, metavar or kind.__name__.upper()


def _said(doc: str) -> dict[str, str]:
    """The line of each argument in a docstring; `a, b: as in x` speaks of both."""
    said = {}
    for line in doc.splitlines():
        match = re.match(r"\s*([a-z_]+(?:, [a-z_]+)*): (\S.*)", line)
        if match:
            said.update(dict.fromkeys(match[1].split(", "), match[2].rstrip(".")))
    return said


def _of_others() -> Iterator[Option]:
    """The options of registered schemes, which are imported anyway."""
    shipped = {file.stem.replace("_", "-") for file in Path(schemes.__path__[0]).glob("*.py")}
    for name in schemes.names():
        if name not in shipped:
            scheme = schemes.get(name)
            said = _said(scheme.plan.__doc__ or "")
            for option, default in scheme.options.items():
                kind = type(default) if type(default) in _KINDS.values() else str
                yield Option(option, kind, default, kind.__name__.upper(), said.get(option, ""), (name,))
