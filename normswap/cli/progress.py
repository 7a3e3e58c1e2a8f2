"""Progress on stderr, drawn by rich, and only if stderr is a terminal, so that logs stay clean.

rich is imported inside functions (see `tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from normswap.cli.terminal import say_aside, styled
from normswap.errors import printable

if TYPE_CHECKING:
    from rich.console import Console

    from normswap.training.engine import TrainingProgress


def _console() -> Console:
    """Return rich's console on stderr, without markup, highlighting or emoji codes."""
    from rich.console import Console

    return Console(stderr=True, markup=False, highlight=False, emoji=False)


@contextmanager
def working(text: str) -> Iterator[Callable[[str], None]]:
    """Show a spinner beside `text` during a `with` block.

    A function is yielded that changes the text.
    """
    with _console().status(styled(text)) as status:
        yield lambda changed: status.update(styled(changed))


@contextmanager
def bar(text: str, *, in_logs: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a bar beside `text` during a `with` block.

    A function is yielded that moves the bar. It takes the number of images done, and their total,
    which is 0 if it is not known.

    Args:
        text: What is done.
        in_logs: Whether a log, which has no bar, gets a line now and then.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = _console()
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    hidden = not console.is_terminal
    # `Pace` takes the same numbers, and says now and then how far the work is.
    if hidden and in_logs:
        from normswap.models.pace import Pace

        yield Pace(text, say_aside)
        return
    with Progress(*columns, console=console, transient=True, disable=hidden) as shown:
        task = shown.add_task(printable(text), total=None)

        def progress(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total or None)

        yield progress


@contextmanager
def training_bar(
    *, quiet: bool = False
) -> Iterator[tuple[Callable[[TrainingProgress], None], Callable[[str], None]]]:
    """Show a bar over all updates of a training run during a `with` block.

    A log, which has no bar, gets a line for each epoch. Two functions are yielded. The first takes
    the engine's `TrainingProgress` and moves the bar. The second prints a sentence above it.

    Args:
        quiet: Whether nothing is shown at all, as in every process but the first.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = _console()
    text_column = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(24), text_column, TimeRemainingColumn())
    hidden = quiet or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as shown:
        task = shown.add_task("starting", total=None)

        def progress(moment: TrainingProgress) -> None:
            """Show how far the training is: move the bar or, in a log, print a line per epoch."""
            line = _moment_line(moment)
            # Beside the bar the top-1 of the latest validation is shown, too.
            description = line
            if moment.top1 is not None:
                description += f"  top-1 {moment.top1:.2f}"
            shown.update(
                task, completed=moment.update, total=moment.updates, description=description
            )

            # Without a bar, whoever reads the log is told at the end of each epoch.
            ends_epoch = moment.epoch == int(moment.epoch)
            if hidden and not quiet and ends_epoch:
                say_aside(line)

        def say(sentence: str) -> None:
            if not quiet:
                console.print(styled(sentence), soft_wrap=not console.is_terminal)

        yield progress, say


def _moment_line(moment: TrainingProgress) -> str:
    """Return the epoch, speed, learning rate and loss of a moment of training, in one line."""
    parts = (
        f"epoch {moment.epoch:.2f}/{moment.epochs:g}",
        f"{moment.images_per_s:.0f} img/s",
        f"lr {moment.lr:.3g}",
        f"loss {moment.loss:.4f}",
    )
    return "  ".join(parts)
