"""The mean of a filter beside its standardized weights: how it is stored, how fast it learns."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from timm.layers import ScaledStdConv2dSame
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn

import normswap
from normswap.images.datasets import make_loader
from normswap.layers.standardized import (
    MeanStdConv2d,
    ScaledStdConv1d,
    ScaledStdConv3d,
    effective_weight,
    scale_filters,
    set_effective,
)

# `nf --mean keep` as it was written when `mean` was (O, 1, 1, 1) and not scaled.
BEFORE = Path(__file__).parents[1] / "data" / "nf_before"
LAYERS = {
    "1-D": lambda: ScaledStdConv1d(6, 4, 3, mean=True),
    "2-D": lambda: MeanStdConv2d(6, 4, 3),
    "2-D, groups": lambda: MeanStdConv2d(6, 4, 3, groups=2),
    "3-D": lambda: ScaledStdConv3d(6, 4, 3, mean=True),
}


@pytest.fixture(scope="module")
def demo() -> nn.Module:
    return normswap.open("demo")


@pytest.fixture(scope="module")
def batch(demo: nn.Module) -> tuple[Tensor, Tensor]:
    images, labels = next(iter(make_loader(demo, "demo", batch_size=100, workers=0)))
    return images, labels


@pytest.mark.parametrize("kind", LAYERS)
def test_any_weight_is_computed(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    weight = torch.randn_like(layer.weight) + 3
    factor = torch.rand(4, dtype=torch.float64) + 0.5

    set_effective(layer, weight)
    assert layer.mean.shape == (4,)
    assert torch.allclose(effective_weight(layer), weight, rtol=1e-9)

    scale_filters(layer, factor)
    wanted = weight * factor.view(-1, *(1,) * (weight.ndim - 1))
    assert torch.allclose(effective_weight(layer), wanted, rtol=1e-9)


@pytest.mark.parametrize("stride", [1, 2])
def test_a_same_padded_layer_computes_what_timms_does_whatever_its_dilation(stride: int) -> None:
    torch.manual_seed(0)
    timms = ScaledStdConv2dSame(6, 4, 3, stride=stride, dilation=(3, 2))
    layer = MeanStdConv2d(6, 4, 3, stride=stride, padding=0, dilation=(3, 2), same_pad=True)
    layer.load_state_dict(timms.state_dict(), strict=False)
    x = torch.randn(2, 6, 11, 9)

    assert torch.allclose(layer(x), timms(x), atol=1e-6)


@pytest.mark.parametrize("kind", LAYERS)
def test_a_state_dict_of_before_gives_the_same_weight(kind: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[kind]().double()
    weight = torch.randn_like(layer.weight) + 3
    set_effective(layer, weight)
    old = dict(layer.state_dict())
    ones = (1,) * (weight.ndim - 1)
    old["mean"] = (old["mean"] / weight[0].numel() ** 0.5).view(-1, *ones)
    given = dict(old)

    again = LAYERS[kind]().double()
    again.load_state_dict(given)

    assert torch.allclose(effective_weight(again), weight, rtol=1e-9)
    assert given["mean"].shape == (4, *ones)


def test_a_directory_of_before_loads(tmp_path: Path) -> None:
    network = BEFORE / "network"
    stored = load_file(BEFORE / "outputs.safetensors")

    opened = (
        normswap.load(network),
        normswap.load(network, weights=network / "model.safetensors"),
        normswap.load(normswap.save(normswap.load(network), tmp_path / "anew")),
    )

    for model in opened:
        means = [layer.mean for layer in model.modules() if isinstance(layer, MeanStdConv2d)]
        assert means
        assert all(mean.ndim == 1 for mean in means)
        assert torch.allclose(model(stored["images"]), stored["outputs"], rtol=1e-4, atol=1e-5)


def test_no_rule_by_shape_decays_a_mean() -> None:
    model = nn.Sequential(MeanStdConv2d(3, 4, 3))
    groups = param_groups_weight_decay(model, 1.0)
    decayed = [id(each) for group in groups if group["weight_decay"] for each in group["params"]]

    assert id(model[0].mean) not in decayed


def _losses(model: nn.Module, batch: tuple[Tensor, Tensor], updates: int) -> list[float]:
    optimizer = torch.optim.SGD(model.train().parameters(), lr=1e-3)
    losses = []
    for _ in range(updates):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_nf_with_means_learns_as_skipinit_does(
    demo: nn.Module, batch: tuple[Tensor, Tensor]
) -> None:
    skipinit = normswap.convert(demo, to="skipinit").model
    nf = normswap.convert(demo, to="nf", mean="keep").model

    wanted = _losses(skipinit, batch, 8)
    losses = _losses(nf, batch, 8)

    assert losses == pytest.approx(wanted, abs=2e-3)
    gradients = {"mean": 0.0, "others": 0.0}
    for name, parameter in nf.named_parameters():
        kind = "mean" if name.endswith(".mean") else "others"
        gradients[kind] += parameter.grad.square().sum().item()
    assert gradients["mean"] < 9 * gradients["others"]
