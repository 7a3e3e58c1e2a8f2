"""LayerNorm, RMSNorm and LayerScale: what is known of them, and what can replace them.

y = gamma (x - mean) / sqrt(var + eps) + beta, Ba et al. 2016, arXiv:1607.06450; RMSNorm (Zhang &
Sennrich 2019, arXiv:1910.07467) leaves mean and beta out: y = gamma x / sqrt(mean(x^2) + eps). For
x of mean zero both are equal. LayerScale is y = gamma x (Touvron et al. 2021, arXiv:2103.17239,
section 2). timm's is known by its forward. Another library's (transformers' DINOv2) is a module
without children whose only tensor has one number per channel, if it is measured to multiply by
that.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeGuard
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.layers.known_norms import KINDS, Statistics, at_each_position, is_believed, kind_of
from normswap.layers.planned_layer import OwnLayer, PlannedLayer


class ShiftedRMSNorm(nn.RMSNorm):
    """RMSNorm over the last dimension or (dim=1) the second, perhaps with a beta that no linear
    layer can absorb.
    """

    def __init__(self, channels: int, *, eps: float, scale: bool, shift: bool, dim: int) -> None:
        super().__init__(channels, eps=eps, elementwise_affine=scale)
        self.bias = nn.Parameter(torch.zeros(channels)) if shift else None
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        """Map (..., C), or (N, C, ...) with dim=1, to the same shape."""
        # Core ML has no movedim, not even of a dimension to itself.
        if self.dim == -1:
            return self._scaled(x)
        return self._scaled(x.movedim(self.dim, -1)).movedim(-1, self.dim)

    def _scaled(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shift={self.bias is not None}, dim={self.dim}"


KINDS[ShiftedRMSNorm] = at_each_position(-1, centres=False)
_LAYER_SCALES = {timm_layers.LayerScale.forward: -1, timm_layers.LayerScale2d.forward: 1}
_MEASURED: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def channel_dim(module: nn.Module) -> int | None:
    """Along which dimension a LayerNorm or RMSNorm normalizes: -1 or 1; None for any other module."""
    kind = kind_of(module)
    if (
        kind is None
        or kind.statistics is not Statistics.POSITION
        or kind.single
        or "forward" in vars(module)
    ):
        return None
    shape: tuple[int, ...] = getattr(module, "normalized_shape", ())
    if not is_believed(module):
        # The LayerNorms of ConvNeXt, SAM and others permute in forward.
        if not isinstance(module, nn.LayerNorm) or len(shape) != 1:
            return None
        return measured_dim(
            module,
            shape[0],
            lambda twin, x: F.layer_norm(x, shape, twin.weight, twin.bias, twin.eps),
        )
    if kind.activation or len(shape) != 1:
        return None
    return module.dim if isinstance(module, ShiftedRMSNorm) else kind.dim


@torch.no_grad()
def measured_dim(
    module: nn.Module, channels: int, expected: Callable[[Any, Tensor], Tensor]
) -> int | None:
    """The dimension, -1 or 1, along which a module computes `expected(copy, x)`, x (..., C)
    float64; None: neither.
    """
    if module not in _MEASURED:
        _MEASURED[module] = None
        # A module may refuse to be copied, or an input of this shape.
        with suppress(Exception):
            twin = copy.deepcopy(module).double().eval()
            generator = torch.Generator().manual_seed(1)
            for parameter in twin.parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                )
            for dim in (-1, 1):
                x = probe(channels, dim)
                y = expected(twin, x.movedim(dim, -1)).movedim(-1, dim)
                with suppress(Exception):
                    if torch.allclose(twin(x.clone()), y, rtol=1e-9, atol=1e-12):
                        _MEASURED[module] = dim
    return _MEASURED[module]


def probe(channels: int, dim: int) -> Tensor:
    """Noise (4-D, float64) with the channels in dimension 1 or -1, and no other dimension of that
    size.
    """
    rows, columns = [size for size in (3, 5, 7) if size != channels][:2]
    noise = torch.randn(
        1, rows, columns, channels, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    return noise.movedim(-1, dim).contiguous()


def scaled_dim(module: nn.Module) -> int | None:
    """Along which dimension a LayerScale has its channels: -1 or 1; None for any other module."""
    if (
        isinstance(module, OwnLayer)
        or "forward" in vars(module)
        or module._modules
        or module._buffers
    ):
        return None
    parameters = list(module._parameters.values())
    if (
        len(parameters) != 1
        or parameters[0] is None
        or parameters[0].ndim != 1
        or parameters[0].numel() < 2
    ):
        return None
    if (dim := _LAYER_SCALES.get(type(module).forward)) is not None:
        return dim
    return measured_dim(module, parameters[0].numel(), lambda twin, x: x * layer_scale_gamma(twin))


def layer_scale_gamma(module: nn.Module) -> Tensor:
    """The gamma (C,) of a LayerScale, in float64."""
    (parameter,) = module.parameters()
    return parameter.detach().double()


def is_layernorm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether `module` is one of the LayerNorms that `channel_dim` knows."""
    return isinstance(module, nn.LayerNorm) and channel_dim(module) is not None


