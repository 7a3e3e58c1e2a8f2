"""The devices that torch has here, by their names."""

import torch
from torch import nn

from normswap.errors import OptionError, spelled
from normswap.models import calling


def find(name: str) -> torch.device:
    """Return the device that the user names. `auto` is the accelerator, or else the CPU.

    Args:
        name: The name, such as `cpu`, `cuda:1` or `auto`.

    Raises:
        OptionError: Torch does not know the name, or this machine has no such device.
    """
    accelerator = None
    if torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(
            f"device {name!r}", "torch does not know it", "Use auto, cpu, cuda, cuda:1 or mps"
        ) from None

    # A device without a number, such as `cuda`, is the first one.
    is_here = (
        accelerator is not None
        and device.type == accelerator.type
        and (device.index or 0) < torch.accelerator.device_count()
    )
    if device.type != "cpu" and not is_here:
        raise OptionError(
            f"device {name} is not available here",
            remedy=f"Use {spelled('device', 'cpu')}, or auto",
        )
    return device


def place(model: nn.Module, name: str) -> nn.Module:
    """Move a network to the device that the user names, and return the network.

    Args:
        model: The network.
        name: The name of the device, as `find` takes it.

    Raises:
        OptionError: There is no such device, or the network is an exported file.
    """
    device = find(name)
    # A module that runs an exported file has no parameters, so `anchor` finds an empty tensor.
    if name != "auto" and device.type != "cpu" and not calling.anchor(model).numel():
        raise OptionError(
            f"device {name} is not for exported files", "they run in their own runtime"
        )
    return model.to(device)
