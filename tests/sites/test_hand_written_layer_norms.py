"""LayerNorms and RMSNorms that users write themselves are found by what they compute."""

import copy
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.sites import known_norms
from normswap.sites.site import site_of, sites_of

C = 8


class Own(nn.Module):
    """LayerNorm over the first dimension after the batch, with an eps that is stated nowhere."""

    centres = True
    dim = 1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(C) + 0.5)
        self.bias = nn.Parameter(torch.randn(C))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1, keepdim=True)
        variance = (x - mean).pow(2).mean(1, keepdim=True)
        y = (x - mean) / torch.sqrt(variance + 1e-6)
        shape = (-1, *(1,) * (x.ndim - 2))
        return self.weight.view(shape) * y + self.bias.view(shape)


class LastFirst(nn.Module):
    """LayerNorm over the last dimension. Beta is made before gamma."""

    centres = True
    dim = -1

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(C))
        self.weight = nn.Parameter(torch.rand(C) + 0.5)
        self.epsilon = 3e-4

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,), self.weight, self.bias, self.epsilon)


class MapsOnly(LastFirst):
    """LayerNorm over dimension 1, which permutes maps and takes nothing else."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Rms(nn.Module):
    """RMSNorm over the last dimension."""

    centres = False
    dim = -1

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(C) + 0.5)
        self.variance_epsilon = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon) * self.weight
        )


class RmsOfMaps(Rms):
    """RMSNorm over dimension 1."""

    dim = 1

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


NORMS = [Own, LastFirst, MapsOnly, Rms, RmsOfMaps]
CENTRED = [Own, LastFirst, MapsOnly]


class Bounded(Own):
    """It is no LayerNorm: it bends what is far from the mean."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1, 1)


class Dropped(Own):
    """It is no LayerNorm in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class OutsideTheRoot(Own):
    """It is no LayerNorm: eps is added to the deviation."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x - x.mean(1, keepdim=True)) / (x.std(1, correction=0, keepdim=True) + 1e-3)
        return self.weight.view(-1, 1, 1) * y + self.bias.view(-1, 1, 1)


class OfEachMap(Own):
    """It is no LayerNorm: each map has a mean of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return F.instance_norm(x, weight=self.weight, bias=self.bias)


class BySize(Own):
    """It normalizes whichever dimension has C numbers, so another input gets another norm."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == C:
            return super().forward(x.movedim(-1, 1)).movedim(1, -1)
        return super().forward(x)