def is_at_each_position(module: nn.Module) -> bool:
    """Whether `module` is a LayerNorm or RMSNorm, of whatever kind."""
    kind = kind_of(module)
    return kind is not None and kind.statistics is Statistics.POSITION


def refusal(module: nn.Module) -> str | None:
    """Why the gamma and beta of this LayerNorm or RMSNorm cannot be touched, or None when they can."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which see its output"
    kind = kind_of(module)
    if kind is not None and kind.single:
        return "it computes in float32 whatever the network's precision is"
    if channel_dim(module) is None:
        return (
            f"{type(module).__name__} has a forward of its own, or normalizes more than the"
            " channels"
        )
    return None


def read(norm: Any) -> tuple[Tensor, Tensor]:
    """gamma and beta, each of shape (C,), float64; ones and zeros where a LayerNorm or RMSNorm has
    none.
    """
    beta = getattr(norm, "bias", None)
    ones = torch.ones(norm.normalized_shape, dtype=torch.float64)
    return doubled(norm.weight, ones), doubled(beta, torch.zeros_like(ones))


class BareNorm(PlannedLayer):
    """A LayerNorm or RMSNorm without gamma and beta. It keeps its class."""

    @classmethod
    def replacing(cls, old: nn.LayerNorm | nn.RMSNorm, *, like: Tensor) -> nn.Module:
        new = copy.deepcopy(old, {id(parameter): None for parameter in old.parameters()})
        new.elementwise_affine = False
        return new


class RMSNorm(PlannedLayer):
    """The RMSNorm that a LayerNorm is on values of mean zero: torch's own, or with a shift a
    `ShiftedRMSNorm`.
    """

    @classmethod
    def replacing(cls, old: nn.LayerNorm, *, like: Tensor, shift: bool = False) -> nn.RMSNorm:
        """`shift`: beta stays here; otherwise a linear layer absorbs it."""
        dim = channel_dim(old)
        if dim is None:
            raise TypeError(f"a {type(old).__name__} is no LayerNorm over the channels")
        (channels,) = old.normalized_shape
        scale = old.weight is not None
        new = nn.RMSNorm(channels, eps=old.eps, elementwise_affine=scale)
        if shift or dim != -1:
            new = ShiftedRMSNorm(channels, eps=old.eps, scale=scale, shift=shift, dim=dim)
        new.to(like if old.weight is None else old.weight.detach()[:0])
        for name in ("weight", "bias"):
            mine = getattr(new, name, None)
            source = getattr(old, name, None)
            if mine is not None and source is not None:
                mine.copy_(source)
        return new


class Centred(PlannedLayer):
    """A parameter that is added to a stream of mean zero over its channels, such as a position
    embedding.
    """

    TENSORS = True

    @classmethod
    def replacing(cls, old: nn.Parameter, *, like: Tensor, dim: int) -> nn.Parameter:
        if not isinstance(old, nn.Parameter):
            raise TypeError(f"a {type(old).__name__} is no parameter")
        value = old.detach().double()
        value = value - value.mean(dim, keepdim=True)
        return nn.Parameter(
            value.to(like if like.dtype == torch.float64 else old), requires_grad=old.requires_grad
        )


class Ones(PlannedLayer):
    """A parameter that scales the output of a linear layer, which has taken it in."""

    TENSORS = True

    @classmethod
    def replacing(cls, old: nn.Parameter, *, like: Tensor) -> nn.Parameter:
        ones = torch.ones_like(old, dtype=like.dtype if like.dtype == torch.float64 else old.dtype)
        return nn.Parameter(ones, requires_grad=old.requires_grad)
