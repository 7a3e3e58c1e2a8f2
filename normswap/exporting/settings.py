"""The settings of an exported file, as records; no torch, so that the command's help need not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("fp32", "fp16", "bf16", "int8")
# The bits of int8 weights, the default first: x64 without VNNI adds products of bytes in 16 bits, which 8 overflow.
SAFE_BITS, WHOLE_BITS = 7, 8


@dataclass(frozen=True)
class FileSettings:
    """How a file is to be written, as `exporter.export` is told."""

    format: str | None = None
    dtype: str = "fp32"
    dynamic_batch: bool = False
    input_size: Sequence[int] | None = None
    normalize: bool = False
    softmax: bool = False
    weight_bits: int | None = None
    force: bool = False


@dataclass(frozen=True)
class Quantization:
    """What a runtime's quantizer is given.

    Args:
        images: batches (N, C, H, W) as the file takes them: ranges are from the least to the largest number of all.
        weight_bits: 7 or 8.
    """

    images: Sequence[Tensor]
    weight_bits: int = SAFE_BITS

    @property
    def levels(self) -> int:
        """How many steps from 0 the largest weight is."""
        return 64 if self.weight_bits == SAFE_BITS else 127
