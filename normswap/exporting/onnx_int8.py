"""int8 in ONNX: onnxruntime.quantization's QDQ, on an ONNX file in fp32.

Activations are unsigned, weights signed. On x64 without VNNI, ONNX Runtime multiplies such pairs by an instruction that
saturates at 16 bits; weights of 7 bits cannot reach that, and are the same on every CPU; those of 8 bits are finer.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor, nn

from normswap.errors import RefusedError, first_line
from normswap.exporting import onnx_arranging, onnx_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.settings import LEVELS, SAFE_BITS, Quantization
from normswap.exporting.signature import INPUT
from normswap.graph.node_reader import LINEAR
from normswap.models.weight_files import quiet

NEEDS = ("onnxruntime", "onnx")
LAYERS = LINEAR
# a classifier's answers stay as they come out of its products; what another layer reads is rounded there
_OPTIONS = {"OpTypesToExcludeOutputQuantization": ["Gemm"]}


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`."""
    return LEVELS[bits]


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """See `formats.Quantizer.write_int8`."""
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        plain = Path(folder) / "plain.onnx"
        onnx_file.write(contents, plain)
        quantize(plain, file, how)


def quantize(plain: Path, file: Path, how: Quantization) -> None:
    """Write `plain`, an ONNX file in fp32, to `file` in int8."""
    import onnx
    from onnxruntime.quantization import CalibrationMethod, QuantFormat, QuantType, quantize_static

    model = onnx.load(plain)
    onnx_arranging.arrange(model)
    names = {f"network.{path}.weight" for path in how.keep}
    spared = [node.name for node in model.graph.node if names.intersection(node.input)]
    root = logging.getLogger()  # onnxruntime's tool warns there that the model was not preprocessed: it is folded
    level = root.level
    root.setLevel(logging.ERROR)
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            quantize_static(
                model, file, _CalibrationReader(how.images), quant_format=QuantFormat.QDQ,
                per_channel=how.settings.per_channel,
                reduce_range=how.settings.weight_bits == SAFE_BITS, activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8, calibrate_method=CalibrationMethod.MinMax, nodes_to_exclude=spared,
                extra_options=_OPTIONS,
            )  # fmt: skip
    except Exception as error:  # whatever the tool and the runtime raise
        raise RefusedError("onnxruntime.quantization cannot quantize it", first_line(error)) from None
    finally:
        root.setLevel(level)
    written = onnx.load(file)
    onnx.helper.set_model_props(written, {prop.key: prop.value for prop in onnx.load(plain).metadata_props})
    written.producer_name = model.producer_name
    file.write_bytes(written.SerializeToString())


class _CalibrationReader:
    """Images, as onnxruntime asks for them."""

    def __init__(self, images: Sequence[Tensor]) -> None:
        self.left: Iterator[dict[str, np.ndarray]] = ({INPUT: x.numpy()} for x in images)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)
