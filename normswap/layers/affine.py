"""Which modules are, in eval mode, an affine map per channel: y = act(s * x + t); and their s and t, in float64.

Ioffe & Szegedy 2015, section 3.1: at inference BatchNorm is y = gamma / sqrt(var + eps) * x + (beta - gamma * mean /
sqrt(var + eps)). A class counts when its `forward` is one that was read by a person, or computes the same as far as
can be measured (`unknown_norms`): any other forward may compute anything, and is refused by path.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from timm.layers import norm_act, split_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap.errors import RefusedError
from normswap.layers import channel_norm, layer_scale, unknown_norms
from normswap.layers.known_norms import known
from normswap.layers.own import OwnLayer
from normswap.provenance import output_moments

_BATCHNORM_FORWARDS = {
    _BatchNorm.forward,
    nn.SyncBatchNorm.forward,
    FrozenBatchNorm2d.forward,
    norm_act.BatchNormAct2d.forward,
    norm_act.SyncBatchNormAct.forward,
    norm_act.FrozenBatchNormAct2d.forward,
    split_batchnorm.SplitBatchNorm2d.forward,
}
_FROZEN = (FrozenBatchNorm2d, norm_act.FrozenBatchNormAct2d)
_FUSED = (
    norm_act.BatchNormAct2d, norm_act.SyncBatchNormAct, norm_act.FrozenBatchNormAct2d, norm_act.GroupNormAct,
    norm_act.LayerNormAct2d,
)  # fmt: skip
_OTHER_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.LocalResponseNorm, nn.RMSNorm)


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` normalizes with population statistics in eval mode."""
    return isinstance(module, (_BatchNorm, *_FROZEN)) or _looks_like_one(module)


def is_frozen(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm whose four tensors never change, also in training mode."""
    return isinstance(module, _FROZEN) or (
        _looks_like_one(module) and not module._parameters and not isinstance(module, _BatchNorm)
    )


def _looks_like_one(module: nn.Module) -> bool:
    return not isinstance(module, OwnLayer) and unknown_norms.has_the_tensors(module)


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is any kind of normalization layer."""
    return is_batchnorm(module) or isinstance(module, _OTHER_NORMS) or known(module) is not None


def is_affine(module: nn.Module) -> bool:
    """Whether `module` is a per-channel affine map in eval mode, be it a norm or one of normswap's own layers."""
    return is_batchnorm(module) or _own(module) is not None or _vouched(module)


def holds_statistics(module: nn.Module) -> bool:
    """Whether an affine module is a norm, or one lives on in it, so that it may become a plain scale and shift."""
    own = _own(module)
    return own.HOLDS_STATISTICS if own is not None else is_batchnorm(module) or _vouched(module)


def _own(module: nn.Module) -> OwnLayer | None:
    return module if isinstance(module, OwnLayer) and module.AFFINE else None


def _vouched(module: nn.Module) -> bool:
    found = known(module)
    return found is not None and found.read is not None


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
    if _own(module) is not None or _vouched(module):
        return None
    if isinstance(module, OwnLayer) and module.NORMALIZES:
        return f"{type(module).__name__} bends what it reads"
    if not is_batchnorm(module):
        return f"{type(module).__name__} computes its statistics per sample"
    if known(module) is None and not _was_read(module):
        name = type(module).__name__
        if "forward" in vars(module) or unknown_norms.eps(module) is None:
            why = f"{name} has a forward of its own, which is not that of a BatchNorm"
            return f"{why} as far as its tensors say; if you know better: normswap.register_norm({name}, ...)"
    if module.running_mean is None or module.running_var is None:
        return "it has no running statistics (track_running_stats=False), so eval mode depends on the batch"
    return None


def _was_read(module: nn.Module) -> bool:
    own = isinstance(module, OwnLayer)
    return (own or type(module).forward in _BATCHNORM_FORWARDS) and "forward" not in vars(module)


def read(module: nn.Module, *, unit_gamma: bool = False) -> tuple[Tensor, Tensor]:
    """s and t of y = s * x + t, each of shape (C,) or (1,), float64; of a LayerNorm or RMSNorm, gamma and beta.

    Args:
        module: one for which `refusal` is None, or `channel_norm.refusal`.
        unit_gamma: read a BatchNorm as if gamma were 1 and beta 0 (the plain standardization).
    """
    own, vouched = _own(module), known(module)
    if own is not None:
        return own.as_affine()
    if vouched is not None and vouched.read is not None:
        scale, shift = vouched.read(module)
        return scale.detach().double(), shift.detach().double()
    if channel_norm.channel_dim(module) is not None:
        return channel_norm.read(module)
    if layer_scale.scaled_dim(module) is not None:
        gamma = layer_scale.gamma(module)
        return gamma, torch.zeros_like(gamma)
    norm: Any = module
    mean, var = norm.running_mean.double(), norm.running_var.double()
    scale = torch.rsqrt(var + epsilon(norm))
    if unit_gamma:
        return scale, -mean * scale
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.detach().double()


def epsilon(norm: nn.Module) -> float:
    """What a BatchNorm for which `refusal` is None adds to the variance; some name it nowhere but in their forward."""
    one: Any = norm
    found: Any = one.eps if _was_read(norm) or known(norm) is not None else unknown_norms.eps(norm)
    return found


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
    if isinstance(module, OwnLayer):
        return getattr(module, "act", None)
    if not isinstance(module, _FUSED):
        return None
    parts = [part for part in (getattr(module, "drop", None), getattr(module, "act", None)) if part is not None]
    parts = [part for part in parts if not isinstance(part, nn.Identity)]
    return nn.Sequential(*parts) if len(parts) > 1 else (parts[0] if parts else None)


def copied_activation(module: nn.Module) -> nn.Module | None:
    """A copy of what `activation` gives."""
    return copy.deepcopy(activation(module))


def moments(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of a BatchNorm's output: beta and |gamma| (Ioffe & Szegedy, section 3)."""
    norm: Any = module
    return output_moments(norm.running_mean, norm.weight, norm.bias)


def set_shift(norm: nn.Module, shift: Tensor, scale: Tensor, part: slice = slice(None)) -> None:
    """Set the beta of a BatchNorm, in place, so that its t is `shift`, in a part of its channels.

    Raises:
        RefusedError: it has no beta.
    """
    one: Any = norm
    if one.bias is None:
        raise RefusedError("cannot unfold", "the norm has no beta to take up what was learned")
    one.bias[part].copy_(shift + one.running_mean.double()[part] * scale)
