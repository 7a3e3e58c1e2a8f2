"""Convolutions with a forward of their own: those that pad by themselves are convolutions, all
others are refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import zoo_networks
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.sampled_tables import sampled
from timm.layers import Conv2dSame, ScaledStdConv2d, pad_same
from torch import Tensor, nn

import normswap
from normswap.calibration.sampling import fits, patches
from normswap.errors import PlanError
from normswap.layers import own_forwards, reparametrized, standardized
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import PlannedLayer, planned_layers
from normswap.layers.standardized import STANDARDIZED, ScaledStdConv1d, ScaledStdConv3d


class Ahead(nn.Conv2d):
    """Pads with a module of its own, one end more than the other."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        stride = self.stride[0]
        kernel = self.kernel_size[0]
        less = (kernel - stride) // 2
        more = (kernel - stride + 1) // 2
        self.padding_of_mine = (
            nn.ZeroPad2d((less, more, less, more)) if kernel > 1 else nn.Identity()
        )

    def forward(self, x):
        x = self.padding_of_mine(x)
        return F.conv2d(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class BySize(nn.Conv2d):
    """Pads by the size of its input."""

    def forward(self, x):
        x = pad_same(x, list(self.kernel_size), list(self.stride), list(self.dilation))
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class Same(nn.Conv2d):
    """Pads as torch does."""

    def forward(self, x):
        return F.conv2d(x, self.weight, self.bias, 1, "same", self.dilation, self.groups)


class Own(nn.Conv2d):
    def __init__(self, body):
        super().__init__(3, 6, 3)
        self.body = body

    def forward(self, x):
        return self.body(self, x)


def masked(m, x):
    m.weight.data[:, :, -1] = 0
    return nn.Conv2d.forward(m, x)


OTHERS = {
    "doubles": lambda m, x: 2 * nn.Conv2d.forward(m, x),
    "bends": lambda m, x: nn.Conv2d.forward(m, x.relu()),
    "masks": masked,
    "mirrors": lambda m, x: F.conv2d(F.pad(x, (1, 1, 1, 1), mode="reflect"), m.weight, m.bias),
    "has no bias": lambda m, x: F.conv2d(x, m.weight),
    "strides": lambda m, x: F.conv2d(x, m.weight, m.bias, 2),
}


@pytest.mark.parametrize("kind", [Ahead, BySize, Conv2dSame])
@pytest.mark.parametrize("args", [{"stride": 2}, {"groups": 3}, {"bias": False}, {"dilation": 2}])
def test_a_convolution_that_pads_by_itself_is_one(kind, args):
    conv = kind(3, 6, 3, **args)
    before = {name: tensor.clone() for name, tensor in conv.state_dict().items()}
    assert own_forwards.computes(conv)
    assert own_forwards.pads(conv)
    assert all(torch.equal(tensor, before[name]) for name, tensor in conv.state_dict().items())


@pytest.mark.parametrize("body", OTHERS.values(), ids=OTHERS)
def test_whatever_computes_something_else_is_none(body):
    assert not own_forwards.computes(Own(body))
    assert not fits(Own(body))


def test_even_padding_is_what_torch_pads_the_same_with():
    assert own_forwards.even_padding(Ahead(3, 6, 3)) == (1, 1)
    assert own_forwards.even_padding(Ahead(3, 6, 1)) == (0, 0)
    assert own_forwards.even_padding(Ahead(3, 6, 3, stride=2)) is None
    assert own_forwards.even_padding(BySize(3, 6, 3, stride=2)) is None  # by the size of its input
    assert not own_forwards.pads(Ahead(3, 6, 1))


@pytest.mark.parametrize(
    ("kind", "kernel", "stride"), [(Ahead, 3, 2), (BySize, 3, 2), (Same, 5, 1)]
)
@pytest.mark.parametrize("size", [9, 12])
def test_patches_are_read_as_the_layer_pads_them(kind, kernel, stride, size):
    conv = kind(4, 6, kernel, stride=stride, groups=2).double()
    x = torch.randn(2, 4, size, size, dtype=torch.float64)
    y = conv(x)
    seen, wanted = patches(conv, x, y, 1000, torch.Generator())
    weight = conv.weight.view(2, 3, -1)
    made = torch.einsum("ngpf,gof->ngpo", seen, weight) + conv.bias.view(2, 1, 3)
    assert torch.allclose(made, wanted)


def network(kind, seed=0):
    torch.manual_seed(seed)

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = kind(8, 16, 1, bias=False)
            self.norm1 = nn.BatchNorm2d(16)
            self.two = kind(16, 16, 3, groups=16, bias=False)
            self.norm2 = nn.BatchNorm2d(16)
            self.three = kind(16, 8, 1, bias=False)
            self.norm3 = nn.BatchNorm2d(8)

        def forward(self, x):
            y = F.relu6(self.norm2(self.two(F.relu6(self.norm1(self.one(x))))))
            return x + self.norm3(self.three(y))

    stem = [kind(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8), nn.ReLU6()]
    model = nn.Sequential(
        *stem, Block(), Block(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                nn.init.uniform_(tensor, 0.5, 2)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor)
    return model.eval()


@pytest.mark.parametrize("kind", [Ahead, BySize])
@pytest.mark.parametrize(
    ("scheme", "options"), [("folded", {}), ("tune", {}), ("fixup", {}), ("nf", {"mean": "keep"})]
)
def test_networks_of_them_convert_and_keep_their_function(kind, scheme, options):
    model = network(kind)
    result = normswap.convert(model, scheme, input_size=(3, 32, 32), **options)
    x = torch.randn(2, 3, 32, 32)
    assert torch.allclose(result.model(x), model(x), atol=1e-4)
    if scheme == "folded":
        assert not any(isinstance(module, nn.BatchNorm2d) for module in result.model.modules())
    else:
        back = normswap.convert(result, "folded", input_size=(3, 32, 32))
        assert torch.allclose(back.model(x), model(x), atol=1e-4)


@pytest.mark.parametrize("kind", [Ahead, BySize])
def test_they_are_fitted_to_images(kind):
    model = network(kind)
    images = torch.randn(64, 3, 32, 32)
    plain = normswap.convert(model, "groupnorm", input_size=(3, 32, 32)).model
    fitted = normswap.convert(model, "groupnorm", input_size=(3, 32, 32), calibrate=[images]).model
    changed = [
        not torch.equal(a.weight, b.weight)
        for a, b in zip(plain.modules(), fitted.modules(), strict=True)
        if isinstance(a, nn.Conv2d)
    ]
    assert all(changed)


class Part(nn.Module):
    """A convolution, its norm, and an activation that others have, too, as Ultralytics' networks
    have it.
    """

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


def test_another_layer_of_a_name_that_is_taken_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"two layers are called Vacant: one is in normswap.layers.placeholders"
    ):
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


class Ours(standardized.Other, nn.Conv2d):
    """What timm has a class of its own for."""


CASES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "1-D": (ScaledStdConv1d, {}),
    "1-D grouped, strided, same": (
        ScaledStdConv1d,
        {"groups": 2, "padding": "same", "dilation": 2},
    ),
    "3-D": (ScaledStdConv3d, {"stride": 2, "padding": 1}),
    "3-D without bias": (ScaledStdConv3d, {"bias": False}),
}


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_formula_filter_by_filter(name: str, mean: bool) -> None:
    """Brock et al. 2021, as timm has it: (w - mean w) / sqrt(var w + eps) gain / sqrt(fan in)."""
    torch.manual_seed(0)
    kind, options = CASES[name]
    conv = kind(4, 6, 3, mean=mean, **options).double()
    nn.init.normal_(conv.gain)
    if mean:
        nn.init.normal_(conv.mean)

    weight = torch.empty_like(conv.weight)
    for i, w in enumerate(conv.weight.detach()):
        unit = (w - w.mean()) / (w.var(correction=0) + conv.eps) ** 0.5
        weight[i] = unit * conv.gain[i] / w.numel() ** 0.5 + (conv.mean[i] if mean else 0)

    plain = kind.__bases__[1](4, 6, 3, **options).double()
    plain.load_state_dict({"weight": weight, **({} if conv.bias is None else {"bias": conv.bias})})
    x = torch.randn(2, 4, *(9,) * (conv.weight.ndim - 2), dtype=torch.float64)

    assert distance(run(plain, x), run(conv, x)) < 1e-14


