"""ExecuTorch: a .pte program for phones.

XNNPACK computes all that it takes, portable kernels the rest. The method `normswap` returns the
metadata. int8 is ExecuTorch's PT2E quantizer for XNNPACK. Weights have 8 bits: XNNPACK adds
products of bytes in 32 bits on every CPU. ExecuTorch's tracer gives no value from inside XNNPACK's
graph.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.export import ExportedProgram

from normswap import reading
from normswap.exporting import pt2_file, simpler_graph
from normswap.exporting.exported_module import FileContents
from normswap.exporting.formats import Runs, counted, silent
from normswap.exporting.settings import Quantization

if TYPE_CHECKING:
    from executorch.exir.schema import Program

_METADATA = "normswap"


def write(contents: FileContents, file: Path) -> None:
    """Write the network and its metadata to a .pte file.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
    """
    file.write_bytes(_lowered(_traced(contents), contents))


def _traced(contents: FileContents) -> ExportedProgram:
    """Return a network as a program of torch.export.

    Values that depend on no input are computed here and stored as constants, not at each run.

    Args:
        contents: The network and its example inputs.
    """
    return pt2_file.traced(contents, simpler_graph.with_constants(contents))


def _lowered(program: ExportedProgram, contents: FileContents) -> bytes:
    """Return the bytes of a .pte file, made from a program of torch.export.

    XNNPACK computes all operators that it has. The method `normswap` of the file returns the
    metadata.

    Args:
        program: The program.
        contents: The contents of the file, with the metadata.
    """
    with silent():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        constant_methods = {_METADATA: json.dumps(dict(contents.metadata))}
        edge = to_edge_transform_and_lower(
            program, partitioner=[XnnpackPartitioner()], constant_methods=constant_methods
        )
        return bytes(edge.to_executorch().buffer)


def write_int8(contents: FileContents, file: Path, how: Quantization) -> None:
    """Write the network to a .pte file in int8.

    Args:
        contents: The network, its example inputs and its metadata.
        file: The path of the file.
        how: The images that set the ranges of activations, and the bits of a weight.
    """
    program = _traced(contents)
    with silent():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import XNNPACKQuantizer

        quantizer = XNNPACKQuantizer().set_global(
            pt2_file.quantization_config(torch.int8, how.levels)
        )
        rounded = pt2_file.calibrated(program.module(), quantizer, how.images)
    file.write_bytes(_lowered(pt2_file.traced(contents, rounded), contents))


def open(file: Path) -> Runs:
    """Open a .pte file in ExecuTorch, and return a function that runs it.

    The function takes the file's input tensors and returns its output tensors.

    It runs on the CPU.
    """
    with silent():
        from executorch.runtime import Runtime

        forward = Runtime.get().load_program(file).load_method("forward")

    def runs(*tensors: Tensor) -> list[Tensor]:
        return [value.clone() for value in forward.execute([x.contiguous() for x in tensors])]

    return runs


def nodes(file: Path) -> dict[str, int]:
    """Return how many operators of each kind a .pte file has, the most frequent kind first."""
    kinds = []
    # The file has a plan for each method, and a plan has chains of instructions.
    for plan in _program(file).execution_plan:
        for instruction in (each for chain in plan.chains or [] for each in chain.instructions):
            # An instruction calls an operator, or a delegate such as XNNPACK, which computes a part
            # of the graph. Other instructions, such as jumps, are not counted.
            call = instruction.instr_args
            if hasattr(call, "delegate_index"):
                kinds.append(plan.delegates[call.delegate_index].id)
            elif hasattr(call, "op_index"):
                # An operator's name is such as aten::relu.
                kinds.append(plan.operators[call.op_index].name.rpartition("::")[2])
    return counted(kinds)


def metadata(file: Path) -> dict[str, str]:
    """Return the texts that `export` stored in a .pte file as metadata, by their keys.

    An example is the name of the source network, with the key `source`.
    """
    # A file of another program has no method of this name. The method returns one constant, a text.
    plans = {plan.name: plan for plan in _program(file).execution_plan}
    if _METADATA not in plans:
        return {}
    texts = reading.parse_object(plans[_METADATA].values[0].val.string_val)
    return {name: str(value) for name, value in texts.items()}


def _program(file: Path) -> Program:
    """Return the parsed content of a .pte file, which is not run."""
    with silent():
        from executorch.exir._serialize._program import deserialize_pte_binary

        return deserialize_pte_binary(file.read_bytes()).program
