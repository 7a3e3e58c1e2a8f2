"""Options that several commands share are a record, written once: a command that takes one has its fields as options.

typer knows only options one by one, so what it is shown is a signature in which each record is replaced by its fields.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from inspect import Parameter

Command = Callable[..., int]


def spread(command: Command, **made: Mapping[str, object]) -> Command:
    """`command` as typer takes it.

    Args:
        made: by name of an argument, options that are not written but made: what typer is to know of each by its name.
            The argument gets those that are given, as a dict.
    """
    records: dict[str, tuple[Callable[..., object], list[Parameter]]] = {}
    flat: list[Parameter] = []
    for argument in inspect.signature(command, eval_str=True).parameters.values():
        kind = argument.annotation
        if argument.name in made:
            records[argument.name] = _given, [_option(name, hint, None) for name, hint in made[argument.name].items()]
        elif isinstance(kind, type) and is_dataclass(kind):
            hints = typing.get_type_hints(kind, include_extras=True)
            chosen = [one for one in fields(kind) if one.init]
            records[argument.name] = kind, [_option(one.name, hints[one.name], one.default) for one in chosen]
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


def _option(name: str, hint: object, default: object) -> Parameter:
    default = Parameter.empty if default is MISSING else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _given(**options: object) -> dict[str, object]:
    return {name: value for name, value in options.items() if value is not None}
