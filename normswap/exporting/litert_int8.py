"""int8 in LiteRT: ai-edge-quantizer, on the file in fp32. Images come in and answers go out in fp32.

Weights have 8 bits: LiteRT multiplies bytes exactly on every CPU. Its quantizer takes every layer that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from torch import Tensor, nn

from normswap.errors import RefusedError
from normswap.exporting import litert_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import reason
from normswap.exporting.settings import LEVELS, WHOLE_BITS, Quantization
from normswap.exporting.silence import silent

if TYPE_CHECKING:
    from ai_edge_quantizer.quantizer import Quantizer

Seen: TypeAlias = "dict[str, dict[str, np.ndarray]]"  # what each tensor of the file held, by name
NEEDS = ("ai_edge_quantizer",)
LAYERS = (nn.Conv2d, nn.Linear)


def _extremes(tool: Quantizer, images: Sequence[Tensor]) -> Seen:
    """The smallest and largest number of each tensor over all images; the tool itself would average them."""
    total: Seen = {}
    for x in images:
        for name, values in tool.calibrate({"serving_default": [{"args_0": x.numpy()}]}).items():
            before = total.setdefault(name, values)
            total[name] = {
                **values,
                "min": np.minimum(before["min"], values["min"]),
                "max": np.maximum(before["max"], values["max"]),
            }
    return total


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`."""
    return LEVELS[bits]


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """See `formats.Quantizer.write_int8`."""
    how.require_whole_bytes("LiteRT")
    contents.require_one_image("a LiteRT file")
    content = litert_file.converted(contents)
    file.write_bytes(litert_file.finished(_quantized(content, how), contents.network.signature, contents.metadata))


def _quantized(content: bytes, how: Quantization) -> bytes:
    """A file in fp32 as one in int8."""
    try:
        with silent():
            from ai_edge_quantizer import qtyping, quantizer

            tool = quantizer.Quantizer(bytearray(content))
            each = qtyping.QuantGranularity.CHANNELWISE
            tool.add_static_config(
                ".*", qtyping.TFLOperationName.ALL_SUPPORTED, activation_num_bits=8, weight_num_bits=WHOLE_BITS,
                weight_granularity=each if how.settings.per_channel else qtyping.QuantGranularity.TENSORWISE,
            )  # fmt: skip
            for end in ("INPUT", "OUTPUT"):
                tool.update_quantization_recipe(".*", qtyping.TFLOperationName[end], algorithm_key="no_quantize")
            return bytes(tool.quantize(_extremes(tool, how.images)).quantized_model)
    except Exception as error:  # whatever it and the runtime raise
        raise RefusedError("ai-edge-quantizer cannot quantize it", reason(error)) from None
