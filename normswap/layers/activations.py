"""Which modules and functions are activations, and which of them a positive factor passes: ReLU,
LeakyReLU.
"""

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
_RELUS = (nn.ReLU, nn.LeakyReLU)
# What a graph calls them: functions, and names of methods.
RELU_FUNCTIONS = (F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_")
HOMOGENEOUS_FUNCTIONS = (*RELU_FUNCTIONS, F.leaky_relu)
_MODULES = ("torch.nn.modules.activation", "timm.layers.activations")
_NAMES = {"relu", "leaky_relu", "silu", "gelu", "elu", "relu6", "hardtanh", "hardswish"}


def keeps_forward(module: object, kinds: tuple[type[nn.Module], ...]) -> bool:
    """Whether a module is of one of these classes and has the forward of that class."""
    if "forward" in getattr(module, "__dict__", {}):
        return False
    return any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)


def is_homogeneous(act: nn.Module | None) -> bool:
    """Whether act(c x) = c act(x) for every c > 0: ReLU, LeakyReLU, identities in eval mode, and
    sequences of them.
    """
    if act is not None and keeps_forward(act, (nn.Sequential,)):
        return all(is_homogeneous(layer) for layer in act.children())
    return act is None or keeps_forward(act, (*_RELUS, *_IDENTITIES))


def is_identity(module: object) -> bool:
    """Whether a module passes its input on unchanged in eval mode."""
    return keeps_forward(module, _IDENTITIES)


def is_activation(module: nn.Module) -> bool:
    """Whether the module is one of torch's or timm's activations."""
    return type(module).__module__.startswith(_MODULES)


def is_activation_call(target: object) -> bool:
    """Whether a function, or a method of that name, is an activation."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name.strip("_") in _NAMES
