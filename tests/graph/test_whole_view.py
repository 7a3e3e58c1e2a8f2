"""Laws of what is seen of a network: over all tails, inputs, sums and arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, lived_in, run
from support.tiny_modules import C, bn, conv
from torch import Tensor, nn

import normswap
from normswap.graph.anatomy import restrict
from normswap.graph.inspection import inspect

IMAGES = torch.randn(4, C, 8, 8, generator=torch.Generator().manual_seed(0))


# The classifier.

# What follows the last linear layer, and whether that layer then is the classifier.
TAILS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "nothing": (nn.Identity, True),
    "softmax": (lambda: nn.Softmax(1), True),
    "sigmoid": (nn.Sigmoid, True),
    "dropout": (lambda: nn.Dropout(0.5), True),
    "another shape": (lambda: nn.Unflatten(1, (3, 2)), True),
    "BatchNorm": (lambda: nn.BatchNorm1d(6), False),
    "BatchNorm, then an activation": (
        lambda: nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()),
        False,
    ),
    "an activation, then BatchNorm": (
        lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(6)),
        False,
    ),
    "BatchNorm without affine": (lambda: nn.BatchNorm1d(6, affine=False), False),
    "LayerNorm": (lambda: nn.LayerNorm(6), False),
    "GroupNorm": (lambda: nn.GroupNorm(2, 6), False),
}


@pytest.mark.parametrize("name", TAILS)
def test_the_last_linear_layer_is_the_classifier_unless_a_norm_follows(name: str) -> None:
    """An embedding network may end in a linear layer and a norm."""
    make, is_classifier = TAILS[name]
    trunk = [nn.Conv2d(C, C, 3), nn.BatchNorm2d(C), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*trunk, nn.Linear(C, 5), nn.ReLU(), nn.Linear(5, 6), make()).eval()

    assert inspect(model, IMAGES).classifier == ("6" if is_classifier else None)


# What stands between a dropout and the classifier, and whether it is the classifier's dropout.
BETWEEN: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "nothing": (nn.Identity, True),
    "an activation": (nn.ReLU, True),
    "a linear layer": (lambda: nn.Linear(C, C), False),
    "LayerNorm": (lambda: nn.LayerNorm(C), False),
    "BatchNorm": (lambda: nn.BatchNorm1d(C), False),
    "an activation, then BatchNorm": (
        lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(C)),
        False,
    ),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_the_dropout_of_the_classifier_has_no_norm_and_no_linear_layer_behind_it(
    name: str,
) -> None:
    make, is_the_classifiers = BETWEEN[name]
    pooled = [nn.Conv2d(C, C, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*pooled, nn.Dropout(0.3), make(), nn.Linear(C, 6)).eval()

    assert inspect(model, IMAGES).dropout == ("3" if is_the_classifiers else None)


# Scope.


class Block(nn.Module):
    """A transformer's block of convolutions: two sums in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = conv(), bn()
        self.conv2, self.norm2 = conv(), bn()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm1(self.conv1(x))
        return x + self.norm2(self.conv2(x))


def blocks() -> Any:
    model = nn.Sequential(Block(), Block(), Block())
    return lived_in(model, IMAGES).float()


@pytest.mark.parametrize("chosen", [("0",), ("1",), ("0", "2"), ("1.norm1",), ("0", "1", "2")])
@pytest.mark.parametrize("option", ["skip", "only"])
def test_all_sums_of_a_module_are_in_or_out_of_scope_with_it(
    option: str, chosen: tuple[str, ...]
) -> None:
    model = blocks()
    anatomy = inspect(model, IMAGES)
    paths = [block.path for block in anatomy.blocks]
    assert paths == ["0", "0+2", "1", "1+2", "2", "2+2"]

    named = restrict(anatomy, **{option: chosen})

    def is_in(path: str) -> bool:
        is_named = any(path == name or path.startswith(f"{name}.") for name in chosen)
        return is_named if option == "only" else not is_named

    for path in paths:
        assert named.takes_part(path) is is_in(path.partition("+")[0]), path
    for norm in anatomy.norms:
        assert named.takes_part(norm.path) is is_in(norm.path), norm.path


