"""RMSNorm in place of LayerNorm, and layers whose scale and shift another layer has absorbed.

LayerNorm is y = gamma (x - mean) / sqrt(var + eps) + beta (Ba et al. 2016, arXiv:1607.06450).
RMSNorm leaves mean and beta out: y = gamma x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019,
arXiv:1910.07467). For x of mean zero both are equal, except for beta.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.layers.planned_layer import PlannedLayer
from normswap.sites.known_norms import KINDS, at_each_position, kind_of
from normswap.sites.position_norms import channel_dim, epsilon, gamma_and_beta


class ShiftedRMSNorm(nn.RMSNorm):
    """RMSNorm over dimension -1 or 1, perhaps with a beta that no linear layer could absorb."""

    def __init__(self, channels: int, *, eps: float, scale: bool, shift: bool, dim: int) -> None:
        super().__init__(channels, eps=eps, elementwise_affine=scale)
        self.bias = nn.Parameter(torch.zeros(channels)) if shift else None
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C), or (N, C, ...) with dim=1, to the same shape."""
        # Core ML has no movedim, not even of a dimension to itself.
        if self.dim == -1:
            return self._normalized(x)
        return self._normalized(x.movedim(self.dim, -1)).movedim(-1, self.dim)

    def _normalized(self, x: Tensor) -> Tensor:
        """Return gamma x / sqrt(mean(x^2) + eps) + beta for x (..., C), over the last dimension."""
        y = F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shift={self.bias is not None}, dim={self.dim}"


KINDS[ShiftedRMSNorm] = at_each_position(-1, centres=False, states_dim=True)


class ChannelLayerNorm(nn.LayerNorm):
    """LayerNorm over dimension 1, without gamma and beta."""

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__(channels, eps=eps, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, C, ...) to the same shape."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


KINDS[ChannelLayerNorm] = at_each_position(1)


class BareNorm(PlannedLayer):
    """Builds a LayerNorm or RMSNorm of the same class without gamma and beta.

    A norm that a user wrote becomes torch's LayerNorm, a `ChannelLayerNorm` or a `ShiftedRMSNorm`.
    """

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> nn.Module:
        """Return a norm that computes what `old` does, without gamma and beta.

        Args:
            old: A LayerNorm or RMSNorm over the channels.
            like: Not used, since the new norm has no tensors.
        """
        kind = kind_of(old)
        # An eps in the record of the class was measured, so the norm is a hand-written one.
        if kind is not None and kind.eps is not None:
            return cls._of_known_class(old, kind.eps, centres=kind.centres)

        # deepcopy takes None for each of these parameters from its memo.
        without_parameters = {id(parameter): None for parameter in nn.Module.parameters(old)}
        new: nn.Module = copy.deepcopy(old, without_parameters)
        new.elementwise_affine = False  # type: ignore[assignment]
        return new

    @staticmethod
    def _of_known_class(old: nn.Module, eps: float, *, centres: bool) -> nn.Module:
        """Return the norm of torch's or of this file that takes the place of a hand-written one.

        Args:
            old: The hand-written norm.
            eps: Its epsilon, which was measured (`NormKind.eps`).
            centres: Whether it subtracts the mean.
        """
        # The new norm has neither gamma nor beta, as its readers absorb them. Here, gamma only
        # tells the number of channels.
        gamma, _ = gamma_and_beta(old)
        channels = len(gamma)
        dim = 1 if channel_dim(old) == 1 else -1

        new: nn.Module = ChannelLayerNorm(channels, eps=eps)
        if not centres:
            new = ShiftedRMSNorm(channels, eps=eps, scale=False, shift=False, dim=dim)
        elif dim == -1:
            new = nn.LayerNorm(channels, eps=eps, elementwise_affine=False)
        return new.train(old.training)


class RMSNorm(PlannedLayer):
    """The RMSNorm that equals a LayerNorm on values of mean zero.

    It is torch's own, or a `ShiftedRMSNorm` if beta stays or dimension 1 holds the channels.
    """

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, shift: bool = False) -> nn.RMSNorm:
        """Return the RMSNorm with the LayerNorm's gamma.

        Args:
            old: A LayerNorm over the channels.
            like: An empty tensor with the model's dtype and device, for a norm without gamma.
            shift: Whether beta stays in the norm. Otherwise a linear layer absorbs it.
        """
        dim = channel_dim(old)
        if dim is None:
            raise TypeError(f"a {type(old).__name__} is no LayerNorm over the channels")
        channels = len(gamma_and_beta(old)[0])
        eps = epsilon(old)

        weight = getattr(old, "weight", None)
        has_scale = weight is not None
        if shift or dim != -1:
            new: nn.RMSNorm = ShiftedRMSNorm(
                channels, eps=eps, scale=has_scale, shift=shift, dim=dim
            )
        else:
            new = nn.RMSNorm(channels, eps=eps, elementwise_affine=has_scale)
        # The norm gets the dtype and device of the old gamma, if there was one.
        new.to(like if weight is None else weight.detach()[:0])

        # gamma, and beta if it stays.
        for name in ("weight", "bias"):
            new_tensor = getattr(new, name, None)
            old_tensor = getattr(old, name, None)
            if new_tensor is not None and old_tensor is not None:
                new_tensor.copy_(old_tensor)
        return new


class Centred(PlannedLayer):
    """A parameter, such as a position embedding, minus its mean over the channels.

    The network adds the parameter to a residual stream whose channels have mean zero.
    """

    TENSORS = True

    @classmethod
    def replacing(cls, old: nn.Parameter, *, like: Tensor, dim: int) -> nn.Parameter:
        """Return the parameter minus its mean over the dimension `dim`, computed in float64."""
        if not isinstance(old, nn.Parameter):
            raise TypeError(f"a {type(old).__name__} is no parameter")

        value = old.detach().double()
        value = value - value.mean(dim, keepdim=True)
        target = like if like.dtype == torch.float64 else old
        return nn.Parameter(value.to(target), requires_grad=old.requires_grad)


class Ones(PlannedLayer):
    """Ones in place of a parameter that scaled the output of a linear layer.

    The linear layer has absorbed the parameter.
    """

    TENSORS = True

    @classmethod
    def replacing(cls, old: nn.Parameter, *, like: Tensor) -> nn.Parameter:
        """Return ones of the parameter's shape, which learn if the parameter did."""
        dtype = like.dtype if like.dtype == torch.float64 else old.dtype
        return nn.Parameter(torch.ones_like(old, dtype=dtype), requires_grad=old.requires_grad)
