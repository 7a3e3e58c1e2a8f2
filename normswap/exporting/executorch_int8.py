"""int8 in ExecuTorch: its own PT2E quantizer for XNNPACK, on the graph that torch.export makes in fp32.

Weights have 8 bits: XNNPACK adds products of bytes in 32 bits on every CPU.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from normswap.errors import RefusedError
from normswap.exporting import executorch_file, pt2
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import reason
from normswap.exporting.settings import LEVELS, Quantization
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
            from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

            quantizer = XNNPACKQuantizer().set_global(_config(per_channel=how.settings.per_channel))
            watched = prepare_pt2e(program.module(), quantizer)
            for batch in how.images:
                watched(batch)
            done: fx.GraphModule = convert_pt2e(watched)
    except Exception as error:  # whatever it raises
        raise RefusedError("ExecuTorch cannot quantize it", reason(error)) from None
    return done


def _config(*, per_channel: bool) -> object:
    """As XNNPACK's own, but for the ranges (of all images, as everywhere) and steps as small as the numbers."""
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

    activations = QuantizationSpec(
        torch.int8, MinMaxObserver, quant_min=-128, quant_max=127, qscheme=torch.per_tensor_affine
    )
    observer, scheme = (
        (PerChannelMinMaxObserver, torch.per_channel_symmetric) if per_channel
        else (MinMaxObserver, torch.per_tensor_symmetric)
    )  # fmt: skip
    fine = observer.with_args(eps=torch.finfo(torch.float32).tiny)
    weights = QuantizationSpec(torch.int8, fine, quant_min=-127, quant_max=127, qscheme=scheme, ch_axis=0)
    return QuantizationConfig(activations, activations, weights, None)
