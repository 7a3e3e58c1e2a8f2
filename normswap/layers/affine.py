"""Which modules are, in eval mode, an affine map per channel: y = act(s * x + t); and their s and t, in float64.

Ioffe & Szegedy 2015, section 3.1: at inference BatchNorm is y = gamma / sqrt(var + eps) * x + (beta - gamma * mean /
sqrt(var + eps)). A class counts when its `forward` is one that was read by a person, or computes the same as far as
can be measured (`unknown_norms`): any other forward may compute anything, and is refused by path.
"""

from __future__ import annotations

from typing import Any

import torch
from timm import layers as timm_layers
from timm.layers import norm_act, split_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap.layers import channel_norm, scalars, seats, site_norm, unknown_norms

_BATCHNORM_FORWARDS = {
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    site_norm.SiteNorm.forward,
    FrozenBatchNorm2d.forward,
    norm_act.BatchNormAct2d.forward,
    norm_act.SyncBatchNormAct.forward,
    norm_act.FrozenBatchNormAct2d.forward,
    split_batchnorm.SplitBatchNorm2d.forward,
}
_BATCHNORMS = (_BatchNorm, FrozenBatchNorm2d, norm_act.FrozenBatchNormAct2d)
LAYER_SCALES = (timm_layers.LayerScale, timm_layers.LayerScale2d)
FROZEN = (FrozenBatchNorm2d, norm_act.FrozenBatchNormAct2d)
_FUSED = (
    norm_act.BatchNormAct2d, norm_act.SyncBatchNormAct, norm_act.FrozenBatchNormAct2d, norm_act.GroupNormAct,
    norm_act.LayerNormAct2d,
)  # fmt: skip
_OURS = (seats.Scale, seats.ChannelAffine, seats.ChannelBias, site_norm.EvalNorm, scalars.ScalarBias)
_WITH_ACT = (
    seats.Vacant, seats.ChannelAffine, seats.ChannelBias, scalars.ScalarBias,
    site_norm.EvalNorm, site_norm.SiteNorm,
)  # fmt: skip
_OTHER_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` normalizes with population statistics in eval mode."""
    return isinstance(module, _BATCHNORMS) or unknown_norms.has_the_tensors(module)


def is_frozen(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm whose four tensors never change."""
    frozen = unknown_norms.has_the_tensors(module) and not module._parameters
    return isinstance(module, FROZEN) or (frozen and not isinstance(module, _BatchNorm))


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is any kind of normalization layer."""
    return is_batchnorm(module) or isinstance(module, _OTHER_NORMS)


def is_affine(module: nn.Module) -> bool:
    """Whether `module` is a per-channel affine map in eval mode, be it a BatchNorm or one of normswap's own layers."""
    return is_batchnorm(module) or isinstance(module, _OURS)


def channels(module: nn.Module) -> int:
    """Number of channels of a norm."""
    for name in ("num_features", "num_channels"):
        if isinstance(getattr(module, name, None), int):
            return getattr(module, name)
    weight = getattr(module, "weight", None)
    return weight.numel() if isinstance(weight, Tensor) else 0


def refusal(module: nn.Module) -> str | None:
    """Why the eval-mode affine map of this norm cannot be read, or None when it can."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which would be lost with it"
    if isinstance(module, _OURS):
        return None
    if not is_batchnorm(module):
        return f"{type(module).__name__} computes its statistics per sample"
    if not _was_read(module) and ("forward" in vars(module) or unknown_norms.eps(module) is None):
        return f"{type(module).__name__} has a forward of its own, which is not that of a BatchNorm"
    if module.running_mean is None or module.running_var is None:
        return "it has no running statistics (track_running_stats=False), so eval mode depends on the batch"
    return None


def _was_read(module: nn.Module) -> bool:
    return type(module).forward in _BATCHNORM_FORWARDS and "forward" not in vars(module)


def read(module: nn.Module, *, unit_gamma: bool = False) -> tuple[Tensor, Tensor]:
    """s and t of y = s * x + t, each of shape (C,) or (1,), float64; of a LayerNorm or RMSNorm, gamma and beta.

    Args:
        module: one for which `refusal` is None, or `channel_norm.refusal`.
        unit_gamma: read a BatchNorm as if gamma were 1 and beta 0 (the plain standardization).
    """
    if isinstance(module, seats.Scale):
        shift = torch.zeros_like(module.alpha) if module.bias is None else module.bias
        return module.alpha.detach().double(), shift.detach().double()
    if isinstance(module, scalars.ScalarBias):
        return torch.ones_like(module.bias).double(), module.bias.detach().double()
    if isinstance(module, seats.ChannelAffine):
        return module.weight.detach().double(), module.bias.detach().double()
    if isinstance(module, seats.ChannelBias):
        bias = module.bias.detach().double()
        return (torch.ones_like(bias) if module.sign is None else module.sign.double()), bias
    if isinstance(module, LAYER_SCALES):
        return module.gamma.detach().double(), torch.zeros_like(module.gamma, dtype=torch.float64)
    if channel_norm.channel_dim(module) is not None:
        return channel_norm.read(module)
    norm: Any = module
    mean, var = norm.running_mean.double(), norm.running_var.double()
    eps = norm.eps if _was_read(module) else unknown_norms.eps(module)
    scale = torch.rsqrt(var + eps)
    if unit_gamma:
        return scale, -mean * scale
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def split(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """s * x + t = magnitude * (sign * x + shift) with magnitude > 0, for moving the magnitude through a ReLU.

    A channel with s = 0, or so small that t / s leaves the range of `dtype`, becomes a constant: sign 0, magnitude 1.
    """
    scale, shift = read(module)
    limit = torch.finfo(dtype).max / 1024
    dead = (scale.abs() < torch.finfo(dtype).tiny * 1024) | (shift.abs() > scale.abs() * limit)
    magnitude = torch.where(dead, torch.ones_like(scale), scale.abs())
    sign = torch.where(dead, torch.zeros_like(scale), scale.sign())
    return magnitude, sign, shift / magnitude


def activation(module: nn.Module) -> nn.Module | None:
    """What a fused norm+act module applies after its affine map (dropout, then activation), or None."""
    if isinstance(module, _WITH_ACT):
        return module.act
    if not isinstance(module, _FUSED):
        return None
    parts = [part for part in (getattr(module, "drop", None), getattr(module, "act", None)) if part is not None]
    parts = [part for part in parts if not isinstance(part, nn.Identity)]
    return nn.Sequential(*parts) if len(parts) > 1 else (parts[0] if parts else None)


def moments(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of a BatchNorm's output: beta and |gamma| (Ioffe & Szegedy, section 3)."""
    norm: Any = module
    zeros = torch.zeros_like(norm.running_mean, dtype=torch.float64)
    gamma = zeros + 1 if norm.weight is None else norm.weight.detach().double()
    beta = zeros if norm.bias is None else norm.bias.detach().double()
    return beta, gamma.abs()
