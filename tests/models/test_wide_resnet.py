"""Wide-ResNets n-k: the parameter counts of their paper, timm's ways, and SkipInit on them against
plain formulas.
"""

import math
import sys
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, run, step, swapped
from torch import Tensor, nn

from normswap import shipped
from normswap.errors import SourceError
from normswap.models import zoo
from normswap.plan import Arch

shipped.register_networks()
wide_resnet: Any = sys.modules["normswap.recipes.wide_resnet"]
ORDERS = ("pre", "post")


def network(**args: Any) -> nn.Module:
    torch.manual_seed(0)
    return (
        timm.create_model("wide_resnet_cifar", **{"depth": 16, "width": 1, **args}).eval().double()
    )


def images(n: int = 2) -> Tensor:
    return torch.randn(
        n, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("depth", "width", "millions"),
    [(16, 8, 11.0), (28, 10, 36.5), (40, 1, 0.6), (40, 4, 8.9), (22, 8, 17.2)],
)
def test_the_parameter_counts_of_the_paper(depth: int, width: int, millions: float) -> None:
    """Zagoruyko & Komodakis 2016, tables 4 and 5."""
    with torch.device("meta"):
        model = wide_resnet.WideResNet(depth, width)
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
def test_it_computes_what_its_formula_says(order: str) -> None:
    model = network(order=order, depth=10, divide=True)
    x = images()

    def plain(conv: nn.Module, x: Tensor) -> Tensor:
        return F.conv2d(x, conv.weight, stride=conv.stride, padding=conv.padding)  # type: ignore[arg-type]

    eps = math.sqrt(1 + 1e-5)  # a fresh norm in eval mode
    y = plain(model.conv1, x)
    y = y if order == "pre" else F.relu(y / eps)
    for stage in model.stages:
        for block in stage:
            if order == "pre":
                active = F.relu(y / eps)
                branch = plain(block.conv2, F.relu(plain(block.conv1, active) / eps))
                skip = y if block.downsample is None else plain(block.downsample, active)
                y = (skip + branch) / math.sqrt(2)
            else:
                branch = plain(block.conv2, F.relu(plain(block.conv1, y) / eps)) / eps
                skip = y if block.downsample is None else plain(block.downsample[0], y) / eps
                y = F.relu((skip + branch) / math.sqrt(2))
    y = F.relu(y / eps) if order == "pre" else y

    assert distance(F.linear(y.mean((2, 3)), model.fc.weight, model.fc.bias), run(model, x)) < 1e-14


@pytest.mark.parametrize(
    "args", [{"depth": 15}, {"depth": 4}, {"width": 0}, {"order": "v2"}, {"nonsense": 1}]
)
def test_what_it_cannot_be_is_an_error_of_the_input(args: dict[str, Any]) -> None:
    with pytest.raises(SourceError, match="wide_resnet_cifar cannot be built with"):
        zoo.create(Arch("wide_resnet_cifar", args))


def test_timm_knows_it_and_its_ways() -> None:
    model: Any = network(depth=10, num_classes=7, in_chans=1).float()
    x = torch.randn(2, 1, 32, 32)

    assert model.forward_features(x).shape == (2, 64, 8, 8)
    assert model.forward_head(model.forward_features(x), pre_logits=True).shape == (2, 64)
    assert model.get_classifier() is model.fc

    model.reset_classifier(3)
    assert model(x).shape == (2, 3)

    model.reset_classifier(0)
    assert model(x).shape == (2, 64)
    assert zoo.data_config(zoo.create(Arch("wide_resnet_cifar", {})))["input_size"] == (3, 32, 32)

    groups = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert set(groups) == {name for name, _ in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("alpha", "value"), [(0, 0.0), (1, 1.0), ("inv-sqrt-depth", 1 / math.sqrt(6)), (0.25, 0.25)]
)  # six blocks at depth 16
def test_skipinit_resets_the_scalars(order: str, alpha: float | str, value: float) -> None:
    """y = skip + alpha f(x), f of unit variance on normalized inputs: a plain forward with the
    source's own weights.
    """
    model: Any = network(order=order)
    result: Any = swapped(model, "skipinit", alpha=alpha)
    x = images()
    eps = math.sqrt(1 + 1e-5)

    def plain(conv: Any, x: Tensor) -> Tensor:
        return F.conv2d(x, conv.weight / eps, stride=conv.stride, padding=conv.padding)

    y = (
        F.conv2d(x, model.conv1.weight, padding=1)
        if order == "pre"
        else F.relu(plain(model.conv1, x))
    )
    for stage, changed in zip(model.stages, result.stages, strict=True):
        for block, new in zip(stage, changed, strict=True):
            active = F.relu(y) if order == "pre" else y
            branch = plain(block.conv2, F.relu(plain(block.conv1, active)))
            branch = (
                branch * rescaling_of(block, new) if order == "pre" else branch
            )  # after a norm it is 1 already
            skip = y if block.downsample is None else plain(projection(block), active)
            y = skip + value * branch if order == "pre" else F.relu(skip + value * branch)
    y = F.relu(y) / eps if order == "pre" else y
    reference = F.linear(y.mean((2, 3)), model.fc.weight, model.fc.bias)

    assert distance(reference, run(result, x)) < 1e-12


def rescaling_of(block: Any, new: Any) -> float:
    """What the last convolution was divided by: its output's deviation where its input is relu(z),
    z ~ N(0, 1).

    The variance of relu(z) is 1/2 - 1/(2 pi); normswap finds it by quadrature, to a percent.
    """
    ratio = new.conv2.weight / block.conv2.weight
    assert float(ratio.std()) < 1e-12
    found = float(ratio.mean())
    variance = block.conv2.weight.square().sum((1, 2, 3)).mean() * (0.5 - 1 / (2 * math.pi))
    assert found * math.sqrt(variance) == pytest.approx(1, rel=0.02)
    return found


def projection(block: Any) -> nn.Module:
    return block.downsample if isinstance(block.downsample, nn.Conv2d) else block.downsample[0]


@pytest.mark.slow
def test_a_factor_of_the_skip_that_leaves_half_precision_is_refused() -> None:
    """Without a factor on the skip, 1/sqrt(2), the branch of block l has 2^((l - 1) / 2): above
    2^15 from 32 on.
    """
    _, builder = step(network(depth=202), "residual-scale", rule="balduzzi")

    expected: list[str] = []
    for stage in range(3):
        expected += [f"stages.{stage}.31", f"stages.{stage}.32"]
    assert list(builder.refusals) == expected
