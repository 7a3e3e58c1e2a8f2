"""Forty kinds of norm, each in a small residual network, for the table of kinds and targets."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.layers import norm_act, split_batchnorm
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap import register_norm

WIDTH = 8
CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SIDES = {1: (3, 12), 2: (3, 7, 7), 3: (3, 5, 5, 5)}


class Residual(nn.Module):
    """A stem, one residual block whose branch ends in the norm, and a head."""

    def __init__(self, norm: nn.Module, rank: int) -> None:
        super().__init__()
        conv = CONVOLUTIONS[rank]
        self.stem = conv(3, WIDTH, 1)
        self.conv = conv(WIDTH, WIDTH, 1)
        self.norm = norm
        self.out = nn.Linear(WIDTH, 5)
        self.pooled = tuple(range(-rank, 0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        return self.head(y + self.norm(self.conv(y)))

    def head(self, y: Tensor) -> Tensor:
        y = F.relu(y)
        if self.pooled:
            y = y.mean(self.pooled)
        return self.out(y)


class Rows(Residual):
    """The same of linear layers, on rows (N, C)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm, 1)
        self.stem = nn.Linear(3, WIDTH)
        self.conv = nn.Linear(WIDTH, WIDTH)
        self.pooled = ()


class Tokens(Rows):
    """The same on tokens (N, L, C), with a norm over the last dimension."""


class ReadsWeight(Residual):
    """Its forward also returns what the gamma of the norm weighs."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), self.norm.weight.abs().sum()


class ByHand(Residual):
    """Its forward computes the norm by itself, from the norm's tensors."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        norm = self.norm
        normalized = F.batch_norm(
            self.conv(y), norm.running_mean, norm.running_var, norm.weight, norm.bias, False
        )
        return self.head(y + normalized)