def test_in_two_dimensions_it_is_timms() -> None:
    torch.manual_seed(0)
    ours, theirs = (
        kind(4, 6, 3, padding=1, groups=2, eps=1e-3) for kind in (Ours, ScaledStdConv2d)
    )
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
    wanted = weight if mean else torch.stack([w - w.mean() for w in weight])
    assert distance(wanted, reparametrized.effective(conv).detach()) < 1e-13


def trained(kind: str) -> tuple[nn.Module, Tensor]:
    shape = {"one_d": (8, 96, 32), "three_d": (8, 3, 4, 16, 16)}[kind]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return lived_in(zoo_networks.KINDS[kind](), x), x


@pytest.mark.parametrize(
    ("kind", "conv"), [("one_d", ScaledStdConv1d), ("three_d", ScaledStdConv3d)]
)
@pytest.mark.parametrize("to", sampled(["nf", "centered-weightnorm"], every=2))
def test_networks_of_other_dimensions(kind: str, conv: type, to: str, tmp_path: Path) -> None:
    """Exact with the means kept, by way of the disk, and back to plain layers; fitted without them."""
    model, x = trained(kind)
    kept = normswap.convert(model, to, inputs=x, mean="keep")
    assert kept.report.exact
    assert batchnorms(kept.model) == []
    assert sum(type(m) is conv for m in kept.model.modules()) > 2

    again = normswap.load(normswap.save(kept, tmp_path / "kept"), skeleton=trained(kind)[0])
    assert distance(run(model, x), run(again, x)) < 1e-10

    plain = normswap.convert(again, "folded", inputs=x).model
    assert not any(isinstance(m, STANDARDIZED) for m in plain.modules())
    assert distance(run(model, x), run(plain, x)) < 1e-10

    fitted = normswap.convert(
        model, to, inputs=x, calibrate=[x[i : i + 2] for i in (0, 2, 4, 6)] * 4
    )
    left = [
        m
        for m in fitted.model.modules()
        if isinstance(m, STANDARDIZED) and not reparametrized.keeps_mean(m)
    ]

    assert left

    for m in left:
        assert reparametrized.effective(m).flatten(1).sum(1).abs().max() < 1e-10
    assert (
        normswap.load(normswap.save(fitted, tmp_path / "fitted"), skeleton=trained(kind)[0])(x)
        .isfinite()
        .all()
    )
