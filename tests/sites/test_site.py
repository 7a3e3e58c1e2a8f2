"""A `Site` says what a module is, and everything else reads it."""

import copy
from typing import Any

import pytest
import timm.layers
import torch
from support.lived_in_networks import distance, run
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torchvision.ops import FrozenBatchNorm2d

import normswap
from normswap.errors import RefusedError
from normswap.sites.known_norms import Statistics
from normswap.sites.site import Site, site_of


class Two(nn.Module):
    """A convolution, one of two norms, and a convolution."""

    def __init__(self, norm: nn.Module, other: nn.Module | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = norm
        self.other = other
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.conv(x)).relu())


class Blocks(nn.Module):
    """Two residual blocks whose branches end in one module that both share."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 1)
        self.convs = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.shared = shared
        self.out = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = x + self.shared(norm(conv(x)))
        return self.out(x)


class Conditional(nn.Module):
    """A norm whose scale depends on a second argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(width, affine=False)
        self.scale = nn.Linear(6, width)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.norm(x) * (1 + self.scale(t))[..., None, None]


class ConditionalBlock(nn.Module):
    """A residual block whose branch ends in a layer of two arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.last = Conditional(3)
        self.out = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.out(x + self.last(self.conv(x), t=t))


def maps() -> Tensor:
    return torch.randn(3, 3, 9, 9, generator=torch.Generator().manual_seed(0))


class WithParameters(nn.Module):
    """A BatchNorm by what it computes. In eval mode its statistics are fixed, but gamma learns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(8) + 0.5)
        self.bias = nn.Parameter(torch.rand(8))
        self.register_buffer("running_mean", torch.rand(8))
        self.register_buffer("running_var", torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


TRAITS = ("is_norm", "is_affine_norm", "is_frozen", "is_at_each_position", "averages")
# A module, the shapes that it read, and its traits.
MODULES: dict[str, tuple[nn.Module, tuple[tuple[int, ...], ...], set[str]]] = {
    "convolution": (nn.Conv2d(8, 8, 1), (), set()),
    "activation": (nn.ReLU(), (), set()),
    "BatchNorm": (nn.BatchNorm2d(8), (), {"is_norm", "is_affine_norm"}),
    "frozen BatchNorm": (FrozenBatchNorm2d(8), (), {"is_norm", "is_affine_norm", "is_frozen"}),
    "hand-written BatchNorm": (WithParameters(), (), {"is_norm", "is_affine_norm"}),
    "GroupNorm": (nn.GroupNorm(2, 8), (), {"is_norm", "averages"}),
    "InstanceNorm of batches": (
        nn.InstanceNorm2d(8, affine=True),
        ((2, 8, 5, 6),),
        {"is_norm", "averages"},
    ),
    "InstanceNorm of single samples": (
        nn.InstanceNorm2d(8, affine=True),
        ((8, 5, 6),),
        {"is_norm"},
    ),
    "LayerNorm": (nn.LayerNorm(8), (), {"is_norm", "is_at_each_position"}),
    "LayerNorm of maps": (
        timm.layers.LayerNorm2d(8),
        (),
        {"is_norm", "is_at_each_position", "averages"},
    ),
    "LayerNorm of maps in float32": (
        timm.layers.LayerNorm2dFp32(8),
        (),
        {"is_norm", "is_at_each_position"},
    ),
    "RMSNorm of maps": (
        timm.layers.RmsNorm2d(8),
        (),
        {"is_norm", "is_at_each_position", "averages"},
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_what_a_module_is(name: str) -> None:
    module, shapes, traits = MODULES[name]
    site = Site(module, shapes=shapes)

    assert {trait for trait in TRAITS if getattr(site, trait)} == traits


def test_the_record_of_a_norm_is_all_that_it_holds() -> None:
    """It puts the norm back later. A momentum of None becomes NaN, as a tensor holds no None."""
    norm = nn.BatchNorm2d(3, eps=0.02, momentum=0.3)
    cumulative = nn.BatchNorm2d(3, momentum=None)
    nn.init.normal_(norm.weight)

    recorded = site_of(norm).recorded_tensors()

    numbers = {"eps": torch.tensor(0.02).double(), "momentum": torch.tensor(0.3).double()}
    expected = {**norm.state_dict(), **numbers}
    assert recorded.keys() == expected.keys()
    for name, tensor in recorded.items():
        assert torch.allclose(tensor.double(), expected[name].double())
    assert torch.isnan(site_of(cumulative).recorded_tensors()["momentum"])
    assert site_of(nn.Conv2d(3, 3, 1)).recorded_tensors() == {}
    assert site_of(nn.LayerNorm(3)).recorded_tensors() == {}


def test_a_site_says_kind_shape_and_calls() -> None:
    anatomy = normswap.inspect(Two(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).eval(), maps())

    called = anatomy.site("norm")
    assert called.kind == "BatchNorm2d"
    assert called.called == 1
    assert tuple(called.shapes[0][1:]) == (8, 7, 7)
    assert called.statistics is Statistics.POPULATION
    assert called.statistics_in_training is Statistics.BATCH
    assert called.refusal is None

    never_called = anatomy.site("other")
    assert never_called.called == 0
    assert not never_called.shapes


@pytest.mark.parametrize("shared", [nn.Dropout(0.2), nn.MaxPool2d(3, 1, 1), nn.AvgPool2d(3, 1, 1)])
@pytest.mark.parametrize("target", ["skipinit", "fixup"])
def test_a_shared_layer_at_the_end_of_branches_refuses_no_block(
    shared: nn.Module, target: str
) -> None:
    network = Blocks(shared).eval()
    done = normswap.convert(network, target, inputs=maps())
    scalars = [path for path, module in done.model.named_modules() if hasattr(module, "alpha")]
    assert len(scalars) == 2
    assert distance(run(network, maps()), run(done.model, maps())) < 1e-5


def test_a_branch_may_end_in_a_layer_of_two_arguments() -> None:
    network = ConditionalBlock().eval()
    inputs = (maps(), torch.randn(3, 6))
    done = normswap.convert(network, "skipinit", inputs=inputs)
    assert distance(run(network, *inputs), run(done.model, *inputs)) < 1e-5


def test_a_convolution_of_buffers_keeps_its_weight() -> None:
    network = Two(nn.BatchNorm2d(8)).eval()
    weight = network.conv.weight.detach()
    del network.conv.weight
    network.conv.register_buffer("weight", weight)

    done = normswap.convert(network, "folded", inputs=maps())
    assert "weight" in done.model.get_submodule("conv")._buffers
    assert "conv.weight is a buffer" in str(done.outcomes["norm"])


@pytest.mark.parametrize(
    "norm", [timm.layers.EvoNorm2dB0(8), nn.InstanceNorm2d(8, 1e-5, 0.1, True, True)]
)
def test_federated_refuses_a_norm_that_training_changes(norm: nn.Module) -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 1), norm).eval()
    with pytest.raises(RefusedError, match=type(norm).__name__):
        normswap.convert(network, "dyt", inputs=maps(), purpose="federated", only=["0"])


def test_federated_says_that_the_input_never_reaches_a_norm() -> None:
    network = Two(nn.BatchNorm2d(8), nn.BatchNorm2d(8)).eval()
    with pytest.raises(RefusedError, match=r"other: .*never reaches it"):
        normswap.convert(network, "folded", inputs=maps(), purpose="federated")


def test_recalibrate_measures_tracked_instance_norms_as_torch_does() -> None:
    norm = nn.InstanceNorm2d(3, momentum=1.0, track_running_stats=True)
    network = nn.Sequential(norm, nn.Conv2d(3, 2, 1)).eval()
    images = maps()
    done = normswap.recalibrate(network, [images])

    # With a momentum of 1 torch keeps the statistics of the one batch.
    norm.train()(images)
    measured: Any = done.model[0]
    assert torch.allclose(measured.running_mean, norm.running_mean, atol=1e-5)
    assert torch.allclose(measured.running_var, norm.running_var, atol=1e-5)


def test_recalibrate_takes_batches_of_one_image() -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 2, 1)).eval()
    peer: Any = copy.deepcopy(network)
    images = [image[None] for image in maps()]
    update_bn(images, peer)

    measured: Any = normswap.recalibrate(network, images).model[0]
    assert torch.allclose(measured.running_var, peer[0].running_var, rtol=1e-4)


