"""How much of a processor's time the tests took, in each room, and their start.

A second of a test is a second on one core: that of the process, and of the processes that it
started and waited for. Time in which a test waits is not counted, so that a busy machine changes
these figures less than it changes the durations that pytest prints.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# What is not a test: what each process imports, and how it finds its tests.
START = "start"


def spent() -> float:
    """Return the seconds that this process, and its children that have ended, had on a core."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def room_of(nodeid: str) -> str:
    """Return the room of a test: a folder of the tests, or the file if it stands in none."""
    return nodeid.partition("::")[0].rpartition("/")[0].removeprefix("tests").lstrip("/") or "*.py"


class CoreSeconds:
    """Gives each report the core seconds since the last, and writes them to a file at the end.

    Args:
        path: The file of JSON that is written: the seconds of each room, and of each test.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.last = 0.0
        self.tests: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.last = spent()
        output = getattr(session.config, "workeroutput", None)
        if output is None:
            self.tests[START] += self.last
        else:
            output[START] = self.last

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[None]:
        outcome: Any = yield
        now = spent()
        outcome.get_result().core_seconds = now - self.last
        self.last = now

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.tests[report.nodeid] += report.core_seconds

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.tests[START] += getattr(node, "workeroutput", {}).get(START, 0)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            return

        rooms: Counter[str] = Counter()
        for nodeid, seconds in self.tests.items():
            rooms[START if nodeid == START else room_of(nodeid)] += seconds
        self.path.write_text(
            json.dumps({"rooms": rooms, "tests": self.tests}, indent=1), encoding="utf-8"
        )
