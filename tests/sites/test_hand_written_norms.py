"""Norms that users write themselves are found by what they compute, not by their tensors' names."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.graph.inspection import inspect
from normswap.sites.site import site_of

C = 8
IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


class Own(nn.Module):
    """Calls torch's function on tensors of other names."""

    eps_inside = 1e-5
    # Which of the tensors are parameters, and the order in which they are made.
    parameters_named = ("g", "b")
    order = ("g", "b", "m", "v")

    def __init__(self) -> None:
        super().__init__()
        values = {
            "g": torch.rand(C) + 0.5,
            "b": torch.randn(C),
            "m": torch.randn(C),
            "v": torch.rand(C) + 0.5,
        }
        for name in self.order:
            if name in self.parameters_named:
                self.register_parameter(name, nn.Parameter(values[name]))
            else:
                self.register_buffer(name, values[name])

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.m, self.v, self.g, self.b, self.training, 0.1, self.eps_inside)


class ByHand(Own):
    eps_inside = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.ndim - 2))
        mean, variance, gamma, beta = (
            tensor.view(shape) for tensor in (self.m, self.v, self.g, self.b)
        )
        return (x - mean) / torch.sqrt(variance + self.eps_inside) * gamma + beta


class Frozen(Own):
    """As detection libraries write it: four buffers, maps only."""

    parameters_named = ()
    order = ("v", "b", "m", "g")

    def forward(self, x: Tensor) -> Tensor:
        scale = self.g * (self.v + self.eps_inside).rsqrt()
        shift = self.b - self.m * scale
        return x * scale.reshape(1, -1, 1, 1) + shift.reshape(1, -1, 1, 1)


class Bounded(Own):
    """It is no BatchNorm: it bends what is large."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-50, 50)


class Squared(Own):
    """It is no BatchNorm: the fourth vector does something else."""

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        return x * self.g.view(shape) + self.b.view(shape) + (self.m * self.v.square()).view(shape)


class Net(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv1 = nn.Conv2d(3, C, 3, bias=False)
        self.norm1 = norm()
        self.conv2 = nn.Conv2d(C, C, 3, bias=False)
        self.norm2 = norm()
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        return self.head(self.norm2(self.conv2(x)).relu().mean((2, 3)))


class Inline(Net):
    """The network's own forward calls the function, beside a norm that is a module."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.BatchNorm2d(C))
        del self.norm1
        self.register_buffer("mean", torch.randn(C))
        self.register_buffer("variance", torch.rand(C) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.conv1(x), self.mean, self.variance).relu()
        return self.head(self.norm2(self.conv2(x)).relu().mean((2, 3)))


@pytest.mark.parametrize(
    ("norm", "scheme"),
    [
        *itertools.product([Own, ByHand], ["folded", "frozen-bn", "affine", "tune", "batchnorm"]),
        # It is frozen already.
        *itertools.product([Frozen], ["folded", "affine", "tune", "batchnorm"]),
    ],
)
def test_it_converts_as_batchnorm_does(norm: type[nn.Module], scheme: str) -> None:
    source = Net(norm).eval()

    result = normswap.convert(source, scheme, inputs=IMAGES)

    assert result.report.verdict == "PROVED"
    assert len(result.outcomes) == 2
    assert not any(isinstance(module, norm) for module in result.model.modules())
    with torch.no_grad():
        expected = copy.deepcopy(source).double()(IMAGES.double())
        error = (result.model(IMAGES) - expected).norm() / expected.norm()
    assert error < 1e-6


@pytest.mark.parametrize("order", list(itertools.permutations("gbmv")))
def test_the_order_in_which_tensors_are_made_says_nothing(order: tuple[str, ...]) -> None:
    norm = type("Norm", (ByHand,), {"order": order, "parameters_named": ()})()

    mean, variance = site_of(norm).input_moments

    assert torch.equal(mean, norm.m.double())
    assert torch.equal(variance, norm.v.double())


@pytest.mark.parametrize("norm", [Bounded, Squared])
def test_what_computes_something_else_is_no_norm(norm: type[nn.Module]) -> None:
    assert not site_of(norm().eval()).is_norm


def test_what_was_measured_holds_for_these_values_only() -> None:
    """Of a fresh norm gamma and variance are both one, so that either could be either."""
    norm = type("Norm", (ByHand,), {"order": ("v", "b", "m", "g"), "parameters_named": ()})()
    trained = norm.state_dict()
    fresh = {name: torch.ones(C) if name in "gv" else torch.zeros(C) for name in "gbmv"}
    trained = {name: tensor.clone() for name, tensor in trained.items()}

    norm.load_state_dict(fresh)
    assert site_of(norm).is_norm
    norm.load_state_dict(trained)

    _, variance = site_of(norm).input_moments
    assert torch.equal(variance, trained["v"].double())


def test_a_call_in_the_networks_own_forward_is_said() -> None:
    source = Inline().eval()

    result = normswap.convert(source, "folded", inputs=IMAGES)

    notes = "\n".join(result.notes)
    assert "the network itself keeps its norm: forward calls batch_norm itself" in notes
    assert list(result.outcomes) == ["norm2"]
    source.norm2 = nn.Identity()
    with pytest.raises(RefusedError, match="the network itself: forward calls batch_norm itself"):
        normswap.convert(source, "folded", inputs=IMAGES)


class Calling(nn.Module):
    """A part of a network that calls a norm's function in its forward, behind a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.ReLU()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("layer_norm", lambda x: F.layer_norm(x, x.shape[1:])),
        ("group_norm", lambda x: torch.group_norm(x, 2)),
        ("instance_norm", F.instance_norm),
        ("rms_norm", lambda x: F.rms_norm(x, x.shape[-1:])),
        ("batch_norm", lambda x: F.batch_norm(x, None, None, training=True)),
    ],
)
def test_a_call_of_any_norms_function_is_said(
    name: str, function: Callable[[Tensor], Tensor]
) -> None:
    source = Net(lambda: Calling(function)).eval()

    with pytest.raises(RefusedError, match=f"norm1: forward calls {name} itself"):
        normswap.convert(source, "folded", inputs=IMAGES)


def test_a_weight_that_is_normalized_is_no_norm() -> None:
    weight = torch.randn(C, C, 1, 1)
    source = Net(lambda: Calling(lambda x: F.conv2d(x, F.layer_norm(weight, (C, 1, 1))))).eval()
    assert inspect(source, IMAGES).functional_norms == {}
