"""Networks that run from node to node: what they compute, and what they keep on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from narrow_networks import source
from torch import Tensor, nn

from normswap.calibration.lockstep import SIZE, Interpreter, Lockstep
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


class Pointwise(nn.Module):
    """A function, and a layer to stop at."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.layer = function, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.function(x))


@pytest.mark.parametrize("function", [torch.reciprocal, torch.log], ids=["to inf", "to -inf"])
@pytest.mark.parametrize("broken", [0, 1, 2, None])
def test_one_value_that_is_not_finite_is_refused_in_whichever_batch(
    function: Callable[[Tensor], Tensor], broken: int | None
) -> None:
    batches = [torch.ones(2, 4) for _ in range(3)]
    if broken is not None:
        batches[broken][1, 2] = 0.0
    examples = [Example((batch,)) for batch in batches]
    interpreter = Interpreter(Pointwise(function).eval(), Example((torch.ones(2, 4),)))
    lockstep = Lockstep([interpreter], examples)
    (layer,) = (node for node in interpreter.nodes if node.target == "layer")
    try:
        if broken is None:
            assert len([*lockstep.run_to([layer])]) == 3
        else:
            with pytest.raises(VerificationError, match="not finite"):
                list(lockstep.run_to([layer]))
    finally:
        lockstep.close()


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(((x > 0).long() * 1.0).mean(1, keepdim=True) + x * 1.0)


def test_whole_numbers_become_floats_where_the_network_lets_them() -> None:
    """They have no mean; a product of floats with 1 is not run."""
    network, x = Counting().eval(), torch.randn(3, 4)
    interpreter = Interpreter(network, Example((x,)))
    assert sum("mul" in str(node.target) for node in interpreter.nodes) == 1
    lockstep = Lockstep([interpreter], [Example((x,))])
    try:
        ((values,),) = lockstep.run_to([interpreter.nodes[-1]])
        assert values is not None
    finally:
        lockstep.close()


@pytest.mark.parametrize("mirror", [True, False])
def test_images_are_shown_in_a_mirror_left_for_right(mirror: bool) -> None:
    """In whole batches, each behind its own."""
    batches = [torch.arange(24.0).view(2, 1, 3, 4), 100 + torch.arange(12.0).view(1, 1, 3, 4)]
    model = nn.Sequential(nn.Conv2d(1, 2, 1)).eval()
    lockstep = Lockstep([Interpreter(model, Example((batches[0],)))], [Example((x,)) for x in batches], mirror=mirror)
    (conv,) = (node for node in lockstep.interpreters[0].nodes if node.op == "call_module")
    shown = [next(value for name, value in values.items() if name != SIZE) for (values,) in lockstep.run_to([conv])]
    lockstep.close()
    expected = [x for batch in batches for x in ((batch, batch[..., [3, 2, 1, 0]]) if mirror else (batch,))]
    assert [x.tolist() for x in shown] == [x.tolist() for x in expected]
    assert (lockstep.images, lockstep.shown) == (3, 6 if mirror else 3)
