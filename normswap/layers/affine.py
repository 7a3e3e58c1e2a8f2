"""Which modules are, in eval mode, an affine map per channel: y = act(s * x + t); and their s and
t, in float64.

Ioffe & Szegedy 2015, section 3.1: at inference BatchNorm is y = gamma / sqrt(var + eps) * x + (beta
- gamma * mean / sqrt(var + eps)). A person has read the `forward` of each known class; another
forward must be measured to compute the same (`known_norms`), or is refused by path.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.copying import doubled
from normswap.errors import RefusedError
from normswap.layers import channel_norm, known_norms
from normswap.layers.activations import keeps_forward
from normswap.layers.known_norms import BatchNorm, Pair, Read, Statistics
from normswap.layers.planned_layer import OwnLayer


def is_batchnorm(module: nn.Module) -> bool:
    """Whether `module` normalizes with population statistics in eval mode."""
    kind = known_norms.kind_of(module)
    return kind is not None and kind.statistics is Statistics.POPULATION


def is_frozen(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm whose four tensors never change, also in training mode."""
    return is_batchnorm(module) and not isinstance(module, _BatchNorm) and not module._parameters


def is_norm(module: nn.Module) -> bool:
    """Whether `module` is any kind of normalization layer."""
    return known_norms.kind_of(module) is not None


def is_affine(module: nn.Module) -> bool:
    """Whether `module` is a per-channel affine map in eval mode, be it a norm or one of normswap's
    own layers.
    """
    return is_affine_norm(module) or _own(module) is not None


def is_affine_norm(module: nn.Module) -> bool:
    """Whether `module` is a norm that is a per-channel affine map in eval mode."""
    return is_batchnorm(module) or _registered_map(module) is not None


def is_registered(module: nn.Module) -> bool:
    """Whether somebody registered how to read the map of `module`, which may be no BatchNorm in
    training.
    """
    return _registered_map(module) is not None


def has_moments(module: nn.Module) -> bool:
    """Whether `module` is a norm that keeps mean and variance of its input."""
    return is_batchnorm(module) and (
        _moments(module) is not None or getattr(module, "running_mean", None) is not None
    )


def holds_statistics(module: nn.Module) -> bool:
    """Whether an affine module is a norm, or has a norm's statistics, and may become a plain scale
    and shift.
    """
    return is_affine_norm(module) or getattr(_own(module), "HOLDS_STATISTICS", False)


def _own(module: nn.Module) -> OwnLayer | None:
    if isinstance(module, OwnLayer) and module.AFFINE:
        return module
    return None


def _registered_map(module: nn.Module) -> Read | None:
    return getattr(known_norms.kind_of(module), "affine", None)


def _moments(module: nn.Module) -> Read | None:
    return getattr(known_norms.kind_of(module), "moments", None)


def channels(module: nn.Module) -> int:
    """Number of channels of a norm."""
    for name in ("num_features", "num_channels"):
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight.numel()
    return 0


def refusal(module: nn.Module) -> str | None:
    """Why the eval-mode affine map of this norm cannot be read, or None when it can."""
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which would be lost with it"
    if _own(module) is not None or _registered_map(module) is not None:
        return None
    if isinstance(module, OwnLayer) and module.NORMALIZES:
        return f"{type(module).__name__} bends what it reads"
    if not is_batchnorm(module):
        return f"{type(module).__name__} computes its statistics per sample"
    if not known_norms.is_believed(module):
        name = type(module).__name__
        if "forward" in vars(module) or known_norms.measured_eps(module) is None:
            why = f"{name} has a forward of its own, which is not that of a BatchNorm"
            return (
                f"{why} as far as its tensors say; if you know better:"
                f" normswap.register_norm({name}, ...)"
            )
    if module.running_mean is None or module.running_var is None:
        return (
            "it has no running statistics (track_running_stats=False), so eval mode depends on the"
            " batch"
        )
    return None


def has_average(module: nn.Module) -> bool:
    """Whether it is a norm with statistics per sample or position that a BatchNorm can replace on
    average.
    """
    kind = known_norms.kind_of(module)
    if (
        kind is None
        or kind.statistics not in (Statistics.SAMPLE, Statistics.POSITION)
        or kind.dim != 1
        or kind.single
    ):
        return False
    hooks = module._forward_hooks or module._forward_pre_hooks
    return (
        known_norms.is_believed(module)
        and not hooks
        and not getattr(module, "track_running_stats", False)
    )


def read(module: nn.Module, *, unit_gamma: bool = False) -> Pair:
    """s and t of y = s * x + t, each of shape (C,) or (1,), float64; of a LayerNorm or RMSNorm,
    gamma and beta.

    Args:
        module: one for which `refusal` is None, or `channel_norm.refusal`.
        unit_gamma: read a BatchNorm as if gamma were 1 and beta 0 (the plain standardization).
    """
    layer = _own(module)
    registered = _registered_map(module)
    if layer is not None:
        return layer.as_affine()
    if registered is not None and not unit_gamma:
        scale, shift = registered(module)
        return scale.detach().double(), shift.detach().double()
    if channel_norm.channel_dim(module) is not None:
        return channel_norm.read(module)
    if channel_norm.scaled_dim(module) is not None:
        gamma = channel_norm.layer_scale_gamma(module)
        return gamma, torch.zeros_like(gamma)
    norm = cast(BatchNorm, module)
    mean, var = statistics(module)
    scale = torch.rsqrt(var + epsilon(module))
    if unit_gamma:
        return scale, -mean * scale
    if norm.weight is not None:
        scale = scale * norm.weight.detach().double()
    shift = -mean * scale
    return scale, shift + doubled(norm.bias, torch.zeros_like(shift))


