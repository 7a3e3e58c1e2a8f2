"""Networks that run from node to node: what they compute, and what they keep on the way."""

from __future__ import annotations

import torch
from narrow_networks import source
from torch import Tensor

from normswap.calibration.lockstep import SIZE, Interpreter
from normswap.models.calling import Example


def test_only_what_is_still_read_is_kept() -> None:
    model, x, reference = source("seresnet18")
    interpreter = Interpreter(model, Example((x,)))
    readers = {node.name: [i for i, user in enumerate(interpreter.nodes) if node in user.all_input_nodes]
               for node in interpreter.nodes}  # fmt: skip
    values = interpreter.start(Example((x,)))
    with torch.no_grad():
        for stop in range(1, len(interpreter.nodes)):
            values = interpreter.run(values, stop - 1, stop)
            still = {node.name for node in interpreter.nodes[:stop] if any(at >= stop for at in readers[node.name])}
            assert values.keys() - {SIZE} == still
    (answer,) = (value for name, value in values.items() if name != SIZE)
    assert isinstance(answer, Tensor)
    assert torch.allclose(answer, reference)
