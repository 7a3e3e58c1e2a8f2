"""What editors and type checkers know of `normswap.convert` is what the options' records say.

`python tests/surgery/test_typed_convert.py` writes the file anew.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence
from pathlib import Path

from normswap import schemes
from normswap.schemes.parts.options import OPTIONS, Option
from normswap.surgery import typed_convert

FILE = Path(str(typed_convert.__file__))
BEGIN = "# --- made from the options' records by tests/surgery/test_typed_convert.py\n"


def made() -> str:
    """The part of the file that is made."""
    plain = sorted({info.name.replace("_", "-") for info in pkgutil.iter_modules(schemes.__path__) if not info.ispkg})
    parts = [_record(name, OPTIONS[name]) for name in sorted(OPTIONS)]
    calls = [_call([name], _class(name)) for name in sorted(OPTIONS)]
    calls.append(_call([*(name for name in plain if name not in OPTIONS), "unfold"], "EveryOption"))
    calls.append(_call([], ""))
    head = 'class TypedConvert(Protocol):\n    """`convert`, with the options of each scheme."""\n\n'
    return BEGIN + "\n\n" + "\n\n".join([*parts, head + "\n".join(calls)]).rstrip() + "\n\n\n"


def _class(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-")) + "Options"


def _record(name: str, options: tuple[Option, ...]) -> str:
    lines = [f"class {_class(name)}(EveryOption, total=False):", f'    """Of `{name}`."""', ""]
    return "\n".join([*lines, *(f"    {option.name}: {_type(option)}" for option in options), ""])


def _type(option: Option) -> str:
    words = _literal(option.choices)
    if option.kind is object:
        return f"{words} | float"
    return words if option.choices else option.kind.__name__


def _call(names: list[str], options: str) -> str:
    one = f"        self, model: nn.Module | Network | Conversion, to: {_literal(names)}, **options: "
    one += f"Unpack[{options}]" if options else "object"
    return f"    @overload\n    def __call__(\n{one}\n    ) -> Conversion: ...\n"


def _literal(names: Sequence[str]) -> str:
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"Literal[{quoted}]" if names else "str"


def written() -> str:
    """That part as it stands in the file, however it is laid out."""
    _, _, rest = FILE.read_text().partition(BEGIN)
    return BEGIN + rest.partition("convert = cast")[0]


def plain(text: str) -> str:
    return "".join(text.split()).replace(",]", "]").replace(",)", ")")


def test_the_types_are_those_of_the_records() -> None:
    assert plain(written()) == plain(made())


def test_it_is_convert_itself() -> None:
    import normswap

    assert typed_convert.convert is normswap.convert


if __name__ == "__main__":
    text = FILE.read_text()
    FILE.write_text(text.replace(written(), made()))
