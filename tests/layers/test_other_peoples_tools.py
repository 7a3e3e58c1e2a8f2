"""What torch's and timm's own functions do with the layers of a converted network."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, lived_in, run
from timm import layers as timm_layers
from timm.layers import BatchNormAct2d, unfreeze_batch_norm_2d
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_qat_fx
from torch.nn.utils import parametrizations

import normswap
from normswap.errors import RefusedError
from normswap.layers import reparametrized
from normswap.layers.channelwise import ChannelAffine

SIZE = (3, 48, 48)
IMAGES = torch.randn(2, *SIZE, generator=torch.Generator().manual_seed(0))


def _network(arch: str) -> nn.Module:
    torch.manual_seed(0)
    narrow = timm.create_model(arch, channels=(8, 8, 8, 8), num_classes=3)
    return lived_in(narrow, IMAGES.double()).float()


class WithoutWidth(nn.Module):
    """A BatchNorm of one's own, which does not say how many channels it has."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, channels))
        self.bias = nn.Parameter(torch.linspace(-1, 1, channels))
        self.register_buffer("running_mean", torch.linspace(1, -1, channels))
        self.register_buffer("running_var", torch.linspace(2, 0.5, channels))

    def forward(self, x: Tensor) -> Tensor:
        moments = (self.running_mean, self.running_var)
        return F.batch_norm(x, *moments, self.weight, self.bias, self.training)


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, BatchNormAct2d, WithoutWidth])
def test_timm_thaws_a_frozen_norm_that_was_of_any_class(kind: type[nn.Module]) -> None:
    x = torch.randn(4, 4, 9, 9, dtype=torch.float64)
    layers = [nn.Conv2d(4, 6, 3), kind(6), nn.Conv2d(6, 5, 3)]
    network = lived_in(nn.Sequential(*layers), x)
    frozen = normswap.convert(network, "frozen-bn", inputs=x).model

    thawed: Any = unfreeze_batch_norm_2d(copy.deepcopy(frozen))

    assert isinstance(thawed[1], BatchNormAct2d if kind is BatchNormAct2d else nn.BatchNorm2d)
    assert thawed[1].num_features == 6
    assert distance(run(network, x), run(thawed, x)) <= 1e-12


@pytest.mark.parametrize(
    ("arch", "kind"), [("resnet18", nn.BatchNorm2d), ("resnetv2_18", BatchNormAct2d)]
)
def test_timm_thaws_what_was_frozen(arch: str, kind: type[nn.Module]) -> None:
    source = _network(arch)
    frozen = normswap.convert(source, "frozen-bn", input_size=SIZE).model

    thawed = unfreeze_batch_norm_2d(copy.deepcopy(frozen)).eval()

    norms = [module for module in thawed.modules() if isinstance(module, kind)]
    assert len(norms) == sum(isinstance(module, kind) for module in source.modules())
    assert torch.allclose(thawed(IMAGES), source(IMAGES), atol=1e-6)
    thawed.train()(IMAGES)
    assert any(
        not torch.equal(tensor, source.state_dict()[name])
        for name, tensor in thawed.state_dict().items()
        if name.endswith("running_mean")
    )


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore:.*deprecated")
@pytest.mark.parametrize(
    ("arch", "scheme"),
    [
        *itertools.product(
            ["resnet18"], ["folded", "skipinit", "affine", "frozen-bn", "tune", "dyt", "groupnorm"]
        ),
        ("resnetv2_18", "folded"),
    ],
)
def test_torchscript_compiles_what_the_page_says(arch: str, scheme: str) -> None:
    converted = normswap.convert(_network(arch), scheme, input_size=SIZE).model

    scripted = torch.jit.script(converted)

    with torch.no_grad():
        assert torch.allclose(scripted(IMAGES), converted(IMAGES), atol=1e-6)


