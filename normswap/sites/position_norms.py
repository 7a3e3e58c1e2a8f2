"""LayerNorm, RMSNorm and LayerScale of any library: how each is recognized and read.

LayerNorm is y = gamma (x - mean) / sqrt(var + eps) + beta (Ba et al. 2016, arXiv:1607.06450).
RMSNorm leaves mean and beta out: y = gamma x / sqrt(mean(x^2) + eps) (Zhang & Sennrich 2019,
arXiv:1910.07467).

LayerScale is y = gamma x (Touvron et al. 2021, arXiv:2103.17239, section 2). timm's LayerScale is
recognized by its forward. Another library's LayerScale, such as transformers' in DINOv2, is
recognized by measurement: a module without children, whose only tensor has one number per channel,
must multiply its input by that tensor. LayerNorms and RMSNorms that users write are measured by
`known_norms.measured_at_each_position`.
"""

import copy
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.sites.known_norms import Statistics, is_believed, kind_of
from normswap.sites.own_layer import OwnLayer

# What a module should return: a function of a float64 copy of it and an input (..., C).
ExpectedOutput: TypeAlias = Callable[[Any, Tensor], Tensor]

_LAYER_SCALES = {timm_layers.LayerScale.forward: -1, timm_layers.LayerScale2d.forward: 1}
# The answers of `measured_dim`, by module.
_MEASURED: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()


def channel_dim(module: nn.Module) -> int | None:
    """Return the dimension along which a LayerNorm or RMSNorm normalizes: -1 or 1.

    The result is None for any other module, for a norm over more than the channels, for a norm that
    always computes in float32, and for a norm that applies an activation.
    """
    kind = kind_of(module)
    # `single` says that the norm always computes in float32.
    if kind is None or kind.statistics is not Statistics.POSITION or kind.single:
        return None
    if "forward" in vars(module):
        return None
    # An eps in the record says that a trial run has found the kind of this norm, with its dimension
    # (`known_norms.measured_at_each_position`).
    if kind.eps is not None:
        return kind.dim

    # With a longer shape the norm takes its statistics over more than the channels.
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
    # Norms of the same class may have their channels in different dimensions.
    if kind.states_dim:
        stated: int = module.dim  # type: ignore[assignment]
        return stated
    return kind.dim


def _layer_norm(norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """Return what torch's LayerNorm computes for x (..., C) with the tensors of `norm`."""
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


@torch.no_grad()
def measured_dim(module: nn.Module, channels: int, expected: ExpectedOutput) -> int | None:
    """Return the dimension, -1 or 1, along which a module computes what `expected` returns.

    It is found by a trial: a float64 copy of the module, with random parameters, runs on an input
    for each dimension. The result is None if the copy computes something else along both. It is
    None, too, if the copy computes it along both: such a module takes the dimension that has C
    numbers, so what it computes depends on the size of its input. Each module is tried once, and
    its result is kept.

    Args:
        module: The module that is tried.
        channels: The number C of its channels.
        expected: A function of the copy and an input (..., C) that returns the expected output.
    """
    # A module on "meta" has no values. It may get some later, and is tried then.
    if any(parameter.is_meta for parameter in nn.Module.parameters(module)):
        return None
    if module not in _MEASURED:
        dims: list[int] = []
        # This is foreign code: it may refuse to be copied, or an input of this shape.
        with suppress(Exception):
            twin = copy.deepcopy(module).double().eval()
            generator = torch.Generator().manual_seed(1)
            for parameter in nn.Module.parameters(twin):
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(values)

            for dim in (-1, 1):
                x = probe(channels, dim)
                y = expected(twin, x.movedim(dim, -1)).movedim(-1, dim)
                # A module for (N, C, H, W) may refuse (N, H, W, C), and the other way round.
                with suppress(Exception):
                    if torch.allclose(twin(x.clone()), y, rtol=1e-9, atol=1e-12):
                        dims.append(dim)
        _MEASURED[module] = dims[0] if len(dims) == 1 else None
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
    (parameter,) = nn.Module.parameters(module)
    return parameter.detach().double()


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

    They are ones and zeros where the norm has none. These are on the CPU if it has neither.
    """
    layer = cast(nn.LayerNorm, norm)
    beta = getattr(layer, "bias", None)
    own = layer.weight if layer.weight is not None else beta
    shape, device = (layer.normalized_shape, None) if own is None else (own.shape, own.device)
    ones = torch.ones(shape, dtype=torch.float64, device=device)
    return doubled(layer.weight, ones), doubled(beta, torch.zeros_like(ones))


def epsilon(norm: nn.Module) -> float:
    """Return the eps of a LayerNorm or RMSNorm."""
    kind = kind_of(norm)
    if kind is not None and kind.eps is not None:
        return kind.eps
    return cast(nn.LayerNorm, norm).eps
