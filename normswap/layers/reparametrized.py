"""Linear layers that compute their weight in each forward, and their plain equals in eval mode.

These are weight standardization (timm's `StdConv2d`, and `ScaledStdConv2d` of NF networks, Brock et
al. 2021, arXiv:2101.08692), torch's weight norm and spectral norm, BatchNorm in tune mode
(`TunedConv2d`) and Fixup's scalar input bias (`InputBiasedConv2d` ...). Their weight depends on
parameters alone: in eval mode it is a constant, which can be stored instead ("baked").
"""

from collections import OrderedDict
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normswap import copying
from normswap.layers.planned_layer import GAMMA, Linearity, OwnLayer
from normswap.sites.own_forwards import CONVOLUTIONS

_STANDARDIZED = (
    timm_layers.StdConv2d,
    StdConv2dSame,
    timm_layers.ScaledStdConv2d,
    ScaledStdConv2dSame,
)
# Attributes and children that only the computation of the weight needs; a plain layer has none.
_STALE = ("scale", "eps", "gain_init", "same_pad", "parametrizations")


class Gain(OwnLayer):
    """One learnable scalar that multiplies a weight behind a spectral norm.

    A spectral norm brings the weight's largest singular value to 1, and the scalar brings it back.

    Source: Miyato et al. 2018, arXiv:1802.05957.
    """

    ROLES = {"alpha": "gain"}

    def __init__(self, alpha: Tensor) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha.detach().clone().view(1))

    def forward(self, weight: Tensor) -> Tensor:
        """Map (O, I, ...) to (O, I, ...)."""
        return self.alpha * weight


class Standardized(OwnLayer):
    """Base of convolutions with scaled weight standardization and timm's parameters.

    If the parameter `mean` (O,) is not None, mean / sqrt(fan_in) is added to the standardized
    filters, one number to each.
    """

    ROLES = {"mean": "filter_mean"}
    mean: nn.Parameter | None
    weight: Tensor

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *others: Any, **named: Any
    ) -> None:
        """Load the tensors, and convert a `mean` that an older version of normswap stored.

        The older version stored it in the shape (O, 1, ...), and not times sqrt(fan_in).
        """
        name = f"{prefix}mean"
        mean = state_dict.get(name)
        if self.mean is not None and isinstance(mean, Tensor) and mean.ndim > 1:
            fan_in = self.weight[0].numel()
            state_dict[name] = (mean.double() * fan_in**0.5).flatten().to(mean.dtype)
        super()._load_from_state_dict(state_dict, prefix, *others, **named)


class StandardizedTensors(Protocol):
    """The tensors and settings of a standardized convolution.

    timm's `StdConv2d` has no gain and no scale.
    """

    weight: Tensor
    gain: Tensor
    scale: float
    eps: float
    mean: Tensor
    out_channels: int
    kernel_size: tuple[int, ...]


class TunedConv2d(OwnLayer, nn.Conv2d):
    """A convolution with its BatchNorm in tune mode: gamma and beta learn, statistics are frozen.

    W' = gamma / sqrt(var + eps) W, b' = beta + gamma / sqrt(var + eps) (b - mean): Efficient ConvBN
    Blocks, arXiv:2305.11624, section 3.3.
    """

    ROLES = {"gamma": GAMMA, "beta": "beta"}
    gamma: nn.Parameter
    beta: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    norm_eps: float

    def folded(self) -> tuple[Tensor, Tensor]:
        """Return weight and bias of the plain convolution that computes what this layer does."""
        scale = self.gamma * torch.rsqrt(self.running_var + self.norm_eps)
        offset = -self.running_mean
        if self.bias is not None:
            offset = self.bias - self.running_mean
        return self.weight * scale.view(-1, 1, 1, 1), self.beta + scale * offset

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, H, W) to (N, O, H', W')."""
        output: Tensor = self._conv_forward(x, *self.folded())
        return output


class InputBiased(OwnLayer):
    """Base of layers that add one learnable scalar to their input: Fixup, Zhang et al. 2019."""

    ROLES = {"in_bias": "scalar_bias"}
    in_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, ...) to (N, O, ...)."""
        output: Tensor = super().forward(x + self.in_bias.to(x))
        return output

    @staticmethod
    def of(layer: Linearity) -> nn.Module:
        """Let a layer add a learnable scalar to its input, at first 0, and return the layer.

        The layer's class is changed in place.
        """
        shifted: nn.Module = layer
        shifted.__class__ = INPUT_BIASED[type(layer)]
        shifted.register_parameter("in_bias", nn.Parameter(torch.zeros(1).to(layer.weight)))
        return shifted


