"""Which modules and functions are activations, and which of them commute with a positive factor."""

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import nn

_DROPOUTS = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    timm_layers.DropPath,
    timm_layers.DropBlock2d,
)
_IDENTITIES = (nn.Identity, *_DROPOUTS)
_MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool2d)
_MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
_POOLS = (*_MAX_POOLS, *_MEAN_POOLS, timm_layers.BlurPool2d)
_RELUS = (nn.ReLU, nn.LeakyReLU)
# A node of a graph names the function that it calls, or the method of a tensor by a string.
RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
HOMOGENEOUS_FUNCTIONS = (*RELU_FUNCTIONS, F.leaky_relu)
_ACTIVATION_FILES = ("torch.nn.modules.activation", "timm.layers.activations")
_FUNCTION_NAMES = {"relu", "leaky_relu", "silu", "gelu", "elu", "relu6", "hardtanh", "hardswish"}


def keeps_forward(module: object, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is an instance of one of `kinds` and still runs that class's forward."""
    if "forward" in getattr(module, "__dict__", {}):
        return False
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def is_homogeneous(act: nn.Module | None) -> bool:
    """Whether act(c x) = c act(x) for every c > 0 in eval mode.

    This holds for ReLU, LeakyReLU, identities, and sequences of them. None counts as the identity.
    """
    if act is None:
        return True
    if keeps_forward(act, (nn.Sequential,)):
        return all(is_homogeneous(layer) for layer in nn.Module.children(act))
    return keeps_forward(act, (*_RELUS, *_IDENTITIES))


def is_identity(module: object) -> bool:
    """Whether a module returns its input unchanged in eval mode, as dropout does."""
    return keeps_forward(module, _IDENTITIES)


def is_pool(module: object) -> bool:
    """Whether a module is a mean or maximum pooling, f(c x) = c f(x) for every c > 0."""
    return keeps_forward(module, _POOLS)


def is_activation(module: nn.Module) -> bool:
    """Whether the class of a module is one of torch's or timm's activations."""
    return type(module).__module__.startswith(_ACTIVATION_FILES)


def is_activation_call(target: object) -> bool:
    """Whether a function, or a method given by its name, is an activation."""
    # The functions that write in place have the same name with `_` at the end, such as `relu_`.
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_") in _FUNCTION_NAMES
