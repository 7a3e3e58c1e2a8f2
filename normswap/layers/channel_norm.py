"""LayerNorm, RMSNorm and LayerScale: how each is recognized, and the layers that replace them.

LayerNorm is y = gamma (x - mean) / sqrt(var + eps) + beta (Ba et al. 2016, arXiv:1607.06450).
RMSNorm leaves mean and beta out: y = gamma x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019,
arXiv:1910.07467). For x of mean zero both are equal, except for beta.

LayerScale is y = gamma x (Touvron et al. 2021, arXiv:2103.17239, section 2). timm's LayerScale is
recognized by its forward. Another library's LayerScale, such as transformers' in DINOv2, is
recognized by measurement: a module without children, whose only tensor has one number per channel,
must multiply its input by that tensor.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, TypeGuard, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.layers.known_norms import KINDS, Statistics, at_each_position, is_believed, kind_of
from normswap.layers.planned_layer import OwnLayer, PlannedLayer

# What a module should return: a function of a float64 copy of it and an input (..., C).
ExpectedOutput: TypeAlias = Callable[[Any, Tensor], Tensor]


class ShiftedRMSNorm(nn.RMSNorm):
    """RMSNorm over dimension -1 or 1, with a beta where no linear layer can absorb it."""

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
        """Return the norm of x (..., C) over its last dimension."""
        y = F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        if self.bias is not None:
            y = y + self.bias
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, shift={self.bias is not None}, dim={self.dim}"


KINDS[ShiftedRMSNorm] = at_each_position(-1, centres=False)
_LAYER_SCALES = {timm_layers.LayerScale.forward: -1, timm_layers.LayerScale2d.forward: 1}
# The answers of `measured_dim`, by module.
_MEASURED: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def channel_dim(module: nn.Module) -> int | None:
    """Return the dimension along which a LayerNorm or RMSNorm normalizes: -1 or 1.

    The result is None for any other module, for a norm over more than the channels, for a norm that
    always computes in float32, and for a norm that applies an activation.
    """
    kind = kind_of(module)
    if kind is None or kind.statistics is not Statistics.POSITION or kind.single:
        return None
    if "forward" in vars(module):
        return None

    shape: tuple[int, ...] = getattr(module, "normalized_shape", ())
    if len(shape) != 1:
        return None

    if not is_believed(module):
        # The LayerNorms of ConvNeXt, SAM and others permute in forward, so they are measured.
        if not isinstance(module, nn.LayerNorm):
            return None
        return measured_dim(module, shape[0], _layer_norm)
    if kind.activation:
        return None
    return module.dim if isinstance(module, ShiftedRMSNorm) else kind.dim


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return what torch's LayerNorm computes for x (..., C) with the tensors of `norm`."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


@torch.no_grad()
def measured_dim(module: nn.Module, channels: int, expected: ExpectedOutput) -> int | None:
    """Return the dimension, -1 or 1, along which a module is measured to compute `expected`.

    A float64 copy of the module, with random parameters, runs on an input for each dimension. None
    says that the copy computes something else along both. Each module is measured once.

    Args:
        module: The module to measure.
        channels: The number C of its channels.
        expected: A function of the copy and an input (..., C) that returns the expected output.
    """
    if module not in _MEASURED:
        _MEASURED[module] = None
        # This is foreign code: it may refuse to be copied, or an input of this shape.
        with suppress(Exception):
            twin = copy.deepcopy(module).double().eval()
            generator = torch.Generator().manual_seed(1)
            for parameter in twin.parameters():
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values)

            for dim in (-1, 1):
                x = probe(channels, dim)
                y = expected(twin, x.movedim(dim, -1)).movedim(-1, dim)
                # A module for (N, C, H, W) may refuse (N, H, W, C), and the other way round.
                with suppress(Exception):
                    if torch.allclose(twin(x.clone()), y, rtol=1e-9, atol=1e-12):
                        _MEASURED[module] = dim
    return _MEASURED[module]


def probe(channels: int, dim: int) -> Tensor:
    """Return 4-D float64 noise with the channels in dimension 1 or -1.

    No other dimension has the size of the channels, so a layer that normalizes another dimension
    gives another output, or fails.
    """
    rows, columns = [size for size in (3, 5, 7) if size != channels][:2]
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, rows, columns, channels, generator=generator, dtype=torch.float64)
    return noise.movedim(-1, dim).contiguous()


def scaled_dim(module: nn.Module) -> int | None:
    """Return the dimension in which a LayerScale has its channels: -1, 1, or None if it is none."""
    if isinstance(module, OwnLayer) or "forward" in vars(module):
        return None
    if module._modules or module._buffers:
        return None

    # The only tensor must be one parameter (C,).
    parameters = list(module._parameters.values())
    if len(parameters) != 1 or parameters[0] is None:
        return None
    gamma = parameters[0]
    if gamma.ndim != 1 or gamma.numel() < 2:
        return None

    known_dim = _LAYER_SCALES.get(type(module).forward)
    if known_dim is not None:
        return known_dim
    return measured_dim(module, gamma.numel(), _layer_scale)


def _layer_scale(module: nn.Module, x: Tensor) -> Tensor:
    """Return x (..., C) multiplied by the only parameter of a module."""
    return x * layer_scale_gamma(module)


def layer_scale_gamma(module: nn.Module) -> Tensor:
    """Return the gamma (C,) of a LayerScale, in float64."""
    (parameter,) = module.parameters()
    return parameter.detach().double()


def is_layernorm(module: nn.Module) -> TypeGuard[nn.LayerNorm]:
    """Whether a module is a LayerNorm whose `channel_dim` is known."""
    return isinstance(module, nn.LayerNorm) and channel_dim(module) is not None


def is_at_each_position(module: nn.Module) -> bool:
    """Whether a module is any kind of LayerNorm or RMSNorm."""
    kind = kind_of(module)
    return kind is not None and kind.statistics is Statistics.POSITION


def refusal(module: nn.Module) -> str | None:
    """Return why gamma and beta of a LayerNorm or RMSNorm cannot be changed, or None."""
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


def gamma_and_beta(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return gamma and beta of a LayerNorm or RMSNorm, each (C,), in float64.

    They are ones and zeros where the norm has none.
    """
    layer = cast(nn.LayerNorm, norm)
    ones = torch.ones(layer.normalized_shape, dtype=torch.float64)
    beta = getattr(layer, "bias", None)
    return doubled(layer.weight, ones), doubled(beta, torch.zeros_like(ones))


