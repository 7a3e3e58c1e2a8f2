"""Options that several commands share are a record, written once: a command that takes one has its fields as options.

A record's `GROUP` is the heading in --help below which the options stand that it adds.

typer knows only options one by one, so what it is shown is a signature in which each record is replaced by its fields.
"""

from __future__ import annotations

import copy
import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from inspect import Parameter
from typing import Annotated

Command = Callable[..., int]


@dataclass(frozen=True)
class Made:
    """Options that are not written but made: what typer is to know of each by its name, and their heading."""

    options: Mapping[str, object]
    group: str


def spread(command: Command, **made: Made) -> Command:
    """`command` as typer takes it.

    Args:
        made: by name of an argument, options that are made. The argument gets those that are given, as a dict.
    """
    records: dict[str, tuple[Callable[..., object], list[Parameter]]] = {}
    flat: list[Parameter] = []
    for argument in inspect.signature(command, eval_str=True).parameters.values():
        kind = argument.annotation
        if argument.name in made:
            some = made[argument.name]
            listed = [_option(name, _under(some.group, hint), None) for name, hint in some.options.items()]
            records[argument.name] = _given, listed
        elif isinstance(kind, type) and is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            chosen = [(one, _under(_group(kind, one.name), hints[one.name])) for one in fields(kind) if one.init]
            records[argument.name] = kind, [_option(one.name, hint, one.default) for one, hint in chosen]
        flat += (
            records[argument.name][1] if argument.name in records else [argument.replace(kind=Parameter.KEYWORD_ONLY)]
        )

    @functools.wraps(command)
    def flattened(**given: object) -> int:
        for name, (build, options) in records.items():
            given[name] = build(**{option.name: given.pop(option.name) for option in options})
        return command(**given)

    flattened.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in flat}
    return flattened


def _group(kind: type, name: str) -> str | None:
    """The heading of the record that adds this option."""
    adds = next(one for one in kind.__mro__ if name in inspect.get_annotations(one))
    return getattr(adds, "GROUP", None)


def _under(group: str | None, hint: object) -> object:
    """The type of an option, for typer, with its heading."""
    if group is None:
        return hint
    kind, info = typing.get_args(hint)
    info = copy.copy(info)
    info.rich_help_panel = group
    return Annotated[kind, info]


def _option(name: str, hint: object, default: object) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}
