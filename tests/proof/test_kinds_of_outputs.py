"""What a forward returns is compared, whatever object holds it, or it proves nothing."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.models import calling


class Named(NamedTuple):
    mu: Tensor


@dataclass(frozen=True)
class Frozen:
    mu: Tensor


@dataclass(frozen=True, slots=True)
class Slotted:
    mu: Tensor


class Inherited(Slotted):
    """It has the slots of its base, and attributes of its own."""

    __slots__ = ()


class Private:
    __slots__ = ("__mu", "unused")

    def __init__(self, mu: Tensor) -> None:
        self.__mu = mu


class Called:
    def __init__(self, mu: Tensor) -> None:
        self.mu = mu

    def __call__(self) -> Tensor:
        return self.mu


class Measured:
    def __init__(self, mu: Tensor) -> None:
        self.mu = mu.detach().numpy()


def nested(mu: Tensor) -> object:
    value: object = mu
    for _ in range(20):
        value = [value]
    return value


READ: dict[str, Callable[[Tensor], object]] = {
    "a named tuple": Named,
    "a dict": lambda mu: {"mu": mu},
    "a frozen dataclass": Frozen,
    "a dataclass with slots": Slotted,
    "a class with inherited slots": Inherited,
    "a private slot": Private,
    "a namespace": lambda mu: SimpleNamespace(mu=mu),
    "a distribution": lambda mu: torch.distributions.Normal(mu, 1.0),
    "a distribution in another": lambda mu: torch.distributions.Independent(
        torch.distributions.Normal(mu, 1.0), 1
    ),
    "an array": lambda mu: mu.detach().numpy(),
    "a number of numpy": lambda mu: mu.detach().numpy().sum(),
    "an object with an array": Measured,
    "a number": lambda mu: mu.sum().item(),
    "a complex number": lambda mu: complex(mu.sum().item(), 1.0),
}
UNREAD: dict[str, Callable[[Tensor], object]] = {
    "an array of objects": lambda mu: np.array([mu.sum().item(), None], dtype=object),
    "an array of long doubles": lambda mu: mu.detach().numpy().astype(np.longdouble),
    "a set": lambda mu: {mu},
    "an object that is called": Called,
    "a list in 20 lists": nested,
}
# What is returned so often that it must not stand in the way of a proof.
HARMLESS: dict[str, Callable[[Tensor], object]] = {
    "nothing": lambda mu: None,
    "a text": lambda mu: "logits",
    "a size": lambda mu: mu.shape,
    "a dtype": lambda mu: mu.dtype,
    "a device": lambda mu: mu.device,
    "a function": lambda mu: nested,
    "an array of texts": lambda mu: np.array(["a", "b"]),
    "no entries": lambda mu: [{}, (), set()],
    "a set of texts": lambda mu: {"a", "b"},
}


class Policy(nn.Module):
    """It returns a value, and beside it what `kind` makes of an action's mean."""

    def __init__(self, kind: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.kind = kind
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.mu = nn.Linear(8, 4)
        self.value = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> object:
        features = self.bn(self.conv(x)).mean((2, 3))
        return self.kind(self.mu(features)), self.value(features)


def verdicts(kind: Callable[[Tensor], object]) -> tuple[Any, Any]:
    """Return the reports of a right result, and of one whose means are off."""
    torch.manual_seed(0)
    source = Policy(kind).eval()
    images = torch.randn(2, 3, 16, 16)
    wrong = copy.deepcopy(source)
    with torch.no_grad():
        wrong.mu.weight.mul_(0.9)
    right = normswap.verify(source, copy.deepcopy(source), images)
    return right, normswap.verify(source, wrong, images)


@pytest.mark.parametrize("what", READ)
def test_it_is_compared(what: str) -> None:
    right, wrong = verdicts(READ[what])
    assert (right.verdict, wrong.verdict) == ("PROVED", "WRONG")


@pytest.mark.parametrize("what", UNREAD)
def test_what_is_not_compared_proves_nothing(what: str) -> None:
    right, wrong = verdicts(UNREAD[what])
    assert (right.verdict, wrong.verdict) == ("NOT PROVED", "NOT PROVED")
    assert "no comparison reads what the network returns as 0" in right.unproved


@pytest.mark.parametrize("what", HARMLESS)
def test_what_is_no_result_stands_in_no_way(what: str) -> None:
    right, _ = verdicts(HARMLESS[what])
    assert right.verdict == "PROVED"


def test_an_approximate_result_says_what_was_not_compared() -> None:
    source = Policy(UNREAD["a set"]).eval()
    images = torch.randn(4, 3, 16, 16)
    report = normswap.convert(source, "groupnorm", inputs=images).report
    assert report.verdict == "MEASURED"
    assert any("no comparison reads" in remark for remark in report.remarks)


@pytest.mark.parametrize("what", ["a dataclass with slots", "a private slot", "a frozen dataclass"])
def test_tensors_in_any_object_are_exchanged(what: str) -> None:
    value = READ[what](torch.ones(2))
    doubled = calling.changed(value, lambda tensor: 2 * tensor)
    assert [tensor.tolist() for _, tensor in calling.named_tensors(doubled)] == [[2.0, 2.0]]
    assert [tensor.tolist() for _, tensor in calling.named_tensors(value)] == [[1.0, 1.0]]
