"""Ctrl-C while modules are imported.

The C code of some packages swallows an interruption of its import: the command goes on, or fails in another way.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from normswap.storage import one_writer

INTERRUPTED = 130  # as a shell has it: 128 + SIGINT


@contextmanager
def ends_imports() -> Iterator[None]:
    """Let an interruption of an import end the process, where nobody else minds interruptions."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, _end_or_raise)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end_or_raise(number: int, frame: FrameType | None) -> None:
    if _is_import(frame):
        one_writer.leave()
        os._exit(INTERRUPTED)
    signal.default_int_handler(number, frame)


def _is_import(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False
