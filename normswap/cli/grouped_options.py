"""Options that several commands share are a dataclass, written once; a command takes its fields as options.

Typer knows only options one by one, so it is shown a signature in which each dataclass is replaced by its fields. The
dataclass's `GROUP` is the heading of the panel in --help below which the options stand that it adds.
"""

import copy
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from inspect import Parameter
from typing import Annotated, Any

Command = Callable[..., int | None]


def spread(command: Command) -> Command:
    """Return `command` as typer takes it: called with the options, it gets the dataclasses."""
    records: dict[str, type[Any]] = {}
    options: list[Parameter] = []
    for argument in inspect.signature(command, eval_str=True).parameters.values():
        kind = argument.annotation
        if isinstance(kind, type) and is_dataclass(kind):
            records[argument.name] = kind
            hints = typing.get_type_hints(kind, include_extras=True)
            options += [_option(kind, field, hints[field.name]) for field in fields(kind) if field.init]
        else:
            options.append(argument.replace(kind=Parameter.KEYWORD_ONLY, annotation=_escaped(kind)))

    @functools.wraps(command)
    def flattened(**options: object) -> int | None:
        for name, record in records.items():
            options[name] = record(**{field.name: options.pop(field.name) for field in fields(record) if field.init})
        return command(**options)

    flattened.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    flattened.__annotations__ = {option.name: option.annotation for option in options}
    return flattened


def _option(record: type[Any], field: Field[Any], hint: object) -> Parameter:
    adds = next(base for base in record.__mro__ if field.name in inspect.get_annotations(base))
    default = Parameter.empty if field.default is MISSING else field.default
    hint = _escaped(hint, getattr(adds, "GROUP", None))
    return Parameter(field.name, Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def _escaped(hint: object, panel: str | None = None) -> object:
    """Return the option's type with its help's brackets escaped, which rich would take for markup, and its panel."""
    if typing.get_origin(hint) is not Annotated:
        return hint
    kind, info = typing.get_args(hint)
    info = copy.copy(info)
    info.help = info.help and info.help.replace("[", r"\[")
    info.rich_help_panel = panel or info.rich_help_panel
    return Annotated[kind, info]
