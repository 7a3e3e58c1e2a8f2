"""Devices by their names."""

from pathlib import Path

import pytest
import torch
from commands import DEMO, MODEL, Capture, here, refused

from normswap.errors import OptionError
from normswap.models import devices

__all__ = ["here"]
ABSENT = "cuda:7" if torch.cuda.is_available() else "cuda"
DATA = ("--data", MODEL)
COMMANDS = {
    "convert": (*DEMO, "skipinit"),
    "verify": ("verify", MODEL),
    "evaluate": ("evaluate", MODEL, *DATA),
    "recalibrate": ("recalibrate", MODEL, *DATA),
    "spp": ("spp", MODEL),
    "report": ("report", MODEL),
    "export": ("export", MODEL, "-o", "x.onnx"),
    "finetune": ("finetune", MODEL, "--recipe", "none"),
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("here")
def test_commands_refuse_an_absent_device_before_they_begin(command: str, here: Path, capfd: Capture) -> None:
    refused((*COMMANDS[command], "--device", ABSENT), (f"device {ABSENT} is not available here", "--device cpu"), here,
            capfd)  # fmt: skip
    refused((*COMMANDS[command], "--device", "tpu"), ("device 'tpu'",), here, capfd)


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.find("cpu") == torch.device("cpu")
    with pytest.raises(OptionError, match="meta"):
        devices.find("meta")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert devices.find("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert devices.find("auto") == torch.device("cuda")
    assert devices.find("cuda:1") == torch.device("cuda:1")
    for absent in ("cuda:2", "mps"):
        with pytest.raises(OptionError, match="not available"):
            devices.find(absent)
    with pytest.raises(OptionError, match="exported"):
        devices.place(torch.nn.ReLU(), "cuda")