def test_one_value_at_the_size_of_use_is_seen() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.norm = nn.BatchNorm2d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x).mean((2, 3), keepdim=True))

    assert normswap.inspect(Pooled().eval(), maps()).site("norm").sees_one_value
    with pytest.raises(RefusedError, match=r"norm: .*one element"):
        normswap.convert(Pooled().eval(), "instancenorm", inputs=maps())


def test_one_value_at_a_small_size_of_our_own_is_no_reason_to_refuse() -> None:
    # The network is recorded on a small image of normswap's own, where its last maps are 1 x 1.
    convolutions = [nn.Conv2d(3, 3, 3, stride=2, padding=1) for _ in range(6)]
    network = nn.Sequential(*convolutions, nn.BatchNorm2d(3)).eval()
    assert not normswap.inspect(network).site("6").sees_one_value


class Levels(nn.Module):
    """One norm for maps of several sizes, as heads of detectors have it."""

    def __init__(self, sides: tuple[int, ...]) -> None:
        super().__init__()
        self.sides = sides
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        levels = [self.norm(nn.functional.adaptive_avg_pool2d(x, side)) for side in self.sides]
        return torch.stack([level.mean((2, 3)) for level in levels]).sum(0)


@pytest.mark.parametrize("sides", [(1,), (1, 1), (1, 4), (4, 1), (4, 2)], ids=str)
def test_one_value_at_one_of_several_maps_is_no_reason_to_refuse(sides: tuple[int, ...]) -> None:
    site = normswap.inspect(Levels(sides).eval(), maps()).site("norm")

    assert [tuple(shape[2:]) for shape in site.shapes] == [(side, side) for side in sides]
    assert site.sees_one_value is (max(sides) == 1)


def test_a_norm_by_itself_has_a_site() -> None:
    tracked = site_of(nn.InstanceNorm1d(4, track_running_stats=True))
    assert tracked.is_batchnorm
    assert tracked.statistics_in_training is Statistics.SAMPLE
    assert tracked.together(3) == [1, 1, 1]
    assert site_of(nn.InstanceNorm1d(4)).statistics is Statistics.SAMPLE
    assert not site_of(nn.Conv2d(3, 3, 1)).is_norm
