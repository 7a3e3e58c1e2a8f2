"""pt2: a torch.export archive, which needs torch alone: `torch.export.load(file).module()(images)`.

int8 is torchao's PT2E, on the graph of torch.export in fp32. Activations are unsigned, weights
signed. The file rounds both and multiplies in fp32, the same on every CPU. Compiled with torchao's
passes it multiplies bytes, which saturates on x64 without VNNI, but not with weights of 7 bits.
"""

import copy
import inspect
import io
import keyword
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrize

from normswap import copying
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, quietly, refusing
from normswap.exporting.pt2_archive import read_pt2, rewritten_pt2
from normswap.exporting.settings import Quantization
from normswap.graph.tracing import LINEAR

_ATEN = torch.ops.aten
# Notes on nodes, of file names on the exporting machine and of torchao's steps. They are removed.
_HISTORY = ("stack_trace", "from_node", "source_fn_stack")
_KINDS = {_ATEN.conv2d.default: nn.Conv2d, _ATEN.linear.default: nn.Linear}


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to a .pt2 file.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    network = contents.network
    if network.stored != network.dtype:
        # The weights are stored in bfloat16. `_Cast` turns them into float32 when they are read.
        network = copying.duplicate(network, {})
        # Parametrizing adds modules, so the layers are listed before.
        layers = [module for module in nn.Module.modules(network) if isinstance(module, LINEAR)]
        for module in layers:
            module.weight.data = module.weight.data.bfloat16()
            parametrize.register_parametrization(module, "weight", _Cast(), unsafe=True)
    save(traced(contents, network), contents, file)


def traced(contents: FileContents, network: nn.Module) -> ExportedProgram:
    """Return the program that torch.export makes of a network, without notes on its nodes.

    Args:
        contents: The contents of the file, with the example that the network is traced on.
        network: The network of the contents, or one that was made of it.

    Raises:
        RefusedError: torch.export cannot express the network.
    """
    with refusing("torch.export cannot express the network"):
        program = torch.export.export(
            network, contents.example, dynamic_shapes=contents.dynamic_shapes
        )

    for node in list(program.graph.nodes):
        for key in _HISTORY:
            node.meta.pop(key, None)
        # torch.export adds an assertion of the dtype behind each cast. It computes nothing, so the
        # file does not need it.
        if node.target is _ATEN._assert_tensor_metadata.default:
            program.graph.erase_node(node)

    _rename_keywords(program)
    return program


