"""What earlier versions took on the command line and this one does not: one line each says what to use."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple


class Removed(NamedTuple):
    """Neighbouring words that these commands took (patterns, `|` between alternatives), and what to use instead."""

    typed: str
    command: str
    instead: str


REMOVED = (
    Removed("--check", "schemes", "The pytest fixture `check_scheme` tries a scheme on small networks."),
    Removed("--side *", "spp", "Use --input-size C,H,W."),
    Removed("--mean *", "doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-mean R,G,B."),
    Removed("--std *", "convert|doctor|evaluate|export|finetune|recalibrate|verify", "Use --image-std R,G,B."),
    Removed("--steady *", "convert", "Use --relative-eps, a multiple of the mean variance: 9 makes a share of 0.9."),
    Removed("smp:*", "*", "Use segmentation_models_pytorch:ARCH with --arch-arg encoder_name=ENCODER."),
    Removed("--format torchscript", "export", "Use FILE.pt2, by torch.export."),
    Removed("--nproc *", "finetune", "Use torchrun --nproc-per-node N -m normswap finetune ..."),
    Removed("--resume [!a]*", "finetune", "Use --resume auto. Copy another run's folder, and name the copy by -o."),
    Removed("*.tar.gz|*.tgz|*.tar.xz", "*", "Unpack it: a plain .tar, or a folder."),
)


def instead_of(arguments: Sequence[str]) -> str | None:
    """Return what to say of a removed word in a command line that failed; None if nothing in it was removed."""
    words = [text for word in arguments for text in (word.split("=", 1) if word.startswith("--") else [word])]
    for removed in REMOVED:
        patterns = removed.typed.split()
        if not words or (removed.command != "*" and words[0] not in removed.command.split("|")):
            continue
        for start in range(len(words) - len(patterns) + 1):
            typed = words[start : start + len(patterns)]
            if all(map(_matches, typed, patterns)):
                return f"{' '.join(typed)} was removed. {removed.instead}"
    return None


def _matches(word: str, patterns: str) -> bool:
    return any(fnmatchcase(word, pattern) for pattern in patterns.split("|"))
