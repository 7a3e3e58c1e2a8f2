"""The tensors of a weights file as a network's own, where loading would do no more than copy them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

# BatchNorm's and InstanceNorm's own ways to load say something of old files, and copy
_TORCHS = (nn.Module.state_dict, nn.Module._save_to_state_dict, nn.Module.load_state_dict, nn.Module.set_extra_state,
           nn.Module._load_from_state_dict, nn.BatchNorm2d._load_from_state_dict,
           nn.InstanceNorm2d._load_from_state_dict)  # fmt: skip
_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def take(model: nn.Module, state: Mapping[str, Tensor]) -> bool:
    """Let the tensors of `model` be those of `state`, not copies of them.

    Returns:
        False, and nothing is done, where loading would do more than copy: cast, rename, or what a module does itself.
    """
    tensors = model.state_dict(keep_vars=True)
    if not same_layout(state, tensors) or any(_loads_itself(module) for module in model.modules()):
        return False
    for name, tensor in tensors.items():
        tensor.data = state[name]  # who else holds the parameter sees it, too
    return True


def same_layout(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    """Tell whether both have the same names, dtypes and shapes."""
    return _layout(one) == _layout(two)


def _loads_itself(module: nn.Module) -> bool:
    """Tell whether a state dict passes through code that is not torch's on its way into the module, or out of it."""
    ways = (getattr(getattr(module, way.__name__), "__func__", None) for way in _TORCHS)
    return any(way not in _TORCHS for way in ways) or any(getattr(module, name) for name in _HOOKS)


def _layout(state: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in state.items()}
