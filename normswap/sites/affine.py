"""Which modules are, in eval mode, y = act(s * x + t) per channel, and their s and t in float64.

Ioffe & Szegedy 2015, section 3.1: at inference BatchNorm is
y = gamma / sqrt(var + eps) * x + (beta - gamma * mean / sqrt(var + eps)).

A person has read the `forward` of each known class. A class with another forward must be measured
to compute the same (`known_norms.measured_eps`), or it is refused by path.
"""

import copy
from typing import cast

import torch
from torch import Tensor, nn

from normswap.copying import doubled
from normswap.errors import RefusedError
from normswap.sites import known_norms, position_norms
from normswap.sites.activations import keeps_forward
from normswap.sites.known_norms import BatchNorm, Pair, ReadPair, Statistics
from normswap.sites.own_layer import OwnLayer


def is_batchnorm(module: nn.Module) -> bool:
    """Whether a module is a norm that in eval mode uses statistics kept from training."""
    kind = known_norms.kind_of(module)
    return kind is not None and kind.statistics is Statistics.POPULATION


def is_norm(module: nn.Module) -> bool:
    """Whether a module is any kind of normalization layer."""
    return known_norms.kind_of(module) is not None


def is_affine(module: nn.Module) -> bool:
    """Whether a module is y = act(s * x + t) in eval mode, as a norm or as normswap's own layer."""
    return is_affine_norm(module) or _own_affine(module) is not None


def is_affine_norm(module: nn.Module) -> bool:
    """Whether a module is a norm that computes y = act(s * x + t) in eval mode."""
    return is_batchnorm(module) or _registered_map(module) is not None


def is_registered(module: nn.Module) -> bool:
    """Whether the s and t of a module, y = s * x + t, are read by a function for its class.

    A user gives such a function to `register_norm`. A module that is measured to be a BatchNorm
    with tensors of other names (`known_norms.measured_roles`) has one, too.
    """
    return _registered_map(module) is not None


def has_moments(module: nn.Module) -> bool:
    """Whether a module is a norm that keeps the mean and variance of its input."""
    if not is_batchnorm(module):
        return False
    keeps_running_mean = getattr(module, "running_mean", None) is not None
    return _registered_moments(module) is not None or keeps_running_mean


def holds_statistics(module: nn.Module) -> bool:
    """Whether an affine module is a norm, or a layer of this package that has a norm's statistics.

    Such a module may become a plain scale and shift.
    """
    return is_affine_norm(module) or getattr(_own_affine(module), "HOLDS_STATISTICS", False)


def _own_affine(module: nn.Module) -> OwnLayer | None:
    """Return the module if it is a layer of this package that is affine in eval mode, or None."""
    if isinstance(module, OwnLayer) and module.AFFINE:
        return module
    return None


def _registered_map(module: nn.Module) -> ReadPair | None:
    """Return the function for a module's class that reads s and t of y = s * x + t, or None.

    It was given to `register_norm`, or comes from a measurement (`known_norms.measured_roles`).
    """
    return getattr(known_norms.kind_of(module), "affine", None)


def _registered_moments(module: nn.Module) -> ReadPair | None:
    """Return the function for a norm's class that reads its mean and variance, or None.

    It was given to `register_norm`, or comes from a measurement (`known_norms.measured_roles`).
    """
    return getattr(known_norms.kind_of(module), "moments", None)


def channels(module: nn.Module) -> int:
    """Return the number of channels of a norm, or 0 if the norm does not state it.

    The statistics decide: pruning by hand leaves `num_features` as it was.
    """
    statistics_mean = module._buffers.get("running_mean")
    if statistics_mean is not None and statistics_mean.ndim == 1:
        return statistics_mean.numel()

    for name in ("num_features", "num_channels"):
        count = getattr(module, name, None)
        if isinstance(count, int):
            return count

    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return weight.numel()
    # A BatchNorm may have its tensors under other names.
    if known_norms.measured_roles(module) is not None:
        scale, _ = read_map(module)
        return scale.numel()
    return 0


