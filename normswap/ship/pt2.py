"""pt2: a torch.export archive. It needs torch alone: `torch.export.load(file).module()(images)`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from normswap.errors import RefusedError, VerificationError
from normswap.ship.formats import Runs, reason
from normswap.ship.shipped import Shipped
from normswap.weights import first_line, quiet

NAME = "pt2"
NEEDS = ()
GRAPH = True
ARITHMETIC: Mapping[str, torch.dtype] = {}
NOTES: Mapping[str, str] = {}


def write(network: Shipped, x: Tensor, file: Path, *, dynamic: bool, metadata: Mapping[str, str]) -> None:
    """See `formats.Format.write`. The metadata are extra files of the archive."""
    shapes = ({0: torch.export.Dim("batch", min=1)},) if dynamic else None
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(network, (x,), dynamic_shapes=shapes)
    except Exception as error:  # torch's exporter raises whatever it meets on its way
        raise RefusedError("torch.export cannot express the network", reason(error)) from None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # the exporting machine's file names
    with quiet():
        torch.export.save(program, file, extra_files=dict(metadata))


def open(file: Path) -> Runs:
    """See `formats.Format.open`."""
    try:
        with quiet():
            return torch.no_grad()(torch.export.load(file).module())
    except Exception as error:
        raise VerificationError("torch.export.load does not take it", first_line(error)) from None


def nodes(file: Path) -> dict[str, int]:
    """See `formats.Format.nodes`."""
    with quiet():
        graph = torch.export.load(file).graph
    called = (str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function")
    return dict(Counter(called).most_common())
