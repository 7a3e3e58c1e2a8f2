"""Tiny networks in which a norm is hard to move, each with what must happen to its norms."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    BatchNormAct2d,
    Conv2dSame,
    FrozenBatchNormAct2d,
    ScaledStdConv2d,
    StdConv2d,
    SyncBatchNormAct,
)
from timm.layers.split_batchnorm import SplitBatchNorm2d
from torch import Tensor, nn
from torch.nn import BatchNorm1d, BatchNorm3d, Conv1d, Conv3d, ConvTranspose2d, Linear
from torch.nn.utils.parametrizations import weight_norm
from torchvision.ops.misc import FrozenBatchNorm2d

from support.lived_in_networks import lived_in, run
from support.tiny_modules import (
    HEAD,
    ONE,
    V2,
    C,
    MeanOnly,
    Renamed,
    Untraceable,
    aliased,
    bn,
    conv,
    hooked,
    hooked_norm,
    net,
    patched,
    tied,
)

BACK = "^folds into "
FORWARD = "^folds forward into "
MOVED = "^scale moves to "
KEPT = "^keeps scale and shift: .*"
REFUSED = "REFUSED "


@dataclass(frozen=True)
class Case:
    """One network, and what must happen to its norms.

    Args:
        name: What makes a norm hard to move.
        make: Builds the network.
        expect: By path, a pattern for the outcome of a norm; `REFUSED` and a pattern for its
            refusal.
        shape: The shape of the input.
        fuser: Whether `torch.fx.experimental.optimization.fuse` was seen to get the network
            silently wrong.
    """

    name: str
    make: Callable[[], nn.Module]
    expect: dict[str, str]
    shape: tuple[int, ...] = (3, C, 7, 7)
    fuser: bool = False

    def __str__(self) -> str:
        return self.name.replace(" ", "-")


def _loop(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = F.relu(m.bn(m.conv(x)))
    return x


def _loop_v2(m: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + m.conv(F.relu(m.bn(x)))
    return x


def _in_place_after(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    y.add_(1)
    return m.bn(y)


def _overwritten(m: Any, x: Tensor) -> Tensor:
    y = m.conv2(x)
    z = m.bn(y)
    m.act(y)  # in place, after the norm has read it
    return m.head(m.conv(z) + y)


def _overwritten_before(m: Any, x: Tensor) -> Tensor:
    y = m.conv2(x)
    m.act(y)
    return m.head(m.conv(m.bn(y)) + y)


def _by_shape(m: Any, x: Tensor) -> Tensor:
    y = m.conv(x)
    return m.bn(y).view(y.shape[0], -1, y.size(3))


def _iadd(m: Any, x: Tensor) -> Tensor:
    skip = x
    x = m.bn(m.conv(x))
    x += skip
    return F.relu(x, inplace=True)


def _v2(m: Any, x: Tensor, act: Any = F.relu) -> Tensor:
    y = act(m.bn1(x))
    return m.down(y) + m.conv2(act(m.bn2(m.conv1(y))))


def _basic(m: Any, x: Tensor) -> Tensor:
    return m.act(m.bn2(m.conv2(m.act(m.bn1(m.conv1(x))))) + x)


def simple(m: Any, x: Tensor) -> Tensor:
    return m.bn(m.conv(x))


def first(m: Any, x: Tensor) -> Tensor:
    return m.head(
        F.silu(m.conv(m.bn(x))).mean((2, 3))
    )  # the convolution that reads the norm is not the classifier


def first_relu(m: Any, x: Tensor) -> Tensor:
    return m.head(F.silu(m.conv(F.relu(m.bn(x)))).mean((2, 3)))


MULTIPLE = [
    Case(
        "conv twice, norm on one",
        net(lambda m, x: m.bn(m.conv(x)) + m.conv(x), **ONE),
        {"bn": KEPT + "elsewhere"},
        fuser=True,
    ),
    Case(
        "conv twice, chained",
        net(lambda m, x: m.conv(F.relu(m.bn(m.conv(x)))), **ONE),
        {"bn": KEPT},
        fuser=True,
    ),
    Case(
        "conv twice, two norms",
        net(lambda m, x: m.bn(m.conv(x)) + m.bn2(m.conv(x)), **ONE, bn2=bn),
        {"bn": KEPT, "bn2": KEPT},
        fuser=True,
    ),
    Case(
        "conv read by norm and add",
        net(lambda m, x: (y := m.conv(x)) + m.bn(y), **ONE),
        {"bn": KEPT + "consumer"},
    ),
    Case(
        "two norms on one conv",
        net(lambda m, x: m.bn(y := m.conv(x)) + m.bn2(y), **ONE, bn2=bn),
        {"bn": KEPT, "bn2": KEPT},
    ),
    Case(
        "identity read twice",
        net(lambda m, x: m.bn(y := m.i(m.conv(x))) + y, i=nn.Identity, **ONE),
        {"bn": KEPT},
    ),
    Case(
        "norm on two convs",
        net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.conv2(x)), **ONE, conv2=conv),
        {"bn": BACK},
    ),
    Case(
        "norm on conv and input", net(lambda m, x: m.bn(m.conv(x)) + m.bn(x), **ONE), {"bn": KEPT}
    ),
    Case(
        "block called twice",
        net(lambda m, x: m.bn(m.conv(F.relu(m.bn(m.conv(x))))), **ONE),
        {"bn": BACK + "conv$"},
        fuser=True,
    ),
    Case("block in a loop", net(_loop, **ONE), {"bn": BACK + "conv$"}, fuser=True),
    Case("v2 block in a loop", net(_loop_v2, **ONE), {"bn": MOVED + "conv;"}),
    Case("norm on itself", net(lambda m, x: m.bn(m.bn(m.conv(x))), **ONE), {"bn": KEPT}),
    Case(
        "norm on itself by a detour",
        net(lambda m, x: m.bn(m.conv(x)) + m.bn(m.bn2(m.conv2(x))), **ONE, conv2=conv, bn2=bn),
        {"bn": KEPT, "bn2": BACK + "conv2"},
    ),
    Case("aliased conv, one call", aliased(simple, "conv", "alias", **ONE), {"bn": BACK}),
    Case(
        "aliased conv, both called",
        aliased(lambda m, x: m.bn(m.conv(x)) + m.alias(x), "conv", "alias", **ONE),
        {"bn": KEPT},
        fuser=True,
    ),
    Case(
        "aliased norm",
        aliased(lambda m, x: m.bn(m.conv(x)) + m.alias(x), "bn", "alias", **ONE),
        {"bn": KEPT},
    ),
    Case(
        "one conv behind two norms",
        net(lambda m, x: m.conv(F.relu(m.bn(x))) + m.conv(F.relu(m.bn2(x))), **ONE, bn2=bn),
        {"bn": KEPT, "bn2": KEPT},
    ),
    Case("tied weights", tied, {"bn": KEPT + "shared"}),
    Case(
        "weight read in forward",
        net(lambda m, x: m.bn(m.conv(x)) + F.conv2d(x, m.conv.weight, padding=1), **ONE),
        {"bn": KEPT + "read elsewhere"},
        fuser=True,
    ),
    Case(
        "norm's bias read in forward",
        net(lambda m, x: m.bn(m.conv(x)) + m.bn.bias.view(1, -1, 1, 1), **ONE),
        {"bn": REFUSED + "read"},
    ),
    Case(
        "kept norm's weight read",
        net(lambda m, x: m.bn(x) + m.bn.weight.view(1, -1, 1, 1), bn=bn),
        {"bn": REFUSED + "read"},
    ),
    Case("hook on conv", hooked, {"bn": KEPT + "hooks"}, fuser=True),
    Case("hook on norm", hooked_norm, {"bn": REFUSED + "hooks"}, fuser=True),
    Case("patched conv", patched("conv"), {"bn": KEPT + "forward of its own"}, fuser=True),
    Case("patched norm", patched("bn"), {"bn": REFUSED + "forward"}, fuser=True),
    Case(
        "parametrized conv",
        net(simple, conv=lambda: weight_norm(conv()), bn=bn),
        {"bn": BACK + "|parametrized"},
    ),
    Case(
        "old spectral norm",
        net(simple, conv=lambda: nn.utils.spectral_norm(conv()), bn=bn),
        {"bn": KEPT + "hooks"},
    ),
    Case("conv changed in place", net(_in_place_after, **ONE), {"bn": KEPT}),
    Case(
        "overwritten later",
        net(
            _overwritten,
            conv=lambda: conv(1),
            bn=bn,
            conv2=conv,
            head=conv,
            act=lambda: nn.ReLU(inplace=True),
        ),
        {"bn": MOVED},
    ),
    Case(
        "overwritten before",
        net(
            _overwritten_before,
            conv=lambda: conv(1),
            bn=bn,
            conv2=conv,
            head=conv,
            act=lambda: nn.ReLU(inplace=True),
        ),
        {"bn": FORWARD},
    ),
    Case("shape read", net(_by_shape, **ONE), {"bn": BACK}),
    Case("norm unused", net(lambda m, x: m.conv(x), **ONE), {"bn": "never called"}),
]

KINDS = [
    Case("plain", net(simple, **ONE), {"bn": BACK}),
    Case("no bias", net(simple, conv=lambda: conv(bias=False), bn=bn), {"bn": BACK}),
    Case("large eps", net(simple, conv=conv, bn=lambda: bn(eps=0.1)), {"bn": BACK}),
    Case("no affine", net(simple, conv=conv, bn=lambda: bn(affine=False)), {"bn": BACK}),
    Case(
        "no statistics",
        net(simple, conv=conv, bn=lambda: bn(track_running_stats=False)),
        {"bn": REFUSED + "no running statistics"},
    ),
    Case(
        "sequential",
        lambda: nn.Sequential(conv(), bn(), nn.ReLU(inplace=True), conv(1), bn()),
        {"1": BACK + "0", "4": BACK + "3"},
    ),
    Case(
        "grouped", net(simple, conv=lambda: conv(out=8, groups=2), bn=lambda: bn(8)), {"bn": BACK}
    ),
    Case(
        "depthwise", net(simple, conv=lambda: conv(out=8, groups=4), bn=lambda: bn(8)), {"bn": BACK}
    ),
    Case(
        "transposed",
        net(simple, conv=lambda: ConvTranspose2d(C, 6, 3, 2, 1), bn=lambda: bn(6)),
        {"bn": BACK},
    ),
    Case(
        "grouped transposed",
        net(simple, conv=lambda: ConvTranspose2d(C, 6, 3, groups=2, bias=False), bn=lambda: bn(6)),
        {"bn": BACK},
    ),
    Case(
        "transposed after relu",
        net(first_relu, bn=bn, conv=lambda: ConvTranspose2d(C, C, 3, 2, 1, groups=2), **HEAD),
        {"bn": MOVED},
    ),
    Case(
        "transposed after norm",
        net(first, bn=bn, conv=lambda: ConvTranspose2d(C, C, 3, 2), **HEAD),
        {"bn": MOVED},
    ),
    Case(
        "conv1d",
        net(simple, conv=lambda: Conv1d(C, 6, 3), bn=lambda: BatchNorm1d(6)),
        {"bn": BACK},
        (3, C, 9),
    ),
    Case(
        "conv3d",
        net(simple, conv=lambda: Conv3d(C, 6, 3), bn=lambda: BatchNorm3d(6)),
        {"bn": BACK},
        (3, C, 4, 4, 4),
    ),
    Case(
        "reflecting conv",
        net(simple, conv=lambda: conv(padding_mode="reflect"), bn=bn),
        {"bn": BACK},
    ),
    Case(
        "same-padding conv",
        net(simple, conv=lambda: Conv2dSame(C, C, 3, stride=2), bn=bn),
        {"bn": BACK},
    ),
    Case(
        "scaled-standardized conv",
        net(simple, conv=lambda: ScaledStdConv2d(C, C, 3), bn=bn),
        {"bn": BACK + "|forward of its own"},
    ),
    Case(
        "standardized conv",
        net(simple, conv=lambda: StdConv2d(C, C, 3), bn=bn),
        {"bn": BACK + "|forward of its own"},
    ),
    Case("synchronized", net(simple, conv=conv, bn=lambda: nn.SyncBatchNorm(C)), {"bn": BACK}),
    Case("split", net(simple, conv=conv, bn=lambda: SplitBatchNorm2d(C)), {"bn": BACK}),
    Case("frozen", net(simple, conv=conv, bn=lambda: FrozenBatchNorm2d(C)), {"bn": BACK}),
    Case(
        "frozen with act", net(simple, conv=conv, bn=lambda: FrozenBatchNormAct2d(C)), {"bn": BACK}
    ),
    Case(
        "synchronized with act",
        net(simple, conv=conv, bn=lambda: SyncBatchNormAct(C)),
        {"bn": BACK},
    ),
    Case("fused relu", net(simple, conv=conv, bn=lambda: BatchNormAct2d(C)), {"bn": BACK}),
    Case(
        "fused silu",
        net(simple, conv=conv, bn=lambda: BatchNormAct2d(C, act_layer=nn.SiLU)),
        {"bn": BACK},
    ),
    Case(
        "fused leaky relu and drop",
        net(
            simple,
            conv=conv,
            bn=lambda: BatchNormAct2d(C, act_layer=nn.LeakyReLU, drop_layer=nn.Dropout),
        ),
        {"bn": BACK},
    ),
    Case(
        "fused, no act",
        net(simple, conv=conv, bn=lambda: BatchNormAct2d(C, apply_act=False)),
        {"bn": BACK},
    ),
    Case(
        "fused relu before conv",
        net(first, conv=conv, bn=lambda: BatchNormAct2d(C), **HEAD),
        {"bn": MOVED},
    ),
    Case(
        "fused silu before conv",
        net(first, conv=conv, bn=lambda: BatchNormAct2d(C, act_layer=nn.SiLU), **HEAD),
        {"bn": KEPT},
    ),
    Case("renamed class", net(simple, conv=conv, bn=lambda: Renamed(C)), {"bn": BACK}),
    Case(
        "unknown class",
        net(simple, conv=conv, bn=lambda: MeanOnly(C)),
        {"bn": REFUSED + "forward of its own"},
    ),
    Case(
        "looks at values",
        net(lambda m, x: m.inner(m.bn(m.conv(x))), inner=Untraceable, **ONE),
        {"bn": BACK, "inner.norm": KEPT + "another consumer|elsewhere|consumer"},
    ),
]

PLACES = [
    Case("before a padded conv", net(first, **ONE, **HEAD), {"bn": MOVED}),
    Case("before a 1x1 conv", net(first, conv=lambda: conv(1), bn=bn, **HEAD), {"bn": FORWARD}),
    Case(
        "before a grouped conv",
        net(first, conv=lambda: conv(groups=2, padding=0), bn=bn, **HEAD),
        {"bn": FORWARD},
    ),
    Case(
        "before a reflecting conv",
        net(first, conv=lambda: conv(padding_mode="reflect"), bn=bn, **HEAD),
        {"bn": MOVED},
    ),
    Case(
        "before padding='same'",
        net(first, conv=lambda: conv(padding="same"), bn=bn, **HEAD),
        {"bn": MOVED},
    ),
    Case(
        "between two convs",
        net(lambda m, x: m.conv2(m.bn(m.conv(x))), conv2=conv, **ONE),
        {"bn": BACK + "conv$"},
    ),
    Case(
        "both sides of a conv",
        net(lambda m, x: m.bn2(m.conv(m.bn(x))), conv=lambda: conv(padding=0), bn=bn, bn2=bn),
        {"bn": FORWARD, "bn2": BACK},
    ),
    Case(
        "norm after norm",
        net(lambda m, x: m.bn2(m.bn(m.conv(x))), **ONE, bn2=bn),
        {"bn": BACK, "bn2": BACK},
    ),
    Case(
        "norm before norm",
        net(lambda m, x: first(m, m.bn2(x)), conv=lambda: conv(1), bn=bn, bn2=bn, **HEAD),
        {"bn": FORWARD, "bn2": KEPT},
    ),
    Case(
        "through dropout", net(lambda m, x: m.bn(m.d(m.conv(x))), d=nn.Dropout, **ONE), {"bn": BACK}
    ),
    Case(
        "after a pool",
        net(lambda m, x: m.bn(m.p(m.conv(x))), p=lambda: nn.AvgPool2d(2), **ONE),
        {"bn": BACK},
    ),
    Case(
        "after a pool, in a row",
        net(
            lambda m, x: m.bn(F.adaptive_avg_pool2d(m.conv(x), 2).flatten(1)),
            conv=conv,
            bn=lambda: BatchNorm1d(4 * C),
        ),
        {"bn": KEPT + "may not be its channels"},
    ),
    Case(
        "after a pool, over its rows",
        net(
            lambda m, x: m.bn(F.adaptive_avg_pool2d(m.conv(x), (3, 5)).transpose(1, 2)),
            conv=conv,
            bn=lambda: bn(3),
        ),
        {"bn": KEPT + "may not be its channels"},
    ),
    Case(
        "after pixel shuffle",
        net(lambda m, x: m.bn(F.pixel_shuffle(m.conv(x), 2)), conv=conv, bn=lambda: bn(1)),
        {"bn": KEPT},
    ),
    Case(
        "on the input",
        net(lambda m, x: m.head(F.relu(first(m, x))), conv=conv, bn=bn, head=lambda: Linear(C, C)),
        {"bn": MOVED},
    ),
    Case(
        "after cat",
        net(lambda m, x: m.bn(torch.cat([m.conv(x), x], 1)), conv=conv, bn=lambda: bn(2 * C)),
        {"bn": KEPT},
    ),
    Case("after add", net(lambda m, x: F.silu(m.bn(m.conv(x) + x)), **ONE), {"bn": KEPT}),
    Case(
        "relu then pool",
        net(
            lambda m, x: m.head(m.conv(m.p(F.relu(m.bn(x)))).mean((2, 3))),
            **ONE,
            **HEAD,
            p=lambda: nn.MaxPool2d(3, 2, 1),
        ),
        {"bn": MOVED},
    ),
    Case(
        "relu, then returned",
        net(lambda m, x: (y := F.relu(m.bn(x)), m.conv2(m.conv(y))), **ONE, conv2=conv),
        {"bn": KEPT},
    ),
    Case(
        "relu in place on a fork",
        net(
            lambda m, x: m.head(m.conv(m.act(m.bn(y := m.conv2(x)))) + y),
            conv2=conv,
            act=lambda: nn.ReLU(inplace=True),
            head=conv,
            **ONE,
        ),
        {"bn": MOVED},
    ),
    Case("gelu before conv", net(lambda m, x: m.conv(F.gelu(m.bn(x))), **ONE), {"bn": KEPT}),
    Case(
        "linear on flat input",
        net(
            lambda m, x: m.bn(m.fc(torch.flatten(x, 1))),
            fc=lambda: Linear(12, 5),
            bn=lambda: BatchNorm1d(5),
        ),
        {"bn": BACK},
        (9, 3, 4),
    ),
    Case(
        "linear on a method's flat input",
        net(
            lambda m, x: m.bn(m.fc(x.mean((2, 3)).flatten(1))),
            fc=lambda: Linear(C, 5),
            bn=lambda: BatchNorm1d(5),
        ),
        {"bn": BACK},
    ),
    Case(
        "linear on 3-D input",
        net(lambda m, x: m.bn(m.fc(x)), fc=lambda: Linear(7, C), bn=lambda: BatchNorm1d(C)),
        {"bn": KEPT + "Linear"},
        (5, C, 7),
        fuser=True,
    ),
    Case(
        "linear on flat input split by a module",
        net(
            lambda m, x: m.bn(m.fc(m.u(torch.flatten(x, 1)))),
            fc=lambda: Linear(7, C),
            bn=lambda: BatchNorm1d(C),
            u=lambda: nn.Unflatten(1, (C, 7)),
        ),
        {"bn": KEPT + "Linear"},
        (5, C, 7),
        fuser=True,
    ),
]

RESIDUAL = [
    Case(
        "residual in the root",
        net(_basic, act=nn.ReLU, conv1=conv, bn1=bn, conv2=conv, bn2=bn),
        {"bn1": BACK, "bn2": BACK},
    ),
    Case("torch.add", net(lambda m, x: F.relu(torch.add(m.bn(m.conv(x)), x)), **ONE), {"bn": BACK}),
    Case(
        "add of twice the branch",
        net(lambda m, x: torch.add(x, m.bn(m.conv(x)), alpha=2), **ONE),
        {"bn": BACK},
    ),
    Case("skip.add_", net(lambda m, x: (x * 1).add_(m.bn(m.conv(x))), **ONE), {"bn": BACK}),
    Case("+=", net(_iadd, **ONE), {"bn": BACK}),
    Case("pre-activation", net(_v2, **V2), {"bn1": MOVED + "down, conv1|conv1, down", "bn2": BACK}),
    Case(
        "pre-activation, silu",
        net(lambda m, x: _v2(m, x, F.silu), **V2),
        {"bn1": KEPT, "bn2": BACK},
    ),
    Case(
        "pre-activation, in place",
        net(lambda m, x: _v2(m, x, F.relu_), **V2),
        {"bn1": MOVED, "bn2": BACK},
    ),
    Case(
        "gate",
        net(
            lambda m, x: (
                (y := m.bn(m.conv(x))) * torch.sigmoid(m.fc(y.mean((2, 3), keepdim=True))) + x
            ),
            **ONE,
            fc=lambda: conv(1),
        ),
        {"bn": BACK},
    ),
    Case(
        "branch read before its end",
        net(
            lambda m, x: m.head(m.i(y := m.conv(F.relu(m.bn(m.conv2(x))))) + x) + m.head2(y),
            **ONE,
            conv2=conv,
            head=conv,
            head2=conv,
            i=nn.Identity,
        ),
        {"bn": BACK},
    ),
    Case(
        "branch used twice",
        net(lambda m, x: (y := m.bn(m.conv(x))) + x + 2 * y, **ONE),
        {"bn": BACK},
    ),
]

CASES = [*MULTIPLE, *KINDS, *PLACES, *RESIDUAL]


EXACT = 1e-12


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Everything that the model returns, in a row."""
    # Some forwards write to their input.
    value: Any = run(model, x.clone())
    parts = value if isinstance(value, tuple) else (value,)
    return torch.cat([part.flatten() for part in parts])


def build(case: Case) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    seen, x = torch.randn(2, *case.shape, dtype=torch.float64)
    return lived_in(case.make(), seen), x
