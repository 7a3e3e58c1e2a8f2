"""OpenVINO: FILE.xml with FILE.bin beside it, made from the ONNX file of the same network.

NNCF makes the file in int8.

With weights of 7 bits the file computes the same on every CPU; with 8, layers that are not
depthwise may saturate on CPUs without VNNI (`OverflowFix`). NNCF's own bias correction is off: it
doubles the errors of some networks.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normswap.errors import first_line
from normswap.exporting import onnx_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, silent
from normswap.exporting.settings import SAFE_BITS, Quantization

if TYPE_CHECKING:
    import openvino as ov

# The package by which OpenVINO and NNCF tell Intel that they are used, and what is converted.
_TELEMETRY = "openvino_telemetry"
# Nodes of a graph that compute nothing.
_ENDS = ("Constant", "Parameter", "Result")


@contextmanager
def _unreported() -> Iterator[None]:
    """In a `with` block, keep OpenVINO and NNCF from sending reports of their use.

    They send some when they are imported and when they convert, unless the package for it cannot be
    imported. If the caller has imported OpenVINO before, it goes on as it is.
    """
    modules: dict[str, Any] = sys.modules
    has_own = _TELEMETRY in modules
    own = modules.get(_TELEMETRY)
    # An import of a module that is None in `sys.modules` fails.
    modules[_TELEMETRY] = None
    try:
        yield
    finally:
        del modules[_TELEMETRY]
        if has_own:
            modules[_TELEMETRY] = own


def _openvino() -> ModuleType:
    """Return the package openvino, which sends nothing if this is what imports it."""
    with _unreported():
        import openvino
    return openvino


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to an .xml file.

    The metadata are in the XML, as runtime information.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    _save(_model(contents.in_float32, file.parent), contents, file)


def _model(contents: FileContents, parent: Path) -> ov.Model:
    """Return a network as OpenVINO's model, which is made from a temporary ONNX file.

    Args:
        contents: The network and its example inputs.
        parent: The folder in which a temporary folder for the ONNX file is made.
    """
    import onnx

    openvino = _openvino()
    # `parent` is the temporary folder of `atomic_write`, and the new folder is made inside of
    # it. If the process is killed, the next export tells the user which folder to remove.
    with tempfile.TemporaryDirectory(dir=parent) as folder:
        file = Path(folder) / "network.onnx"
        onnx.save(onnx_file.graph(contents), file)
        with _unreported():
            model: ov.Model = openvino.convert_model(file)
    return model


def _save(model: ov.Model, contents: FileContents, file: Path) -> None:
    """Write a model of OpenVINO to an .xml file, with its weights in a .bin file beside it.

    Args:
        model: The model.
        contents: The contents of the file: the metadata to write, and whether weights are in fp16.
        file: The path of the .xml file.

    Raises:
        OSError: OpenVINO cannot write.
    """
    ov = _openvino()
    for key, value in contents.metadata.items():
        model.set_rt_info(value, ["normswap", key])
    try:
        ov.save_model(model, file, compress_to_fp16=contents.network.dtype == torch.float16)
    # OpenVINO raises RuntimeError, or errors of its own, when it cannot write.
    except Exception as error:
        raise OSError(f"OpenVINO cannot, as on a full disk ({first_line(error)})") from None


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """Write the network to an .xml file in int8.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
        how: The images that set the ranges of activations, and the bits of a weight.
    """
    model = _model(contents, file.parent)
    # NNCF logs nothing but errors while it runs.
    logger = logging.getLogger("nncf")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)
        # NNCF draws progress bars, and logs when it is imported.
        with silent(), _unreported():
            import nncf
            from nncf.quantization.advanced_parameters import OverflowFix, QuantizationParameters
            from nncf.quantization.range_estimator import RangeEstimatorParametersSet

            # The fix writes weights of 7 bits, except in depthwise layers.
            needs_fix = how.weight_bits == SAFE_BITS
            advanced = nncf.AdvancedQuantizationParameters(
                overflow_fix=OverflowFix.ENABLE if needs_fix else OverflowFix.DISABLE,
                weights_quantization_params=QuantizationParameters(per_channel=True),
                disable_bias_correction=True,
                activations_range_estimator_params=RangeEstimatorParametersSet.MINMAX,
            )
            rounded = nncf.quantize(
                model,
                nncf.Dataset([batch.numpy() for batch in how.images]),
                subset_size=len(how.images),
                preset=nncf.QuantizationPreset.MIXED,
                advanced_parameters=advanced,
            )
    finally:
        logger.setLevel(level)
    _save(rounded, contents, file)


def open(file: Path, *, inside: bool = False) -> Runs:
    """Open an OpenVINO .xml file in OpenVINO, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.

    It runs on the CPU.

    Args:
        file: The path of the file.
        inside: Whether the function returns all values that the file computes, not only its
            outputs.
    """
    ov = _openvino()
    model = ov.Core().read_model(file)
    # With `inside`, the value of every operator becomes an output, too.
    if inside:
        inner = [op for op in model.get_ops() if op.get_type_name() not in _ENDS]
        model.add_outputs([output for op in inner for output in op.outputs()])
    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    compiled = ov.Core().compile_model(model, "CPU", hints)

    def runs(*tensors: Tensor) -> list[Tensor]:
        outputs = compiled([x.numpy() for x in tensors])
        return [torch.from_numpy(outputs[index].copy()) for index in range(len(compiled.outputs))]

    return runs


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind an OpenVINO file has, the most frequent kind first.

    Constants, and the nodes that stand for inputs and outputs, are not counted.
    """
    ov = _openvino()
    kinds = (op.get_type_name() for op in ov.Core().read_model(file).get_ops())
    return counted(kind for kind in kinds if kind not in _ENDS)


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in an OpenVINO .xml file as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    ov = _openvino()
    # OpenVINO would try other readers, which print what they find.
    if not file.read_bytes()[:64].lstrip().startswith(b"<"):
        raise ValueError("it is no XML")
    # The texts can be read only while the model is referenced.
    model = ov.Core().read_model(file)
    runtime_info = model.get_rt_info()
    # A file of another program has no such entry.
    if "normswap" not in runtime_info:
        return {}
    return {key: str(value.value) for key, value in runtime_info["normswap"].items()}
