"""The settings of an exported file, as records, without torch for the command's help."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("fp32", "fp16", "bf16", "int8")
# The bits of int8 weights, the default first. x64 without VNNI adds products of bytes in 16 bits.
# With 8-bit weights these sums overflow.
SAFE_BITS = 7
WHOLE_BITS = 8


@dataclass(frozen=True)
class FileSettings:
    """The options of an exported file.

    Args:
        format: The format: onnx, openvino, pt2, ncnn, executorch, litert or coreml. By default the
            file's ending says it.
        dtype: The precision. fp16 holds for weights and arithmetic. bf16 holds for weights alone,
            with arithmetic in fp32: in bf16 more than 1 answer in 1000 would change. int8 is
            written by the runtime's own quantizer.
        dynamic_batch: Whether the file takes any number of images at a time. Otherwise it takes
            one.
        input_size: The size (C, H, W) of an image. By default it is the network's own.
        normalize: Whether the file takes pixels in 0..1, subtracts the mean and divides by the
            standard deviation itself.
        softmax: Whether the file gives probabilities.
        weight_bits: The bits of an int8 weight. With 7 bits the answers are the same on every CPU.
            8 bits are for CPUs that add products of bytes in 32 bits: x64 with VNNI, ARM with dot
            products. The default is the fewest bits that the format has.
        force: Whether a file that exists is replaced.
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
    """The type of `export`'s keyword arguments for the file: the same fields as `FileSettings`."""

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
    """What a quantizer to int8 is given beside the network.

    Args:
        images: Batches of calibration images (N, C, H, W), which set the ranges of activations.
        weight_bits: The bits of a weight, 7 or 8.
    """

    images: Sequence[Tensor]
    weight_bits: int = SAFE_BITS

    @property
    def levels(self) -> int:
        """How many quantization steps the largest weight is away from 0: 64 or 127."""
        return {SAFE_BITS: 64, WHOLE_BITS: 127}[self.weight_bits]
