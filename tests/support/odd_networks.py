"""Odd networks: a small residual network with features that compose, drawn by hypothesis.

Each feature is one thing that real networks have beside convolutions and norms: frozen parts, extra
state, buffers of other dtypes, attributes and layers of odd names, inputs and outputs that are no
single tensor. `build` makes the same network from the same names and seed, also in a process that
loads it by its factory.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

from support.scheme_rows import ROWS, Row

CHANNELS = 8
SIDE = 8
BATCH = 2


@dataclass
class Answer:
    """An output that is a record."""

    maps: Tensor
    scores: Tensor


class Block(nn.Module):
    """A residual block with its activation behind the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(CHANNELS)
        self.act = nn.ReLU()
        self.conv2 = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.act(self.norm1(self.conv1(x)))
        return self.act(x + self.norm2(self.conv2(branch)))


class Mended(nn.Conv2d):
    """A convolution that takes the filters of an old version in the other order."""

    _version = 3

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        if (metadata.get("version") or 1) < 3:
            state[f"{prefix}weight"] = state[f"{prefix}weight"].flip(0)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


class Tempered(nn.Module):
    """A factor that is kept as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor

    def get_extra_state(self) -> dict[str, float]:
        return {"factor": self.factor}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.factor = state["factor"]


class Softened(nn.Module):
    """A parametrization whose values are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x)


class Odd(nn.Module):
    """The network. Its forward asks which features it has."""

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self.features = frozenset(features)
        if "scalar parameter" in features:
            self.logit_scale = nn.Parameter(torch.tensor(1.3))
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.act = nn.ReLU()
        self.block = Block()
        self.tail = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.tail_norm = nn.BatchNorm2d(CHANNELS)
        self.head = nn.Conv2d(CHANNELS, 4, 1)
        self.classifier = nn.Linear(4, 5)
        for feature in features:
            FEATURES[feature](self)

    def forward(self, x: Any, other: Tensor | None = None) -> Any:
        if other is not None:
            x = x + other
        x = self.norm(self.stem(self.at("images", x)))
        x = self.act(self.at("stem", x))
        side = x
        x = self.at("block", self.block(self.at("block", x)))
        if "mixed dtypes" in self.features:
            x = x.to(self.tail.weight.dtype)
        x = self.tail_norm(self.tail(x)).to(side.dtype)

        x = self.head(self.at("tail", x).relu())
        if "layers named by words" in self.features:
            x = x + sum(layer(side) for layer in self.heads.values())
        maps = x
        x = self.at("scores", self.classifier(x.relu().mean((2, 3))))
        if "second path" in self.features:
            return x, self.side(side)
        if "record as output" in self.features:
            return Answer(maps, x)
        return x

    def at(self, place: str, x: Tensor) -> Tensor:
        """Return a value as the network's features change it at a place of the forward."""
        for feature, change in CHANGES[place].items():
            if feature in self.features:
                x = change(self, x)
        return x

    def grid(self, x: Tensor) -> Tensor:
        """Return a grid of positions, which is made once for each size."""
        if x.shape[2:] not in self.grids:
            line = torch.linspace(-1, 1, x.shape[3])
            self.grids[x.shape[2:]] = line.expand(x.shape[2], -1)
        return self.grids[x.shape[2:]].to(x)


def _of_one_size(net: Odd, x: Tensor) -> Tensor:
    if len(x) != BATCH:
        raise ValueError(f"a batch of {BATCH} is wanted")
    return x


def _with_spectrum(net: Odd, x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft2(x.float() if x.dtype == torch.bfloat16 else x)
    return x + torch.fft.irfft2(spectrum, s=x.shape[2:]).to(x.dtype)


# What features do to values, by the place in the forward.
CHANGES: dict[str, dict[str, Callable[[Any, Tensor], Tensor]]] = {
    "images": {
        "bytes as input": lambda net, x: x.to(net.stem.weight.dtype) / 255,
        "fixed batch": _of_one_size,
        "float64 buffer": lambda net, x: x - net.mean.to(x.dtype)[:, None, None],
        "integer buffer": lambda net, x: x[:, net.order],
        "spectrum": _with_spectrum,
    },
    "stem": {
        "plain tensor": lambda net, x: x + net.shift.to(x.dtype),
        "buffer that is not saved": lambda net, x: x * net.waves.cos().to(x.dtype),
    },
    "block": {"shared dropout": lambda net, x: net.dropout(x)},
    "tail": {
        "layer called twice": lambda net, x: net.twice(net.twice(x)),
        "cached grid": lambda net, x: x + net.grid(x),
    },
    "scores": {
        "extra state": lambda net, x: net.tempered(x),
        "scalar parameter": lambda net, x: x * net.logit_scale.to(x.dtype).exp(),
        "infinite mask": lambda net, x: (x + net.mask.to(x.dtype)).softmax(1),
    },
}


def _buffer(name: str, values: Callable[[], Tensor], **options: bool) -> Callable[[Odd], None]:
    return lambda net: net.register_buffer(name, values(), **options)


def _attribute(name: str, value: Callable[[], object]) -> Callable[[Odd], None]:
    return lambda net: net.__dict__.__setitem__(name, value())


def _module(name: str, make: Callable[[], nn.Module | None]) -> Callable[[Odd], None]:
    return lambda net: net.add_module(name, make())


def _freeze(*paths: str) -> Callable[[Odd], None]:
    def freeze(net: Odd) -> None:
        for path in paths:
            net.get_submodule(path).requires_grad_(False)

    return freeze


def _freeze_weights(net: Odd) -> None:
    for name, parameter in nn.Module.named_parameters(net):
        parameter.requires_grad_(name.endswith("bias"))


def _weight_as_buffer(net: Odd) -> None:
    weight = net.tail.weight.detach()
    del net.tail.weight
    net.tail.register_buffer("weight", weight)


def _plain_gamma(net: Odd) -> None:
    gamma = net.block.norm1.weight.detach() * 1.3
    del net.block.norm1.weight
    net.block.norm1.weight = gamma


def _tie(net: Odd) -> None:
    net.block.conv2.weight = net.block.conv1.weight


def _hooks(net: Odd) -> None:
    net.head.register_forward_hook(_seen)
    net.act.register_forward_pre_hook(_asked)
    net.register_load_state_dict_post_hook(_loaded)


def _seen(module: nn.Module, args: object, output: object) -> None:
    """A hook that looks on."""


def _asked(module: nn.Module, args: object) -> None:
    """A hook that looks on before."""


def _loaded(module: nn.Module, keys: object) -> None:
    """A hook that is told of loading."""


def _momentum(net: Odd) -> None:
    for module in net.children():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    net.block.norm2.momentum = None


def _without_affine(net: Odd) -> None:
    net.tail_norm = nn.BatchNorm2d(CHANNELS, affine=False)


def _without_children(net: Odd) -> None:
    net.register_module("unused", None)
    net.never = nn.BatchNorm2d(5)
    net.stem.register_buffer("nothing", None)


def _expanded(net: Odd) -> None:
    net.norm.running_var = torch.full((1,), 0.7).expand(CHANNELS)


def _odd_gammas(net: Odd) -> None:
    with torch.no_grad():
        net.norm.weight[:2] = torch.tensor([0.0, -1.2])
        net.tail_norm.weight[3] = -0.4


def _parametrized(net: Odd) -> None:
    parametrize.register_parametrization(net.norm, "weight", Softened())


def _cut(net: Odd) -> None:
    """Prune two channels by hand; what layers state of themselves stays as it was."""
    keep = CHANNELS - 2
    conv, norm, after = net.block.conv1, net.block.norm1, net.block.conv2
    for module, name in ((conv, "weight"), (conv, "bias"), (norm, "weight"), (norm, "bias")):
        setattr(module, name, nn.Parameter(getattr(module, name).detach()[:keep].clone()))
    norm.running_mean = norm.running_mean[:keep].clone()
    norm.running_var = norm.running_var[:keep].clone()
    after.weight = nn.Parameter(after.weight.detach()[:, :keep].clone())


def _of_words() -> nn.ModuleDict:
    names = ("class", "in", "None")
    return nn.ModuleDict(
        {name: nn.Sequential(nn.Conv2d(CHANNELS, 4, 1), nn.BatchNorm2d(4)) for name in names}
    )


def _nothing(net: Odd) -> None:
    """The feature is one of the forward, or of the network as a whole."""


def _mean_of_images() -> Tensor:
    return torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64)


def _waves() -> Tensor:
    return 3 * torch.rand(CHANNELS, SIDE, SIDE)


def _mask() -> Tensor:
    mask = torch.zeros(5)
    mask[2] = -math.inf
    return mask


