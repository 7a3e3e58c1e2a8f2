"""pt2: a torch.export archive.

It needs torch alone: `torch.export.load(file).module()(images)`; in int8 after `import
torch.ao.quantization.fx._decomposed`, which defines its operators.
"""

from __future__ import annotations

import copy
import io
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.nn.utils import parametrize

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import rounding
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.formats import FP16, Runs, extra_files, reason
from normswap.graph.node_reader import LINEAR
from normswap.models.weight_files import quiet

NAME = "pt2"
NEEDS = ()
GRAPH = True
PARTS = ()
metadata = extra_files
_HISTORY = ("stack_trace", "from_node", "source_fn_stack")  # the exporting machine's file names, and what torchao did
_ATEN = torch.ops.aten
_NEUTRAL = {_ATEN.mul.Tensor: 1, _ATEN.add.Tensor: 0, _ATEN.add_.Tensor: 0}  # the number with which it changes nothing
NOTES = {
    "fp16": FP16,
    "bf16": "each run casts the weights to fp32, unless the graph is compiled: the file is smaller, not faster",
    "int8": "import torch.ao.quantization.fx._decomposed before torch.export.load: it defines the operators. The file "
    "rounds to int8 and computes in fp32, unless the graph is compiled: the file is smaller, not faster",
}


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`."""
    network = contents.network
    save(traced(contents, _with_bf16(network) if network.stored != network.dtype else network), file, contents.metadata)


def traced(contents: FileContents, network: nn.Module) -> ExportedProgram:
    """The network, or what was made of it, as torch.export records it.

    Raises:
        RefusedError: it cannot.
    """
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(network, contents.example, dynamic_shapes=contents.dynamic_shapes)
    except Exception as error:  # torch's exporter raises whatever it meets on its way
        raise RefusedError("torch.export cannot express the network", reason(error)) from None
    _leave_out_identities(program.graph)
    for node in list(program.graph.nodes):
        for key in _HISTORY:
            node.meta.pop(key, None)
        if node.target is torch.ops.aten._assert_tensor_metadata.default:  # that a cast weight has the dtype it has
            program.graph.erase_node(node)
    return program


def save(program: ExportedProgram, file: Path, metadata: Mapping[str, str]) -> None:
    """Write it, with the metadata as extra files of the archive."""
    held = io.BytesIO()  # torch's own writer kills the process when the disk is full
    with quiet():
        torch.export.save(program, held, extra_files=dict(metadata))
    file.write_bytes(held.getbuffer())


class _Cast(nn.Module):
    def forward(self, stored: Tensor) -> Tensor:
        return stored.float()


def _with_bf16(network: Shipped) -> Shipped:
    """A copy that holds every weight in bfloat16 that it is exact in, and casts it."""
    twin = copy.deepcopy(network)
    for module in list(twin.modules()):
        if isinstance(module, LINEAR) and rounding.is_bfloat16(module.weight):
            module.weight.data = module.weight.data.bfloat16()
            parametrize.register_parametrization(module, "weight", _Cast(), unsafe=True)
    return twin


def _leave_out_identities(graph: fx.Graph) -> None:
    """Take out products with the number 1, and sums with 0.

    Networks that once had scalars compute the former (timm's NormFreeBlock), those with merged branches the latter.
    Where what it reads, or gives, is overwritten, it is needed as a copy.
    """
    for node in list(graph.nodes):
        number = node.args[1] if node.target in _NEUTRAL else None
        if not isinstance(number, float | int) or number != _NEUTRAL[node.target]:
            continue
        same = node.args[0]
        if same.meta["val"].dtype != node.meta["val"].dtype:  # an integer becomes a float
            continue
        overwritten = any(_writes(user) for user in (*node.users, *same.users))
        if _writes(node) or len(same.users) == 1 or not overwritten:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def _writes(node: fx.Node) -> bool:
    """Whether it works in place."""
    return node.op == "call_function" and str(node.target).split(".")[-2].endswith("_")


def open(file: Path) -> Runs:
    """See `formats.Format.open`."""
    try:
        with quiet():
            return torch.no_grad()(load(file).module())
    except Exception as error:
        raise VerificationError("torch.export.load does not take it", first_line(error)) from None


def load(file: Path) -> ExportedProgram:
    """The program of a file, whatever its precision. Raises what torch raises."""
    with quiet():
        import torch.ao.quantization.fx._decomposed  # defines the operators of int8

        return torch.export.load(file)


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`."""
    called = (str(node.target).removeprefix("aten.") for node in load(file).graph.nodes if node.op == "call_function")
    return dict(Counter(called).most_common())
