"""Silence: words that the formats' own tools write to the terminal stay off it, as errors say what is to be known."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator

from normswap.models.weight_files import quiet


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep off it what is printed, warned and logged in Python, and what C++ writes to the error stream."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