class InputBiasedConv1d(InputBiased, nn.Conv1d):
    """A Conv1d that adds one learnable scalar to its input."""


class InputBiasedConv2d(InputBiased, nn.Conv2d):
    """A Conv2d that adds one learnable scalar to its input."""


class InputBiasedConv3d(InputBiased, nn.Conv3d):
    """A Conv3d that adds one learnable scalar to its input."""


class InputBiasedConv2dSame(InputBiased, timm_layers.Conv2dSame):
    """A `Conv2dSame` of timm that adds one learnable scalar to its input."""


class InputBiasedLinear(InputBiased, nn.Linear):
    """A Linear that adds one learnable scalar to its input."""


INPUT_BIASED: dict[type[Linearity], type[InputBiased]] = {
    nn.Conv1d: InputBiasedConv1d,
    nn.Conv2d: InputBiasedConv2d,
    nn.Conv3d: InputBiasedConv3d,
    timm_layers.Conv2dSame: InputBiasedConv2dSame,
    nn.Linear: InputBiasedLinear,
    timm_layers.Linear: InputBiasedLinear,
}
_KNOWN_PARAMETRIZATIONS = (parametrizations._WeightNorm, parametrizations._SpectralNorm, Gain)


def is_reparametrized(module: nn.Module) -> bool:
    """Whether `plain` can make a layer of a plain class with the same weight and bias.

    This holds for a convolution or linear layer that computes its weight in each forward (by weight
    norm, spectral norm, standardized filters, tune mode), or that adds a scalar to its input.
    """
    # A forward that was set on the instance may compute anything.
    if "forward" in vars(module):
        return False
    if parametrize.is_parametrized(module):
        return _has_known_parametrization(module)
    if isinstance(module, Standardized):
        return True

    # A subclass with a forward of its own may compute anything, too.
    kinds = (*_STANDARDIZED, TunedConv2d, InputBiased)
    known_forwards = {kind.forward for kind in kinds}
    return isinstance(module, kinds) and type(module).forward in known_forwards


def _has_known_parametrization(module: nn.Module) -> bool:
    """Whether a layer's parametrizations are of the weight alone, and of known classes.

    Known are torch's weight norm and spectral norm, and `Gain`, a scalar that multiplies a weight.
    """
    parametrized = dict(module.get_submodule("parametrizations").named_children())
    if list(parametrized) != ["weight"]:
        return False
    layers = nn.Module.children(parametrized["weight"])
    return all(isinstance(layer, _KNOWN_PARAMETRIZATIONS) for layer in layers)


def keeps_input_bias(module: nn.Module) -> bool:
    """Whether a layer has an input bias that no output bias can replace.

    The layer pads its input with zeros, and the zeros do not get the bias.
    """
    if not isinstance(module, InputBiased) or not module.in_bias.any():
        return False
    if isinstance(module, timm_layers.Conv2dSame):
        return True

    padding: str | tuple[int, ...] = getattr(module, "padding", ())
    return padding == "same" or (padding != "valid" and any(padding))


def plain(module: Linearity) -> Linearity:
    """Return a float64 layer of a plain class that computes what `module` does in eval mode.

    Args:
        module: A layer that computes its weight in each forward, for instance by weight norm, or
            that adds a scalar to its input (`is_reparametrized`).
    """
    twin = copying.duplicate(module, {}).double().eval()
    weight_and_bias = _computed_tensors(twin)
    new = _without_tensors(twin, plain_class(twin))

    # Weight and bias learn if any parameter of the layer did, as they may be computed from all.
    learns = any(parameter.requires_grad for parameter in nn.Module.parameters(module))
    for name, value in zip(("weight", "bias"), weight_and_bias, strict=True):
        parameter: nn.Parameter | None = None
        if value is not None:
            parameter = nn.Parameter(value.detach().clone(), requires_grad=learns)
        new.register_parameter(name, parameter)
    return new