def refusal(module: nn.Module) -> str | None:
    """Return why a module cannot be read as y = s * x + t per channel, or None if it can."""
    class_name = type(module).__name__
    if module._forward_hooks or module._forward_pre_hooks:
        return "it has forward hooks, which would be lost with it"

    # The class decides first, then the forward, then the tensors.
    if _own_affine(module) is not None or _registered_map(module) is not None:
        return None
    if isinstance(module, OwnLayer) and module.NORMALIZES:
        return f"{class_name} bends what it reads"
    if not is_batchnorm(module):
        return f"{class_name} computes its statistics per sample"

    if _has_unknown_forward(module):
        return (
            f"{class_name} has a forward of its own, which is not that of a BatchNorm as far as"
            f" its tensors say; if you know better: normswap.register_norm({class_name}, ...)"
        )
    if module.running_mean is None or module.running_var is None:
        return (
            "it has no running statistics (track_running_stats=False), so eval mode depends on the"
            " batch"
        )
    return None


def _has_unknown_forward(norm: nn.Module) -> bool:
    """Whether a BatchNorm's forward may compute something else than a BatchNorm does.

    It does not if the forward is that of a known class, or if a trial run shows that the results
    agree. For an instance with a `forward` of its own, a trial run does not count.
    """
    if known_norms.is_believed(norm):
        return False
    return "forward" in vars(norm) or known_norms.measured_eps(norm) is None


def has_average(module: nn.Module) -> bool:
    """Whether a BatchNorm can take the place of this norm and equal it for an average sample.

    This holds for a norm with channels in dimension 1 that takes its statistics from each sample or
    position. Its forward must be that of a known class. A norm with forward hooks, or one that
    computes in float32 whatever its input is, cannot be replaced.
    """
    kind = known_norms.kind_of(module)
    # `single` says that the norm computes in float32 whatever its input is.
    if kind is None or kind.dim != 1 or kind.single:
        return False
    if kind.statistics not in (Statistics.SAMPLE, Statistics.POSITION):
        return False

    has_hooks = bool(module._forward_hooks or module._forward_pre_hooks)
    # `is_believed` says that the forward is that of a known class.
    return known_norms.is_believed(module) and not has_hooks


def read_map(module: nn.Module, *, unit_gamma: bool = False) -> Pair:
    """Return s and t of y = s * x + t, each of shape (C,) or (1,), in float64.

    For a LayerNorm, RMSNorm or LayerScale these are gamma and beta.

    Args:
        module: A module for which `refusal`, or `position_norms.refusal`, returns None.
        unit_gamma: Whether a BatchNorm is read as if gamma were 1 and beta 0. Then s and t compute
            the plain standardization (x - mean) / sqrt(var + eps).
    """
    # normswap's own layers say themselves what they compute.
    own_layer = _own_affine(module)
    if own_layer is not None:
        return own_layer.as_affine()

    # The function for a registered class reads s and t with gamma and beta in them.
    registered = _registered_map(module)
    if registered is not None and not unit_gamma:
        scale, shift = registered(module)
        return scale.detach().double(), shift.detach().double()

    if position_norms.channel_dim(module) is not None:
        return position_norms.gamma_and_beta(module)
    if position_norms.scaled_dim(module) is not None:
        gamma = position_norms.layer_scale_gamma(module)
        return gamma, torch.zeros_like(gamma)

    return _batchnorm_map(cast(BatchNorm, module), unit_gamma=unit_gamma)


def _batchnorm_map(norm: BatchNorm, *, unit_gamma: bool) -> Pair:
    """Return s = gamma / sqrt(var + eps) and t = beta - mean * s of a BatchNorm, each (C,).

    Args:
        norm: The BatchNorm.
        unit_gamma: Whether gamma counts as 1 and beta as 0.
    """
    module = cast(nn.Module, norm)
    mean, var = statistics(module)
    scale = torch.rsqrt(var + epsilon(module))
    if unit_gamma:
        return scale, -mean * scale

    # Products and differences with float64 are float64.
    if norm.weight is not None:
        scale = scale * norm.weight.detach()
    if norm.bias is None:
        return scale, -mean * scale
    return scale, norm.bias.detach() - mean * scale