class HandWritten(nn.Module):
    """A frozen BatchNorm as detection libraries write their own."""

    def __init__(self, features: int, *, learns: bool = False) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            if learns:
                self.register_parameter(name, nn.Parameter(torch.ones(features)))
            else:
                self.register_buffer(name, torch.ones(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_var", torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight * (self.running_var + 1e-5).rsqrt()
        shift = self.bias - self.running_mean * scale
        shape = (1, -1, *(1,) * (x.ndim - 2))
        return x * scale.view(shape) + shift.view(shape)


class Casting(nn.BatchNorm2d):
    """A BatchNorm whose forward only adds a cast."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


class Plain(nn.BatchNorm2d):
    """A subclass that changes nothing."""


class Bending(nn.BatchNorm2d):
    """A BatchNorm that computes more than one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Tempered(nn.Module):
    """A norm of a third party: an affine map that it states itself."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.register_buffer("mean", torch.linspace(-1, 1, features))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (x.ndim - 2))
        return (x - self.mean.view(shape)) * self.weight.view(shape)


def _map_of_tempered(module: Any) -> tuple[Tensor, Tensor]:
    return module.weight, -module.mean * module.weight


def _statistics_of_tempered(module: Any) -> tuple[Tensor, Tensor]:
    return module.mean, torch.ones_like(module.mean)


class PerSample(nn.Module):
    """A norm of a third party that takes its statistics from each sample."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.num_features = features

    def forward(self, x: Tensor) -> Tensor:
        size = x.flatten(1).std(1).view(-1, *(1,) * (x.ndim - 1))
        return x / size * self.weight.view(1, -1, *(1,) * (x.ndim - 2))


class Vouched(nn.BatchNorm2d):
    """A BatchNorm with a forward of its own that its author has registered."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1


register_norm(Tempered, affine=_map_of_tempered, statistics=_statistics_of_tempered)
register_norm(PerSample, per_sample=True)
register_norm(Vouched)


@dataclass(frozen=True)
class Kind:
    """A kind of norm.

    Args:
        name: What the table calls it.
        norm: Returns a new norm.
        rank: The number of dimensions of the maps that it reads: 1, 2 or 3.
        network: Returns the network around the norm, given the norm and the rank.
        size: The size of the input. By default it is three samples of maps of this rank.
        library: The package that has the norm, where it may not be installed (`support.needs`).
    """

    name: str
    norm: Callable[[], nn.Module]
    rank: int = 2
    network: Callable[[nn.Module, int], nn.Module] = Residual
    size: tuple[int, ...] = ()
    library: str = ""

    def build(self) -> tuple[nn.Module, Tensor]:
        """Return the network in float64 and eval mode, with random tensors, and its input."""
        torch.manual_seed(0)
        norm = self.norm()
        network = self.network(norm, self.rank)
        x = torch.randn(self.size or (3, *SIDES[self.rank]))
        with torch.no_grad():
            # A lazy norm gets its tensors in the first forward.
            network.eval()(x)
            for tensor in (*norm.parameters(), *norm.buffers()):
                if tensor.is_floating_point():
                    tensor.copy_(torch.rand_like(tensor) + 0.5)
        return network.double(), x.double()


def hooked() -> nn.Module:
    """Return a BatchNorm with a forward hook that changes nothing."""
    norm = nn.BatchNorm2d(WIDTH)
    norm.register_forward_hook(lambda module, args, output: None)
    return norm


def frozen() -> nn.Module:
    """Return a BatchNorm whose gamma and beta do not learn."""
    return nn.BatchNorm2d(WIDTH).requires_grad_(False)


def of_opacus() -> nn.Module:
    """Return the norm that Opacus puts in the place of a BatchNorm."""
    validators = importlib.import_module("opacus.validators")
    fixed: nn.Module = validators.ModuleValidator.fix(nn.Sequential(nn.BatchNorm2d(WIDTH)))
    return fixed.get_submodule("0")


def of_ultralytics() -> nn.Module:
    """Return the BatchNorm of a YOLO layer, with the eps that Ultralytics sets."""
    modules = importlib.import_module("ultralytics.nn.modules")
    torch_utils = importlib.import_module("ultralytics.utils.torch_utils")
    layer: nn.Module = modules.Conv(WIDTH, WIDTH)
    torch_utils.initialize_weights(layer)
    return layer.get_submodule("bn")


def of_monai(name: object, rank: int) -> nn.Module:
    """Return the norm that MONAI's factory makes of a name, for maps of this rank."""
    utils = importlib.import_module("monai.networks.layers.utils")
    norm: nn.Module = utils.get_norm_layer(name, rank, WIDTH)
    return norm


def untracked() -> nn.Module:
    """Return a BatchNorm that takes its statistics from the batch in eval mode, too."""
    return nn.BatchNorm2d(WIDTH, track_running_stats=False)


def _rows(norm: nn.Module, rank: int) -> nn.Module:
    return Rows(norm)


def _tokens(norm: nn.Module, rank: int) -> nn.Module:
    return Tokens(norm)


LAYERS: Any = timm.layers
KINDS = (
    Kind("BatchNorm1d on rows", lambda: nn.BatchNorm1d(WIDTH), 1, _rows, (3, 3)),
    Kind("BatchNorm1d on series", lambda: nn.BatchNorm1d(WIDTH), 1),
    Kind("BatchNorm2d", lambda: nn.BatchNorm2d(WIDTH)),
    Kind("BatchNorm3d", lambda: nn.BatchNorm3d(WIDTH), 3),
    Kind("BatchNorm2d without gamma", lambda: nn.BatchNorm2d(WIDTH, affine=False)),
    Kind("BatchNorm2d without statistics", untracked),
    Kind("BatchNorm2d of another eps", lambda: nn.BatchNorm2d(WIDTH, eps=0.1)),
    Kind("BatchNorm2d with momentum None", lambda: nn.BatchNorm2d(WIDTH, momentum=None)),
    Kind("LazyBatchNorm2d", nn.LazyBatchNorm2d),
    Kind("SyncBatchNorm", lambda: nn.SyncBatchNorm(WIDTH)),
    Kind("frozen parameters", frozen),
    Kind("with a hook", hooked),
    Kind("subclass", lambda: Plain(WIDTH)),
    Kind("subclass that casts", lambda: Casting(WIDTH)),
    Kind("subclass that bends", lambda: Bending(WIDTH)),
    Kind("registered BatchNorm", lambda: Vouched(WIDTH)),
    Kind("registered map", lambda: Tempered(WIDTH)),
    Kind("registered per sample", lambda: PerSample(WIDTH)),
    Kind("hand-written, frozen", lambda: HandWritten(WIDTH)),
    Kind("hand-written, learning", lambda: HandWritten(WIDTH, learns=True)),
    Kind("its weight is read", lambda: nn.BatchNorm2d(WIDTH), 2, ReadsWeight),
    Kind("computed by forward itself", lambda: nn.BatchNorm2d(WIDTH), 2, ByHand),
    Kind("torchvision FrozenBatchNorm2d", lambda: FrozenBatchNorm2d(WIDTH)),
    Kind("timm BatchNormAct2d", lambda: norm_act.BatchNormAct2d(WIDTH)),
    Kind("timm FrozenBatchNormAct2d", lambda: norm_act.FrozenBatchNormAct2d(WIDTH)),
    Kind("timm SplitBatchNorm2d", lambda: split_batchnorm.SplitBatchNorm2d(WIDTH)),
    Kind("timm GroupNormAct", lambda: norm_act.GroupNormAct(WIDTH, 2)),
    Kind("timm LayerNormAct2d", lambda: norm_act.LayerNormAct2d(WIDTH)),
    Kind("timm LayerNorm2d", lambda: LAYERS.LayerNorm2d(WIDTH)),
    Kind("timm RmsNorm2d", lambda: LAYERS.RmsNorm2d(WIDTH)),
    Kind("timm EvoNorm2dB0", lambda: LAYERS.EvoNorm2dB0(WIDTH)),
    Kind("timm EvoNorm2dS0", lambda: LAYERS.EvoNorm2dS0(WIDTH, group_size=2)),
    Kind("InstanceNorm1d", lambda: nn.InstanceNorm1d(WIDTH, affine=True), 1),
    Kind("InstanceNorm2d", lambda: nn.InstanceNorm2d(WIDTH)),
    Kind("tracked InstanceNorm1d", lambda: nn.InstanceNorm1d(WIDTH, 1e-5, 0.1, True, True), 1),
    Kind("tracked InstanceNorm2d", lambda: nn.InstanceNorm2d(WIDTH, 1e-5, 0.1, True, True)),
    Kind("tracked InstanceNorm3d", lambda: nn.InstanceNorm3d(WIDTH, 1e-5, 0.1, True, True), 3),
    Kind("tracked without gamma", lambda: nn.InstanceNorm2d(WIDTH, 1e-5, 0.1, False, True)),
    Kind(
        "tracked, unbatched",
        lambda: nn.InstanceNorm2d(WIDTH, 1e-5, 0.1, True, True),
        size=(3, 7, 7),
    ),
    Kind("GroupNorm", lambda: nn.GroupNorm(2, WIDTH)),
    Kind("GroupNorm that Opacus puts", of_opacus),
    Kind("LayerNorm", lambda: nn.LayerNorm(WIDTH), 1, _tokens, (2, 6, 3)),
    Kind("RMSNorm", lambda: nn.RMSNorm(WIDTH), 1, _tokens, (2, 6, 3)),
    Kind("LocalResponseNorm", lambda: nn.LocalResponseNorm(3)),
    Kind("Ultralytics BatchNorm2d", of_ultralytics, library="ultralytics"),
    Kind("MONAI batch", lambda: of_monai("batch", 2), library="monai"),
    Kind("MONAI batch, 3-D", lambda: of_monai("batch", 3), 3, library="monai"),
    Kind("MONAI instance", lambda: of_monai("instance", 2), library="monai"),
    Kind("MONAI group", lambda: of_monai(("group", {"num_groups": 2}), 2), library="monai"),
)
BY_NAME = {kind.name: kind for kind in KINDS}
