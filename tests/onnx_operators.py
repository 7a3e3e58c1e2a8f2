"""torch.onnx reads its table of some five hundred operators anew for every export, which takes longer than all the rest
of a small network's. Here it is read once for each file of tests: import the fixture, and it is used."""

import functools
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def operators_once() -> Iterator[None]:
    """As nothing is added to the table (`custom_translation_table`), one serves all."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    with pytest.MonkeyPatch.context() as once:
        once.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield
