"""Six small networks that look as if they had been trained, each hard in another way."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normswap import schemes
from support.hand_written_networks import Net, PostAct, PreAct
from support.lived_in_networks import batchnorms, lived_in, shared
from support.narrow_networks import skeleton

SIZE = (3, 16, 16)


class Inverted(nn.Module):
    """A linear bottleneck with a depthwise convolution; eps and momentum as in mobile networks."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.expand = nn.Conv2d(channels, wide, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(wide, 1e-3, 0.03)
        self.depth = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.bn2 = nn.BatchNorm2d(wide, 1e-3, 0.03)
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels, 1e-3, 0.03)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.expand(x)).relu()
        return x + self.bn3(self.project(self.bn2(self.depth(y)).relu()))


class Joined(nn.Module):
    """Maps of two scales side by side; the small one is enlarged by a transposed convolution.

    There is no residual branch, and norms stand before layers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 6, 3, 2, 1)
        self.up = nn.ConvTranspose2d(6, 4, 2, 2, groups=2)
        self.out = nn.Conv2d(8, 4, 1)
        self.bn1 = nn.BatchNorm2d(4, momentum=0.2)
        self.bn2 = nn.BatchNorm2d(6, momentum=0.2)
        self.bn3 = nn.BatchNorm2d(4, momentum=0.2)
        self.bn4 = nn.BatchNorm2d(8, momentum=0.2)
        self.drop = nn.Dropout2d(0.3)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.drop(self.bn1(self.stem(x)).relu())
        up = self.bn3(self.up(self.bn2(self.down(skip).relu()))).relu()
        return self.head(self.out(self.bn4(torch.cat([skip, up], 1))).relu().mean((2, 3)))


SIX: dict[str, Callable[[], nn.Module]] = {
    "post": lambda: Net(PostAct),
    "pre": lambda: Net(PreAct),
    "inverted": lambda: Net(Inverted, 4),
    "joined": Joined,
    "resnet18": lambda: skeleton("resnet18", layers=(1, 2, 1, 1), channels=(4, 6, 8, 8)),
    "seresnet18": lambda: skeleton("seresnet18", layers=(1, 2, 1, 1), channels=(8, 8, 16, 16)),
}


class TwoSums(PostAct):
    """The layers of `PostAct` as two residual branches, one after the other, as transformers have
    them.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.bn1(self.conv1(x.relu()))
        return x + self.bn2(self.conv2(x.relu()))


class Nested(nn.Module):
    """A residual block whose branch has a residual block in it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.inside = PostAct(channels)
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bn(self.conv(self.inside(x)))


def _shared_block() -> nn.Module:
    """A network that calls its first block twice."""
    model = Net(PostAct)
    model.blocks.append(model.blocks[0])
    return model


# Networks that have more residual sums than modules around them.
MORE_SUMS: dict[str, Callable[[], nn.Module]] = {
    "two sums": lambda: Net(TwoSums),
    "nested": lambda: Net(Nested),
    "shared": _shared_block,
}
# The networks without a residual sum, so that no scalar of a branch has a place.
BRANCHLESS = ("joined",)


def fits(name: str, scheme: str) -> bool:
    """Whether the network has the branches, or maps of several positions, that the scheme needs."""
    if scheme == "instancenorm":
        return "resnet" not in name
    return name not in BRANCHLESS or not schemes.get(scheme).on_branches or scheme == "nf"


def images(count: int, seed: int = 0) -> Tensor:
    """Smooth images of unequal brightness, (count, 3, 16, 16), in float64."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(count, *SIZE, generator=generator, dtype=torch.float64)
    brightness = torch.rand(count, 1, 1, 1, generator=generator).double()
    return nn.functional.avg_pool2d(noise, 3, 1, 1) * 2 + brightness


@functools.cache
def trained(name: str, seed: int = 0) -> nn.Module:
    """The network of this name in float64; nobody may change it.

    Its statistics are roughly those of `images(8)`.
    """
    torch.manual_seed(seed)
    model = lived_in({**SIX, **MORE_SUMS}[name](), images(8), seed)
    for number, path in enumerate(batchnorms(model)):
        norm: Any = model.get_submodule(path)
        norm.num_batches_tracked.fill_(100 + number)
    return shared(model)


def measured(model: nn.Module, x: Tensor) -> nn.Module:
    """Return `model` itself, with running statistics that are exactly those of `x`."""
    handles = []

    def measure(norm: Any, args: tuple[Tensor, ...]) -> None:
        values = args[0].transpose(0, 1).flatten(1)
        norm.running_mean.copy_(values.mean(1))
        norm.running_var.copy_(values.var(1))

    for path in batchnorms(model):
        handles.append(model.get_submodule(path).register_forward_pre_hook(measure))
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return model
