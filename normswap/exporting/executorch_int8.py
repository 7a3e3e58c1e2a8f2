"""int8 in ExecuTorch: its own PT2E quantizer for XNNPACK, on the graph that torch.export makes in fp32.

Weights have 8 bits: XNNPACK adds products of bytes in 32 bits on every CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from normswap.errors import RefusedError
from normswap.exporting import executorch_file, pt2, pt2_int8
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import reason
from normswap.exporting.settings import LEVELS, WHOLE_BITS, Quantization
from normswap.exporting.silence import silent

NEEDS = ("executorch", "torchao")
LAYERS = (nn.Conv2d, nn.Linear)


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`."""
    return LEVELS[bits]


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """See `formats.Quantizer.write_int8`."""
    how.require_whole_bytes("ExecuTorch")
    contents.require_one_image("an ExecuTorch file")
    rounded = _quantized(executorch_file.traced(contents), how)
    file.write_bytes(executorch_file.lowered(pt2.traced(contents, rounded), contents.metadata))


def _quantized(program: ExportedProgram, how: Quantization) -> fx.GraphModule:
    """A program in fp32 as a module in int8, to be traced again."""
    try:
        with silent(), torch.no_grad():
            from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer

            settings = pt2_int8.config(torch.int8, LEVELS[WHOLE_BITS], per_channel=how.settings.per_channel)
            return pt2_int8.calibrated(program.module(), XNNPACKQuantizer().set_global(settings), how.images)
    except Exception as error:  # whatever it raises
        raise RefusedError("ExecuTorch cannot quantize it", reason(error)) from None