def _without_tensors(layer: Linearity, kind: type[Linearity]) -> Linearity:
    """Return a layer of class `kind` with the attributes of `layer`, but without its tensors.

    Attributes that only the computation of the weight needs (`_STALE`) are left out.
    """
    # The constructors of these classes differ, so the attributes are moved to a bare instance. The
    # hook with which torch's weight norm reads older checkpoints is left out.
    new = kind.__new__(kind)
    for name, value in vars(layer).items():
        if name not in ("_parameters", "_buffers", "_modules", *_STALE):
            new.__dict__[name] = value
    children = {name: child for name, child in layer._modules.items() if name not in _STALE}
    new.__dict__.update(
        _parameters={}, _buffers={}, _modules=children, _load_state_dict_pre_hooks=OrderedDict()
    )
    return new


def plain_class(module: Linearity) -> type[Linearity]:
    """Return the class of the layer that `plain` makes, such as Conv2d for a `TunedConv2d`.

    For a layer with a weight of its own, this is the class of the layer itself.
    """
    if not is_reparametrized(module):
        return type(module)
    # torch gives a parametrized layer a class of its own, above the layer's class.
    if parametrize.is_parametrized(module):
        return cast(type[Linearity], parametrize.type_before_parametrizations(module))
    # Each plain class has a variant that adds a scalar to its input.
    if isinstance(module, InputBiased):
        return next(kind for kind, shifted in INPUT_BIASED.items() if type(module) is shifted)
    if isinstance(module, TunedConv2d):
        return nn.Conv2d
    # Only standardized convolutions are left. Those with `same_pad` pad as timm's `Conv2dSame`.
    if getattr(module, "same_pad", False):
        return timm_layers.Conv2dSame
    return next(kind for kind in CONVOLUTIONS if isinstance(module, kind))


def _computed_tensors(module: Linearity) -> tuple[Tensor, Tensor | None]:
    """Return the weight and bias that a layer computes with in eval mode."""
    if isinstance(module, TunedConv2d):
        return module.folded()

    # W (x + c) + b = W x + (b + c sum(W)). There is a bias also while c is 0, so that one plan
    # gives one structure for all weights.
    if isinstance(module, InputBiased):
        shift = module.in_bias * module.weight.flatten(1).sum(1)
        if module.bias is not None:
            shift = module.bias + shift
        return module.weight, shift

    if isinstance(module, (*_STANDARDIZED, Standardized)):
        return effective(module), module.bias
    # torch computes the weight of a parametrized layer when the attribute is read.
    return module.weight, module.bias


def effective(conv: nn.Module) -> Tensor:
    """Return the weight (O, I / groups, ...) that a standardized convolution computes with.

    The formula is timm's. The gain and the filters' means are applied if the layer has them.
    """
    layer = cast(StandardizedTensors, conv)
    gain: Tensor | None = None
    if hasattr(layer, "gain"):
        gain = (layer.gain * layer.scale).view(-1)

    # timm standardizes by a BatchNorm in training mode, whose channels are the filters.
    flat = layer.weight.reshape(1, layer.out_channels, -1)
    flat = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=layer.eps)
    weight: Tensor = flat.reshape_as(layer.weight)
    if keeps_mean(layer):
        # The means are stored divided by the scale.
        mean = layer.mean * layer.scale
        # A symbolic trace does not know the weight's shape, but `kernel_size` is a plain tuple.
        weight = weight + mean.view(-1, 1, *(1,) * len(layer.kernel_size))
    return weight


def keeps_mean(module: object) -> bool:
    """Whether a standardized convolution adds a mean to each filter."""
    return isinstance(module, Standardized) and module.mean is not None
