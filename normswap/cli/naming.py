"""What networks are called in the names of outputs and in tables."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path


def last_part(name: str) -> str:
    """What a network is called: the last part of its source."""
    prefix, _, rest = name.partition(":")
    if prefix in ("hf-hub", "hf_hub"):
        return rest.partition("@")[0].rpartition("/")[2]
    path = Path(rest if prefix == "local-dir" else name)
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else path.name


def label(name: str, taken: Collection[str]) -> str:
    """`name`, or with a number behind it if that is taken."""
    again = (f"{name} ({i})" for i in range(2, len(taken) + 3))
    return name if name not in taken else next(one for one in again if one not in taken)
