"""Linear layers whose weight is computed at each step, and the plain layer that each of them is in
eval mode.

Weight standardization (timm's `StdConv2d`, and `ScaledStdConv2d` of NF networks, Brock et al. 2021,
arXiv:2101.08692), torch's weight norm and spectral norm, BatchNorm in tune mode (`TunedConv2d`),
Fixup's scalar input bias (`ShiftedConv2d` ...). Their weight depends on parameters alone: in eval
mode it is a constant, which can be baked.
"""

import copy
from collections import OrderedDict
from typing import Any, cast

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from normswap.layers.planned_layer import GAMMA, Linearity, OwnLayer

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STANDARDIZED = (
    timm_layers.StdConv2d,
    StdConv2dSame,
    timm_layers.ScaledStdConv2d,
    ScaledStdConv2dSame,
)
_STALE = ("scale", "eps", "gain_init", "same_pad", "parametrizations")


class Gain(OwnLayer):
    """One learnable scalar on a weight: what a spectral norm takes away (Miyato et al. 2018,
    arXiv:1802.05957).
    """

    ROLES = {"alpha": "gain"}

    def __init__(self, alpha: Tensor) -> None:
        super().__init__()
        self.alpha = nn.Parameter(alpha.detach().clone().view(1))

    def forward(self, weight: Tensor) -> Tensor:
        """Map (O, I, ...) to (O, I, ...)."""
        return self.alpha * weight


class Standardized(OwnLayer):
    """A convolution with scaled weight standardization, with timm's parameters and `mean` (O, 1,
    ...) or None.
    """

    ROLES = {"mean": "filter_mean"}
    mean: nn.Parameter | None


class TunedConv2d(OwnLayer, nn.Conv2d):
    """A convolution with its BatchNorm in tune mode: gamma learns, statistics are frozen.

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
        """Weight and bias of the convolution that this is."""
        scale = self.gamma * torch.rsqrt(self.running_var + self.norm_eps)
        offset = -self.running_mean if self.bias is None else self.bias - self.running_mean
        return self.weight * scale.view(-1, 1, 1, 1), self.beta + scale * offset

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, H, W) to (N, O, H', W')."""
        output: Tensor = self._conv_forward(x, *self.folded())
        return output


