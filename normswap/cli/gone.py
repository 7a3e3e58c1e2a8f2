"""What earlier versions took on the command line and this one does not: one line each says what to use."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class Removed(NamedTuple):
    """A command, option or value that is no longer taken.

    Args:
        typed: neighbouring words of the command line, each a pattern: `--calibrate noise`, `smp:*`.
        command: the commands that took it, `|` between them.
        instead: what to use, as a sentence.
    """

    typed: str
    command: str
    instead: str


REMOVED = (
    Removed("--check", "schemes", "The pytest fixture `check_scheme` tries a scheme on small networks."),
    Removed("--side *", "spp", "Use --input-size C,H,W."),
    Removed("--batch *", "bench", "Use --batch-size N,N."),
    Removed("--size *", "bench", "Use --input-size C,H,W."),
    Removed("--mean *", "doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-mean R,G,B."),
    Removed("--std *", "convert|doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-std R,G,B."),
    Removed("--dtype *", "bench|export", "Use --precision."),
)


def instead_of(arguments: Sequence[str]) -> str | None:
    """Return what to say of a removed word in a command line that failed; None if nothing in it was removed."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for removed in REMOVED:
        patterns = removed.typed.split()
        if not words or words[0] not in removed.command.split("|"):
            continue
        for start in range(len(words) - len(patterns) + 1):
            typed = words[start : start + len(patterns)]
            if all(map(fnmatchcase, typed, patterns)):
                return f"{' '.join(typed)} was removed. {removed.instead}"
    return None
