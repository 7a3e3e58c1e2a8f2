"""The registry is the folder: every file is a scheme, every keyword of its `plan` an option.

A scheme is a module with a docstring (first line: the help text; then the algebra and what is lost), `PAPER`,
`plan(anatomy, *, options) -> Draft`, and `exact(options) -> bool`: whether the function is kept; perhaps `fit`, which
sets values from data, and `SOURCE`, the scheme that the network must be brought to first where it has no norm. A file
whose name begins with `_` is a step that is no target by itself: what `--for` adds, or a part of the way.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from normswap.errors import OptionError
from normswap.plan import Step

PURPOSES = ("opacus", "federated")
EVERY = ("only", "skip")  # options of every scheme: see `selection`


def names() -> list[str]:
    """The schemes that one can convert to, as the command line spells them."""
    return [name for name in _files() if not name.startswith("_")]


def _files() -> list[str]:
    return sorted(info.name if info.name.startswith("_") else info.name.replace("_", "-")
                  for info in pkgutil.iter_modules(__path__) if not info.ispkg)  # fmt: skip


def get(name: str) -> ModuleType:
    """The scheme, or the step, of that name.

    Raises:
        OptionError: there is none; near names are suggested.
    """
    if name not in names() and f"_{name}" not in _files():
        raise _unknown(name)
    prefix = "" if name in names() else "_"
    return importlib.import_module(f"{__name__}.{prefix}{name.replace('-', '_')}")


def demand_target(name: str) -> None:
    """Raises:
    OptionError: one cannot convert to that.
    """
    if name in PURPOSES:
        raise OptionError(f"{name} is no scheme", "it is what a network is for", f"Say '--to SCHEME --for {name}'")
    if name not in names():
        raise _unknown(name)


def demand_purpose(name: str | None) -> None:
    """Raises:
    OptionError: `--for` names nothing that is known.
    """
    if name is not None and name not in PURPOSES:
        raise OptionError(f"unknown purpose {name!r}", remedy=f"--for {'|'.join(PURPOSES)}")


def _unknown(name: str) -> OptionError:
    known = sorted([*names(), "unfold"])
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}"
    return OptionError(f"unknown scheme {name!r}", remedy=hint)


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
    unknown = sorted(set(given) - {*known, *EVERY})
    if unknown:
        has = f"its options are {_listed(known)}" if known else "it takes no options"
        raise OptionError(f"scheme '{name}' has no option {_listed(unknown)}", has)
    return {**known, **given}


def own(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those that every scheme has."""
    return {name: value for name, value in options.items() if name not in EVERY}


def exact(step: Step) -> bool:
    """Whether the step keeps the function."""
    return bool(get(step.scheme).exact(resolve(step.scheme, step.options)))


def _listed(names: Iterable[str]) -> str:
    return ", ".join(name.replace("_", "-") for name in sorted(names))
