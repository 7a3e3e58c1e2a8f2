"""Core ML: the directory FILE.mlpackage, an ML program for Apple's devices.

coremltools makes it from a traced network, on every system; macOS runs it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap import reading
from normswap.errors import RefusedError
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, refusing, require_inside, silent
from normswap.exporting.signature import Signature
from normswap.exporting.simpler_graph import or_simpler

if TYPE_CHECKING:
    from coremltools.models import MLModel
    from coremltools.proto.Model_pb2 import Model

_ENDING = ".mlpackage"
# coremltools' message begins so when it cannot write.
_DISK = "[MIL FileWriter]"
# The prefix of coremltools' own metadata, such as the date.
_TOOL = "com.github.apple.coremltools."


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to a .mlpackage file.

    Inputs and outputs have the names that the sidecar gives them.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    if file.suffix != _ENDING:
        raise RefusedError(
            f"{file.name} is no name of a Core ML package", f"it has to end in {_ENDING}"
        )

    # coremltools takes a network in float32, and converts it to float16 itself. If it refuses the
    # network, it gets one with simpler operators.
    in_float32 = contents.in_float32
    half = contents.network.dtype == torch.float16
    converted = or_simpler(in_float32, lambda network: _converted(network, in_float32, half=half))
    try:
        _require_names(converted.get_spec(), contents.network.signature)
        converted.user_defined_metadata.clear()
        converted.user_defined_metadata.update(contents.metadata)
        with silent():
            converted.save(str(file))
    # coremltools would keep its directory until the process ends.
    finally:
        shutil.rmtree(converted.package_path, ignore_errors=True)


def _converted(network: nn.Module, contents: FileContents, *, half: bool) -> MLModel:
    """Return a network in float32 as Core ML's model.

    Args:
        network: The network, or the same network in simpler operators.
        contents: The names of the file's inputs and outputs, and its example inputs.
        half: Whether the model computes in fp16.

    Raises:
        RefusedError: Core ML cannot express the network.
        OSError: coremltools cannot write, as on a full disk.
    """
    signature = contents.network.signature
    try:
        with refusing("Core ML cannot express the network"), silent():
            import coremltools as ct

            pairs = zip(signature.inputs, contents.example, strict=True)
            return ct.convert(
                torch.jit.trace(network, contents.example, check_trace=False),
                inputs=[ct.TensorType(name=name, shape=x.shape) for name, x in pairs],
                outputs=[ct.TensorType(name=name) for name in signature.outputs],
                convert_to="mlprogram",
                compute_precision=ct.precision.FLOAT16 if half else ct.precision.FLOAT32,
                minimum_deployment_target=ct.target.iOS15,
                skip_model_load=True,
            )
    except RefusedError as error:
        if _DISK in error.why:
            raise OSError(error.why) from None
        raise


def _require_names(spec: Model, signature: Signature) -> None:
    """Check that the inputs and outputs of a Core ML model have the names that they should have.

    They do not if coremltools has merged two outputs.

    Args:
        spec: The parsed content of the model.
        signature: The right names.

    Raises:
        RefusedError: A name is another one.
    """
    interface = spec.description
    names = [feature.name for feature in (*interface.input, *interface.output)]
    expected = [*signature.inputs, *signature.outputs]
    if wrong := [name for name, other in zip(expected, names, strict=True) if name != other]:
        raise RefusedError(
            "Core ML cannot express the network", f"{wrong[0]} gets another name", "Try onnx"
        )


def open(file: Path) -> Runs:
    """Open a Core ML package in Core ML, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.
    It runs on the CPU of macOS.
    """
    require_own_files(file)
    with silent():
        import coremltools as ct

        model = ct.models.MLModel(str(file), compute_units=ct.ComputeUnit.CPU_ONLY)
        interface = model.get_spec().description
    inputs = [feature.name for feature in interface.input]
    outputs = [feature.name for feature in interface.output]

    def runs(*tensors: Tensor) -> list[Tensor]:
        answers = model.predict({name: x.numpy() for name, x in zip(inputs, tensors, strict=True)})
        return [torch.from_numpy(answers[name]) for name in outputs]

    return runs


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind a Core ML package has, the most frequent first.

    Constants are not counted.
    """
    main = _spec(file).mlProgram.functions["main"]
    kinds = (feature.type for feature in main.block_specializations[main.opset].operations)
    return counted(kind for kind in kinds if kind != "const")


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in a Core ML package as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    texts = _spec(file).description.metadata.userDefined
    return {key: value for key, value in texts.items() if not key.startswith(_TOOL)}


def _spec(file: Path) -> Model:
    """Return the parsed content of a Core ML package: its graph, inputs, outputs and metadata.

    Raises:
        SourceError: A file of the model lies outside of the package.
    """
    require_own_files(file)
    with silent():
        import coremltools as ct

        return ct.utils.load_spec(str(file))


def require_own_files(package: Path) -> None:
    """Check that a Core ML package, which is a directory, uses no files outside of it.

    Neither a link in it nor a path in its manifest may lead out of it.

    Args:
        package: The path of the package.

    Raises:
        SourceError: An entry is a link, or a path, that leads elsewhere.
        ValueError: The manifest is damaged.
        OSError: The manifest cannot be read.
    """
    for path in package.rglob("*"):
        require_inside(package, package, str(path.relative_to(package)))

    manifest = reading.parse_object(reading.file_text(package / "Manifest.json"))
    entries = manifest.get("itemInfoEntries")
    if not isinstance(entries, dict):
        raise ValueError("its Manifest.json names no files")
    for entry in entries.values():
        require_inside(package, package / "Data", str(entry["path"]))
