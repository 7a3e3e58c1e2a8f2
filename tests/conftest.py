"""What holds for every test.

- Each process has one thread: the tests run in several processes (`pytest -n 2`), and the threads
  of OpenMP in one process wait for each other by spinning.
- Printed lines have one width, whatever terminal pytest runs in.
- No test is skipped, unless the machine lacks what tests/support/needs.py declares.
"""

import copy
import functools
import gc
import os
import sys
import types
import typing
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support import needs, sampled_tables
from support.core_seconds import CoreSeconds

# A busy machine is no error.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ["COLUMNS"] = "100"
# Tests serve a hub of their own on localhost, which a machine that is told to ask no hub would not
# ask.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.pop(name, None)

# What is imported is never garbage. A tenth of the time went into looking for garbage among torch's
# modules.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    # What tests keep for one another and import late is no garbage either: all of it is searched a
    # tenth as often.
    gc.set_threshold(700, 10, 100)
    gc.enable()


# The marks of tests that do not run by default.
APART = ("slow", "long", "gpu")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core-seconds", metavar="FILE", help="write each room's core seconds")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--core-seconds")
    if path:
        config.pluginmanager.register(CoreSeconds(Path(path)))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty pictures: most of their time goes into drawing."""
    monkeypatch.setattr("normswap.reporting.figures._svg", lambda axes: "data:")


@pytest.fixture(autouse=True, scope="session")
def drawn_once() -> Iterator[None]:
    """The dead leaves of one size are drawn once.

    Every network that is converted without images sees the same ones.
    """
    from normswap.calibration import channel_values

    draw = functools.lru_cache(24)(channel_values.leaves)

    def drawn(count: int, size: Any, seed: int) -> Any:
        return draw(count, tuple(size), seed).clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channel_values, "leaves", drawn)
        yield


@functools.cache
def read_once(registration: Any) -> None:
    """Let torch.onnx read its table of operators once; every export gets a copy.

    torch.onnx reads its table of some five hundred operators anew for every export, which takes
    longer than all the rest of a small network's export.
    """
    read = functools.cache(registration.ONNXRegistry.from_torchlib)

    def copied(*opset: int, **named: int) -> Any:
        table = copy.copy(read(*opset, **named))
        table.functions = {operator: [*entries] for operator, entries in table.functions.items()}
        return table

    registration.ONNXRegistry.from_torchlib = staticmethod(copied)


@functools.cache
def hinted_once(serialize: Any) -> None:
    """Let torch.export resolve the annotations of each of its records once.

    It resolves them anew for every entry of a file, which takes half of the time of opening one.
    """

    @functools.cache
    def hints(kind: type) -> dict[str, Any]:
        return typing.get_type_hints(kind, globalns=vars(serialize.schema))

    cached = types.ModuleType("typing")
    vars(cached).update(vars(typing))
    vars(cached)["get_type_hints"] = lambda kind, globalns: hints(kind)
    serialize.typing = cached


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("needs"):
        needs.need(*mark.args, **mark.kwargs)

    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is not None:
        read_once(registration)
    serialize = sys.modules.get("torch._export.serde.serialize")
    if serialize is not None:
        hinted_once(serialize)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(n)`, mark all cases but about one in n slow.

    The name of a case decides, so that a case that is added moves no other.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not any(map(item.get_closest_marker, APART)):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)

    for group in cases.values():
        mark = group[0].get_closest_marker("one_in")
        assert mark is not None
        default = sampled_tables.one_in([item.name for item in group], mark.args[0])
        for item in group:
            if item.name not in default:
                item.add_marker(pytest.mark.slow)


def _fail_if_undeclared(
    report: pytest.TestReport | pytest.CollectReport, call: pytest.CallInfo[Any]
) -> None:
    """Let a report say "failed" in place of "skipped", if `needs` did not skip the test."""
    error = call.excinfo.value if call.excinfo is not None else None
    is_skip = isinstance(error, pytest.skip.Exception | unittest.SkipTest)
    if is_skip and not isinstance(error, needs.Lacking):
        report.outcome = "failed"
        report.longrepr = f"skipped, but not by tests/support/needs.py: {error}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    _fail_if_undeclared(outcome.get_result(), call)  # type: ignore[attr-defined]


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report() -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    _fail_if_undeclared(report, report.call)