FEATURES: dict[str, Callable[[Odd], None]] = {
    "scalar parameter": _nothing,
    "float64 buffer": _buffer("mean", _mean_of_images),
    "integer buffer": _buffer("order", lambda: torch.tensor([2, 0, 1])),
    "infinite mask": _buffer("mask", _mask),
    "plain tensor": _attribute("shift", lambda: torch.randn(CHANNELS, 1, 1)),
    "buffer that is not saved": _buffer("waves", _waves, persistent=False),
    "extra state": _module("tempered", Tempered),
    "versioned layer": _module("stem", lambda: Mended(3, CHANNELS, 3, padding=1)),
    "versioned head": _module("head", lambda: Mended(CHANNELS, 4, 1)),
    "frozen part": _freeze("block"),
    "frozen stem": _freeze("stem", "norm"),
    "frozen norms": _freeze("norm", "block.norm1", "block.norm2", "tail_norm"),
    "frozen weights": _freeze_weights,
    "weight as buffer": _weight_as_buffer,
    "plain gamma": _plain_gamma,
    "parametrized gamma": _parametrized,
    "shared dropout": _module("dropout", lambda: nn.Dropout(0.3)),
    "layers named by words": _module("heads", _of_words),
    "attribute called modules": _attribute("modules", lambda: ["a", "b"]),
    "attribute called parameters": _attribute("parameters", lambda: {"depth": 3}),
    "lock": _attribute("lock", threading.Lock),
    "Python module": _attribute("config", lambda: math),
    "bytes as input": _nothing,
    "fixed batch": _nothing,
    "momentum None": _momentum,
    "tied weights": _tie,
    "hooks": _hooks,
    "second path": _module("side", lambda: nn.Conv2d(CHANNELS, 2, 1)),
    "two inputs": _nothing,
    "record as output": _nothing,
    "mixed dtypes": _nothing,
    "mixed modes": _nothing,
    "norm without gamma": _without_affine,
    "empty places": _without_children,
    "expanded statistics": _expanded,
    "odd gammas": _odd_gammas,
    "cut by hand": _cut,
    "spectrum": _nothing,
    "cached grid": _attribute("grids", dict),
    "layer called twice": _module("twice", lambda: nn.Conv2d(CHANNELS, CHANNELS, 1)),
}
# Features of one place exclude one another.
_EXCLUDED = (
    {"second path", "record as output"},
    {"tied weights", "cut by hand"},
    {"plain gamma", "cut by hand"},
    {"expanded statistics", "parametrized gamma"},
    {"odd gammas", "norm without gamma"},
    {"odd gammas", "parametrized gamma"},
    {"bytes as input", "two inputs"},
    {"versioned layer", "frozen stem"},
)


def build(features: Sequence[str], seed: int = 0, double: bool = False) -> Odd:
    """Return the network with these features, in eval mode but for its mixed modes.

    Args:
        features: The names of its features, of `FEATURES`.
        seed: The seed of its numbers.
        double: Whether its parameters are in float64.
    """
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        net = Odd([name for name in FEATURES if name in features])
        _live_in(net)
    finally:
        torch.set_rng_state(state)

    net.train(False)
    if double:
        net.double()
    if "mixed dtypes" in features:
        net.tail.to(torch.bfloat16)
        net.tail_norm.to(torch.bfloat16)
    if "mixed modes" in features:
        net.train()
        net.block.eval()
        net.head.eval()
    if "extra state" in features:
        net.tempered.factor = 1.0 + seed / 7
    return net


def _live_in(net: Odd) -> None:
    """Give norms statistics, gammas and betas as training leaves them."""
    for module in nn.Module.modules(net):
        if not isinstance(module, nn.BatchNorm2d):
            continue
        with torch.no_grad():
            module.running_mean.normal_(0, 0.5)
            if module.running_var.stride() != (0,):
                module.running_var.uniform_(0.5, 2)
            if isinstance(module._parameters.get("weight"), nn.Parameter):
                module.weight.mul_(torch.rand_like(module.weight) + 0.5)
            if isinstance(module._parameters.get("bias"), nn.Parameter):
                module.bias.normal_(0, 0.3)


def inputs_of(features: Sequence[str], double: bool) -> Any:
    """Return a call of the network with these features, as `convert` takes it."""
    generator = torch.Generator().manual_seed(7)
    shape = (BATCH, 3, SIDE, SIDE)
    if "bytes as input" in features:
        return torch.randint(256, shape, generator=generator).to(torch.uint8)
    images = torch.randn(shape, generator=generator, dtype=torch.float64)
    if not double:
        images = images.float()
    if "two inputs" in features:
        return images, images.flip(2, 3) / 2
    return images


@dataclass(frozen=True)
class Draw:
    """One odd network, and what is done to it.

    Args:
        features: The names of its features.
        seed: The seed of its numbers.
        double: Whether its parameters are in float64.
        row: The scheme and its options.
        scope: The options `only` or `skip`.
    """

    features: tuple[str, ...]
    seed: int
    double: bool
    row: Row
    scope: tuple[tuple[str, str], ...] = ()

    def build(self) -> Odd:
        return build(self.features, self.seed, self.double)

    @property
    def inputs(self) -> Any:
        return inputs_of(self.features, self.double)


_SCOPES = ((), (("skip", "stem"),), (("skip", "head"),), (("only", "block"),), (("skip", "tail"),))


@st.composite
def draws(draw: st.DrawFn) -> Draw:
    """Draw a network of two to four features, a scheme, and perhaps a part that is left out."""
    names = draw(st.lists(st.sampled_from(sorted(FEATURES)), min_size=2, max_size=4, unique=True))
    features = tuple(names)
    for excluded in _EXCLUDED:
        if excluded <= set(features):
            features = tuple(name for name in features if name != min(excluded))
    return Draw(
        features,
        draw(st.integers(0, 3)),
        draw(st.booleans()),
        draw(st.sampled_from(ROWS)),
        draw(st.sampled_from(_SCOPES)),
    )
