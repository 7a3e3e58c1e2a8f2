"""Which parameters learn after a conversion, where plain parameters are part of it.

A layer of another package may take a norm into a parameter that stands beside the modules, or read
such a parameter. The layer here does both.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.narrow_networks import skeleton
from support.sampled_tables import sampled
from support.scheme_rows import ROWS, Row
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.errors import RefusedError
from normswap.layers import planned_layer
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import PlannedLayer
from normswap.plan import AbsorbMode, Absorption, Edit, Plan, Step
from normswap.provenance import Provenance
from normswap.surgery import applying, learning


class Scaled(nn.Module):
    """A norm, and a factor per channel behind it that is a plain parameter of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.factor = nn.Parameter(torch.rand(4, 1, 1) + 0.5)
        self.empty = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.empty(self.norm(self.conv(x)) * self.factor)
        return maps


@pytest.fixture(autouse=True)
def other_layers() -> Iterator[None]:
    """Two layers of another package, known while a test runs."""

    class IntoFactor(PlannedLayer):
        """A plain parameter, times the gammas of the norms that it takes in."""

        TENSORS = True

        @classmethod
        def replacing(cls, old: Any, *reads: Any, like: Tensor, takes: object = ()) -> nn.Parameter:
            value = old.detach().clone()
            for norm in reads:
                value = value * norm.weight.detach().reshape(value.shape)
            return nn.Parameter(value, requires_grad=old.requires_grad)

    class OutOfFactor(PlannedLayer):
        """A BatchNorm whose gamma is the parameter that it reads."""

        @classmethod
        def replacing(cls, old: nn.Module, *reads: Any, like: Tensor) -> nn.Module:
            norm = nn.BatchNorm2d(4)
            for scale in reads:
                norm.weight.copy_(scale.gamma)
            return norm

    yield
    for layer in (IntoFactor, OutOfFactor):
        del planned_layer._BY_NAME[layer.__name__]


def absorbed() -> Step:
    """The step that takes the norm into the factor."""
    edits = (
        Edit("norm", Vacant.__name__),
        Edit("factor", "IntoFactor", reads=("norm",), takes=(Absorption(AbsorbMode.AFTER),)),
    )
    return Step("folded", {}, edits)


def with_step(model: nn.Module, step: Step) -> nn.Module:
    """The network after a step, which knows the step."""
    result = applying.apply_step(model, step)
    return provenance.attach(result, Provenance(plan=Plan().then(step)))


@pytest.mark.parametrize("learns", [True, False])
def test_a_plain_parameter_that_is_read_keeps_its_flag(learns: bool) -> None:
    """The gamma that is made of it learns if it learned."""
    source = Scaled()
    source.factor.requires_grad_(learns)
    back = Step("batchnorm", {}, (Edit("empty", "OutOfFactor", reads=("factor",)),))

    norm = applying.apply_step(source, back).get_submodule("empty")

    assert norm.get_parameter("weight").requires_grad is learns


@pytest.mark.parametrize("learns", [True, False])
def test_a_norm_that_returns_learns_as_the_parameter_that_took_it_in(learns: bool) -> None:
    """What stood at the norm's place has no parameter, and the rest of the network is otherwise."""
    source = Scaled()
    source.requires_grad_(not learns)
    source.factor.requires_grad_(learns)
    folded = with_step(source, absorbed())
    back = Step("batchnorm", {}, (Edit("norm", "OutOfFactor"),))

    returned = applying.apply_step(folded, back).get_submodule("norm")

    flags = {name: parameter.requires_grad for name, parameter in returned.named_parameters()}
    assert flags == {"weight": learns, "bias": learns}