@pytest.mark.parametrize(
    ("options", "scaled"),
    [
        ({}, {"0", "1", "2"}),
        ({"skip": ["0"]}, {"1", "2"}),
        ({"only": ["1"]}, {"1"}),
        ({"skip": ["0", "2"]}, {"1"}),
    ],
)
def test_a_module_that_is_skipped_keeps_every_layer(
    options: dict[str, Any], scaled: set[str]
) -> None:
    model = blocks()

    done = normswap.convert(model, "skipinit", inputs=IMAGES, **options)

    for number, block in enumerate(model):
        before = {name: type(module).__name__ for name, module in block.named_modules()}
        after = {name: type(module).__name__ for name, module in done.model[number].named_modules()}
        assert (after == before) is (str(number) not in scaled), number
    assert distance(run(model, IMAGES), run(done.model, IMAGES)) < 1e-4


# Inputs.


class Functional(nn.Module):
    """Calls a norm's function itself, on one of its inputs, on both, on their sum, or a weight."""

    def __init__(self, function: str, on: str) -> None:
        super().__init__()
        self.function = function
        self.on = on
        self.conv = conv()

    def normalized(self, x: Tensor) -> Tensor:
        if self.function == "layer_norm":
            return F.layer_norm(x, x.shape[1:])
        if self.function == "group_norm":
            return F.group_norm(x, 2)
        if self.function == "instance_norm":
            return F.instance_norm(x)
        zeros = torch.zeros(C)
        return F.batch_norm(x, zeros, zeros + 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.on == "first":
            return self.conv(self.normalized(x)) + y
        if self.on == "second":
            return self.conv(x) + self.normalized(y)
        if self.on == "sum":
            return self.normalized(self.conv(x) + y)
        weight = self.normalized(self.conv.weight)
        return F.conv2d(x, weight, padding=1) + y


@pytest.mark.parametrize("on", ["first", "second", "sum", "weight"])
@pytest.mark.parametrize("function", ["layer_norm", "batch_norm", "group_norm", "instance_norm"])
def test_a_norm_that_forward_calls_itself_is_said_of_any_input(function: str, on: str) -> None:
    model = Functional(function, on).eval()

    seen = inspect(model, (IMAGES, IMAGES.flip(0)))

    said = "; ".join(map(str, seen.refusals))
    assert (f"forward calls {function} itself" in said) is (on != "weight")


# Batches.


class Modes(nn.Module):
    """A plain argument decides which norm is called. Nothing is read from a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.main, self.aux, self.last = bn(), bn(), bn()

    def forward(self, x: Tensor, mode: str = "main") -> Tensor:
        return getattr(self, mode)(self.conv(x))


def test_each_other_plain_argument_is_followed_once() -> None:
    model: Any = Modes().eval()
    for number, norm in enumerate((model.main, model.aux, model.last)):
        norm.running_mean.fill_(number - 0.5)
        norm.running_var.fill_(number + 0.5)
    modes = ("main", "aux", "aux", "last", "main")

    seen = inspect(model, [(IMAGES, mode) for mode in modes])

    assert {site.path for site in seen.traced.sites if site.is_norm and site.called} == {
        "main",
        "aux",
        "last",
    }
    ways = [remark for remark in seen.traced.remarks if "takes another way" in remark]
    assert len(ways) == 2
    done = normswap.convert(model, "affine", inputs=[(IMAGES, mode) for mode in modes])
    for mode in modes:
        assert distance(run(model, IMAGES, mode), run(done.model, IMAGES, mode)) < 1e-5


class ScriptedPart(nn.Module):
    """A plain argument decides whether a part is called whose operations cannot be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.part = torch.jit.script(nn.Sequential(conv(), bn()))

    def forward(self, x: Tensor, whole: bool = False) -> Tensor:
        x = self.conv(x)
        return self.part(x) if whole else x


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("order", [(False, True), (True, False), (True,)])
def test_a_scripted_part_is_refused_whichever_path_calls_it(order: tuple[bool, ...]) -> None:
    model = ScriptedPart().eval()

    seen = inspect(model, [(IMAGES, whole) for whole in order])

    assert [path for path, _ in seen.refusals] == ["part"]


class CalledTwice(nn.Module):
    """One GroupNorm is called twice, another once."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.shared = nn.GroupNorm(2, 4)
        self.alone = nn.GroupNorm(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.alone(self.shared(self.conv(self.shared(self.conv(x)).relu())))


def test_one_batchnorm_stands_for_no_norm_that_is_called_twice() -> None:
    norms = inspect(CalledTwice(), torch.randn(2, 4, 8, 8)).norms

    assert {norm.path: norm.averages for norm in norms} == {"shared": False, "alone": True}
