"""Progress by rich (imported as in `tables`), on stderr: only where that is a terminal, so that
logs stay clean.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from normswap.training.engine import TrainingProgress


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


@contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner, and a way to change its text."""
    with _console().status(what) as status:
        yield status.update


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar, moved by calls with the images done and their total (0 when unknown)."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = _console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as shown:
        task = shown.add_task(what, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total or None)


@contextmanager
def training_bar(
    *, quiet: bool = False
) -> Iterator[tuple[Callable[[TrainingProgress], None], Callable[[str], None]]]:
    """A bar over all updates of a training run, and a way to say something beside it; a line per
    epoch in a log.

    The first function takes the engine's `TrainingProgress`, the second a sentence.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = _console()
    columns = (BarColumn(24), TextColumn("{task.description}"), TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as shown:
        task = shown.add_task("starting", total=None)

        def progress(moment: TrainingProgress) -> None:
            words = (
                f"epoch {moment.epoch:.2f}/{moment.epochs:g}  {moment.images_per_s:.0f} img/s  lr"
                f" {moment.lr:.3g}"
            )
            words += f"  loss {moment.loss:.4f}"
            top1 = "" if moment.top1 is None else f"  top-1 {moment.top1:.2f}"
            shown.update(
                task, completed=moment.update, total=moment.updates, description=words + top1
            )
            if hidden and not quiet and moment.epoch == int(moment.epoch):
                print(words, file=sys.stderr)

        def say(what: str) -> None:
            if not quiet:
                console.print(what, soft_wrap=not console.is_terminal)

        yield progress, say
