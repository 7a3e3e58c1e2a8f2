"""Where text reaches the terminal.

Every line that a command prints passes here, or is a `styled` text of rich's: what it quotes may be
from files, names and errors of others (`errors.printable`). rich is imported inside functions: it
takes a third of the time that `normswap --help` has.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from normswap.errors import printable

if TYPE_CHECKING:
    from rich.text import Text


def say(text: str) -> None:
    """Print a line on stdout."""
    print(printable(text))


def say_lines(text: str) -> None:
    """Print a text of several lines on stdout, such as a file's."""
    print(printable(text, lines=True), end="")


def say_json(value: object) -> None:
    """Print strict JSON on stdout, where every character that is not of ASCII is escaped."""
    print(json.dumps(value, indent=2, allow_nan=False))


def remark(notes: Iterable[str]) -> None:
    """Print notes on stderr, a line each. --json prints on stdout only, so they do not mix."""
    for note in notes:
        say_aside(f"note: {note}")


def say_aside(text: str, *, lines: bool = False) -> None:
    """Print a text on stderr. If stderr takes no text, nothing happens.

    Args:
        text: The text.
        lines: Whether the text has several lines.
    """
    with suppress(OSError):
        print(printable(text, lines=lines), file=sys.stderr, flush=True)


def styled(text: str, style: str = "") -> Text:
    """Return a text for rich's tables and bars, in which no markup is read."""
    from rich.text import Text

    return Text(printable(text), style=style)


def open_standard_streams() -> None:
    """Connect stdin, stdout and stderr with os.devnull if this process was started without them.

    Otherwise the next file that is opened gets the number of stdout, and what a library prints is
    written into it.
    """
    for number, mode in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        # The stream is closed. A file gets the lowest free number, which mostly is this one.
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)

    # Python has made no object for a stream that was closed when it started.
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False)


def abandon_stdout() -> None:
    """Connect stdout with os.devnull if it takes no text any more (disk full, pipe closed).

    The interpreter would fail on it again when it ends.
    """
    try:
        sys.stdout.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
