"""The one way in which a command says what it found: as JSON, or for people."""

from __future__ import annotations

import json
import math
import shutil
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from normswap.plan import Body

Said = TypeVar("Said", Body, Sequence[Body])


def show(body: Said, as_json: bool, human: Callable[[Said], None]) -> None:
    """Print `body` as strict JSON, or let `human` print it."""
    if as_json:
        print(json.dumps(plain(body), indent=2, allow_nan=False))
    else:
        human(body)


def between_words(text: str, stream: TextIO) -> str:
    """The text in lines that fit a terminal, broken between words only; as it is for anything else."""
    if not stream.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, break_long_words=False, break_on_hyphens=False)


def plain(value: object) -> object:
    """`value` as JSON has it: numbers that are not finite become null, paths text."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value
