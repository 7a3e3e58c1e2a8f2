"""Convolutions with a forward of their own, and standardized ones.

Those that pad by themselves are convolutions; all others are refused.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import zoo_networks
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.sampled_tables import quick
from timm.layers import Conv2dSame, ScaledStdConv2d, pad_same
from torch import Tensor, nn

import normswap
from normswap.calibration.sampling import fits, patches
from normswap.errors import PlanError
from normswap.layers import reparametrized, standardized
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import PlannedLayer, planned_layers
from normswap.layers.standardized import STANDARDIZED, ScaledStdConv1d, ScaledStdConv3d
from normswap.sites import own_forwards

ConvClass = type[nn.Conv2d]
ConvForward = Callable[[nn.Conv2d, Tensor], Tensor]


class PadsByModule(nn.Conv2d):
    """Pads with a module of its own, one end more than the other."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        stride = self.stride[0]
        kernel = self.kernel_size[0]
        less = (kernel - stride) // 2
        more = (kernel - stride + 1) // 2
        self.padding_of_mine: nn.Module = nn.Identity()
        if kernel > 1:
            self.padding_of_mine = nn.ZeroPad2d((less, more, less, more))

    def forward(self, x: Tensor) -> Tensor:
        x = self.padding_of_mine(x)
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class PadsBySize(nn.Conv2d):
    """Pads by the size of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class PadsAsTorch(nn.Conv2d):
    """Pads as torch does."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, 1, "same", self.dilation, self.groups)


class OddConv(nn.Conv2d):
    def __init__(self, body: ConvForward) -> None:
        super().__init__(3, 6, 3)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def doubles(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return 2 * nn.Conv2d.forward(conv, x)


def bends(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return nn.Conv2d.forward(conv, x.relu())


def masks(conv: nn.Conv2d, x: Tensor) -> Tensor:
    conv.weight.data[:, :, -1] = 0
    return nn.Conv2d.forward(conv, x)


def mirrors(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), conv.weight, conv.bias)


def has_no_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight)


def strides(conv: nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, conv.weight, conv.bias, 2)


@pytest.mark.parametrize("kind", [PadsByModule, PadsBySize, Conv2dSame])
@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"groups": 3}, {"bias": False}, {"dilation": 2}]
)
def test_a_convolution_that_pads_by_itself_is_one(kind: ConvClass, options: Any) -> None:
    conv = kind(3, 6, 3, **options)
    before = {name: tensor.clone() for name, tensor in conv.state_dict().items()}

    assert own_forwards.computes(conv)
    assert own_forwards.pads(conv)

    for name, tensor in conv.state_dict().items():
        assert torch.equal(tensor, before[name])


@pytest.mark.parametrize("body", [doubles, bends, masks, mirrors, has_no_bias, strides])
def test_whatever_computes_something_else_is_none(body: ConvForward) -> None:
    assert not own_forwards.computes(OddConv(body))
    assert not fits(OddConv(body))


def test_even_padding_is_what_torch_pads_the_same_with() -> None:
    assert own_forwards.even_padding(PadsByModule(3, 6, 3)) == (1, 1)
    assert own_forwards.even_padding(PadsByModule(3, 6, 1)) == (0, 0)
    assert own_forwards.even_padding(PadsAsTorch(3, 6, (3, 5))) == (1, 2)
    assert own_forwards.even_padding(PadsByModule(3, 6, 3, stride=2)) is None
    assert own_forwards.even_padding(PadsBySize(3, 6, 3, stride=2)) is None
    assert not own_forwards.pads(PadsByModule(3, 6, 1))


@pytest.mark.parametrize(
    ("kind", "kernel", "stride"),
    [(PadsByModule, 3, 2), (PadsBySize, 3, 2), (PadsAsTorch, 5, 1)],
)
@pytest.mark.parametrize("size", [9, 12])
def test_patches_are_read_as_the_layer_pads_them(
    kind: ConvClass, kernel: int, stride: int, size: int
) -> None:
    conv = kind(4, 6, kernel, stride=stride, groups=2).double()
    assert conv.bias is not None
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    y = conv(x)

    inputs, outputs = patches(conv, x, y, 1000, torch.Generator())

    weight = conv.weight.view(2, 3, -1)
    computed = torch.einsum("ngpf,gof->ngpo", inputs, weight) + conv.bias.view(2, 1, 3)
    assert torch.allclose(computed, outputs)


