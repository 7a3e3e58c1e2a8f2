"""Networks that run from node to node: what they compute, and what they keep on the way."""

from __future__ import annotations

import pytest
import torch
from narrow_networks import source
from torch import Tensor, nn

from normswap.calibration.lockstep import SIZE, Interpreter, Lockstep, interpreters
from normswap.errors import VerificationError
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


@pytest.mark.parametrize("bad", [0, 2])
def test_values_that_overflow_in_one_batch_are_an_error(bad: int) -> None:
    """In whichever batch: it is asked once for all of them."""
    first = nn.Conv2d(3, 4, 3)
    nn.init.constant_(first.weight, 40.0)
    model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 3, 3)).eval()
    batches = [torch.rand(4, 3, 8, 8) for _ in range(3)]
    batches[bad] = batches[bad] * 1e38
    lockstep = Lockstep(*interpreters(batches, model))
    last = next(node for node in lockstep.interpreters[0].nodes if node.target == "2")
    with pytest.raises(VerificationError, match="not finite on the calibration images"):
        list(lockstep.run_to([last]))
    lockstep.close()