class Within(nn.Module):
    """A part of a network, whose other layers learn."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.last(self.part(x))
        return maps


def test_a_norm_in_a_part_learns_as_that_part() -> None:
    """No module was at its place, so the nearest one around it decides."""
    source = Within(Scaled().requires_grad_(False))
    placed = Step("batchnorm", {}, (Edit("part.empty", "OutOfFactor"),))

    norm = applying.apply_step(source, placed).get_submodule("part.empty")

    flags = {name: parameter.requires_grad for name, parameter in norm.named_parameters()}
    assert flags == {"weight": False, "bias": False}


def test_a_plain_parameter_that_takes_in_a_norm_is_no_frozen_weight() -> None:
    """The step places no module there, so there is nothing to say of one."""
    source = Scaled()
    step = absorbed()
    result = applying.apply_step(source, step)

    assert learning.notes(source, step.edits, applying.placed(result, step)) == []


class Pair(nn.Module):
    """Two convolutions with a norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.norm1 = nn.BatchNorm2d(4)
        self.conv2 = nn.Conv2d(4, 4, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        maps: Tensor = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return maps


IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def flags(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def test_a_frozen_weight_stays_frozen_and_the_note_names_the_gamma_in_it() -> None:
    source = Pair().eval()
    source.conv1.requires_grad_(False)

    done = normswap.convert(source, "folded", inputs=IMAGES)

    # The bias carries a beta that learned.
    assert flags(done.model) == {
        "conv1.weight": False,
        "conv1.bias": True,
        "conv2.weight": True,
        "conv2.bias": True,
    }
    assert "the gammas of norm1 learned, and are part of frozen weights now" in done.notes


def test_a_bias_that_carries_frozen_betas_is_frozen() -> None:
    source = Pair().eval()
    source.norm1.requires_grad_(False)
    source.norm2.requires_grad_(False)

    done = normswap.convert(source, "folded", inputs=IMAGES)

    # The first convolution has a bias of its own, which learned.
    assert flags(done.model) == {
        "conv1.weight": True,
        "conv1.bias": True,
        "conv2.weight": True,
        "conv2.bias": False,
    }
    assert not done.notes


class Bare(nn.Module):
    """A residual block whose layers may lack a bias, and gamma and beta."""

    def __init__(self, bias: bool, affine: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 1, bias=bias)
        self.norm = nn.BatchNorm2d(4, affine=affine)
        self.conv1 = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.norm1 = nn.BatchNorm2d(4, affine=affine)
        self.conv2 = nn.Conv2d(4, 4, 3, padding=1, bias=bias)
        self.norm2 = nn.BatchNorm2d(4, affine=affine)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        branch = self.norm1(self.conv1(x)).relu()
        return (x + self.norm2(self.conv2(branch))).relu()


@pytest.mark.parametrize("row", sampled(ROWS, 3))
def test_nothing_learns_where_nothing_learned(row: Row) -> None:
    """Whatever new tensors stand for: a bias, a gamma and a scalar that were not there."""
    for bias, affine in itertools.product((True, False), repeat=2):
        source = Bare(bias, affine).eval().requires_grad_(False)

        try:
            done = normswap.convert(source, row.scheme, inputs=IMAGES, **row.options)
        # Not every scheme takes norms without gamma and beta.
        except RefusedError:
            assert not affine
            continue

        learning_now = [name for name, flag in flags(done.model).items() if flag]
        assert learning_now == [], (bias, affine)


@pytest.mark.parametrize("frozen", ["weight", "bias"])
@pytest.mark.parametrize("row", sampled(ROWS, 3))
def test_a_tensor_that_keeps_its_name_keeps_its_flag(row: Row, frozen: str) -> None:
    """Gammas may learn where betas do not, and the other way round."""
    source = Bare(bias=True, affine=True).eval()
    for norm in (source.norm, source.norm1, source.norm2):
        norm.get_parameter(frozen).requires_grad_(False)

    done = normswap.convert(source, row.scheme, inputs=IMAGES, **row.options)

    # Frozen BatchNorm has buffers in their place, and `keeps` is empty there.
    now = dict(done.model.named_parameters())
    for path in ("norm", "norm1", "norm2"):
        for name in ("weight", "bias"):
            kept = now.get(f"{path}.{name}")
            assert kept is None or kept.requires_grad is (name != frozen), (path, name)


@pytest.mark.parametrize("scheme", ["folded", "affine", "tune", "weightnorm", "groupnorm", "dyt"])
@pytest.mark.parametrize("training", [True, False])
def test_modes_stay(scheme: str, training: bool) -> None:
    """A part that is in eval mode within a network that trains, or the reverse."""
    source = Pair().train(training)
    source.norm2.train(not training)
    source.conv2.train(not training)

    done = normswap.convert(source, scheme, inputs=IMAGES)

    modes = {name: module.training for name, module in done.model.named_children()}
    before = {name: module.training for name, module in source.named_children()}
    assert modes == before
    assert done.model.training is training


def test_directions_of_a_frozen_weight_stay_frozen() -> None:
    """Weight norm keeps the directions of the filters apart; their lengths carry the gamma."""
    source = Pair().eval()
    source.conv1.requires_grad_(False)

    done = normswap.convert(source, "weightnorm", inputs=IMAGES)

    learns = {name.rpartition(".")[2]: flag for name, flag in flags(done.model.conv1).items()}
    assert learns == {"original0": True, "original1": False, "bias": True}
    assert all(flags(done.model.conv2).values())


# Which parameters of a ResNet are frozen before it is converted.
FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing": lambda name: False,
    "all but the head": lambda name: not name.startswith("fc."),
    "the norms": lambda name: "bn" in name or "downsample.1" in name,
    "betas": lambda name: name.endswith("bias"),
    "a stage": lambda name: name.startswith(("conv1", "bn1", "layer1.")),
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("way", ["unfold", "unfold like", "batchnorm like"])
def test_norms_that_come_back_are_trained_as_before(way: str, frozen: str) -> None:
    """And modules are in the mode that they were in. A norm folded into a frozen filter is frozen,
    and its gamma, which is part of a filter, learns where the filter does.
    """
    source = skeleton("resnet18").float()
    for name, parameter in source.named_parameters():
        parameter.requires_grad_(not FROZEN[frozen](name))
    source.train()
    for module in source.layer1.modules():
        module.training = False
    images = torch.randn(8, 3, 33, 33)
    folded = normswap.convert(source, "folded", inputs=images)

    if way == "batchnorm like":
        result = normswap.convert(folded, "batchnorm", like=source, calibrate=[images]).model
    else:
        like = {"like": source} if way == "unfold like" else {}
        result = normswap.convert(folded, "unfold", **like).model

    expected = {name: parameter.requires_grad for name, parameter in source.named_parameters()}
    if frozen == "the norms":
        # Gammas became parts of filters, which learn.
        expected |= {name: True for name in expected if name.endswith("weight")}
    assert {name: parameter.requires_grad for name, parameter in result.named_parameters()} == (
        expected
    )
    assert [module.training for module in result.modules()] == [
        module.training for module in source.modules()
    ]