def statistics(norm: nn.Module) -> Pair:
    """Return mean and variance per channel, (C,) float64, of the input of a norm.

    Args:
        norm: A norm for which `has_moments` is true.
    """
    registered = _registered_moments(norm)
    if registered is not None:
        mean, var = registered(norm)
    else:
        batchnorm = cast(BatchNorm, norm)
        mean, var = batchnorm.running_mean, batchnorm.running_var
    return mean.detach().double(), var.detach().double()


def epsilon(norm: nn.Module) -> float:
    """Return the epsilon of a BatchNorm that can be read (`refusal` returns None).

    A foreign class may state its epsilon only inside its forward, so its epsilon is measured.
    """
    if not known_norms.is_believed(norm):
        measured = known_norms.measured_eps(norm)
        if measured is not None:
            return measured
        if roles := known_norms.measured_roles(norm):
            return roles.eps
    return float(getattr(norm, "eps", 1e-5))


def split(module: nn.Module, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Write s * x + t as magnitude * (sign * x + shift), and return the three, each (C,).

    The magnitude |s| is positive, so it passes a ReLU. If s is 0, or so small that t / s overflows
    `dtype`, the channel becomes the constant t: its sign is 0 and its magnitude 1.

    Args:
        module: A module whose s and t can be read.
        dtype: The dtype that the shift must fit into.
    """
    scale, shift = read_map(module)

    # t / s must stay below the largest number of `dtype`, and |s| above the smallest, each with a
    # margin of 1024. float16 has no room for that: what a dead channel leaves out, s * x, must not
    # be larger than rounding.
    info = torch.finfo(dtype)
    margin = min(1024, info.eps / info.tiny)
    limit = info.max / margin
    is_tiny = scale.abs() < info.tiny * margin
    overflows = shift.abs() > scale.abs() * limit
    # A dead channel is the constant t, whatever x is.
    dead = is_tiny | overflows

    magnitude = torch.where(dead, torch.ones_like(scale), scale.abs())
    sign = torch.where(dead, torch.zeros_like(scale), scale.sign())
    return magnitude, sign, shift / magnitude


def activation(module: nn.Module) -> nn.Module | None:
    """Return the activation that a fused norm+act module applies after its affine map, or None.

    If the module has a dropout before the activation, both are returned in one Sequential.
    """
    if isinstance(module, OwnLayer):
        return getattr(module, "act", None)
    kind = known_norms.kind_of(module)
    if kind is None or not kind.activation:
        return None

    # timm's norms have an Identity where they apply no dropout or no activation.
    layers: list[nn.Module] = []
    for name in ("drop", "act"):
        layer = getattr(module, name, None)
        if layer is not None and not keeps_forward(layer, (nn.Identity,)):
            layers.append(layer)

    if len(layers) > 1:
        return nn.Sequential(*layers)
    return layers[0] if layers else None


def copied_activation(module: nn.Module) -> nn.Module | None:
    """Return a copy of the activation that a module applies after its affine map, or None."""
    return copy.deepcopy(activation(module))


def moments(module: nn.Module) -> Pair:
    """Return mean and standard deviation per channel, (C,) float64, of the output of a norm.

    If the input has the running statistics, the output has mean beta and deviation |gamma|
    (Ioffe & Szegedy, section 3).

    Args:
        module: A norm for which `has_moments` is true.
    """
    # The formula of Ioffe & Szegedy needs the tensors weight and bias. A class whose s and t are
    # read by a function may have others.
    if _registered_map(module) is None:
        norm = cast(BatchNorm, module)
        return output_moments(norm.running_mean, norm.weight, norm.bias)

    mean, var = statistics(module)
    scale, shift = read_map(module)
    return scale * mean + shift, scale.abs() * var.sqrt()


def output_moments(running_mean: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Pair:
    """Return mean and standard deviation, (C,) float64, of a BatchNorm's output: beta and |gamma|.

    Source: Ioffe & Szegedy 2015, section 3.

    Args:
        running_mean: The norm's running mean (C,). Only its shape is read.
        gamma: The learned scale (C,). None means 1.
        beta: The learned shift (C,). None means 0.
    """
    zeros = torch.zeros_like(running_mean, dtype=torch.float64)
    return doubled(beta, zeros), doubled(gamma, zeros + 1).abs()


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return what a conversion records of an affine norm: tensors and settings, copied, by name.

    The record has the norm's parameters and buffers, its eps and its momentum (None becomes NaN).
    For a registered class it has the statistics of input and output as well. The record of any
    other module is empty.
    """
    if not is_affine_norm(module):
        return {}

    recorded: dict[str, Tensor] = {
        **dict(nn.Module.named_parameters(module, recurse=False)),
        **dict(nn.Module.named_buffers(module, recurse=False)),
    }
    for name in ("eps", "momentum"):
        if hasattr(module, name):
            value = getattr(module, name)
            # A tensor cannot hold None.
            if value is None:
                value = float("nan")
            recorded[name] = torch.tensor(value, dtype=torch.float64)

    # These cannot be computed from the other tensors without the functions of the class.
    if _registered_map(module) is not None and has_moments(module):
        mean, var = statistics(module)
        output_mean, output_std = moments(module)
        recorded = {
            "running_mean": mean,
            "running_var": var,
            **recorded,
            "output_mean": output_mean,
            "output_std": output_std,
        }
    return {name: tensor.detach().clone() for name, tensor in recorded.items()}


def set_shift(norm: nn.Module, shift: Tensor, where: slice = slice(None)) -> None:
    """Set beta of a norm, in place, so that the norm computes s * x + shift with its present s.

    Args:
        norm: The norm.
        shift: The new shift of the channels `where`.
        where: The channels that are set. The others keep their beta. By default all are set.

    Raises:
        RefusedError: The norm has no beta.
    """
    beta = getattr(norm, "bias", None)
    if not isinstance(beta, Tensor):
        raise RefusedError("cannot unfold", "the norm has no beta to take up what was learned")

    old_shift = read_map(norm)[1][where]
    beta[where].copy_(beta.double()[where] + shift - old_shift)
    _check_set(norm, "beta", read_map(norm)[1][where], shift)


def set_gamma_to_one(norm: nn.Module, where: slice, chosen: Tensor) -> None:
    """Set gamma of some channels of a norm to 1, in place. Its t changes with it.

    Args:
        norm: The norm.
        where: The channels among which some are chosen.
        chosen: Which of the channels `where` are set.

    Raises:
        RefusedError: The norm has no gamma.
    """
    _gamma(norm)[where].masked_fill_(chosen, 1.0)


def set_map(norm: nn.Module, scale: Tensor, shift: Tensor) -> None:
    """Set gamma and beta of a norm, in place, so that it computes scale * x + shift.

    Args:
        norm: The norm.
        scale: The new s (C,).
        shift: The new t (C,).

    Raises:
        RefusedError: The norm has no gamma or no beta.
    """
    # s is proportional to gamma, so s is read once with gamma = 1.
    gamma = _gamma(norm)
    gamma.fill_(1)
    unit_scale = read_map(norm)[0]
    gamma.copy_(scale / unit_scale)
    _check_set(norm, "gamma", read_map(norm)[0], scale)
    set_shift(norm, shift)


def _gamma(norm: nn.Module) -> Tensor:
    """Return gamma of a norm.

    Raises:
        RefusedError: The norm has no gamma.
    """
    gamma = getattr(norm, "weight", None)
    if not isinstance(gamma, Tensor):
        raise RefusedError("cannot unfold", "the norm has no gamma to take up what was learned")
    return gamma


def _check_set(norm: nn.Module, name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise RefusedError if a norm does not compute what its new gamma or beta should give.

    Only a norm whose map a registered function reads is checked.

    Args:
        norm: The norm whose parameter was set.
        name: The name of the parameter: gamma or beta.
        actual: The s or t that is read from the norm now.
        expected: The s or t that the parameter should give.
    """
    # Other norms compute s and t from gamma and beta by the BatchNorm's formula.
    if _registered_map(norm) is None:
        return
    if not torch.allclose(actual, expected.to(actual), rtol=1e-4, atol=1e-5):
        raise RefusedError(
            "cannot unfold", f"the {name} of a {type(norm).__name__} does not set its map alone"
        )
