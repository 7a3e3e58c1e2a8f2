"""OpenVINO: FILE.xml with FILE.bin beside it, made from the ONNX file of the same network."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import onnx_file
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs
from normswap.exporting.signature import alone

if TYPE_CHECKING:
    import openvino as ov

NAME = "openvino"
NEEDS = ("openvino", "onnx", "onnxscript")
GRAPH = True
PARTS = (".bin",)
NOTES: Mapping[str, str] = {
    "fp16": "weights only: OpenVINO computes in what the device is fast in, and here it was checked in fp32"
}


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. The metadata are in the XML, as runtime information."""
    network = contents.network
    if network.stored == torch.bfloat16:
        raise RefusedError("OpenVINO is not written in bf16", remedy="Its files are fp32, fp16 or int8")
    half = network.dtype == torch.float16
    if half:
        contents = replace(contents, network=network.around(network.network.float()))
    save(graph(contents), file, contents.metadata, half=half)


def graph(contents: FileContents) -> ov.Model:
    """An OpenVINO model, in float32.

    Raises:
        RefusedError: ONNX or OpenVINO cannot express the network.
    """
    import openvino as ov

    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        file = Path(folder) / "network.onnx"
        onnx_file.write(replace(contents, metadata={}), file)
        try:
            return ov.convert_model(file)
        except Exception as error:  # its own exceptions derive from nothing else
            raise RefusedError("OpenVINO cannot express the network", first_line(error)) from None


def save(model: ov.Model, file: Path, metadata: Mapping[str, str], *, half: bool = False) -> None:
    """Write the XML and what lies beside it."""
    import openvino as ov

    for key, value in metadata.items():
        model.set_rt_info(value, ["normswap", key])
    try:
        ov.save_model(model, file, compress_to_fp16=half)
    except Exception as error:  # the disk is full
        raise OSError(f"OpenVINO cannot, as on a full disk ({first_line(error)})") from None


def open(file: Path) -> Runs:
    """See `formats.Format.open`; on the CPU."""
    import openvino as ov

    hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    try:
        compiled = ov.Core().compile_model(file, "CPU", hints)
    except Exception as error:  # its own exceptions derive from nothing else
        raise VerificationError("OpenVINO cannot run it", first_line(error)) from None

    def runs(*tensors: Tensor) -> object:
        outputs = compiled([x.numpy() for x in tensors])
        return alone(torch.from_numpy(outputs[place].copy()) for place in range(len(compiled.outputs)))

    return runs


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`; constants and the ends of the graph are not counted."""
    import openvino as ov

    kinds = (op.get_type_name() for op in ov.Core().read_model(file).get_ops())
    return dict(Counter(kind for kind in kinds if kind not in ("Constant", "Parameter", "Result")).most_common())


def metadata(file: Path) -> dict[str, str]:
    """See `formats.Format.metadata`."""
    import openvino as ov

    if not file.read_bytes()[:64].lstrip().startswith(b"<"):  # OpenVINO tries other readers, which print what they find
        raise ValueError("it is no XML")
    model = ov.Core().read_model(file)  # what it notes may be asked for only while it lives
    noted = model.get_rt_info()
    return {key: str(value.value) for key, value in noted["normswap"].items()} if "normswap" in noted else {}