class InputBiased(OwnLayer):
    """A linear layer that adds one learnable scalar to its input first: Fixup, Zhang et al. 2019."""

    ROLES = {"in_bias": "scalar_bias"}
    in_bias: nn.Parameter

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, ...) to (N, O, ...)."""
        output: Tensor = super().forward(x + self.in_bias.to(x))
        return output

    @staticmethod
    def of(layer: Linearity) -> nn.Module:
        """The layer itself, from now on one that shifts its input, by 0 at first."""
        shifted: nn.Module = layer
        shifted.__class__ = SHIFTED[type(layer)]
        shifted.register_parameter("in_bias", nn.Parameter(torch.zeros(1).to(layer.weight)))
        return shifted


class ShiftedConv1d(InputBiased, nn.Conv1d):
    """Conv1d with a scalar input bias."""


class ShiftedConv2d(InputBiased, nn.Conv2d):
    """Conv2d with a scalar input bias."""


class ShiftedConv3d(InputBiased, nn.Conv3d):
    """Conv3d with a scalar input bias."""


class ShiftedConv2dSame(InputBiased, timm_layers.Conv2dSame):
    """Conv2dSame with a scalar input bias."""


class ShiftedLinear(InputBiased, nn.Linear):
    """Linear with a scalar input bias."""


SHIFTED: dict[type[Linearity], type[InputBiased]] = {
    nn.Conv1d: ShiftedConv1d,
    nn.Conv2d: ShiftedConv2d,
    nn.Conv3d: ShiftedConv3d,
    timm_layers.Conv2dSame: ShiftedConv2dSame,
    nn.Linear: ShiftedLinear,
    timm_layers.Linear: ShiftedLinear,
}
_KNOWN = (parametrizations._WeightNorm, parametrizations._SpectralNorm, Gain)


def is_reparametrized(module: nn.Module) -> bool:
    """Whether the weight of this linear layer is computed at each step, in a known way."""
    if "forward" in vars(module):
        return False
    if parametrize.is_parametrized(module):
        parametrized = dict(module.get_submodule("parametrizations").named_children())
        return list(parametrized) == ["weight"] and all(
            isinstance(layer, _KNOWN) for layer in parametrized["weight"].children()
        )
    if isinstance(module, Standardized):
        return True
    forwards = {kind.forward for kind in (*_STANDARDIZED, TunedConv2d, InputBiased)}
    return (
        isinstance(module, (*_STANDARDIZED, TunedConv2d, InputBiased))
        and type(module).forward in forwards
    )


def keeps_input_bias(module: nn.Module) -> bool:
    """Whether it has an input bias and zero padding, so that a bias of the output cannot replace
    it.
    """
    if not isinstance(module, InputBiased) or not module.in_bias.any():
        return False
    padding: Any = getattr(module, "padding", ())
    return (
        padding == "same"
        or (padding != "valid" and any(padding))
        or isinstance(module, timm_layers.Conv2dSame)
    )


def plain(module: Linearity) -> Linearity:
    """The layer of the plain class that computes what a reparametrized one does in eval mode, in
    float64.
    """
    twin = copy.deepcopy(module).double().eval()
    tensors = _tensors(twin)
    kind = plain_class(twin)
    new = kind.__new__(kind)
    children = {name: child for name, child in twin._modules.items() if name not in _STALE}
    dictionaries = ("_parameters", "_buffers", "_modules")
    new.__dict__.update(
        {name: value for name, value in vars(twin).items() if name not in (*dictionaries, *_STALE)}
    )
    new.__dict__.update(
        _parameters={}, _buffers={}, _modules=children, _load_state_dict_pre_hooks=OrderedDict()
    )
    grad = any(parameter.requires_grad for parameter in module.parameters())
    for name, value in zip(("weight", "bias"), tensors, strict=True):
        parameter = (
            None if value is None else nn.Parameter(value.detach().clone(), requires_grad=grad)
        )
        new.register_parameter(name, parameter)
    return new


def plain_class(module: Linearity) -> type[Linearity]:
    """The class of the layer that `plain` makes of this one (its own, if it is plain already)."""
    if not is_reparametrized(module):
        return type(module)
    if parametrize.is_parametrized(module):
        return cast(type[Linearity], parametrize.type_before_parametrizations(module))
    if isinstance(module, InputBiased):
        return next(kind for kind, shifted in SHIFTED.items() if type(module) is shifted)
    if isinstance(module, TunedConv2d):
        return nn.Conv2d
    if getattr(module, "same_pad", False):
        return timm_layers.Conv2dSame
    return next(kind for kind in CONVOLUTIONS if isinstance(module, kind))


def _tensors(module: Linearity) -> tuple[Tensor, Tensor | None]:
    if isinstance(module, TunedConv2d):
        return module.folded()
    if isinstance(module, InputBiased) and module.in_bias.any():
        shift = module.in_bias * module.weight.flatten(1).sum(1)
        if module.bias is not None:
            shift = module.bias + shift
        return module.weight, shift
    if isinstance(module, (*_STANDARDIZED, Standardized)):
        return effective(module), module.bias
    return module.weight, module.bias


def effective(conv: Any) -> Tensor:
    """The weight (O, I / groups, ...) of a standardized convolution: timm's formula, with gain and
    means if any.
    """
    gain: Tensor | None = None
    if hasattr(conv, "gain"):
        gain = (conv.gain * conv.scale).view(-1)
    flat = conv.weight.reshape(1, conv.out_channels, -1)
    flat = F.batch_norm(flat, None, None, weight=gain, training=True, momentum=0.0, eps=conv.eps)
    weight: Tensor = flat.reshape_as(conv.weight)
    if keeps_mean(conv):
        weight = weight + conv.mean
    return weight


def keeps_mean(module: object) -> bool:
    """Whether its filters need not sum to zero."""
    return isinstance(module, Standardized) and module.mean is not None
