"""How a network is run for a comparison: what comes out, and what is left behind."""

import operator
from collections.abc import Callable

import pytest
import torch
from test_blind_spots import LabelsAndHead
from torch import Tensor, nn

from normswap.models.calling import Example
from normswap.proof import running


def test_heads_of_training_run_where_they_are_asked_for() -> None:
    model = LabelsAndHead()
    call = Example((torch.randn(2, 3, 6, 6),))

    outputs, _ = running.run(model, call)
    with_heads, _ = running.run(model, call, heads=True)

    assert outputs.keys() == {"labels", "brightness"}
    assert with_heads.keys() == {"labels", "brightness", "auxiliary"}


def test_other_values_are_the_mirror_image_at_seven_tenths() -> None:
    """A value of 0 stays finite. Labels stay labels, and are at last left as they are."""
    images = torch.tensor([[0.0, 1.0, -2.0]])
    labels = torch.tensor([[3, 0, 5]])
    number = torch.tensor(2.5)

    others = [
        other.tensors()
        for other in running.with_other_values(Example((images, labels), {"number": number}))
    ]

    assert torch.allclose(others[0][0], torch.tensor([[-1.4, 0.7, 0.0]]))
    assert others[0][1].tolist() == [[5, 0, 3]]
    assert torch.allclose(others[1][0], torch.tensor([[-1.4, 0.7, 0.0]]))
    assert torch.allclose(others[2][0], torch.tensor([[0.0, 0.7, -1.4]]))
    for other in others[1:]:
        assert other[1].equal(labels)
    for other in others:
        assert other[2].equal(number)


class Fails(nn.Linear):
    """A linear layer that takes no float64."""

    def __init__(self, error: Callable[[], Exception]) -> None:
        super().__init__(4, 4)
        self.inner = nn.Linear(4, 4)
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(self.inner(x))
        if self.weight.dtype == torch.float64:
            raise self.error()
        return x


@pytest.mark.parametrize("error", [RuntimeError, KeyError, ZeroDivisionError])
def test_a_run_in_float64_that_fails_leaves_every_tensor_as_it_was(
    error: Callable[[], Exception],
) -> None:
    """Two modules run as it fails: the layer, and the network around it, which has a buffer."""
    model = nn.Sequential(nn.Linear(4, 4), Fails(error))
    model.register_buffer("scale", torch.rand(3))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call = Example((torch.randn(2, 4, dtype=torch.float64),))

    if error is ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            running.by_parts(model, call)
    else:
        assert running.by_parts(model, call) is None

    after = model.state_dict()
    assert {name: value.dtype for name, value in after.items()} == dict.fromkeys(
        before, torch.float32
    )
    assert all(value.equal(before[name]) for name, value in after.items())


def test_a_run_in_float64_leaves_every_tensor_and_what_waits_for_its_gradient() -> None:
    """DistributedDataParallel waits at the node that adds up a parameter's gradient."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    images = torch.randn(2, 3, 8, 8)
    before = [*model.parameters(), *model.buffers()]
    came: set[str] = set()
    nodes = []
    for name, parameter in model.named_parameters():
        [(node, _)] = parameter.expand_as(parameter).grad_fn.next_functions
        node.register_hook(lambda *_, name=name: came.add(name))
        nodes.append(node)

    assert running.by_parts(model, Example((images.double(),))) is not None
    model(images).sum().backward()

    assert all(map(operator.is_, [*model.parameters(), *model.buffers()], before))
    assert came == dict(model.named_parameters()).keys()
