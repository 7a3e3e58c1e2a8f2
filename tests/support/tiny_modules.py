"""Parts of tiny networks: a module whose forward fits on a line, and what is hard to fold."""

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import BatchNorm2d, Conv2d, Linear

C = 4


class Net(nn.Module):
    """A module whose forward is `body(module, x)`, so that a case fits on a line."""

    def __init__(self, body: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def conv(kernel: int = 3, out: int = C, **kwargs: Any) -> Conv2d:
    return Conv2d(C, out, kernel, **{"padding": kernel // 2, **kwargs})


def bn(channels: int = C, **kwargs: Any) -> BatchNorm2d:
    return BatchNorm2d(channels, **kwargs)


def net(body: Callable[..., Any], /, **kinds: Any) -> Callable[[], nn.Module]:
    """A function that builds a `Net`, its parts from factories or copied from modules."""

    def make() -> nn.Module:
        return Net(body, **{name: _part(kind) for name, kind in kinds.items()})

    return make


def _part(kind: Any) -> nn.Module:
    if isinstance(kind, nn.Module):
        return copy.deepcopy(kind)
    return kind()


def aliased(
    body: Callable[..., Any], original: str, alias: str, **kinds: Any
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = net(body, **kinds)()
        setattr(model, alias, getattr(model, original))
        return model

    return make


def tied() -> nn.Module:
    model: Any = net(lambda m, x: m.bn(m.conv(x)) + m.other(x), conv=conv, other=conv, bn=bn)()
    model.other.weight = model.conv.weight
    return model


def hooked() -> nn.Module:
    model: Any = net(lambda m, x: m.bn(m.conv(x)), conv=conv, bn=bn)()
    model.conv.register_forward_hook(_double)
    return model


def _double(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def hooked_norm() -> nn.Module:
    model: Any = net(lambda m, x: m.bn(m.conv(x)), conv=conv, bn=bn)()
    model.bn.register_forward_hook(_double)
    return model


def patched(name: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model: Any = net(lambda m, x: m.bn(m.conv(x)), conv=conv, bn=bn)()
        getattr(model, name).forward = lambda x: 3 * x
        return model

    return make


class MeanOnly(BatchNorm2d):
    """A BatchNorm by its class, with a forward of its own."""

    def forward(self, input: Tensor) -> Tensor:
        assert self.running_mean is not None
        return input - self.running_mean.view(1, -1, 1, 1)


class Renamed(BatchNorm2d):
    """A BatchNorm under another name."""


class Untraceable(nn.Module):
    """Branches on the values of its input, and holds a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = bn()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x) if float(x.sum()) < 1e9 else x


V2 = {"bn1": bn, "bn2": bn, "conv1": conv, "conv2": conv, "down": lambda: conv(1)}
ONE = {"conv": conv, "bn": bn}
HEAD = {"head": Linear(C, 2)}
