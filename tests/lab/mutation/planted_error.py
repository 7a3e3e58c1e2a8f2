"""The record of an error that is planted (`planted.py`)."""

from __future__ import annotations

from typing import NamedTuple


class Planted(NamedTuple):
    """One error.

    Args:
        name: what is wrong then.
        file: where, from the root of the repository.
        old, new: the text that is there, once, and what stands there instead.
        tests: files, or tests in them, of which one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
