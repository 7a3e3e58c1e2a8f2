"""What may be dropped unnoticed: arguments, fields of dataclasses, flags that functions return, denominators.

    python tests/lab/mutation/dropped.py --rooms folding surgery --count 40 -o tests/lab/mutation/dropped.md

Of a public function each argument with a default is the default whatever is passed; of a dataclass each field with a
default has it; a function that returns a bool returns one only; of a quotient the denominator is left out. They are
drawn and tried as `mutants.py` does; of a field those tests run that come by a line that reads an attribute of its name.
"""

import ast
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from mutants import ROOT, Mutant, functions, main, shown


def arguments(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """First line of the body, name and default of each argument of a public function that has a default."""
    for function in functions(tree):
        taken, body = function.args, function.body[ast.get_docstring(function) is not None :]
        positional = [*taken.posonlyargs, *taken.args]
        defaulted = positional[len(positional) - len(taken.defaults) :]
        pairs = [*zip(defaulted, taken.defaults, strict=True), *zip(taken.kwonlyargs, taken.kw_defaults, strict=True)]
        for argument, default in pairs:
            if default is not None and body and not function.name.startswith("_"):
                yield body[0].lineno, argument.arg, ast.unparse(default)


def fields(tree: ast.Module) -> Iterator[tuple[ast.ClassDef, str, str]]:
    """Class, name and default of each field of a dataclass that has a plain default."""
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        if any("dataclass" in ast.unparse(decorator) for decorator in kind.decorator_list):
            for line in kind.body:
                if isinstance(line, ast.AnnAssign) and isinstance(line.value, ast.Constant):
                    yield kind, ast.unparse(line.target), ast.unparse(line.value)


def flags(tree: ast.Module) -> Iterator[ast.Return]:
    """Each `return` of a function that gives a bool, but for constants."""
    for function in functions(tree):
        if function.returns is not None and ast.unparse(function.returns) == "bool":
            for node in ast.walk(function):
                if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
                    yield node


def spliced(text: str, node: ast.expr, new: str) -> str:
    """The text with another expression in the place of a node."""
    lines = text.encode().splitlines(keepends=True)
    start = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: (node.end_lineno or 0) - 1])) + (node.end_col_offset or 0)
    return (text.encode()[:start] + new.encode() + text.encode()[end:]).decode()


def mutants(file: Path) -> Iterator[Mutant]:
    """Everything in a file that can be dropped, one at a time."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    for line, name, default in arguments(tree):
        indent = lines[line - 1][: len(lines[line - 1]) - len(lines[line - 1].lstrip())]
        changed = [*lines[: line - 1], f"{indent}{name} = {default}\n", *lines[line - 1 :]]
        yield Mutant(file, line, line, f"argument {name}", default, "".join(changed))
    for kind, name, default in fields(tree):
        end = kind.end_lineno or 0
        found = f"{default} if name == {name!r} else object.__getattribute__(self, name)"
        getter = f"\n    def __getattribute__(self, name):\n        return {found}\n"
        changed_text = "".join([*lines[:end], getter, *lines[end:]])
        yield Mutant(file, kind.lineno, end, f"field {kind.name}.{name}", default, changed_text, rf"\.{name}")
    for flag in flags(tree):
        assert flag.value is not None
        for value in ("True", "False"):
            changed_text = spliced(text, flag.value, value)
            yield Mutant(file, flag.lineno, flag.end_lineno or 0, shown(flag), f"return {value}", changed_text)
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.FloorDiv):
            divided = ast.unparse(node.left)
            # A path is joined by the same sign.
            right = node.right
            if not isinstance(right, ast.JoinedStr) and not isinstance(getattr(right, "value", None), str):
                end = node.end_lineno or 0
                yield Mutant(file, node.lineno, end, shown(node), divided, spliced(text, node, f"({divided})"))


def drawn(files: Sequence[Path], count: int, seed: int) -> Iterator[Mutant]:
    """So many of them, each as likely as any other."""
    every = [mutant for file in files for mutant in mutants(file)]
    yield from random.Random(seed).sample(every, min(count, len(every)))


if __name__ == "__main__":
    main("What may be dropped", __doc__, drawn)
