"""The settings of an exported file, as records, without torch for the command's help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("fp32", "fp16", "bf16", "int8")
# The bits of int8 weights, the default first: x64 without VNNI adds products of bytes in 16 bits,
# which 8 overflow.
SAFE_BITS = 7
WHOLE_BITS = 8


@dataclass(frozen=True)
class FileSettings:
    """How a file is to be written.

    Args:
        format: onnx, openvino, pt2, ncnn, executorch, litert or coreml; by default that of the
            file's ending.
        dtype: fp32; fp16, for weights and arithmetic; bf16, for weights, with arithmetic in fp32
            (in bf16 more than 1 answer in 1000 would change); int8, by the runtime's own quantizer.
        dynamic_batch: any number of images at a time, else one.
        input_size: (C, H, W); by default the network's own size.
        normalize: the file takes pixels in 0..1, and subtracts the mean and divides by std itself.
        softmax: the file gives probabilities.
        weight_bits: of int8: 7, the same on every CPU, or 8, for CPUs that add products of bytes in
            32 bits (x64 with VNNI, ARM with dot products); by default the fewest that the format
            has.
        force: replace a file that exists.
    """

    format: str | None = None
    dtype: str = "fp32"
    dynamic_batch: bool = False
    input_size: Sequence[int] | None = None
    normalize: bool = False
    softmax: bool = False
    weight_bits: int | None = None
    force: bool = False


class FileOptions(TypedDict, total=False):
    """`FileSettings` as keywords."""

    format: str | None
    dtype: str
    dynamic_batch: bool
    input_size: Sequence[int] | None
    normalize: bool
    softmax: bool
    weight_bits: int | None
    force: bool


@dataclass(frozen=True)
class Quantization:
    """The quantizer's input: batches (N, C, H, W) that set the ranges, and 7 or 8 bits for weights."""

    images: Sequence[Tensor]
    weight_bits: int = SAFE_BITS

    @property
    def levels(self) -> int:
        """The largest weight in quantization steps."""
        return {SAFE_BITS: 64, WHOLE_BITS: 127}[self.weight_bits]
