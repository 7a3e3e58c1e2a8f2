"""What SkipInit's scalars start from, where they stand, and what they do in training."""

import functools
import itertools
import math
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run, step, swapped
from support.tiny_modules import Net, conv
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.graph import inspection
from normswap.graph.inspection import Anatomy
from normswap.layers.placeholders import Chain
from normswap.layers.scalars import Scale
from normswap.schemes import skipinit
from normswap.surgery import applying

SMALL: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 16, 24, 32)},
    "resnet26d": {"channels": (8, 16, 24, 32), "stem_width": 8, "layers": (1, 2, 1, 1)},
    "seresnet18": {"channels": (8, 16, 24, 32)},
    "ecaresnet50t": {"channels": (8, 16, 24, 32), "layers": (1, 2, 1, 1)},
    "resnetv2_18": {"channels": (8, 16, 24, 32), "stem_chs": 8},
}
LAST = {"resnet18": "bn2", "resnet26d": "bn3", "seresnet18": "bn2", "ecaresnet50t": "bn3"}
SCALAR_AT = {
    "resnet18": "bn2",
    "resnet26d": "bn3",
    "seresnet18": "se",
    "ecaresnet50t": "se",
    "resnetv2_18": "drop_path",
}
architectures = pytest.mark.parametrize("arch", SMALL)


