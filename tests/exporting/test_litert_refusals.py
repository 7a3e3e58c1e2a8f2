"""What LiteRT's writers refuse, without the packages that they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normswap.errors import RefusedError
from normswap.exporting import litert_file, litert_int8
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.settings import Int8Settings, Quantization

BYTES = Int8Settings(weight_bits=8)


class _WrittenError(Exception):
    """The writer has come to the conversion."""


def come(*args: object) -> bytes:
    raise _WrittenError


def contents(stored: torch.dtype) -> Any:
    network = SimpleNamespace(stored=stored, dtype=torch.float32)
    quiet = dict.fromkeys(("require_one_image", "require_floats"), lambda what: None)
    return SimpleNamespace(network=network, in_float32=None, **quiet)


def test_bfloat16_is_refused_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litert_file, "converted", come)
    with pytest.raises(RefusedError, match="not written in bf16"):
        litert_file.write(contents(torch.bfloat16), Path("net.tflite"))
    with pytest.raises(_WrittenError):
        litert_file.write(contents(torch.float32), Path("net.tflite"))


def test_layers_that_stay_are_refused_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litert_file, "converted", come)
    with pytest.raises(RefusedError, match="all layers or none"):
        litert_int8.write_int8(
            contents(torch.float32), Path("net.tflite"), Quantization([], settings=BYTES, keep=["stem"])
        )
    with pytest.raises(_WrittenError):
        litert_int8.write_int8(contents(torch.float32), Path("net.tflite"), Quantization([], settings=BYTES))


def test_any_number_of_images_is_refused_in_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file would take one at a time all the same."""
    monkeypatch.setattr(litert_file, "converted", come)
    shipped, image = Shipped(nn.Conv2d(3, 4, 3)), torch.zeros(1, 3, 8, 8)
    for dynamic, raised in ((True, RefusedError), (False, _WrittenError)):
        with pytest.raises(raised):
            litert_int8.write_int8(
                FileContents(shipped, (image,), dynamic), Path("net.tflite"), Quantization([], settings=BYTES)
            )


def test_finer_steps_than_bytes_have_are_refused() -> None:
    Quantization([], BYTES).require_whole_bytes("ExecuTorch")
    with pytest.raises(RefusedError, match=r"ExecuTorch's weights have 8 bits: .*weight_bits=8"):
        Quantization([]).require_whole_bytes("ExecuTorch")
    with pytest.raises(RefusedError, match=r"ExecuTorch's quantizer takes all layers or none. Leave out sensitive=1"):
        Quantization([], BYTES, ["stem"]).require_whole_bytes("ExecuTorch")


def test_what_the_quantizer_raises_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litert_int8, "silent", come)
    with pytest.raises(RefusedError, match="cannot quantize it"):
        litert_int8._quantized(b"", Quantization([]))


def test_ranges_are_those_of_all_images() -> None:
    class Tool:
        def calibrate(self, given: dict[str, Sequence[dict[str, np.ndarray]]]) -> Any:
            (one,) = given["serving_default"]
            return {"x": {"min": one["args_0"].min(keepdims=True), "max": one["args_0"].max(keepdims=True)}}

    images: list[Tensor] = [torch.tensor(values) for values in ([-1.0, 2.0], [-5.0, 1.0], [0.0, 7.0], [0.5, 0.6])]
    seen = litert_int8._extremes(Tool(), images)  # type: ignore[arg-type]
    assert (seen["x"]["min"].tolist(), seen["x"]["max"].tolist()) == ([-5], [7])
