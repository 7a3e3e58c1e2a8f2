"""What remains of a norm that no weight absorbs: a shift, or a scale and shift, per channel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.errors import RefusedError
from normswap.layers.planned_layer import GAMMA, OwnLayer, PlannedLayer, per_channel
from normswap.sites import affine


class ChannelAffine(PlannedLayer, OwnLayer):
    """A norm without its statistics: y = act(weight * x + bias), weight and bias per channel."""

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
        cls, old: nn.Module, *, like: Tensor, mean: Sequence[float] = (), **recorded: object
    ) -> ChannelAffine:
        """Return the layer that computes what `old` does, or the identity where a norm is gone.

        Args:
            old: The norm, or the module that took its place.
            like: An empty tensor with the dtype and device of the new tensors.
            mean: The recorded mean (C,) of a norm that stood here and is gone. Only its length is
                read, as the number of channels.
            recorded: Further records of the norm. They are not used.
        """
        act = affine.copied_activation(old)
        # A norm that is gone may have left a scale and shift. If it left nothing, the new layer is
        # the identity, with as many channels as the record of the norm has.
        has_map = isinstance(old, OwnLayer) and old.PER_CHANNEL
        if mean and not has_map:
            ones = torch.ones(len(mean)).to(like)
            return cls(ones, torch.zeros_like(ones), act)

        scale, shift = affine.read_map(old)
        return cls(scale.to(like), shift.to(like), act)

    @classmethod
    def invert(cls, old: nn.Module, now: ChannelAffine, reads: tuple[nn.Module, ...]) -> None:
        """Set gamma and beta of the norm `old` so that it computes what `now` does.

        A norm whose rounded s and t are those of `now` already is left as it is.

        Args:
            old: The norm of the source.
            now: The layer that took its place, after training.
            reads: Not used, since this layer reads no other module.
        """
        scale, shift = affine.read_map(old)
        same_scale = torch.equal(scale.to(now.weight), now.weight)
        if same_scale and torch.equal(shift.to(now.bias), now.bias):
            return
        affine.set_map(old, now.weight.double(), now.bias.double())


class ChannelBias(PlannedLayer, OwnLayer):
    """What is left of a norm y = act(s x + t) whose scale |s| moved into the next convolution.

    It computes y = act(sign * x + bias) per channel, with bias = t / |s|. `sign` is a fixed buffer
    of -1, 0 or 1 per channel. It is None if all signs of s are 1.
    """

    AFFINE = PER_CHANNEL = True
    OUTCOME = "bias"
    ROLES = {"bias": "beta"}
    # TorchScript reads annotations when it compiles, and those of this file are text by then.
    if TYPE_CHECKING:
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
        """Return the layer that computes sign * x + t / |s| where the norm `old` is s * x + t.

        Args:
            old: The norm. The convolution after it absorbs |s|.
            like: An empty tensor with the dtype and device of the new tensors.
            signed: Whether the layer multiplies by the signs of s. Without them it computes
                x + t / |s|, which is enough if all signs are 1.
        """
        _, sign, shift = affine.split(old, like.dtype)
        kept_sign = sign.to(like) if signed else None
        return cls(shift.to(like), kept_sign, affine.copied_activation(old))

    @classmethod
    def invert(
        cls, old: nn.Module, now: nn.Module, reads: tuple[nn.Module, ...], *, signed: bool
    ) -> None:
        """Set beta of the norm `old` so that its t / |s| is the bias of `now`.

        Where the sign of s is another one since, gamma is set as well.

        Args:
            old: The norm of the source.
            now: The layer that took its place, after training.
            reads: Not used, since this layer reads no other module.
            signed: Whether `now` also multiplies by the signs of s.

        Raises:
            RefusedError: `now` is no ChannelBias, or the norm has no beta or gamma to be set.
        """
        if not isinstance(now, ChannelBias):
            raise RefusedError("cannot unfold", f"a {type(now).__name__} sits there")

        # The convolution behind the norm is restored by the source's |s|. So s has that magnitude,
        # and the sign that was learned, which is 0 for a channel that is a constant.
        magnitude, sign, shift = affine.split(old, now.bias.dtype)
        present_sign, present_shift = now.as_affine()
        if not torch.equal(sign, present_sign):
            affine.set_map(old, magnitude * present_sign, magnitude * present_shift)
            return

        # The bias is t / |s|, so t is |s| times the trained bias. If training did not change the
        # bias, beta stays exactly as it is.
        if not torch.equal(shift.to(now.bias), now.bias):
            affine.set_shift(old, magnitude * present_shift)
