"""Layers with BatchNorm's tensors: kept, put back or measured, frozen, in tune mode, or with ghost
batches.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import torch
import torch.nn.functional as F
from timm.layers import FrozenBatchNormAct2d
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap.layers import affine
from normswap.layers.folded import folded
from normswap.layers.known_norms import KINDS
from normswap.layers.placeholders import Chain
from normswap.layers.planned_layer import GAMMA, OwnLayer, PlannedLayer
from normswap.layers.reparametrized import TunedConv2d
from normswap.plan import AbsorbMode, Absorption, Body

Floats: TypeAlias = Sequence[float] | None
# Eps, momentum and the number of batches of a norm that stood there before, as far as they are
# known.
Record: TypeAlias = Body | None
_SHOWN = ("weight", "bias", "running_mean", "running_var")


class SiteNorm(PlannedLayer, OwnLayer, _BatchNorm):
    """BatchNorm of any dimension, with the activation of the norm before, and perhaps ghost
    batches.

    Ghost batch norm (Hoffer et al. 2017, arXiv:1705.08741, algorithm 1): in training each `ghost`
    samples are normalized as a batch of their own, and update the running statistics in turn. A
    smaller rest joins the last batch.
    """

    KEEPS_NORM = True

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        momentum: float | None,
        ghost: int,
        act: nn.Module | None,
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum)
        self.ghost = ghost
        self.act = act

    def _check_input_dim(self, input: Tensor) -> None:
        if not isinstance(input, fx.Proxy) and input.ndim < 2:
            raise ValueError(f"expected (N, C, ...), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        if self.training and self.ghost:
            batches = input.split(self.ghost_sizes(len(input)))
            x = torch.cat([_BatchNorm.forward(self, batch) for batch in batches])
        else:
            x = _BatchNorm.forward(self, input)
        return self.activated(x)

    def ghost_sizes(self, count: int) -> list[int]:
        """How many of `count` samples share their statistics in training, in a row."""
        if not self.ghost:
            return [count]
        whole = max(count // self.ghost, 1)
        return [self.ghost] * (whole - 1) + [count - self.ghost * (whole - 1)]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, ghost={self.ghost}"

    @classmethod
    def replacing(
        cls,
        old: Any,
        *,
        like: Tensor,
        ghost: int = 0,
        mean: Floats = None,
        std: Floats = None,
        settings: Record = None,
    ) -> SiteNorm:
        """The norm that `old` is; given mean and deviation per channel, the norm that computes what
        `old` does.

        y = s x + t (the identity, or the map of a ChannelBias or ChannelAffine) is a norm of any
        statistics with gamma = s sqrt(var + eps), beta = t + s mean (Ioffe & Szegedy, section 3).
        """
        act = affine.copied_activation(old)
        like = typed(old, like)
        unmeasured = mean is None or std is None
        moments = torch.tensor((mean or (), std or ()), dtype=torch.float64)
        mean_before, var = (
            affine.statistics(old) if unmeasured else (moments[0], moments[1].square())
        )
        values = {"eps": 1e-5, "momentum": 0.1, "num_batches_tracked": 0, **(settings or {})}
        eps = values["eps"]
        momentum = values["momentum"]
        if unmeasured:
            eps = affine.epsilon(old)
            momentum = getattr(old, "momentum", momentum)
        new: Any = cls(len(mean_before), eps=eps, momentum=momentum, ghost=ghost, act=act).to(like)
        new.num_batches_tracked.fill_(values["num_batches_tracked"])
        if unmeasured and not affine.is_registered(old):
            _copy(old, new)
            return cast(SiteNorm, new)
        new.running_mean.copy_(mean_before)
        new.running_var.copy_(var)
        has_map = unmeasured or (isinstance(old, OwnLayer) and old.PER_CHANNEL)
        scale, shift = (
            affine.read(old)
            if has_map
            else (torch.ones_like(new.weight), torch.zeros_like(new.weight))
        )
        new.weight.copy_(scale * (new.running_var.double() + new.eps).sqrt())
        new.bias.copy_(shift + scale * new.running_mean.double())
        return cast(SiteNorm, new)


class EmptyNorm(PlannedLayer):
    """In place of a norm with statistics per sample: one whose values data will give
    (`sequential_fit`).
    """

    KEEPS_NORM = True

    @classmethod
    def replacing(cls, old: Any, *, like: Tensor) -> SiteNorm:
        like = typed(old, like)
        act = affine.copied_activation(old)
        new = SiteNorm(
            affine.channels(old), eps=getattr(old, "eps", 1e-5), momentum=0.1, ghost=0, act=act
        ).to(like)
        for name in ("weight", "bias"):
            if getattr(old, name, None) is not None:
                getattr(new, name).copy_(getattr(old, name))
        return new


class FrozenBatchNorm(FrozenBatchNorm2d):  # type: ignore[misc]
    """torchvision's frozen BatchNorm for any dimensions, in one kernel, under autocast in the
    input's dtype.
    """

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


KINDS[FrozenBatchNorm] = KINDS[FrozenBatchNorm2d]


class FrozenNorm(PlannedLayer):
    """BatchNorm whose statistics, gamma and beta are constants: torchvision's, or timm's with an
    activation in it.
    """

    KEEPS_NORM = True

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, **moments: Any) -> nn.Module:
        """`moments`: mean and deviation per channel, where a norm stood (`SiteNorm`)."""
        live = SiteNorm.replacing(old, like=like, **moments)
        count = live.num_features
        eps = live.eps
        new: Any = FrozenBatchNorm(count, eps)
        if live.act is not None:
            new = FrozenBatchNormAct2d(count, eps)
            new.act = live.act
        new.to(live.weight)
        _copy(live, new)
        return cast(nn.Module, new)


class EvalNorm(PlannedLayer, OwnLayer):
    """y = act(gamma (x - mean) / sqrt(var + eps) + beta) with frozen statistics, where gamma and
    beta learn.
    """

    AFFINE = PER_CHANNEL = SCALES = HOLDS_STATISTICS = True
    ROLES = {"weight": GAMMA, "bias": "beta"}

    def __init__(self, live: SiteNorm) -> None:
        super().__init__()
        self.weight = live.weight
        self.bias = live.bias
        self.act = live.act
        self.eps = live.eps
        self.register_buffer("running_mean", live.running_mean)
        self.register_buffer("running_var", live.running_var)

    running_mean: Tensor
    running_var: Tensor

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        return self.activated(x)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(self.running_var.double() + self.eps) * self.weight.detach().double()
        return scale, self.bias.detach().double() - self.running_mean.double() * scale

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, **moments: Any) -> EvalNorm:
        return cls(SiteNorm.replacing(old, like=like, **moments))


class Tuned(PlannedLayer):
    """A convolution that absorbs the norm after it as a `TunedConv2d`; what else it absorbs is
    folded.
    """

    @classmethod
    def replacing(
        cls, old: Any, *reads: nn.Module, like: Tensor, takes: Sequence[Absorption], **how: Any
    ) -> nn.Module:
        moments = {name: how.pop(name) for name in ("mean", "std", "settings") if name in how}
        absorbed = [*zip(reads, takes, strict=True)]
        (norm,) = (read for read, absorption in absorbed if absorption.way is AbsorbMode.NORM)
        others = [
            (read, absorption)
            for read, absorption in absorbed
            if absorption.way is not AbsorbMode.NORM
        ]
        takes = [absorption for _, absorption in others]
        old = folded(old, [read for read, _ in others], like=like, takes=takes, **how)
        live = SiteNorm.replacing(norm, like=like, **moments).to(old.weight)
        new: Any = TunedConv2d.__new__(TunedConv2d)
        new.__dict__.update(vars(old))
        new.gamma = live.weight
        new.beta = live.bias
        new.norm_eps = live.eps
        new.register_buffer("running_mean", live.running_mean)
        new.register_buffer("running_var", live.running_var)
        return cast(nn.Module, new)


class MeasuredNorm(PlannedLayer):
    """A convolution followed by a BatchNorm; its bias becomes beta, as a bias before a BatchNorm is
    never trained.
    """

    KEEPS_NORM = True
    NAMES = {"weight": "inner.weight"}

    @classmethod
    def replacing(cls, old: _ConvNd, *, like: Tensor, eps: float, momentum: float) -> Chain:
        conv = copy.deepcopy(old)
        if isinstance(conv._parameters.get("bias"), nn.Parameter):
            conv.bias = None
        norm = SiteNorm(conv.out_channels, eps=eps, momentum=momentum, ghost=0, act=None).to(
            typed(old, like)
        )
        chain = Chain(conv, norm)
        settle(old, conv, norm)
        return chain


@torch.no_grad()
def settle(source: _ConvNd, conv: _ConvNd, norm: SiteNorm) -> None:
    """Let a norm after `conv` undo its statistics and add the bias that `conv` lost, to compute
    what `source` does.
    """
    shift = torch.zeros_like(norm.bias)
    if source.bias is not None and conv.bias is None:
        shift = source.bias
    undo_statistics(norm, shift.detach().double())


@torch.no_grad()
def undo_statistics(norm: Any, shift: Tensor) -> None:
    """Set gamma = sqrt(var + eps) and beta = mean + shift (C,), so that a BatchNorm computes x +
    shift.

    Ioffe & Szegedy 2015, arXiv:1502.03167, section 3: the transform can be the identity.
    """
    norm.weight.copy_((norm.running_var.double() + norm.eps).sqrt())
    norm.bias.copy_(norm.running_mean.double() + shift)


def typed(old: nn.Module, like: Tensor) -> Tensor:
    """An empty tensor of the dtype and device of `old`: frozen norms may be in float32 in a network
    in half.
    """
    if like.dtype == torch.float64:
        return like
    tensor = next((t for t in (*old.parameters(), *old.buffers()) if t.is_floating_point()), like)
    return tensor.detach().flatten()[:0]


def _copy(old: Any, new: Any) -> None:
    for name in _SHOWN:
        value = getattr(old, name, None)
        # A norm without gamma and beta multiplies by 1 and adds 0.
        if value is None:
            value = torch.tensor(float(name == "weight"))
        getattr(new, name).copy_(value)
    if getattr(old, "num_batches_tracked", None) is not None and hasattr(
        new, "num_batches_tracked"
    ):
        new.num_batches_tracked.copy_(old.num_batches_tracked)