class Plain(nn.Module):
    """Two convolutions with norms, as `prepare_qat_fx` fuses them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu()
        return self.head(self.bn2(self.conv2(x)).mean((2, 3)))


def _prepared(model: nn.Module) -> nn.Module:
    """The network as torch.ao prepares it for quantization-aware training on x86."""
    settings = get_default_qat_qconfig_mapping("x86")
    prepared: nn.Module = prepare_qat_fx(model.train(), settings, (IMAGES,))
    prepared(IMAGES)
    return prepared


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("scheme", ["folded", "frozen-bn", "groupnorm", "affine"])
def test_a_network_prepared_for_quantization_is_refused_by_what_helps(scheme: str) -> None:
    prepared = _prepared(Plain()).eval()

    with pytest.raises(RefusedError, match=r"before `prepare_qat`"):
        normswap.convert(prepared, scheme, inputs=IMAGES)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_folded_then_prepared_then_quantized() -> None:
    torch.manual_seed(0)
    source = lived_in(Plain(), IMAGES.double()).float()
    folded = normswap.convert(source, "folded", inputs=IMAGES).model

    quantized = convert_fx(_prepared(folded).eval())

    with torch.no_grad():
        expected = source.eval()(IMAGES)
        error = (quantized(IMAGES) - expected).norm() / expected.norm()
    assert error < 0.1


@pytest.mark.slow
def test_a_merged_branch_states_the_widths_that_timm_reads() -> None:
    torch.manual_seed(0)
    source = timm.create_model("repvgg_a0", num_classes=3).eval()
    before = source.stages[0][0].conv_1x1

    merged = normswap.convert(source, "folded", input_size=SIZE).model.stages[0][0].conv_1x1

    assert type(merged.conv).__name__ == "Zero"
    assert merged.in_channels == before.in_channels
    assert merged.out_channels == before.out_channels


class ReadsWidths(Plain):
    """A forward that reads the widths of its layers, beside calling them."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.bn1(self.conv1(x)).relu().view(len(x), self.bn1.num_features, -1)
        x = x.view(len(x), self.conv2.in_channels, *IMAGES.shape[2:])
        return self.head(self.bn2(self.conv2(x)).mean((2, 3)))


@pytest.mark.parametrize("scheme", ["folded", "affine", "groupnorm", "dyt", "weightnorm"])
def test_a_forward_may_read_widths_of_layers_that_are_gone(scheme: str) -> None:
    torch.manual_seed(0)
    source = lived_in(ReadsWidths(), IMAGES.double()).float().eval()

    result = normswap.convert(source, scheme, inputs=IMAGES)

    assert result.report.verdict in ("PROVED", "MEASURED")
    assert result.model.bn1.num_features == source.bn1.num_features


SETTINGS: dict[str, Any] = {"stride": 2, "groups": 2, "bias": True}
# Layers whose weight is computed in each forward, and the plain class that has the same settings.
COMPUTED: dict[str, tuple[Callable[[], Any], type[nn.Conv2d], dict[str, int]]] = {
    "weight norm": (
        lambda: parametrizations.weight_norm(nn.Conv2d(4, 6, 3, padding=1, **SETTINGS)),
        nn.Conv2d,
        {"padding": 1},
    ),
    "spectral norm": (
        lambda: parametrizations.spectral_norm(nn.Conv2d(4, 6, 3, padding=1, **SETTINGS)),
        nn.Conv2d,
        {"padding": 1},
    ),
    "standardized": (
        lambda: timm_layers.StdConv2d(4, 6, 3, padding=1, **SETTINGS),
        nn.Conv2d,
        {"padding": 1},
    ),
    "standardized, padded to the right": (
        lambda: StdConv2dSame(4, 6, 3, **SETTINGS),
        timm_layers.Conv2dSame,
        {},
    ),
    "scaled and standardized": (
        lambda: timm_layers.ScaledStdConv2d(4, 6, 3, padding=1, **SETTINGS),
        nn.Conv2d,
        {"padding": 1},
    ),
    "scaled, standardized, padded to the right": (
        lambda: ScaledStdConv2dSame(4, 6, 3, **SETTINGS),
        timm_layers.Conv2dSame,
        {},
    ),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_baked_layer_is_one_that_has_just_been_made(name: str) -> None:
    """It has the class, the settings and the hooks of a layer that never computed its weight."""
    torch.manual_seed(0)
    make, kind, padding = COMPUTED[name]
    layer = make().double().eval()

    baked: Any = reparametrized.plain(layer)

    fresh = kind(4, 6, 3, **SETTINGS, **padding).eval()
    assert type(baked) is kind
    told = {key: value for key, value in vars(baked).items() if key != "_parameters"}
    assert told == {key: value for key, value in vars(fresh).items() if key != "_parameters"}
    x = torch.randn(2, 4, 8, 7, dtype=torch.float64)
    assert distance(run(layer, x), run(baked, x)) <= 1e-12


@pytest.mark.parametrize("scheme", ["groupnorm", "layernorm", "dyt"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_that_no_convolution_feeds_keeps_its_dtype(scheme: str, dtype: torch.dtype) -> None:
    """The rescaling of its input stands in a layer of its own, whose numbers are new."""
    layers = [nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 3)]
    network = lived_in(nn.Sequential(*layers), torch.randn(4, 4, 9, 9)).to(dtype)

    result = normswap.convert(network, scheme, inputs=torch.randn(2, 4, 9, 9).to(dtype)).model

    assert isinstance(result.get_submodule("0.inner"), ChannelAffine)
    assert {tensor.dtype for tensor in result.state_dict().values()} == {dtype}
