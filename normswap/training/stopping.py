"""SIGTERM, as schedulers send it: noted, so that the run can stop where nothing is lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Stop:
    """Whether somebody has asked to stop."""

    asked = False


@contextmanager
def on_request() -> Iterator[Stop]:
    """Note a SIGTERM instead of dying of it. Only the main thread may; elsewhere nothing is ever asked."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.asked = True

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = signal.signal(signal.SIGTERM, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before)


def ignore(worker: int) -> None:
    """For a loader's process: schedulers signal all processes of a job, and this one is needed until the run stops."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
