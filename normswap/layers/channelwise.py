"""What remains of a norm where no weights can absorb it: a shift, or a scale and a shift, per
channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.errors import RefusedError
from normswap.layers import affine
from normswap.layers.planned_layer import GAMMA, OwnLayer, PlannedLayer, per_channel


class ChannelAffine(PlannedLayer, OwnLayer):
    """y = act(weight * x + bias) per channel: a norm without its statistics, where no convolution
    can absorb it.
    """

    AFFINE = PER_CHANNEL = SCALES = True
    OUTCOME = "affine"
    ROLES = {"weight": GAMMA, "bias": "beta"}

    def __init__(self, weight: Tensor, bias: Tensor, act: nn.Module | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        x = x * per_channel(self.weight, x) + per_channel(self.bias, x)
        return self.activated(x)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        return self.weight.detach().double(), self.bias.detach().double()

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, mean: Sequence[float] = (), **_: Any
    ) -> ChannelAffine:
        """`mean` (C,): a norm is gone, and a scale of 1 and a shift of 0 take its place."""
        if mean and not (isinstance(old, OwnLayer) and old.PER_CHANNEL):
            ones = torch.ones(len(mean)).to(like)
            return cls(ones, torch.zeros_like(ones), affine.copied_activation(old))
        scale, shift = affine.read(old)
        return cls(scale.to(like), shift.to(like), affine.copied_activation(old))

    @classmethod
    def invert(cls, old: nn.Module, now: ChannelAffine, reads: tuple[nn.Module, ...]) -> None:
        scale, shift = affine.read(old)
        if torch.equal(scale.to(now.weight), now.weight) and torch.equal(
            shift.to(now.bias), now.bias
        ):
            return
        affine.set_map(old, now.weight.double(), now.bias.double())


class ChannelBias(PlannedLayer, OwnLayer):
    """y = act(sign * x + bias) per channel: a pre-activation norm without its scale.

    `sign` is a fixed buffer of -1, 0 or 1, present only where some gamma was not positive.
    """

    AFFINE = PER_CHANNEL = True
    OUTCOME = "bias"
    ROLES = {"bias": "beta"}
    sign: Tensor | None

    def __init__(
        self, bias: Tensor, sign: Tensor | None = None, act: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.bias = nn.Parameter(bias)
        self.act = act
        self.register_buffer("sign", sign)

    def forward(self, x: Tensor) -> Tensor:
        if self.sign is not None:
            x = x * per_channel(self.sign, x)
        x = x + per_channel(self.bias, x)
        return self.activated(x)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        bias = self.bias.detach().double()
        return doubled(self.sign, torch.ones_like(bias)), bias

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, signed: bool) -> ChannelBias:
        _, sign, shift = affine.split(old, like.dtype)
        return cls(shift.to(like), sign.to(like) if signed else None, affine.copied_activation(old))

    @classmethod
    def invert(
        cls, old: nn.Module, now: nn.Module, reads: tuple[nn.Module, ...], *, signed: bool
    ) -> None:
        if not isinstance(now, ChannelBias):
            raise RefusedError("cannot unfold", f"a {type(now).__name__} sits there")
        magnitude, _, shift = affine.split(old, now.bias.dtype)
        if not torch.equal(shift.to(now.bias), now.bias):
            affine.set_shift(old, magnitude * now.bias.double())