def _rename_keywords(program: ExportedProgram) -> None:
    """Rename, in place, the tensors of a program whose path has a keyword of Python in it.

    torch writes the paths into source code, where `heads.class.weight` is no name, because `class`
    is a keyword. It becomes `heads.class_.weight`.

    Args:
        program: The program of torch.export.
    """
    signature = program.graph_signature
    for spec in (*signature.input_specs, *signature.output_specs):
        if spec.target is not None:
            spec.target = _without_keywords(spec.target)
    for tensors in (program.state_dict, program.constants):
        renamed = {_without_keywords(name): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors.update(renamed)


def _without_keywords(path: str) -> str:
    """Return a dotted path without Python keywords: `heads.class.bias` as `heads.class_.bias`."""
    parts = [f"{part}_" if keyword.iskeyword(part) else part for part in path.split(".")]
    return ".".join(parts)


def has_keywords(network: nn.Module) -> bool:
    """Whether a layer or tensor of a network has a Python keyword in its path, as `heads.class`."""
    paths = [*copying.tree(network), *copying.tensors(network)]
    return any(path != _without_keywords(path) for path in paths)


def save(program: ExportedProgram, contents: FileContents, file: Path) -> None:
    """Write a program of torch.export to a .pt2 file, which is a zip archive.

    Args:
        program: The program.
        contents: The contents of the file. Each text of the metadata becomes an entry of the
            archive.
        file: The path of the file.
    """
    # torch's own writer ends the process when the disk is full, so it writes into memory.
    buffer = io.BytesIO()
    torch.export.save(program, buffer, extra_files=dict(contents.metadata))
    file.write_bytes(buffer.getbuffer())


class _Cast(nn.Module):
    """Turns a weight that a file stores in bfloat16 into float32 when a layer reads it.

    It is a parametrization of torch (`torch.nn.utils.parametrize`).
    """

    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """Write the network to a .pt2 file in int8.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
        how: The images that set the ranges of activations, and the bits of a weight.
    """
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

    module = traced(contents, contents.network).module()
    assert isinstance(module, fx.GraphModule)

    # torchao looks at the class of the module that an operator comes from. It passes over
    # subclasses, such as timm's Conv2dSame, and gives up if a module is called twice. So each
    # operator is said to come from a module of its own, of torch's class.
    for node in module.graph.nodes:
        if node.target in _KINDS:
            node.meta["source_fn_stack"] = [(node.name, _KINDS[node.target])]
    quantizer = X86InductorQuantizer().set_global(quantization_config(torch.uint8, how.levels))
    rounded = calibrated(module, quantizer, how.images)

    # torchao leaves the weights in fp32 beside those in int8. No node reads them, so they are
    # removed.
    read = {node.target for node in rounded.graph.nodes if node.op == "get_attr"}
    for name in dict(nn.Module.named_parameters(rounded, remove_duplicate=False)):
        if name not in read:
            owner, _, last = name.rpartition(".")
            delattr(rounded.get_submodule(owner), last)
    save(traced(contents, rounded), contents, file)


def calibrated(module: nn.Module, quantizer: object, images: Iterable[Tensor]) -> fx.GraphModule:
    """Quantize a module of torch.export to int8, and return it.

    The ranges of its activations are those that they have on calibration images.

    Args:
        module: The module, in fp32.
        quantizer: A quantizer of torchao, which says how each operator is quantized.
        images: Batches of calibration images.
    """
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    watched = prepare_pt2e(module, quantizer)
    for batch in images:
        watched(batch)
    rounded: fx.GraphModule = convert_pt2e(watched)
    return rounded


def quantization_config(activations: torch.dtype, levels: int) -> object:
    """Return the settings by which torchao's quantizers round activations and weights.

    The range of an activation is its smallest and largest value over all calibration images. A
    weight has one step per output channel, which may be very small. With torchao's usual smallest
    step, 2^-12, a channel of small weights would be rounded to 0.

    Args:
        activations: The type of activations, torch.int8 or torch.uint8.
        levels: How many steps the largest weight is away from 0.
    """
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

    limits = torch.iinfo(activations)
    activation_spec = QuantizationSpec(
        activations,
        MinMaxObserver,
        quant_min=limits.min,
        quant_max=limits.max,
        qscheme=torch.per_tensor_affine,
    )
    # `eps` is the least step.
    weight_observer = PerChannelMinMaxObserver.with_args(eps=torch.finfo(torch.float32).tiny)
    weight_spec = QuantizationSpec(
        torch.int8,
        weight_observer,
        quant_min=-levels,
        quant_max=levels,
        qscheme=torch.per_channel_symmetric,
        ch_axis=0,
    )
    # The specifications of inputs, outputs, weights and biases. Biases are not quantized.
    return QuantizationConfig(activation_spec, activation_spec, weight_spec, None)


def open(file: Path, *, inside: bool = False) -> Runs:
    """Open a .pt2 file in PyTorch, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.

    Args:
        file: The path of the file.
        inside: Whether the function returns all values that the file computes, not only its
            outputs.
    """
    module = _module(load(file))
    if inside:
        assert isinstance(module, fx.GraphModule)
        copies = []
        for node in [node for node in module.graph.nodes if node.op == "call_function"]:
            # A later operator may write into the value, so it is copied at once.
            with module.graph.inserting_after(node):
                copies.append(module.graph.call_function(copy.deepcopy, (node,)))
        module.graph.output_node().args = (copies,)
        # The module's own code would arrange its outputs as the network does. Plain code returns
        # the list.
        module.graph.set_codegen(fx.graph.CodeGen())
        module.recompile()
    return torch.no_grad()(module)


def _module(program: ExportedProgram) -> nn.Module:
    """Return a module that runs a program of torch.export.

    It is made without guards: conditions on the sizes of inputs, written in the file as Python
    source, which torch would execute.
    """
    # Before torch 2.9 no source was executed, and there was no such argument.
    if "check_guards" in inspect.signature(program.module).parameters:
        return program.module(check_guards=False)
    return program.module()


def load(file: Path) -> ExportedProgram:
    """Return the program of torch.export in a .pt2 file, without running code in the file.

    Raises:
        SourceError: The file holds something that could run code.
        Exception: The file is damaged. torch raises errors of several classes.
    """
    with quietly():
        return torch.export.load(rewritten_pt2(file))


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind a .pt2 file has, the most frequent kind first.

    The file is not given to torch, whose reader could run code in it.
    """
    return counted(name.removeprefix("aten.") for name in read_pt2(file).operators)


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in a .pt2 file as metadata, by their keys.

    An example is the name of the source network, with the key `source`. The file is not given to
    torch, whose reader could run code in it.
    """
    return dict(read_pt2(file).extra)
