"""int8 in pt2: torchao's PT2E, on the graph that torch.export makes in fp32.

Activations are unsigned, weights signed. The file rounds both and multiplies in fp32, the same on every CPU. Compiled
with torchao's passes it multiplies bytes, which saturates on x64 without VNNI; weights of 7 bits cannot reach that.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from normswap.errors import RefusedError
from normswap.exporting import pt2
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import reason
from normswap.exporting.settings import LEVELS, Quantization
from normswap.models.weight_files import quiet

NEEDS = ("torchao",)
_KINDS = {torch.ops.aten.conv2d.default: nn.Conv2d, torch.ops.aten.linear.default: nn.Linear}
LAYERS = tuple(_KINDS.values())


def levels(layer: nn.Module, bits: int) -> float:
    """See `formats.Quantizer.levels`."""
    return LEVELS[bits]


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """See `formats.Quantizer.write_int8`."""
    rounded = _quantized(pt2.traced(contents, contents.network), how)
    pt2.save(pt2.traced(contents, rounded), file, contents.metadata)


def _quantized(program: ExportedProgram, how: Quantization) -> fx.GraphModule:
    """A program in fp32 as a module in int8, to be traced again."""
    try:
        with quiet(), torch.no_grad():  # torchao logs as it is imported
            from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import X86InductorQuantizer

            weights = LEVELS[how.settings.weight_bits]
            settings = config(torch.uint8, weights, per_channel=how.settings.per_channel)
            quantizer = X86InductorQuantizer().set_global(settings)
            for path in how.keep:
                quantizer.set_module_name_qconfig(f"network.{path}", None)
            module = program.module()
            _name_kinds_(module.graph)
            done = calibrated(module, quantizer, how.images)
    except Exception as error:  # whatever it raises
        remedy = "Other quantizers write .onnx and .xml"
        raise RefusedError("torchao cannot quantize it", reason(error), remedy) from None
    _drop_unread_(done)
    return done


def calibrated(module: nn.Module, quantizer: object, images: Iterable[Tensor]) -> fx.GraphModule:
    """An exported module in int8, its ranges read off images."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    watched = prepare_pt2e(module, quantizer)
    for batch in images:
        watched(batch)
    done: fx.GraphModule = convert_pt2e(watched)
    return done


def config(activations: torch.dtype, levels: int, *, per_channel: bool) -> object:
    """As the quantizers' own settings, but for ranges of all images, the weights' levels and steps as small as numbers.

    Their least step, 2^-12, would leave nothing of a channel that equalization has made small.

    Args:
        activations: bytes with a sign or without.
        levels: of weights, on either side of 0.
    """
    from torchao.quantization.pt2e import MinMaxObserver, PerChannelMinMaxObserver
    from torchao.quantization.pt2e.quantizer import QuantizationConfig, QuantizationSpec

    room = torch.iinfo(activations)
    between = QuantizationSpec(
        activations, MinMaxObserver, quant_min=room.min, quant_max=room.max, qscheme=torch.per_tensor_affine
    )
    observer, scheme, axis = (
        (PerChannelMinMaxObserver, torch.per_channel_symmetric, 0) if per_channel
        else (MinMaxObserver, torch.per_tensor_symmetric, None)
    )  # fmt: skip
    fine = observer.with_args(eps=torch.finfo(torch.float32).tiny)
    weights = QuantizationSpec(torch.int8, fine, quant_min=-levels, quant_max=levels, qscheme=scheme, ch_axis=axis)
    return QuantizationConfig(between, between, weights, None)


def _name_kinds_(graph: fx.Graph) -> None:
    """Call each convolution and linear layer one of its own.

    torchao goes by the class of the module that an operator comes from, passes over subclasses (timm's Conv2dSame) and
    gives up where a module is called twice.
    """
    for node in graph.nodes:
        if node.target in _KINDS:
            node.meta["source_fn_stack"] = [(node.name, _KINDS[node.target])]


def _drop_unread_(module: fx.GraphModule) -> None:
    """Take out what the graph does not read: torchao leaves the weights in fp32 beside those in int8."""
    read = {node.target for node in module.graph.nodes if node.op == "get_attr"}
    for name in dict(module.named_parameters(remove_duplicate=False)):
        if name not in read:
            owner, _, last = name.rpartition(".")
            delattr(module.get_submodule(owner), last)
