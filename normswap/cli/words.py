"""The words of a command line, as they were typed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def values_typed(option: str, words: Sequence[str]) -> list[str]:
    """Return the values that stand behind an option, in order: `--to X` and `--to=X`.

    Args:
        option: The option, with its dashes.
        words: The words of the command line.
    """
    # A word behind the last one stands for the value that an option at the end lacks.
    values: list[str] = []
    for word, next_word in itertools.pairwise([*words, ""]):
        if word == option:
            values.append(next_word)
        elif word.startswith(f"{option}="):
            values.append(word.removeprefix(f"{option}="))
    return values