@functools.cache
def source(arch: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    seen, x = torch.randn(2, 3, 3, 33, 33, dtype=torch.float64)
    return lived_in(timm.create_model(arch, num_classes=10, **SMALL[arch]), seen), x


@functools.cache
def seen(arch: str) -> Anatomy:
    return inspection.inspect(source(arch)[0])


def with_scalars(arch: str, alpha: str | float) -> nn.Module:
    planned, builder = step(seen(arch), "skipinit", alpha=alpha)
    assert builder.refusals == {}
    return applying.apply_step(source(arch)[0], planned)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return timm's residual blocks, in order."""
    stages: list[Any]
    if hasattr(model, "layer1"):
        stages = [model.get_submodule(f"layer{i}") for i in (1, 2, 3, 4)]
    else:
        stages = [stage.blocks for stage in model.get_submodule("stages").children()]
    return list(itertools.chain.from_iterable(stages))


def scales(model: nn.Module) -> list[Scale]:
    return [module for module in model.modules() if isinstance(module, Scale)]


def alphas(model: nn.Module) -> list[float]:
    return [scale.alpha.item() for scale in scales(model)]


def test_scalars_that_are_there_get_a_bias() -> None:
    model, x = source("resnet18")
    plain = swapped(model, "skipinit", alpha=0.5)
    result = swapped(plain, "regularized-skipinit", alpha=0.5, dropout=0)
    assert [scale.bias is not None for scale in scales(plain) + scales(result)] == [False] * 8 + [
        True
    ] * 8
    assert distance(run(plain, x), run(result, x)) < 1e-12


@architectures
def test_one_scalar_per_block_in_its_place(arch: str) -> None:
    model, _ = source(arch)
    result = swapped(model, "skipinit")
    assert len(scales(result)) == len(blocks(model))

    for before, after in zip(blocks(model), blocks(result), strict=True):
        scalar = after.get_submodule(SCALAR_AT[arch])
        if SCALAR_AT[arch] == "se":
            assert isinstance(scalar, Chain)
            assert type(scalar.inner) is type(before.get_submodule("se"))
            assert isinstance(scalar.then, Scale), "alpha stands after the gate"
        else:
            assert isinstance(scalar, Scale)


def test_moments_behind_an_activation_are_those_of_a_normal_variable() -> None:
    mean, variance = skipinit._through(
        [nn.ReLU()], torch.zeros(1).double(), 2 * torch.ones(1).double()
    )
    assert mean.item() == pytest.approx(2 / math.sqrt(2 * math.pi), rel=0.02)
    assert variance.item() == pytest.approx(2 - 2 / math.pi, rel=0.02)


class PooledBranch(nn.Module):
    """A pre-activation block whose branch has a layer without parameters before its convolution."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.bn = nn.BatchNorm2d(8)
        self.layer = layer
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x) + self.conv(self.layer(self.bn(x).relu()))


POOLINGS = {"max": nn.MaxPool2d(2), "average": nn.AvgPool2d(2)}


@pytest.mark.parametrize("layer", POOLINGS.values(), ids=POOLINGS)
def test_a_pooling_before_the_last_convolution_leaves_it_as_large_as_it_is(
    layer: nn.Module,
) -> None:
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), PooledBranch(layer)).eval()

    done = normswap.convert(network, "skipinit", inputs=torch.randn(2, 3, 16, 16))

    assert done.report.passed
    assert any("its last layer stays as large as it is" in note for note in done.notes)
    weight = network.get_parameter("1.conv.weight")
    weights = [each for each in done.model.parameters() if each.shape == weight.shape]
    # The norm's scale, 1 / sqrt(1 + eps), goes through ReLU and pooling into the convolution.
    assert torch.allclose(weights[0], weight, rtol=1e-4)


@pytest.mark.parametrize("arch", LAST)
def test_match_is_the_deviation_of_the_branch(arch: str) -> None:
    """The last BatchNorm's output has deviation |gamma| (Ioffe & Szegedy), so alpha is the rms of
    gamma.
    """
    model, _ = source(arch)
    expected = [
        b.get_parameter(f"{LAST[arch]}.weight").square().mean().sqrt().item() for b in blocks(model)
    ]
    assert alphas(swapped(model, "skipinit")) == pytest.approx(expected, rel=1e-12)


@architectures
@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        ("0", 0.0),
        (0, 0.0),
        ("1", 1.0),
        (1, 1.0),
        ("0.25", 0.25),
        (-0.5, -0.5),
        ("inv-sqrt-depth", None),
    ],
)
@pytest.mark.one_in(2)
def test_resets(arch: str, alpha: str | float, expected: float | None) -> None:
    """The scalars start where asked. The branches are those of `match`, so only alpha differs."""
    model, x = source(arch)
    count = len(blocks(model))
    value = count**-0.5 if expected is None else expected
    reset = with_scalars(arch, alpha)
    matched = with_scalars(arch, "match")
    assert alphas(reset) == pytest.approx([value] * count)
    with torch.no_grad():
        for scale, target in zip(scales(reset), alphas(matched), strict=True):
            scale.alpha.fill_(target)
    assert distance(run(matched, x), run(reset, x)) <= 1e-12


@pytest.mark.parametrize("arch", ["resnet18", "resnet26d", "seresnet18"])
def test_fresh_networks_get_alpha_0_and_a_live_branch(arch: str) -> None:
    torch.manual_seed(0)
    model = (
        timm.create_model(arch, num_classes=10, zero_init_last=True, **SMALL[arch]).double().eval()
    )
    x = torch.randn(3, 3, 33, 33, dtype=torch.float64)
    result = swapped(model, "skipinit")

    assert alphas(result) == [0.0] * len(blocks(model))
    assert distance(run(model, x), run(result, x)) <= 1e-12

    for block in blocks(result):
        last: Any = block.get_submodule("conv3" if hasattr(block, "conv3") else "conv2")
        assert bool(last.weight.any())

    result.train()(x).square().sum().backward()
    assert all(
        scale.alpha.grad is not None and bool(scale.alpha.grad.any()) for scale in scales(result)
    )


@pytest.mark.one_in(2)
@architectures
def test_drop_path_survives_before_alpha(arch: str) -> None:
    """With the same random numbers, source and result drop the same branches and agree."""
    seen, x = torch.randn(2, 3, 3, 33, 33, dtype=torch.float64)
    torch.manual_seed(0)
    model = lived_in(
        timm.create_model(arch, num_classes=10, drop_path_rate=0.5, **SMALL[arch]), seen
    )
    result = swapped(model, "skipinit")

    def drops(net: nn.Module) -> list[nn.Module]:
        return [module for module in net.modules() if type(module).__name__ == "DropPath"]

    assert len(drops(result)) == len(drops(model)) == len(blocks(model)) - 1

    def stochastic(net: nn.Module) -> Tensor:
        net.eval()
        for drop in drops(net):
            drop.train()
        torch.manual_seed(7)
        with torch.no_grad():
            return net(x)

    reference = stochastic(model)
    assert distance(run(model, x), reference) > 1e-2
    assert distance(reference, stochastic(result)) <= 1e-12
    for block in blocks(result):
        scalar: Any = block.get_submodule("drop_path" if drops(block) else SCALAR_AT[arch])
        if drops(block):
            assert type(scalar) is Chain
            assert type(scalar.inner).__name__ == "DropPath"
            assert type(scalar.then) is Scale
        assert len(scales(block)) == 1
    result.train()(x).sum().backward()


@pytest.mark.one_in(2)
@architectures
def test_regularized_adds_dropout_and_biases(arch: str) -> None:
    model, x = source(arch)
    result: Any = swapped(model, "regularized-skipinit")
    rates = [m.p for m in result.modules() if isinstance(m, nn.Dropout)] + [
        getattr(result, "drop_rate", 0.0)
    ]

    assert 0.2 in rates

    post = arch != "resnetv2_18"
    for scale in scales(result):
        assert (scale.bias is not None) is post, (
            "one scalar bias before the final ReLU of v1 blocks, none in v2"
        )
        assert scale.bias is None or scale.bias.tolist() == [0.0]

    result.train()
    with torch.no_grad():
        assert not torch.equal(result(x), result(x)), "dropout is alive in training"
        own: Any = swapped(model, "skipinit").train()
        assert torch.equal(own(x), own(x))


@architectures
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.one_in(2)
def test_from_regularized_to_plain(arch: str, trained: bool) -> None:
    """The scalars stay as they are, their biases go into the branch, the dropout goes."""
    model, x = source(arch)
    between = normswap.convert(model, "regularized-skipinit", inputs=x)
    if trained:
        with torch.no_grad():
            for number, scale in enumerate(scales(between.model), 1):
                scale.alpha.mul_(1 + number / 7)
                if scale.bias is not None:
                    scale.bias.fill_(number / 9)

    done = normswap.convert(between, "skipinit", inputs=x)
    assert distance(run(between.model, x), run(done.model, x)) <= 1e-12
    assert alphas(done.model) == alphas(between.model)

    stays = trained and SCALAR_AT[arch] == "se"  # a bias does not pass a gate
    assert all((scale.bias is not None) is stays for scale in scales(done.model))
    assert any("keeps the scalar bias" in note for note in done.notes) is stays
    assert torch.equal(done.model.train()(x), done.model(x))


def test_a_scalar_of_zero_keeps_its_bias() -> None:
    """0 f(x) + bias: there is no convolution to put it in that would not die."""
    model, x = source("resnet18")
    between = normswap.convert(model, "regularized-skipinit", inputs=x)
    with torch.no_grad():
        first = scales(between.model)[0]
        first.alpha.zero_()
        first.bias.fill_(0.5)  # type: ignore[union-attr]
    done = normswap.convert(between, "skipinit", inputs=x)
    assert distance(run(between.model, x), run(done.model, x)) <= 1e-12
    assert [scale.bias is None for scale in scales(done.model)] == [False] + 7 * [True]


def test_the_checker_notices() -> None:
    model, x = source("resnet18")
    wrong = swapped(model, "skipinit")
    with torch.no_grad():
        scales(wrong)[0].alpha *= 1.001
    assert alphas(wrong) != pytest.approx(alphas(swapped(model, "skipinit")), rel=1e-12)
    assert distance(run(model, x), run(wrong, x)) > 1e-12


def test_a_branch_that_forward_scales_itself_is_refused_with_the_number() -> None:
    """The block of the blog post, whose forward returns self.beta * residual + skip."""
    block = Net(lambda m, x: 0.2 * m.conv2(m.conv1(x).relu()) + x, conv1=conv(), conv2=conv())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), block)
    with pytest.raises(RefusedError, match=r"multiplies the branch by 0\.2"):
        normswap.convert(model, "skipinit", inputs=torch.randn(2, 3, 16, 16))


WITHOUT_PLACE: dict[str, tuple[Any, str]] = {
    "the branch is read elsewhere too": (
        lambda m, x: (x + (y := m.conv2(m.conv1(x).relu()))) + m.conv3(y),
        "not only its sum",
    ),
    "the last layer is called twice": (
        lambda m, x: x + m.conv2(m.conv2(x).relu()),
        "several times",
    ),
    "the branch ends in a function": (
        lambda m, x: x + m.conv2(m.conv1(x)).relu(),
        "a function of the block itself",
    ),
}


@pytest.mark.parametrize("name", WITHOUT_PLACE)
def test_a_branch_without_a_place_for_a_scalar_is_refused_with_the_reason(name: str) -> None:
    body, why = WITHOUT_PLACE[name]
    block = Net(body, conv1=conv(), conv2=conv(), conv3=conv())
    model = nn.Sequential(conv(), block, conv()).eval()

    _, builder = step(model, "skipinit")

    assert any(why in reason for reason in builder.refusals.values()), builder.refusals


@pytest.mark.parametrize("scheme", ["skipinit", "regularized-skipinit"])
@pytest.mark.parametrize("alpha", ["match", "inv-sqrt-depth", 0, 0.5])
def test_an_alpha_that_changes_the_function_is_noted(alpha: str | float, scheme: str) -> None:
    """De & Smith start at 0, where no branch of a trained network is heard any more."""
    model, x = source("resnet18")

    done = normswap.convert(model, scheme, alpha=alpha, inputs=x)

    is_changed = distance(run(model, x), run(done.model, x)) > 1e-3
    assert is_changed is (alpha != "match")
    assert any("alpha=" in note and "match" in note for note in done.notes) is is_changed
    # The same scalars once more change nothing.
    planner = {"skipinit": skipinit.plan, "regularized-skipinit": skipinit.plan_regularized}[scheme]
    dropout = {"dropout": 0.2} if scheme == "regularized-skipinit" else {}
    again: Any = planner(inspection.inspect(done.model, x), alpha=alpha, **dropout)
    assert not any("match" in note for note in again.notes)


class Summing(nn.Module):
    """A network whose own forward adds, so that it is the block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x)


def test_a_note_about_the_network_itself_names_it() -> None:
    done = normswap.convert(Summing().eval(), "skipinit", inputs=torch.randn(2, 3, 8, 8))

    (note,) = done.notes
    assert note.startswith("the network itself: ")
