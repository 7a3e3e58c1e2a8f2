"""One thread a process, as the tests run in several (`pytest -n 2`) and OpenMP's threads of one
wait by spinning; lines of one width, whatever terminal pytest runs in; and no test is left out but
for a reason that is known.
"""

import copy
import functools
import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # busy is no error
settings.load_profile("untimed")
for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
os.environ["COLUMNS"] = "100"
# Tests serve a hub of their own on localhost, which a machine that is told to ask no hub would not
# ask.
for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.pop(name, None)

# What is imported is never garbage: a tenth of the time went into looking for some among torch's
# modules.
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    # What tests keep for one another and import late is no garbage either: all of it is searched a
    # tenth as often.
    gc.set_threshold(700, 10, 100)
    gc.enable()


SKIPS = {
    r"not there: .*|no shared .* here": "../shared is not part of the repository",
    r"chromium is not installed": "a browser is no Python package",
    r"only Linux says|reads /proc": "/proc is Linux's",
    r"OpenVINO takes no more threads than there are cores": "a machine with one core",
    r"not import .(coremltools|einops|executorch|litert_torch|ncnn|pnnx)": "in another extra",
    r"not import .(flwr|monai|open_clip|ultralytics)": "in another extra",
    r"npm is not installed|npm cannot fetch onnxruntime-web": (
        "a browser's runtime is no Python package"
    ),
    r"this torch has no devices in Python": "they came with torch 2.13",
    r"no network namespaces here": "Linux's, and root's",
    r"ultralytics.* is not installed": "AGPL, and in no extra",
}


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports have empty pictures: most of their time goes into drawing."""
    monkeypatch.setattr("normswap.reporting.figures._svg", lambda axes: "data:")


@pytest.fixture(autouse=True, scope="session")
def drawn_once() -> Iterator[None]:
    """Every network that is converted without images sees the same dead leaves: those of a size are
    drawn once.
    """
    from normswap.calibration import channel_values

    draw = functools.lru_cache(24)(channel_values.leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            channel_values,
            "leaves",
            lambda count, size, seed: draw(count, tuple(size), seed).clone(),
        )
        yield


@functools.cache
def read_once(registration: Any) -> None:
    """torch.onnx reads its table of some five hundred operators anew for every export, which takes
    longer than all the rest of a small network's. Here it is read once, and every export gets a
    copy.
    """
    read = functools.cache(registration.ONNXRegistry.from_torchlib)

    def copied(*opset: int, **named: int) -> Any:
        table = copy.copy(read(*opset, **named))
        table.functions = {operator: [*entries] for operator, entries in table.functions.items()}
        return table

    registration.ONNXRegistry.from_torchlib = staticmethod(copied)


def pytest_runtest_setup() -> None:
    registration = sys.modules.get("torch.onnx._internal.exporter._registration")
    if registration is not None:
        read_once(registration)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test that is marked `one_in(n)`, mark all cases but one in n slow."""
    counts: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and not any(map(item.get_closest_marker, ("slow", "long", "gpu"))):
            test = item.nodeid.partition("[")[0]
            if counts[test] % mark.args[0]:
                item.add_marker(pytest.mark.slow)
            counts[test] += 1


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2]
        if not any(re.search(known, reason) for known in SKIPS):
            report.outcome = "failed"
            report.longrepr = f"skipped for a reason that tests/conftest.py lacks: {reason}"
