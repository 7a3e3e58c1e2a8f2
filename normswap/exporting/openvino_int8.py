"""int8 in OpenVINO: NNCF, on the model in fp32.

Weights of 7 bits have those where a CPU without VNNI would saturate (`OverflowFix`; depthwise ones would not), so that
the file computes the same on every CPU. Biases are corrected by us: NNCF's own correction makes the errors of some
networks twice as large.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from normswap.errors import RefusedError, first_line
from normswap.exporting import openvino_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.settings import SAFE_BITS, Quantization
from normswap.graph.node_reader import LINEAR
from normswap.models.weight_files import quiet

if TYPE_CHECKING:
    import openvino as ov

NEEDS = ("nncf", "openvino")
LAYERS = LINEAR


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`: half of its range is half of 127."""
    depthwise = (
        isinstance(layer, nn.modules.conv._ConvNd) and not layer.transposed and 1 < layer.groups == layer.in_channels
    )
    return 63.5 if bits == SAFE_BITS and not depthwise else 127


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """See `formats.Quantizer.write_int8`."""
    openvino_file.save(_quantized(openvino_file.graph(contents), how), file, contents.metadata)


def _quantized(model: ov.Model, how: Quantization) -> ov.Model:
    """An OpenVINO model in int8."""
    with _hushed():
        import nncf
        from nncf.quantization.advanced_parameters import OverflowFix, QuantizationParameters
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet

        advanced = nncf.AdvancedQuantizationParameters(
            overflow_fix=OverflowFix.ENABLE if how.settings.weight_bits == SAFE_BITS else OverflowFix.DISABLE,
            weights_quantization_params=QuantizationParameters(per_channel=how.settings.per_channel),
            disable_bias_correction=True,
            activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
        )
        spared = nncf.IgnoredScope(names=_readers(model, how.keep), validate=False) if how.keep else None
        try:
            return nncf.quantize(
                model, nncf.Dataset([batch.numpy() for batch in how.images]), subset_size=len(how.images),
                preset=nncf.QuantizationPreset.MIXED, ignored_scope=spared, advanced_parameters=advanced,
            )  # fmt: skip
        except Exception as error:  # whatever it raises
            raise RefusedError("NNCF cannot quantize it", first_line(error)) from None


def _readers(model: ov.Model, keep: Sequence[str]) -> list[str]:
    """The names of the operations that read the weights of these layers."""
    names = {f"network.{path}.weight" for path in keep}
    constants = [op for op in model.get_ops() if op.get_friendly_name() in names]
    return [reader.get_node().get_friendly_name() for op in constants for reader in op.output(0).get_target_inputs()]


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """NNCF draws progress bars on stdout and logs as it is imported."""
    logger = logging.getLogger("nncf")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
