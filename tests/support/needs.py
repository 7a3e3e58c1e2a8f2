"""What a machine may lack: a test that needs it is left out there.

A test asks by the marker `needs` or by a function of this file. tests/conftest.py fails every test
that is skipped in another way, so that nothing is left out for a reason that `DECLARED` lacks.
"""

import importlib
import importlib.util
from types import ModuleType

import pytest

# What may be lacking, and why it is not asked for.
DECLARED = {
    # Packages that the extra `test` does not have.
    "check_jsonschema": "pre-commit has it",
    "coremltools": "it is in the extra coreml",
    "einops": "no extra has it",
    "executorch": "it is in the extra executorch",
    "flwr": "it is in the extra federated",
    "lightning": "no extra has it",
    "litert_torch": "it is in the extra litert",
    "monai": "no extra has it",
    "ncnn": "it is in the extra ncnn",
    "open_clip": "no extra has it",
    "sky": "SkyPilot is no part of an extra; its parser checks recipes/finetune.sky.yaml",
    "pnnx": "it is in the extra ncnn",
    "ultralytics": "its licence is AGPL, and no extra has it",
    # Programs and files.
    "chromium": "a browser is no Python package",
    "onnxruntime-web": "npm fetches a browser's runtime, which is no Python package",
    "shared files": "../shared is not part of the repository",
    # Machines.
    "a GPU": "a machine without CUDA",
    "Linux": "/proc is Linux's",
    "no Core ML": "macOS runs Core ML",
}


class Lacking(pytest.skip.Exception):
    """The test, or its file, is left out: the machine lacks a thing that `DECLARED` names."""


def need(what: str, there: bool | None = None, detail: str = "") -> None:
    """Leave out the test, or the file that is being collected, if the machine lacks a thing.

    Args:
        what: The thing, a key of `DECLARED`.
        there: Whether it is there. By default `what` is a package, which is looked for.
        detail: What else the reader of the skip should know.

    Raises:
        AssertionError: `DECLARED` does not have it.
    """
    assert what in DECLARED, f"tests/support/needs.py does not declare {what}"
    if there is None:
        there = importlib.util.find_spec(what) is not None
    if not there:
        reason = f"{what} is not there: {DECLARED[what]}"
        raise Lacking(f"{reason} ({detail})" if detail else reason, allow_module_level=True)


def package(name: str) -> ModuleType:
    """The package `name`; leaves the test or file out if it is declared and not installed."""
    if name in DECLARED:
        need(name)
    return importlib.import_module(name)
