"""The devices that torch has here, by their names."""

import torch
from torch import nn

from normswap.errors import OptionError, spelled
from normswap.models import calling


def find(name: str) -> torch.device:
    """Find the device of a name; `auto` is the accelerator, or else the CPU; raises OptionError:
    there is none such.
    """
    accelerator = (
        torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    )
    if name == "auto":
        return accelerator or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError(
            f"device {name!r}", "torch does not know it", "Use auto, cpu, cuda, cuda:1 or mps"
        ) from None
    there = (
        accelerator
        and device.type == accelerator.type
        and (device.index or 0) < torch.accelerator.device_count()
    )
    if device.type != "cpu" and not there:
        raise OptionError(
            f"device {name} is not available here",
            remedy=f"Use {spelled('device', 'cpu')}, or auto",
        )
    return device


def place(model: nn.Module, name: str) -> nn.Module:
    """Move a network to the device of a name, and give it back; raises OptionError, also for an
    exported file.
    """
    device = find(name)
    if name != "auto" and device.type != "cpu" and not calling.anchor(model).numel():
        raise OptionError(
            f"device {name} is not for exported files", "they run in their own runtime"
        )
    return model.to(device)
