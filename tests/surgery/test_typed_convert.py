"""What editors and type checkers know of `normswap.convert` is what the options' records say.

`python tests/surgery/test_typed_convert.py` writes the file anew.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from mypy import api

from normswap import schemes
from normswap.schemes.parts.options import OPTIONS, Option
from normswap.surgery import typed_convert

FILE = Path(str(typed_convert.__file__)).with_suffix(".pyi")
BEGIN = "# --- made from the options' records by tests/surgery/test_typed_convert.py\n"

CALLS = """
from typing import Any

import normswap
from torch import nn


def calls(model: nn.Module, name: str, options: dict[str, Any]) -> None:
    normswap.convert(model, to="groupnorm", steady=0.9, groups=8)
    normswap.convert(model, "groupnorm", input_size=(3, 32, 32), only="layer1.*")
    normswap.convert(model, to="folded", branches="keep")
    normswap.convert(model, to="skipinit", alpha=0.5)
    normswap.convert(model, to="skipinit", alpha="match")
    normswap.convert(model, to="rmsnorm", skip=["head"])
    normswap.convert(model, to="batchnorm", like=model)
    normswap.convert(model, to="batchnorm", like="resnet18")
    normswap.convert(model, to="a scheme of one's own", seed=1)
    normswap.convert(model, to="a scheme of one's own", **options)
    normswap.convert(model, name)
    normswap.convert(model, name, **options)
    normswap.convert(model, to="groupnorm", steadi=0.9)  # wrong
    normswap.convert(model, to="groupnorm", steady="much")  # wrong
    normswap.convert(model, to="groupnorm", bend=0.5)  # wrong
    normswap.convert(model, to="folded", branches="cut")  # wrong
    normswap.convert(model, to="skipinit", alpha="other")  # wrong
    normswap.convert(model, to="rmsnorm", steady=0.5)  # wrong
    normswap.convert(model, to="groupnorm", input_size=32)  # wrong
    normswap.convert(model, to="groupnorm", purpose="privat")  # wrong
    normswap.convert(model, to="groupnorm", like=3)  # wrong
    normswap.convert(model, name, steadi=0.9)  # wrong
    normswap.convert(model)  # wrong
"""

QUICK = """
[mypy]
follow_imports = skip
ignore_missing_imports = true

[mypy-normswap,normswap.surgery.typed_convert]
follow_imports = silent
"""
"""Everything behind the types of `convert`, torch too, is taken for Any: else mypy reads for half a minute."""


def made() -> str:
    """The part of the file that is made."""
    plain = sorted({info.name.replace("_", "-") for info in pkgutil.iter_modules(schemes.__path__) if not info.ispkg})
    parts = [_record(name, OPTIONS[name]) for name in sorted(OPTIONS)]
    calls = [_call([name], _class(name)) for name in sorted(OPTIONS)]
    calls.append(_call([*(name for name in plain if name not in OPTIONS), "unfold"], "EveryOption"))
    calls.append(_call([], "EveryOption"))
    head = 'class TypedConvert(Protocol):\n    """`convert`, with the options of each scheme."""\n\n'
    return BEGIN + "\n\n" + "\n\n".join([*parts, head + "\n".join(calls)]).rstrip() + "\n\n\n"


def _class(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-")) + "Options"


def _record(name: str, options: tuple[Option, ...]) -> str:
    lines = [f"class {_class(name)}(EveryOption, total=False):", f'    """Of `{name}`."""', ""]
    return "\n".join([*lines, *(f"    {option.name}: {_type(option)}" for option in options), ""])


def _type(option: Option) -> str:
    if option.kind is object:
        return f"{_literal(option.choices)} | float"
    name = _literal(option.choices) if option.choices else option.kind.__name__
    return f"{name} | nn.Module" if option.or_network else name


def _call(names: list[str], options: str) -> str:
    to = _literal(names) if names else "str"
    one = f"        self, model: nn.Module | Network | Conversion, to: {to}, **options: Unpack[{options}]"
    return f"    @overload\n    def __call__(\n{one}\n    ) -> Conversion: ...\n"


def _literal(names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"Literal[{quoted}]"


def written() -> str:
    """That part as it stands in the file, however it is laid out."""
    _, _, rest = FILE.read_text().partition(BEGIN)
    return BEGIN + rest.partition("convert: TypedConvert")[0]


def plain(text: str) -> str:
    return "".join(text.split()).replace(",]", "]").replace(",)", ")")


def test_the_types_are_those_of_the_records() -> None:
    assert plain(written()) == plain(made())


def test_it_is_convert_itself() -> None:
    import normswap

    assert typed_convert.convert is normswap.convert


def test_wrong_options_are_errors_to_mypy_and_right_ones_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls.py").write_text(CALLS)
    (tmp_path / "mypy.ini").write_text(QUICK)
    monkeypatch.setenv("MYPYPATH", str(FILE.parents[2]))
    monkeypatch.chdir(tmp_path)
    said, trouble, _ = api.run(["--strict", "--hide-error-context", "calls.py"])
    assert not trouble
    wrong = [number for number, line in enumerate(CALLS.split("\n"), start=1) if line.endswith("# wrong")]
    assert sorted({int(number) for number in re.findall(r"^calls\.py:(\d+): error", said, re.MULTILINE)}) == wrong
    assert 'Unexpected keyword argument "steadi"' in said


if __name__ == "__main__":
    text = FILE.read_text()
    FILE.write_text(text.replace(written(), made()))
