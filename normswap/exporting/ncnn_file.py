"""ncnn: FILE.param with FILE.bin beside it, for phones and boards.

pnnx makes them from a traced network.

ncnn has no dimension for the number of images, and takes one at a time. Its reader stops after the
last layer of FILE.param; the metadata follow there.
"""

import io
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from normswap import reading
from normswap.errors import RefusedError
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, refusing
from normswap.exporting.signature import Signature
from normswap.exporting.simpler_graph import or_simpler

# A line of metadata is such as `# normswap.source "resnet50"`: the key, and the text as JSON.
_MARK = "# normswap."
# Layers that compute nothing.
_BOOKKEEPING = ("Input", "Split", "MemoryData")


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to a .param file, and the weights to a .bin beside it.

    Inputs and outputs have the names that the sidecar gives them.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    signature = contents.network.signature
    half = contents.network.dtype == torch.float16
    # `file.parent` is the temporary folder of `atomic_write`, and the new folder is made inside of
    # it. If the process is killed, the next export tells the user which folder to remove.
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        written = Path(folder) / "network.ncnn.param"
        in_float32 = contents.in_float32
        # pnnx takes a network in float32, and converts it to float16 itself. If it lacks an
        # operator of the network, it gets the network in simpler operators.
        or_simpler(
            in_float32,
            lambda network: _convert(network, in_float32.example, written, half=half),
        )
        layers = _named(written.read_text(encoding="utf-8"), signature)
        shutil.copyfile(written.with_suffix(".bin"), file.with_suffix(".bin"))

    # The order of inputs and outputs is also written into the metadata, for `open`.
    order = {"inputs": " ".join(signature.inputs), "outputs": " ".join(signature.outputs)}
    texts = {**contents.metadata, **order}
    metadata_lines = [f"{_MARK}{key} {json.dumps(value)}" for key, value in texts.items()]
    file.write_text("\n".join([*layers, *metadata_lines, ""]), encoding="utf-8")


def _convert(network: nn.Module, example: tuple[Tensor, ...], file: Path, *, half: bool) -> None:
    """Have the converter pnnx write a network as an ncnn graph, with its weights beside it.

    Args:
        network: The network.
        example: The inputs that it is traced on.
        file: The path of the graph, network.ncnn.param in a folder of its own. pnnx makes this name
            of network.pt.
        half: Whether weights are written in fp16.

    Raises:
        RefusedError: TorchScript, pnnx or ncnn cannot express the network.
    """
    import pnnx

    traced = file.with_name("network.pt")
    folder = file.parent
    # torch's own writer ends the process when the disk is full, so it writes into memory.
    buffer = io.BytesIO()
    with refusing("TorchScript cannot express the network"):
        torch.jit.save(torch.jit.trace(network, example, check_trace=False), buffer)
    traced.write_bytes(buffer.getbuffer())
    command = [pnnx.EXEC_PATH, str(traced), f"fp16={int(half)}"]
    # What pnnx prints may hold bytes that are no UTF-8. They are no reason to stop.
    finished = subprocess.run(
        command, cwd=folder, capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    # Without an error, both files must have been written, too.
    has_written = file.is_file() and file.with_suffix(".bin").is_file()
    if finished.returncode or not has_written:
        lines = finished.stderr.strip().splitlines() or [f"it ends with {finished.returncode}"]
        raise RefusedError("pnnx cannot express the network", lines[-1])
    if missing := _missing_layers(file):
        raise RefusedError("ncnn cannot express the network", missing, "Try onnx")


def _named(text: str, signature: Signature) -> list[str]:
    """Return the lines of an ncnn graph, with our names for its inputs and outputs.

    After two lines, each line is a layer: its type, its name, the number of its inputs, the number
    of its outputs, the names of all these values, and its settings.

    Args:
        text: The graph as pnnx wrote it, with inputs in0, in1 ... and outputs out0, out1 ...
        signature: Our names of inputs and outputs.
    """
    names = {f"in{i}": name for i, name in enumerate(signature.inputs)}
    names |= {f"out{i}": name for i, name in enumerate(signature.outputs)}
    magic, counts, *layers = text.splitlines()
    lines = [magic, counts]

    for layer in layers:
        # Convolution conv0 1 1 in0 1 0=16 ...
        words = layer.split()
        input_count = int(words[2])
        output_count = int(words[3])
        for position in range(4, 4 + input_count + output_count):
            words[position] = names.get(words[position], words[position])
        lines.append(" ".join(words))

    return lines


def _missing_layers(file: Path) -> str:
    """Return a sentence that names the kinds of layers in a file that this ncnn does not have.

    The sentence is "" if ncnn has all of them.

    Args:
        file: The path of the .param file.
    """
    import ncnn

    kinds = [kind for kind in nodes(file) if ncnn.layer_to_index(kind) < 0]
    if not kinds:
        return ""
    return f"it has no layer {', '.join(kinds)}"


def open(file: Path, *, inside: bool = False) -> Runs:
    """Open an ncnn .param file in ncnn, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.
    It runs on the CPU, in fp32.

    Args:
        file: The path of the file.
        inside: Whether the function returns all values that the file computes, not only its
            outputs.
    """
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = torch.get_num_threads()
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = False
    # Both calls return 0 if they have read their file.
    if net.load_param(str(file)) or net.load_model(str(file.with_suffix(".bin"))):
        raise ValueError(
            _missing_layers(file) or f"it does not read {file.name} and what lies beside it"
        )

    # A file of another program has no metadata that say the order.
    texts = metadata(file)
    inputs = texts.get("inputs", " ".join(net.input_names())).split()
    outputs = texts.get("outputs", " ".join(net.output_names())).split()
    if inside:
        outputs = [blob.name for blob in net.blobs()]

    def runs(*tensors: Tensor) -> list[Tensor]:
        if len(tensors[0]) != 1:
            raise ValueError(f"ncnn takes one image at a time, not {len(tensors[0])}")
        extractor = net.create_extractor()
        # By default ncnn frees a value once all layers that read it have run.
        extractor.set_light_mode(not inside)
        for name, x in zip(inputs, tensors, strict=True):
            extractor.input(name, ncnn.Mat(np.ascontiguousarray(x[0].numpy())).clone())
        return [torch.from_numpy(np.array(extractor.extract(name)[1])[None]) for name in outputs]

    return runs


def nodes(file: Path) -> dict[str, int]:
    """Return how many layers of each kind an ncnn file has, the most frequent kind first.

    Constants, copies, and the layers that stand for inputs are not counted.
    """
    # The first two lines are a magic number and the counts. Lines of metadata begin with #.
    lines = file.read_text(encoding="utf-8").splitlines()[2:]
    kinds = (line.split()[0] for line in lines if line.strip() and not line.startswith("#"))
    return counted(kind for kind in kinds if kind not in _BOOKKEEPING)


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in an ncnn .param file as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    lines = file.read_text(encoding="utf-8").splitlines()
    parts = (line.removeprefix(_MARK).partition(" ") for line in lines if line.startswith(_MARK))
    return {key: str(reading.parse_json(value)) for key, _, value in parts}