class BySizeOfTorch(nn.LayerNorm):
    """A subclass of LayerNorm that does the same."""

    def __init__(self) -> None:
        super().__init__(C)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] == C:
            return super().forward(x)
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class ScaledBySize(nn.Module):
    """A LayerScale of whichever dimension has C numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(C) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.gamma if x.shape[-1] == C else self.gamma.view(-1, 1, 1))


class Scaled(Rms):
    """It is no RMSNorm: a LayerScale divides by nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Maps(nn.Module):
    """Convolutions with a norm in between, and a residual sum."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, C, 3)
        self.norm1 = norm()
        self.conv = nn.Conv2d(C, C, 1)
        self.norm2 = norm()
        self.head = nn.Conv2d(C, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.conv(self.norm1(x))
        return self.head(self.norm2(x)).mean((2, 3))


class Tokens(Maps):
    """The same of linear layers on tokens (N, L, C)."""

    def __init__(self, norm: Callable[[], nn.Module]) -> None:
        super().__init__(norm)
        self.stem = nn.Linear(3, C)
        self.conv = nn.Linear(C, C)
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(2).transpose(1, 2))
        x = x + self.conv(self.norm1(x))
        return self.head(self.norm2(x)).mean(1)


IMAGES = torch.randn(2, 3, 6, 7, generator=torch.Generator().manual_seed(0))


def network(norm: type[nn.Module]) -> nn.Module:
    kind = Maps if norm.dim == 1 else Tokens
    return kind(norm).eval()


def error_of(result: nn.Module, source: nn.Module) -> float:
    """The relative L2 distance of a network's output from the source's in float64."""
    with torch.no_grad():
        expected = copy.deepcopy(source).double()(IMAGES.double())
        return float((result(IMAGES) - expected).norm() / expected.norm())


@pytest.mark.parametrize("norm", NORMS)
def test_it_is_read_as_what_it_computes(norm: type[nn.Module]) -> None:
    module = norm()
    site = site_of(module)

    assert site.is_at_each_position
    assert site.channel_dim == norm.dim
    assert site.is_layernorm is norm.centres
    assert site.channels == C
    gamma, beta = site.scale_and_shift
    parameters = {tuple(parameter.tolist()) for parameter in module.parameters()}
    assert tuple(gamma.float().tolist()) in parameters
    assert bool(beta.any()) is norm.centres


@pytest.mark.parametrize("norm", NORMS)
def test_its_scale_and_shift_move_on(norm: type[nn.Module], tmp_path: Path) -> None:
    source = network(norm)

    result = normswap.convert(source, "folded", inputs=IMAGES)

    assert result.report.verdict == "PROVED"
    # The last norm gives the network's features, so it stays.
    assert result.outcomes["norm1"].counted == "scale and shift moved on"
    assert not isinstance(result.model.norm1, norm)
    assert not list(result.model.norm1.parameters())
    assert error_of(result.model, source) < 1e-6
    loaded = normswap.load(normswap.save(result, tmp_path / "net"), skeleton=network(norm))
    assert torch.equal(loaded(IMAGES), result.model(IMAGES))


@pytest.mark.parametrize("norm", CENTRED)
def test_it_becomes_an_rmsnorm_and_comes_back(norm: type[nn.Module]) -> None:
    source = network(norm)

    result = normswap.convert(source, "rmsnorm", inputs=IMAGES)

    assert result.report.verdict == "PROVED"
    assert all(isinstance(result.model.get_submodule(path), nn.RMSNorm) for path in result.outcomes)
    assert error_of(result.model, source) < 1e-6
    back = normswap.convert(result, "unfold", like=network(norm), inputs=IMAGES)
    assert isinstance(back.model.norm1, norm)
    assert error_of(back.model, source) < 1e-5


def test_an_rmsnorm_is_no_layernorm_to_replace() -> None:
    with pytest.raises(RefusedError, match="no LayerNorm"):
        normswap.convert(network(Rms), "rmsnorm", inputs=IMAGES)


@pytest.mark.parametrize("norm", [Bounded, Dropped, OutsideTheRoot, OfEachMap, Scaled, BySize])
def test_what_computes_something_else_is_no_norm(norm: type[nn.Module]) -> None:
    torch.manual_seed(0)
    assert not site_of(norm().eval()).is_norm


@pytest.mark.parametrize("layer", [BySize, BySizeOfTorch, ScaledBySize])
def test_a_layer_whose_dimension_depends_on_the_size_stays(layer: Callable[[], nn.Module]) -> None:
    """Images of 10 x 10 pixels give maps that are as wide as they have channels."""
    source = Maps(lambda: nn.Sequential(nn.Conv2d(C, C, 1), layer())).eval()
    source.norm2 = nn.BatchNorm2d(C).eval()
    images = torch.randn(2, 3, 10, 10, generator=torch.Generator().manual_seed(0))
    site = site_of(source.norm1[1])
    assert (site.channel_dim, site.scaled_dim) == (None, None)

    for inputs in (IMAGES, images):
        result = normswap.convert(source, "folded", inputs=inputs).model

        assert type(result.norm1[1]) is layer
        for x in (IMAGES, images):
            torch.testing.assert_close(result(x), source(x))


@pytest.mark.parametrize("eps", [1e-6, 1e-3, math.pi * 1e-5])
def test_its_own_eps_counts(eps: float) -> None:
    source = network(LastFirst)
    source.norm1.epsilon = eps

    result = normswap.convert(source, "folded", inputs=IMAGES)

    assert result.model.norm1.eps == eps
    assert error_of(result.model, source) < 1e-6


@pytest.mark.parametrize("name", ["resnet18", "vit_tiny_patch16_224", "convnext_atto"])
def test_no_module_of_an_ordinary_network_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[nn.Module] = []
    monkeypatch.setattr(known_norms, "_measure_at_each_position", measured.append)
    ordinary = timm.create_model(name)

    assert any(site.is_norm for site in sites_of(ordinary))
    assert not measured
    # The hand-written norms of another network show that the count counts.
    assert not any(site.is_norm for site in sites_of(network(Own)))
    assert len(measured) == 2


@pytest.mark.parametrize("norm", [Own, LastFirst])
def test_a_norm_without_values_is_measured_when_it_has_some(norm: type[nn.Module]) -> None:
    """A network may be looked at on "meta" before its weights come."""
    with torch.device("meta"):
        module = norm().eval()
    assert not site_of(module).is_norm

    module.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    assert site_of(module).is_norm
