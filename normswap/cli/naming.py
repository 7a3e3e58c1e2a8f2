"""The names of networks in outputs and in tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from normswap.models import kinds


def last_part(name: str) -> str:
    """The name of a network: the last part of its source."""
    prefix, _, rest = name.partition(":")
    known = prefix in kinds.prefixes()
    path = Path(rest if known else name)
    if path.is_dir():
        return path.resolve().name
    if path.is_file():
        return path.stem
    return Path(rest.partition("@")[0] if known else name).name.replace(":", "-")


def label(name: str, taken: Collection[str]) -> str:
    """`name`, or with a number behind it if that is taken."""
    again = (f"{name} ({i})" for i in range(2, len(taken) + 3))
    return name if name not in taken else next(one for one in again if one not in taken)
