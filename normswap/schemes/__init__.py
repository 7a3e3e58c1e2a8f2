"""The registry is the folder: every file is a scheme, every keyword of its `plan` an option.

A scheme is a module with a docstring (first line: the help text; then the algebra and what is lost), `PAPER`,
`plan(anatomy, *, options) -> Draft`, and `exact(options) -> bool`: whether the function is kept.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from types import ModuleType
from typing import Any

from normswap.errors import OptionError


def names() -> list[str]:
    """The schemes, as the command line spells them."""
    return sorted(info.name.replace("_", "-") for info in pkgutil.iter_modules(__path__))


def get(name: str) -> ModuleType:
    """The scheme of that name.

    Raises:
        OptionError: there is none; near names are suggested.
    """
    if name not in names():
        near = difflib.get_close_matches(name, names(), 1)
        hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(names())}."
        raise OptionError(f"unknown scheme {name!r}", remedy=hint)
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")


def options(name: str) -> dict[str, Any]:
    """The options of a scheme with their defaults, read off the signature of its `plan`."""
    parameters = inspect.signature(get(name).plan).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def resolve(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """All options of the scheme: its defaults, overruled by what is given.

    Raises:
        OptionError: an option the scheme does not have.
    """
    known = options(name)
    unknown = sorted(set(given) - set(known))
    if unknown:
        has = f"its options are {', '.join(sorted(known))}" if known else "it takes no options"
        raise OptionError(f"scheme '{name}' has no option {', '.join(unknown)}", has)
    return {**known, **given}
