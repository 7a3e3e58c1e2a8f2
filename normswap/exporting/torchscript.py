"""TorchScript: traced and frozen, for libtorch and what still reads it: `torch.jit.load(file)(images)`."""

from __future__ import annotations

import io
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import rounding
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import FP16, Runs, extra_files, reason
from normswap.models.weight_files import quiet

NAME = "torchscript"
NEEDS = ()
GRAPH = True
PARTS = ()
NOTES = {"fp16": FP16}
metadata = extra_files
_NEUTRAL = {"aten::mul": 1, "aten::add": 0, "aten::add_": 0}  # the number with which each changes nothing
_BOOKKEEPING = ("prim::Constant", "prim::ListConstruct", "prim::GetAttr")


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`. The metadata are extra files of the archive.

    A trace takes any number of images anyway, unless the network computes with that number.
    """
    try:
        with quiet(), torch.no_grad():
            frozen = torch.jit.freeze(torch.jit.trace(contents.network, contents.example, check_trace=False))
    except Exception as error:  # whatever tracing meets on its way
        raise RefusedError("TorchScript cannot express the network", reason(error)) from None
    _leave_out_identities(frozen, contents.example)
    if contents.network.stored != contents.network.dtype:
        _store_bf16(frozen.graph)
    held = io.BytesIO()  # torch's own writer kills the process when the disk is full
    with quiet():
        torch.jit.save(frozen, held, _extra_files=dict(contents.metadata))
    file.write_bytes(held.getbuffer())


def _leave_out_identities(frozen: torch.jit.ScriptModule, example: tuple[Tensor, ...]) -> None:
    """Take out products with the number 1, and sums with 0.

    Networks that once had scalars compute the former (timm's NormFreeBlock), those with merged branches the latter.
    Where what it reads, or gives, is overwritten, it is needed as a copy; where a whole number becomes a float, too.
    """
    found = [node for node in frozen.graph.nodes() if _changes_no_number(node)]
    kept = _kept_dtypes(frozen, example) if found else []
    for node, same_dtype in zip(found, kept, strict=True):
        one, result = next(node.inputs()), node.output()
        overwritten = any(use.user.kind().endswith("_") for use in (*result.uses(), *one.uses()))
        if same_dtype and (node.kind().endswith("_") or len(one.uses()) == 1 or not overwritten):
            result.replaceAllUsesWith(one)
            node.destroy()


def _changes_no_number(node: torch.Node) -> bool:
    if node.kind() not in _NEUTRAL:
        return False
    value = [*node.inputs()][1].toIValue()
    return isinstance(value, float | int) and value == _NEUTRAL[node.kind()]


def _kept_dtypes(frozen: torch.jit.ScriptModule, example: tuple[Tensor, ...]) -> list[bool]:
    """Whether each node that changes no number keeps its dtype: freezing has forgotten them, so the graph is run."""
    graph = frozen.graph.copy()
    count = len([*graph.outputs()])
    for node in filter(_changes_no_number, [*graph.nodes()]):
        graph.registerOutput(next(node.inputs()))
        graph.registerOutput(node.output())
    graph.makeMultiOutputIntoTuple()
    with torch.no_grad():
        values = torch._C._create_function_from_graph("looked_at", graph)(frozen, *example)[count:]
    return [one.dtype == result.dtype for one, result in zip(values[::2], values[1::2], strict=True)]


def _store_bf16(graph: torch.Graph) -> None:
    """Hold every weight in bfloat16 that it is exact in, and cast it; the runtime does so once, as it folds constants.

    After freezing, which would cast them, too.
    """
    for node in list(graph.nodes()):
        value = node.output().toIValue() if node.kind() == "prim::Constant" else None
        if not isinstance(value, Tensor) or not rounding.is_bfloat16(value):
            continue
        node.t_("value", value.bfloat16())
        graph.setInsertPoint(node)
        no, default = (graph.insertConstant(other) for other in (False, None))
        kind = graph.insertConstant(torch.float32)
        for constant in (kind, no, default):
            constant.node().moveBefore(node)
        cast = graph.create("aten::to", [node.output(), kind, no, no, default], 1)
        cast.insertAfter(node)
        node.output().replaceAllUsesAfterNodeWith(cast, cast.output())


def open(file: Path) -> Runs:
    """See `formats.Format.open`."""
    try:
        with quiet():
            return torch.no_grad()(torch.jit.load(file))
    except Exception as error:
        raise VerificationError("torch.jit.load does not take it", first_line(error)) from None


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`."""
    with quiet():
        graph = torch.jit.load(file).inlined_graph
    kinds = [node.kind() for node in graph.nodes()]
    return dict(Counter(kind.removeprefix("aten::") for kind in kinds if kind not in _BOOKKEEPING).most_common())
