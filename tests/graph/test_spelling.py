"""How operations are written down: as torch.fx's own symbolic trace names them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from normswap.graph import recording

OPERATIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add": lambda x, y: x + y,
    "take away": lambda x, y: x - y,
    "take from a number": lambda x, y: 2 - x,
    "multiply": lambda x, y: x * y,
    "divide": lambda x, y: x / y,
    "divide a number": lambda x, y: 2 / x,
    "matrix product": lambda x, y: x @ y.mT,
    "negate": lambda x, y: -x,
    "index": lambda x, y: x[:, 0],
    "one of several parts": lambda x, y: x.chunk(2, 1)[1] + 1,
    "a method": lambda x, y: x.flatten(1),
    "a method with a keyword": lambda x, y: x.mean(1, keepdim=True),
    "add with a factor": lambda x, y: x.add(y, alpha=2),
    "a function": lambda x, y: torch.cat([x, y], 1),
    "what passes on a tensor as it is": lambda x, y: x.contiguous() + x,
    "what is written in place": lambda x, y: x.clone().clamp_(min=0) + y,
}


class Operation(nn.Module):
    def __init__(self, operation: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.operation(x, y)


def told(graph: fx.Graph) -> list[tuple[str, Any, str, str]]:
    """Every node but inputs and output, with the names of what it takes as numbers in their order."""
    nodes = list(graph.nodes)
    numbers = {node: f"#{i}" for i, node in enumerate(nodes)}
    found = []
    for node in nodes:
        if node.op not in ("placeholder", "output"):
            args, kwargs = fx.map_arg((node.args, node.kwargs), numbers.__getitem__)
            found.append((node.op, node.target, repr(args), repr(kwargs)))
    return found


@pytest.mark.parametrize("name", OPERATIONS)
def test_as_the_symbolic_trace(name: str) -> None:
    module = Operation(OPERATIONS[name])
    x, y = torch.randn(2, 2, 3, 3), torch.randn(2, 2, 3, 3)
    assert told(recording.record(module, (x, y)).graph) == told(fx.symbolic_trace(module).graph)
