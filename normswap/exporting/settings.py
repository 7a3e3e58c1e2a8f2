"""The settings of an exported file, as records; no torch, so that the command's help need not wait for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from normswap.errors import RefusedError, spelled

if TYPE_CHECKING:
    from torch import Tensor

LEVELS = {7: 64, 8: 127}  # of int8 weights on either side of 0, by their bits
WHOLE_BITS = 8
SAFE_BITS = 7  # x64 without VNNI adds products of bytes in 16 bits, which those of 8 bits overflow


@dataclass(frozen=True)
class FileSettings:
    """How a file is to be written.

    Args:
        format: onnx, onnx-data, openvino, pt2, torchscript, ncnn, executorch, litert, coreml or safetensors; by default
            the one that the file's ending says.
        dtype: fp32; fp16, for weights and arithmetic; bf16, for the weights but those of stem, projections and
            classifier, with arithmetic in fp32: in bf16 more than 1 answer in 1000 would change; int8, by the runtime's
            own quantizer, on a network whose channels are scaled for it (`equalization`).
        dynamic_batch: any number of images at a time, else one.
        input_size: (C, H, W); by default the size the network was made for.
        normalize: the file takes pixels in 0..1, and subtracts the mean and divides by std itself.
        softmax: the file answers with probabilities.
        force: replace a file that exists.
        count_plain: export the network as it is, too, and count that file's nodes.
    """

    format: str | None = None
    dtype: str = "fp32"
    dynamic_batch: bool = False
    input_size: Sequence[int] | None = None
    normalize: bool = False
    softmax: bool = False
    force: bool = False
    count_plain: bool = False


class FileOptions(TypedDict, total=False):
    """The same as keywords."""

    format: str | None
    dtype: str
    dynamic_batch: bool
    input_size: Sequence[int] | None
    normalize: bool
    softmax: bool
    force: bool
    count_plain: bool


@dataclass(frozen=True)
class Int8Settings:
    """How a file is quantized.

    Args:
        per_channel: weights have a step for each output channel, else one for all.
        weight_bits: 7, the same on every CPU, or 8, for those that add products of bytes in 32 bits (x64 with VNNI,
            ARM with dot products).
        sensitive: so many layers, those that int8 costs most, stay in fp32.
        max_drop: points of top-1 (without labels: of agreement) that the file may lose; None: any.
    """

    per_channel: bool = True
    weight_bits: int = SAFE_BITS
    sensitive: int = 0
    max_drop: float | None = None


@dataclass(frozen=True)
class Quantization:
    """The settings of a runtime's quantizer.

    Args:
        images: batches (N, C, H, W) as the file takes them: ranges are from the least to the largest number of all.
        keep: paths of layers that stay in fp32.
    """

    images: Sequence[Tensor]
    settings: Int8Settings = field(default_factory=Int8Settings)
    keep: Sequence[str] = ()

    def require_whole_bytes(self, tool: str) -> None:
        """Check that all layers are to be quantized, with weights of 8 bits.

        Args:
            tool: the name of what does nothing else.

        Raises:
            RefusedError: something else is asked for.
        """
        if self.settings.weight_bits != WHOLE_BITS:
            remedy = f"Give {spelled('weight_bits', WHOLE_BITS)}"
            raise RefusedError(f"{tool}'s weights have {WHOLE_BITS} bits", "on no CPU does it need fewer", remedy)
        if self.keep:
            remedy = f"Leave out {spelled('sensitive', len(self.keep))}"
            raise RefusedError(f"{tool}'s quantizer takes all layers or none", remedy=remedy)