class InvertedResidual(nn.Module):
    def __init__(self, kind: ConvClass) -> None:
        super().__init__()
        self.one = kind(8, 16, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(16)
        self.two = kind(16, 16, 3, groups=16, bias=False)
        self.norm2 = nn.BatchNorm2d(16)
        self.three = kind(16, 8, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu6(self.norm1(self.one(x)))
        y = F.relu6(self.norm2(self.two(y)))
        return x + self.norm3(self.three(y))


def network(kind: ConvClass) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        kind(3, 8, 3, stride=2, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU6(),
        InvertedResidual(kind),
        InvertedResidual(kind),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 2)
            nn.init.uniform_(module.get_buffer("running_var"), 0.5, 2)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.get_buffer("running_mean"))
    return model.eval()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", [PadsByModule, PadsBySize])
@pytest.mark.parametrize(
    ("scheme", "options"), [("folded", {}), ("tune", {}), ("fixup", {}), ("nf", {"mean": "keep"})]
)
def test_networks_of_them_convert_and_keep_their_function(
    kind: ConvClass, scheme: str, options: Any
) -> None:
    model = network(kind)
    result = normswap.convert(model, scheme, input_size=(3, 32, 32), **options)

    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(result.model(x), model(x), atol=1e-4)

    if scheme == "folded":
        assert not any(isinstance(module, nn.BatchNorm2d) for module in result.model.modules())
    else:
        back = normswap.convert(result, "folded", input_size=(3, 32, 32))
        assert torch.allclose(back.model(x), model(x), atol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", [PadsByModule, PadsBySize])
def test_they_are_fitted_to_images(kind: ConvClass) -> None:
    model = network(kind)
    images = torch.randn(64, 3, 32, 32)

    plain = normswap.convert(model, "groupnorm", input_size=(3, 32, 32)).model
    fitted = normswap.convert(model, "groupnorm", input_size=(3, 32, 32), calibrate=[images]).model

    for before, after in zip(plain.modules(), fitted.modules(), strict=True):
        if isinstance(before, nn.Conv2d):
            assert not torch.equal(before.weight, after.weight)


class Part(nn.Module):
    """A convolution, its norm, and an activation that others have, too, as Ultralytics has it."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def test_another_layer_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(PlanError, match=r"Vacant.*normswap\.layers\.placeholders"):
        type("Vacant", (PlannedLayer,), {})
    assert planned_layers()["Vacant"] is Vacant


def test_a_network_that_shares_an_activation_is_exported(tmp_path: Path) -> None:
    """torch.export records such a network through subclasses that have the names of the layers."""
    act = nn.SiLU()
    model = nn.Sequential(Part(act), Part(act), nn.Flatten()).eval()

    done = normswap.export(
        model, tmp_path / "net.pt2", input_size=(3, 8, 8), images=torch.randn(2, 3, 8, 8)
    )

    assert done.figures.passed
    assert planned_layers()["Vacant"] is Vacant


class OtherConv2d(standardized.Other, nn.Conv2d):
    """What timm has a class of its own for."""


STANDARDIZED_CONVS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "1-D": (ScaledStdConv1d, {}),
    "1-D grouped, strided, same": (
        ScaledStdConv1d,
        {"groups": 2, "padding": "same", "dilation": 2},
    ),
    "3-D": (ScaledStdConv3d, {"stride": 2, "padding": 1}),
    "3-D without bias": (ScaledStdConv3d, {"bias": False}),
}


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("name", STANDARDIZED_CONVS)
def test_the_formula_filter_by_filter(name: str, mean: bool) -> None:
    """Brock et al. 2021, as timm has it: (w - mean w) / sqrt(var w + eps) gain / sqrt(fan in)."""
    torch.manual_seed(0)
    kind, options = STANDARDIZED_CONVS[name]
    conv = kind(4, 6, 3, mean=mean, **options).double()
    nn.init.normal_(conv.gain)
    if mean:
        nn.init.normal_(conv.mean)

    weight = torch.empty_like(conv.weight)
    for i, w in enumerate(conv.weight.detach()):
        standardized_filter = (w - w.mean()) / (w.var(correction=0) + conv.eps) ** 0.5
        weight[i] = standardized_filter * conv.gain[i] / w.numel() ** 0.5
        if mean:
            weight[i] += conv.mean[i] / conv.weight[0].numel() ** 0.5
    plain = kind.__bases__[1](4, 6, 3, **options).double()
    tensors = {"weight": weight}
    if conv.bias is not None:
        tensors["bias"] = conv.bias
    plain.load_state_dict(tensors)

    x = torch.randn(2, 4, *(9,) * (conv.weight.ndim - 2), dtype=torch.float64)
    assert distance(run(plain, x), run(conv, x)) < 1e-14


def test_in_two_dimensions_it_is_timms() -> None:
    torch.manual_seed(0)
    ours = OtherConv2d(4, 6, 3, padding=1, groups=2, eps=1e-3)
    theirs = ScaledStdConv2d(4, 6, 3, padding=1, groups=2, eps=1e-3)
    nn.init.normal_(ours.gain)
    theirs.load_state_dict(ours.state_dict())

    x = torch.randn(2, 4, 9, 9)
    assert torch.equal(run(ours, x), run(theirs, x))


@pytest.mark.parametrize("mean", [False, True])
def test_a_weight_is_computed_up_to_its_filters_means(mean: bool) -> None:
    torch.manual_seed(0)
    conv = ScaledStdConv3d(2, 3, 3, mean=mean).double()
    weight = torch.randn(3, 2, 3, 3, 3, dtype=torch.float64)

    standardized.set_effective(conv, weight)

    expected = weight
    if not mean:
        expected = torch.stack([w - w.mean() for w in weight])
    assert distance(expected, reparametrized.effective(conv).detach()) < 1e-13


def trained(kind: str) -> tuple[nn.Module, Tensor]:
    shape = {"one_d": (8, 96, 32), "three_d": (8, 3, 4, 16, 16)}[kind]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return lived_in(zoo_networks.KINDS[kind](), x), x


def convs_without_mean(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if isinstance(module, STANDARDIZED) and not reparametrized.keeps_mean(module):
            yield module


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "conv_class"), [("one_d", ScaledStdConv1d), ("three_d", ScaledStdConv3d)]
)
@pytest.mark.parametrize("scheme", quick(["nf", "centered-weightnorm"], ["nf"]))
def test_networks_of_other_dimensions(
    kind: str, conv_class: type, scheme: str, tmp_path: Path
) -> None:
    """Exact with the means kept, by way of the disk, and back to plain layers; fitted without."""
    model, x = trained(kind)
    kept = normswap.convert(model, scheme, inputs=x, mean="keep")
    assert kept.report.exact
    assert batchnorms(kept.model) == []
    assert sum(type(module) is conv_class for module in kept.model.modules()) > 2

    again = normswap.load(normswap.save(kept, tmp_path / "kept"), skeleton=trained(kind)[0])
    assert distance(run(model, x), run(again, x)) < 1e-10

    plain = normswap.convert(again, "folded", inputs=x).model
    assert not any(isinstance(module, STANDARDIZED) for module in plain.modules())
    assert distance(run(model, x), run(plain, x)) < 1e-10

    batches = [x[start : start + 2] for start in (0, 2, 4, 6)] * 4
    fitted = normswap.convert(model, scheme, inputs=x, calibrate=batches)
    without_mean = [*convs_without_mean(fitted.model)]
    assert without_mean
    for conv in without_mean:
        assert reparametrized.effective(conv).flatten(1).sum(1).abs().max() < 1e-10

    again = normswap.load(normswap.save(fitted, tmp_path / "fitted"), skeleton=trained(kind)[0])
    assert again(x).isfinite().all()