class BareNorm(PlannedLayer):
    """A LayerNorm or RMSNorm of the same class, without gamma and beta."""

    @classmethod
    def replacing(cls, old: nn.LayerNorm | nn.RMSNorm, *, like: Tensor) -> nn.Module:
        # deepcopy takes None for each of these parameters from its memo.
        without_parameters = {id(parameter): None for parameter in old.parameters()}
        new = copy.deepcopy(old, without_parameters)
        new.elementwise_affine = False
        return new


class RMSNorm(PlannedLayer):
    """The RMSNorm that equals a LayerNorm on values of mean zero.

    It is torch's own, or a `ShiftedRMSNorm` where beta stays or the channels are not last.
    """

    @classmethod
    def replacing(cls, old: nn.LayerNorm, *, like: Tensor, shift: bool = False) -> nn.RMSNorm:
        """Return the RMSNorm with the LayerNorm's gamma.

        Args:
            old: A LayerNorm over the channels.
            like: An empty tensor with the model's dtype and device, for a norm without gamma.
            shift: Whether beta stays in the norm. Otherwise a linear layer absorbs it.
        """
        dim = channel_dim(old)
        if dim is None:
            raise TypeError(f"a {type(old).__name__} is no LayerNorm over the channels")
        (channels,) = old.normalized_shape

        scale = old.weight is not None
        if shift or dim != -1:
            new: nn.RMSNorm = ShiftedRMSNorm(
                channels, eps=old.eps, scale=scale, shift=shift, dim=dim
            )
        else:
            new = nn.RMSNorm(channels, eps=old.eps, elementwise_affine=scale)
        new.to(like if old.weight is None else old.weight.detach()[:0])

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
        dtype = like.dtype if like.dtype == torch.float64 else old.dtype
        return nn.Parameter(torch.ones_like(old, dtype=dtype), requires_grad=old.requires_grad)
