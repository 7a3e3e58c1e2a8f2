"""The --help of a command: its options in groups, then examples, then the keys that --json prints.

Plain text, by typer's own formatter: rich takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import typer.core

Keys = Mapping[str, str]
"""The keys that --json prints, and what is to be said of each."""
Clicks = Any
"""Objects of click's, which newer versions of typer hide."""


class _Page:
    """The end of a page: examples, which are not wrapped, and keys."""

    keys: ClassVar[Mapping[str, Keys]] = {}
    examples: ClassVar[tuple[str, ...]] = ()

    def format_epilog(self, ctx: Clicks, formatter: Clicks) -> None:
        """Write it."""
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}normswap {example}\n")
        for of, keys in self.keys.items():
            with formatter.section(" ".join(filter(None, ("Keys of --json", of)))):
                formatter.write_text(", ".join(f"{key} ({said})" if said else key for key, said in keys.items()))


class _Command(_Page, typer.core.TyperCommand):
    """A command; options that name a group stand under its name, after the others."""

    def format_options(self, ctx: Clicks, formatter: Clicks) -> None:
        """Write arguments and options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            group = "Arguments" if parameter.param_type_name == "argument" else "Options"
            group = getattr(parameter, "rich_help_panel", None) or group
            if (row := _without_old_names(parameter).get_help_record(ctx)) is not None:
                groups.setdefault(group, []).append(row)
        first = [name for name in ("Arguments", "Options") if name in groups]
        for name in (*first, *(name for name in groups if name not in first)):
            with formatter.section(name):
                formatter.write_dl(groups[name])


def _without_old_names(parameter: Clicks) -> Clicks:
    """The same option with its first long name only; the others are what it was called."""
    long = [name for name in parameter.opts if name.startswith("--")]
    shown = copy.copy(parameter)
    shown.opts = [name for name in parameter.opts if name not in long[1:]]
    return shown


class _CommandGroup(_Page, typer.core.TyperGroup):
    """A command that has commands."""


def page(keys: Keys, *examples: str, **others: Keys) -> type[_Command]:
    """A command of these keys and examples.

    Args:
        others: by what it is printed of (`of_an_exported_file`), the keys of what is not like the rest.
    """
    return type("Command", (_Command,), _filled(keys, examples, others))


def group_page(keys: Keys, *examples: str) -> type[_CommandGroup]:
    """The same of a command that has commands."""
    return type("Group", (_CommandGroup,), _filled(keys, examples, {}))


def _filled(keys: Keys, examples: tuple[str, ...], others: Mapping[str, Keys]) -> dict[str, object]:
    named = {of.replace("_", " "): some for of, some in others.items()}
    return {"keys": {"": keys, **named} if keys else named, "examples": examples}
