"""Networks that run from node to node: what they compute, and what they keep on the way."""

from collections.abc import Callable

import pytest
import torch
from support.narrow_networks import source
from torch import Tensor, nn

from normswap.calibration import lockstep
from normswap.calibration.lockstep import SIZE, Interpreter, Lockstep
from normswap.errors import VerificationError
from normswap.models.calling import Example


def test_only_what_is_still_read_is_kept() -> None:
    model, x, reference = source("seresnet18")
    interpreter = Interpreter(model, Example((x,)))
    readers = {
        node.name: [i for i, user in enumerate(interpreter.nodes) if node in user.all_input_nodes]
        for node in interpreter.nodes
    }

    values = interpreter.start(Example((x,)))
    with torch.no_grad():
        for stop in range(1, len(interpreter.nodes)):
            values = interpreter.run(values, stop - 1, stop)
            still = {
                node.name
                for node in interpreter.nodes[:stop]
                if any(at >= stop for at in readers[node.name])
            }
            assert values.keys() - {SIZE} == still

    (answer,) = (value for name, value in values.items() if name != SIZE)
    assert isinstance(answer, Tensor)
    assert torch.allclose(answer, reference)


class Pointwise(nn.Module):
    """A function, and a layer to stop at."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 2)

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
    steps = Lockstep([Pointwise(function).eval()], batches)

    (layer,) = (node for node in steps.interpreters[0].nodes if node.target == "layer")
    if broken is None:
        assert len([*steps.run_to([layer])]) == 3
    else:
        with pytest.raises(VerificationError, match="not finite"):
            list(steps.run_to([layer]))


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(((x > 0).long() * 1.0).mean(1, keepdim=True) + x * 1.0)


def test_whole_numbers_become_floats_where_the_network_lets_them() -> None:
    """They have no mean; a product of floats with 1 is not run."""
    network = Counting().eval()
    x = torch.randn(3, 4)
    steps = Lockstep([network], [x])
    nodes = steps.interpreters[0].nodes
    assert sum("mul" in str(node.target) for node in nodes) == 1
    ((values,),) = steps.run_to([nodes[-1]])
    assert values is not None


class InPlace(nn.Module):
    """A network that writes into what a skip connection reads, and into its images."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 1)
        self.second = nn.Conv2d(3, 3, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.first(self.relu(x))
        half = skip[:, :2]
        y = self.second(skip)
        self.relu(half)
        return y + skip


@pytest.mark.parametrize("large", [0, 2**20], ids=["in files", "in memory"])
def test_values_that_are_stored_are_what_one_pass_computes(
    large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node by node, with views and layers that write in place; the user's images stay."""
    monkeypatch.setattr(lockstep, "LARGE", large)
    torch.manual_seed(0)
    model = InPlace().eval()
    batches = [torch.randn(2, 3, 4, 4) for _ in range(2)]
    before = [batch.clone() for batch in batches]
    steps = Lockstep([model], batches)
    found: list[Tensor] = []
    for node in steps.interpreters[0].nodes[1:]:
        found = [values[node.all_input_nodes[0].name] for (values,) in steps.run_to([node])]

    assert all(torch.equal(one, two) for one, two in zip(batches, before, strict=True))

    with torch.no_grad():
        assert all(
            torch.equal(value, model(batch.clone()))
            for value, batch in zip(found, before, strict=True)
        )


class Branches(nn.Module):
    """Calls its two layers in an order that does not change what it computes."""

    def __init__(self, order: tuple[str, str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order = order
        self.skip = nn.Linear(4, 3)
        self.branch = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        called: dict[str, Tensor] = {}
        for name in self.order:
            given = x if name == "skip" else torch.relu(x)
            called[name] = getattr(self, name)(given)
        return called["skip"] + called["branch"]


@pytest.mark.parametrize("large", [0, 2**20], ids=["in files", "in memory"])
@pytest.mark.parametrize("order", [("skip", "branch"), ("branch", "skip")], ids=" ".join)
def test_networks_may_call_their_layers_in_different_orders(
    order: tuple[str, str], large: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has dropped what the other is about to read, and begins again."""
    monkeypatch.setattr(lockstep, "LARGE", large)
    batches = [torch.randn(2, 4) for _ in range(2)]
    steps = Lockstep([Branches(order).eval(), Branches((order[1], order[0])).eval()], batches)
    calls = [
        {node.target: node for node in each.nodes if node.op == "call_module"}
        for each in steps.interpreters
    ]

    for name in (*order, *order):
        wanted = batches if name == "skip" else [torch.relu(batch) for batch in batches]
        nodes = [by_name[name] for by_name in calls]
        found = [
            [values[node.all_input_nodes[0].name] for node, values in zip(nodes, both, strict=True)]
            for both in steps.run_to(nodes)
        ]
        assert all(
            torch.equal(value, batch)
            for both, batch in zip(found, wanted, strict=True)
            for value in both
        )


def test_the_first_images_are_shown_in_a_mirror_left_for_right() -> None:
    """In whole batches, each behind its own."""
    batches = [torch.arange(24.0).view(2, 1, 3, 4), 100 + torch.arange(12.0).view(1, 1, 3, 4)]
    steps = Lockstep([nn.Sequential(nn.Conv2d(1, 2, 1)).eval()], batches, mirrored=1)
    (conv,) = (node for node in steps.interpreters[0].nodes if node.op == "call_module")
    shown = [
        next(value for name, value in values.items() if name != SIZE)
        for (values,) in steps.run_to([conv])
    ]

    assert [x.tolist() for x in shown] == [
        x.tolist() for x in (batches[0], batches[0].flip(-1), batches[1])
    ]
    assert (steps.images, steps.rows) == (3, 5)
