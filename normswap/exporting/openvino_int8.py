"""int8 in OpenVINO: NNCF, on the model in fp32.

Weights of 7 bits have those where a CPU without VNNI would saturate (`OverflowFix`; depthwise ones would not), so that
the file computes the same on every CPU. Biases are corrected by us: NNCF's own correction makes the errors of some
networks twice as large.
"""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from normswap.errors import RefusedError, first_line
from normswap.exporting import openvino_file
from normswap.exporting.exported_module import Shipped
from normswap.exporting.formats import SAFE_BITS
from normswap.graph.inspection import LINEAR
from normswap.models.weight_files import quiet

NEEDS = ("nncf", "openvino")
RANGES = ("minmax", "NNCF's own", "histogram")
LAYERS = LINEAR


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`: half of its range is half of 127."""
    depthwise = (
        isinstance(layer, nn.modules.conv._ConvNd) and not layer.transposed and 1 < layer.groups == layer.in_channels
    )
    return 63.5 if bits == SAFE_BITS and not depthwise else 127


def write_int8(
    network: Shipped,
    x: Tensor,
    file: Path,
    images: Sequence[Tensor],
    *,
    ranges: str,
    per_channel: bool,
    bits: int,
    keep: Sequence[str],
    dynamic: bool,
    metadata: Mapping[str, str],
) -> None:
    """See `formats.Quantizer.write_int8`."""
    model = quantize(
        openvino_file.graph(network, x, dynamic=dynamic), images, ranges=ranges, per_channel=per_channel, bits=bits,
        keep=keep,
    )  # fmt: skip
    openvino_file.save(model, file, metadata)


def quantize(
    model: object,
    images: Sequence[Tensor],
    *,
    ranges: str = RANGES[0],
    per_channel: bool = True,
    bits: int = SAFE_BITS,
    keep: Sequence[str] = (),
) -> object:
    """An OpenVINO model in int8.

    Args:
        images: batches (N, C, H, W) as the model takes them.
        ranges: one of RANGES.
        per_channel: a step for each output channel of the weights, else one for all.
        bits: of the weights.
        keep: paths of layers that stay in fp32.

    Raises:
        RefusedError: NNCF cannot.
    """
    with _hushed():
        import nncf
        from nncf.quantization.advanced_parameters import OverflowFix, QuantizationParameters
        from nncf.quantization.range_estimator import RangeEstimatorParametersSet as Sets

        estimators = {"minmax": Sets.MINMAX, "histogram": Sets.HISTOGRAM}
        advanced = nncf.AdvancedQuantizationParameters(
            overflow_fix=OverflowFix.ENABLE if bits == SAFE_BITS else OverflowFix.DISABLE,
            weights_quantization_params=QuantizationParameters(per_channel=per_channel),
            disable_bias_correction=True,
            **({"activations_range_estimator_params": estimators[ranges]} if ranges in estimators else {}),
        )
        spared = nncf.IgnoredScope(names=_readers(model, keep), validate=False) if keep else None
        try:
            return nncf.quantize(
                model, nncf.Dataset([batch.numpy() for batch in images]), subset_size=len(images),
                preset=nncf.QuantizationPreset.MIXED, ignored_scope=spared, advanced_parameters=advanced,
            )  # fmt: skip
        except Exception as error:  # whatever it raises
            raise RefusedError("NNCF cannot quantize it", first_line(error)) from None


def _readers(model: Any, keep: Sequence[str]) -> list[str]:
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
