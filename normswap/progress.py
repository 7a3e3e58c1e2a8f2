"""What is going on, by rich, on stderr: only where that is a terminal, so that logs stay clean."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def _console() -> Console:
    return Console(stderr=True, markup=False, highlight=False, emoji=False)


@contextmanager
def working(what: str, *, spin: bool = True) -> Iterator[None]:
    """A spinner while something takes its time; nothing where stderr is no terminal."""
    console = _console()
    if not (spin and console.is_terminal):
        yield
        return
    with console.status(what):
        yield


@contextmanager
def stages() -> Iterator[Callable[[str], None]]:
    """A spinner whose text the caller changes."""
    console = _console()
    if not console.is_terminal:
        yield lambda what: None
        return
    with console.status("") as status:
        yield status.update


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, moved by calls with the images done and their total (0 when unknown)."""
    console = _console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total or None)
