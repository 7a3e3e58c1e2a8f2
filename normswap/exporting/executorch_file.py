"""ExecuTorch: a .pte program for phones, in which XNNPACK computes all that it takes and portable kernels the rest.

Its operators are counted as ExecuTorch calls them: one `XnnpackBackend` is a whole part of the network, and what stands
beside it is computed by itself. The metadata are what the method `normswap` returns.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.export import ExportedProgram

from normswap.errors import RefusedError, VerificationError, first_line
from normswap.exporting import constants, pt2
from normswap.exporting.exported_module import FileContents, as_convolutions
from normswap.exporting.formats import Runs, reason
from normswap.exporting.planes import in_planes
from normswap.exporting.position_means import with_linear_means
from normswap.exporting.signature import alone
from normswap.exporting.silence import silent

if TYPE_CHECKING:
    from executorch.exir.schema import Program

NAME = "executorch"
NEEDS = ("executorch",)
GRAPH = True
PARTS = ()
NOTES: Mapping[str, str] = {}
_METADATA = "normswap"


def write(contents: FileContents, file: Path) -> None:
    """See `formats.Format.write`."""
    if contents.network.stored != torch.float32:
        what = "ExecuTorch files are written in fp32 and int8 only"
        raise RefusedError(what, "XNNPACK holds halved weights in fp32 again")
    contents.require_one_image("an ExecuTorch file")  # memory is planned for the largest number
    file.write_bytes(lowered(traced(contents), contents.metadata))


def traced(contents: FileContents) -> ExportedProgram:
    """The network as torch.export records it, in operators that XNNPACK has.

    ExecuTorch has no kernel for a 3-D convolution, and a slow one for means, at which XNNPACK's part would end. It
    computes at each run what depends on no input.
    """
    network = with_linear_means(in_planes(as_convolutions(contents.network)))
    return pt2.traced(contents, constants.with_constants(contents, network))


def lowered(program: ExportedProgram, metadata: Mapping[str, str]) -> bytes:
    """The file's content.

    Raises:
        RefusedError: ExecuTorch cannot express the network.
    """
    try:
        with silent():
            from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
            from executorch.exir import to_edge_transform_and_lower

            edge = to_edge_transform_and_lower(
                program, partitioner=[XnnpackPartitioner()], constant_methods={_METADATA: json.dumps(dict(metadata))}
            )
            return bytes(edge.to_executorch().buffer)
    except Exception as error:  # every pass of it has its own
        raise RefusedError("ExecuTorch cannot express the network", reason(error)) from None


def open(file: Path) -> Runs:
    """See `formats.Format.open`; on the CPU."""
    try:
        with silent():
            from executorch.runtime import Runtime

            forward = Runtime.get().load_program(file).load_method("forward")
    except Exception as error:  # its own exceptions derive from nothing else
        raise VerificationError("ExecuTorch cannot run it", first_line(error)) from None
    return lambda *tensors: alone(value.clone() for value in forward.execute([x.contiguous() for x in tensors]))


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`."""
    kinds = []
    for plan in _program(file).execution_plan:
        for step in (step for chain in plan.chains or [] for step in chain.instructions):
            called = step.instr_args
            if hasattr(called, "delegate_index"):
                kinds.append(plan.delegates[called.delegate_index].id)
            elif hasattr(called, "op_index"):
                kinds.append(plan.operators[called.op_index].name.rpartition("::")[2])
    return dict(Counter(kinds).most_common())


def metadata(file: Path) -> dict[str, str]:
    """See `formats.Format.metadata`."""
    plans = {plan.name: plan for plan in _program(file).execution_plan}
    return dict(json.loads(plans[_METADATA].values[0].val.string_val)) if _METADATA in plans else {}


def _program(file: Path) -> Program:
    with silent():
        from executorch.exir._serialize._program import deserialize_pte_binary

        return deserialize_pte_binary(file.read_bytes()).program