def statistics(norm: nn.Module) -> Pair:
    """Mean and variance per channel, (C,) float64, of what a norm reads, for which `has_moments` is
    true.
    """
    moments = _moments(norm)
    batchnorm = cast(BatchNorm, norm)
    if moments is None:
        return batchnorm.running_mean.detach().double(), batchnorm.running_var.detach().double()
    mean, var = moments(norm)
    return mean.detach().double(), var.detach().double()


def epsilon(norm: nn.Module) -> float:
    """The epsilon of a BatchNorm for which `refusal` is None; some name it nowhere but in their
    forward.
    """
    if (
        not known_norms.is_believed(norm)
        and (measured := known_norms.measured_eps(norm)) is not None
    ):
        return measured
    return float(getattr(norm, "eps", 1e-5))


def split(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The (magnitude, sign, shift) of s * x + t = magnitude * (sign * x + shift), magnitude > 0,
    which passes a ReLU.

    A channel with s = 0, or so small that t / s overflows `dtype`, becomes a constant: sign 0,
    magnitude 1.
    """
    scale, shift = read(module)
    limit = torch.finfo(dtype).max / 1024
    dead = (scale.abs() < torch.finfo(dtype).tiny * 1024) | (shift.abs() > scale.abs() * limit)
    magnitude = torch.where(dead, torch.ones_like(scale), scale.abs())
    sign = torch.where(dead, torch.zeros_like(scale), scale.sign())
    return magnitude, sign, shift / magnitude


def activation(module: nn.Module) -> nn.Module | None:
    """The activation that a fused norm+act module applies after its affine map (dropout, then
    activation), or None.
    """
    if isinstance(module, OwnLayer):
        return getattr(module, "act", None)
    kind = known_norms.kind_of(module)
    if kind is None or not kind.activation:
        return None
    layers = [
        layer
        for layer in (getattr(module, "drop", None), getattr(module, "act", None))
        if layer is not None
    ]
    layers = [layer for layer in layers if not keeps_forward(layer, (nn.Identity,))]
    if len(layers) > 1:
        return nn.Sequential(*layers)
    return next(iter(layers), None)


def copied_activation(module: nn.Module) -> nn.Module | None:
    """A copy of the activation (`activation`)."""
    return copy.deepcopy(activation(module))


def moments(module: nn.Module) -> Pair:
    """Mean and deviation of a norm's output, where `has_moments`: beta and |gamma| (Ioffe &
    Szegedy, section 3).
    """
    norm = cast(BatchNorm, module)
    if _registered_map(module) is None:
        return output_moments(norm.running_mean, norm.weight, norm.bias)
    mean, var = statistics(module)
    scale, shift = read(module)
    return scale * mean + shift, scale.abs() * var.sqrt()


def output_moments(running_mean: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Pair:
    """Mean and deviation (C,), float64, of a BatchNorm's output: beta and |gamma| (Ioffe & Szegedy
    2015, section 3).
    """
    zeros = torch.zeros_like(running_mean, dtype=torch.float64)
    return doubled(beta, zeros), doubled(gamma, zeros + 1).abs()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Copies of an affine norm's tensors, eps and momentum (None as NaN), and registered
    statistics, for the record.
    """
    if not is_affine_norm(module):
        return {}
    own = {
        **dict(module.named_parameters(recurse=False)),
        **dict(module.named_buffers(recurse=False)),
    }
    for name in ("eps", "momentum"):
        if hasattr(module, name):
            value = getattr(module, name)
            own[name] = torch.tensor(float("nan") if value is None else value, dtype=torch.float64)
    if _registered_map(module) is not None and has_moments(module):
        mean, var = statistics(module)
        out_mean, out_std = moments(module)
        own = {
            "running_mean": mean,
            "running_var": var,
            **own,
            "output_mean": out_mean,
            "output_std": out_std,
        }
    return {name: tensor.detach().clone() for name, tensor in own.items()}


def set_shift(norm: nn.Module, shift: Tensor, where: slice = slice(None)) -> None:
    """Set a norm's beta, in place, so that t is `shift` in the channels `where`; raises
    RefusedError: no beta.
    """
    beta = getattr(norm, "bias", None)
    if not isinstance(beta, Tensor):
        raise RefusedError("cannot unfold", "the norm has no beta to take up what was learned")
    beta[where].copy_(beta.double()[where] + shift - read(norm)[1][where])
    _check_read(norm, "beta", read(norm)[1][where], shift)


def set_map(norm: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Set gamma and beta of a norm, in place, so that s and t are these; raises RefusedError: it
    lacks one.
    """
    gamma = getattr(norm, "weight", None)
    if not isinstance(gamma, Tensor):
        raise RefusedError("cannot unfold", "the norm has no gamma to take up what was learned")
    gamma.fill_(1)
    gamma.copy_(scale / read(norm)[0])
    _check_read(norm, "gamma", read(norm)[0], scale)
    set_shift(norm, shift)


def _check_read(norm: nn.Module, name: str, now: Tensor, expected: Tensor) -> None:
    """Raise RefusedError where gamma or beta of a registered class does not act as a BatchNorm's."""
    if _registered_map(norm) is not None and not torch.allclose(
        now, expected.to(now), rtol=1e-4, atol=1e-5
    ):
        raise RefusedError(
            "cannot unfold", f"the {name} of a {type(norm).__name__} does not set its map alone"
        )
