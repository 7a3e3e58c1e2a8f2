"""What can sit in a seat. Each class has `replacing(old, *reads, like, **args)`, which builds it from what it replaces.

`like` is a tensor of the model's dtype and device, for newcomers that replace nothing with a dtype of its own.
`replacing` never branches on tensor values: the same plan gives the same structure on any weights.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap.layers import reparametrized

Linearity = nn.Linear | nn.modules.conv._ConvNd


def _per_channel(value: Tensor, x: Tensor) -> Tensor:
    return value.view(1, -1, *(1,) * (x.ndim - 2))


class Vacant(nn.Module):
    """Where a norm stood: passes its input on, through the activation the norm carried, if any."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        return x if self.act is None else self.act(x)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> Vacant:
        return cls(_activation(old))


class Scale(nn.Module):
    """One learnable scalar on a residual branch, y = alpha * x (+ bias): SkipInit, De & Smith 2020, section 4.

    The optional scalar bias is the one that regularized SkipInit adds after the residual sum, before the ReLU
    (appendix F); addition commutes, so it stands here.
    """

    def __init__(self, alpha: float, *, bias: bool = False, like: Tensor | None = None) -> None:
        super().__init__()
        like = torch.empty(0) if like is None else like
        self.alpha = nn.Parameter(torch.full((1,), alpha, dtype=like.dtype, device=like.device))
        self.bias = nn.Parameter(torch.zeros_like(self.alpha)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        return self.alpha * x if self.bias is None else self.alpha * x + self.bias

    def extra_repr(self) -> str:
        return "bias=True" if self.bias is not None else ""

    @classmethod
    def replacing(
        cls,
        old: nn.Module,
        *,
        like: Tensor,
        alpha: float,
        bias: bool = False,
        keep: bool = False,
        fresh: bool = False,
    ) -> nn.Module:
        """`keep`: chain the scalar after what sits in the seat, whose tensors are then called `inner.*`.

        `fresh`: a bias starts at 0, also if there was one in the seat.
        """
        scale = cls(alpha, bias=bias, like=like)
        if keep:
            return Chain(old, scale)
        if isinstance(old, Scale) and old.bias is not None and scale.bias is not None and not fresh:
            scale.bias.copy_(old.bias)
        act = _activation(old)
        return scale if act is None else Chain(Vacant(act), scale)


class Chain(nn.Module):
    """What sat in the seat, then one more layer. The kept module's tensors are called `inner.*`."""

    def __init__(self, inner: nn.Module, then: nn.Module) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> whatever `inner` returns"""
        return self.then(self.inner(x))


class Copy(nn.Module):
    """Passes on a copy of its input, which may then be overwritten: backward hooks forbid that of what they return."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        return x.clone()


class Copied:
    """What sits in the seat, and a copy of what it returns."""

    @staticmethod
    def replacing(old: nn.Module, *, like: Tensor, keep: bool) -> Chain:
        return Chain(old, Copy())


class OutOfPlace:
    """An activation or dropout that no longer writes into its input."""

    @staticmethod
    def replacing(old: nn.Module, *, like: Tensor) -> nn.Module:
        return out_of_place(copy.deepcopy(old))


def out_of_place(module: Any) -> Any:
    """`module` itself, in which nothing writes into its input any more."""
    for part in module.modules():
        if getattr(part, "inplace", False) is True:
            part.inplace = False
    return module


class WithBias:
    """A parametrized layer without a bias gets one, at first 0."""

    @staticmethod
    def replacing(old: Any, *, like: Tensor) -> Any:
        new = copy.deepcopy(old)
        if new.bias is None:
            channels = new.out_features if isinstance(new, nn.Linear) else new.out_channels
            new.bias = nn.Parameter(torch.zeros(channels).to(new.weight))
        return new


class ChannelAffine(nn.Module):
    """y = act(weight * x + bias) per channel: a norm without its statistics, where no convolution can take it in."""

    def __init__(self, weight: Tensor, bias: Tensor, act: nn.Module | None = None) -> None:
        super().__init__()
        self.weight, self.bias, self.act = nn.Parameter(weight), nn.Parameter(bias), act

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        x = x * _per_channel(self.weight, x) + _per_channel(self.bias, x)
        return x if self.act is None else self.act(x)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> ChannelAffine:
        from normswap.layers import affine

        scale, shift = affine.read(old)
        return cls(scale.to(like), shift.to(like), _activation(old))


class ChannelBias(nn.Module):
    """y = act(sign * x + bias) per channel: what stays of a pre-activation norm when its scale has moved on.

    `sign` is a fixed buffer of -1, 0 or 1, present only where some gamma was not positive.
    """

    sign: Tensor | None

    def __init__(self, bias: Tensor, sign: Tensor | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.bias, self.act = nn.Parameter(bias), act
        self.register_buffer("sign", sign)

    def forward(self, x: Tensor) -> Tensor:
        """(N, C, ...) -> (N, C, ...)"""
        x = x if self.sign is None else x * _per_channel(self.sign, x)
        x = x + _per_channel(self.bias, x)
        return x if self.act is None else self.act(x)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, signed: bool) -> ChannelBias:
        from normswap.layers import affine

        _, sign, shift = affine.split(old, like.dtype)
        return cls(shift.to(like), sign.to(like) if signed else None, _activation(old))


class Folded:
    """A convolution or linear layer that has taken in its neighbours' affine maps. It keeps its class and its name."""

    CASTS = True  # makes float64 from any dtype by itself, if `like` asks for it

    @staticmethod
    def replacing(
        old: Linearity,
        *reads: nn.Module,
        like: Tensor,
        takes: Sequence[str] = (),
        gain: float = 1.0,
        in_gain: float = 1.0,
        bake: bool = False,
        centred: bool = False,
    ) -> Linearity:
        """A copy of `old` with weight W' and bias b', computed in float64.

        Args:
            reads: the modules that are taken in.
            takes: for each of them, how. `after`: old is followed by it (W' = s W, b' = s b + t per output channel);
                `after 16:32`: by these of its channels; `after-unit`: with gamma = 1, beta = 0; `before`: it precedes
                old, with no padding in between (W' = W s per input channel, b' = b + W t); `before-magnitude`: |s|
                alone (`affine.split`); `before-shift`: t alone.
            gain: multiplies the output; `in_gain`: multiplies the input.
            bake: first make `old` a plain layer (see `reparametrized`).
            centred: in the end take the mean over the output channels off: W' = (I - 11'/C) W, b' = b - mean(b).
        """
        from normswap.layers import affine

        if next(old.parameters(), None) is None:
            raise TypeError(f"a {type(old).__name__} has no weight to fold into")
        own = next(old.parameters()).dtype
        dtype = like.dtype if like.dtype == torch.float64 else own
        if bake:
            old = reparametrized.plain(old)  # in float64
        weight, restore = _by_group(old, old.weight.detach().to(torch.float64, copy=True))  # scaled in place below
        groups, out_per_group = weight.shape[0], weight.shape[1]
        rest = (1,) * (weight.ndim - 3)
        bias = weight.new_zeros(groups * out_per_group) if old.bias is None else old.bias.detach().double()
        if in_gain != 1:
            weight *= in_gain
        for module, how in zip(reads, takes, strict=True):
            how, part = way(how)
            if how in ("after", "after-unit"):
                scale, shift = (value[part] for value in affine.read(module, unit_gamma=how == "after-unit"))
                weight *= scale.expand(bias.numel()).reshape(groups, out_per_group, 1, *rest)
                bias = scale * bias + shift
            elif how in ("before", "before-shift"):
                scale, shift = (value.expand(groups * weight.shape[2]) for value in affine.read(module))
                scale, shift = (value.reshape(groups, 1, -1, *rest) for value in (scale, shift))
                bias = bias + (weight * shift).flatten(2).sum(2).flatten()
                if how == "before":
                    weight *= scale
            elif how == "before-magnitude":
                magnitude, _, _ = affine.split(module, like.dtype)
                weight *= magnitude.reshape(groups, 1, -1, *rest)
            else:
                raise ValueError(f"unknown way to take in a neighbour: {how!r}")
        if gain != 1:
            weight *= gain
        if centred:
            weight -= weight.mean((0, 1), keepdim=True)
            bias = bias - bias.mean()
        born = bool(reads) or gain != 1  # a gate's first map, which is only rescaled, gets no bias it never had
        return _with(old, restore(weight), bias * gain if born or old.bias is not None else None, dtype)


def way(how: str) -> tuple[str, slice]:
    """How a neighbour is taken in, and by which of its channels: `after 16:32` -> `after`, 16:32."""
    word, _, part = how.partition(" ")
    return word, slice(*map(int, part.split(":"))) if part else slice(None)


class Dropout:
    """Dropout before the classifier. The seat is a Dropout module, or timm's `drop_rate` number, read in forward."""

    @staticmethod
    def replacing(old: Any, *, like: Tensor, p: float) -> Any:
        return nn.Dropout(p) if isinstance(old, nn.Module) else p


class Number:
    """A number (or a scalar parameter) of a module, read in its forward; None takes it out."""

    @staticmethod
    def replacing(old: Any, *, like: Tensor, value: float | None) -> float | None:
        return value


def _activation(old: nn.Module) -> nn.Module | None:
    from normswap.layers import affine

    return copy.deepcopy(affine.activation(old))


def _by_group(old: Linearity, weight: Tensor) -> tuple[Tensor, Any]:
    """The weight as (groups, out / groups, in / groups, *kernel), and the way back to the layout it came in."""
    groups = getattr(old, "groups", 1)
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    if getattr(old, "transposed", False):  # transposed convolutions store (in, out / groups, *kernel)
        return grouped.transpose(1, 2), lambda w: w.transpose(1, 2).reshape(weight.shape)
    return grouped, lambda w: w.reshape(weight.shape)


def _with(old: Linearity, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Linearity:
    """A copy of `old` with these tensors (None: it has no bias and gets none); the old ones are never copied."""
    grad = old.weight.requires_grad
    parameter = nn.Parameter(weight.to(dtype).contiguous(), requires_grad=grad)
    memo: dict[int, Any] = {id(old.weight): parameter}
    if old.bias is not None and bias is not None:
        memo[id(old.bias)] = nn.Parameter(bias.to(dtype), requires_grad=old.bias.requires_grad)
    new = copy.deepcopy(old, memo)
    if old.bias is None and bias is not None:
        new.bias = nn.Parameter(bias.to(dtype), requires_grad=grad)
    return new.to(dtype)


_SEATED = (Vacant, Scale, ChannelAffine, ChannelBias, Folded, Dropout, Number, Copied, OutOfPlace, WithBias)
SEATED: dict[str, Any] = {cls.__name__: cls for cls in _SEATED}
