"""`finetune` on the second device, beside the same on the CPU: AGC, EMA, mixup, distillation, validation, resuming."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import second_device
import torch
import trained
from accelerate.state import PartialState
from timm.utils import ModelEmaV3
from torch import nn

import normswap
from normswap import demo_files
from normswap.storage.checkpoint import open_model
from normswap.training.progress_records import Result, TrainingProgress

NAME, BATCH, EPOCH = second_device.NAME, 8, 32


class _Generator(torch.Generator):
    """One that says that it is of the device, for which torch makes none in Python. Nothing is drawn of timm's."""

    def __new__(cls, device: object = None) -> _Generator:
        return super().__new__(cls)


class _Average(ModelEmaV3):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with mock.patch.object(torch, "Generator", _Generator):
            super().__init__(*args, **kwargs)


def _trained(
    model: nn.Module, device: str, out: Path, *, images: int = EPOCH, epochs: int = 1, **options: Any
) -> Result:
    plan = trained.recipe(
        demo_files.IMAGES,
        data={
            "samples": images,
            "validation_samples": 16,
            "batch_size": BATCH,
            "augment": {"hflip": 0.5, "mixup": 0.2},
        },
        train={"epochs": epochs, "ema": {"decay": 0.9}},
        optim={"clip": {"mode": "agc", "value": 0.1}},
        distill={"teacher": str(demo_files.FOLDER)},
    )
    on_device = mock.patch.object(PartialState, "default_device", property(lambda self: torch.device(NAME)))
    with on_device, mock.patch("normswap.training.assembly.ModelEmaV3", _Average), torch.enable_grad():
        return normswap.finetune(model, plan, out, device=device, track="none", **options)


def _student() -> nn.Module:
    return normswap.convert(open_model(str(demo_files.FOLDER)), "skipinit").model


class _Died(Exception):
    pass


def as_on_the_cpu() -> None:
    """Two epochs, on the device with an end in the second, from which it goes on after the first."""

    def die(progress: TrainingProgress) -> None:
        if progress.update > EPOCH // BATCH:
            raise _Died

    model = _student()
    with tempfile.TemporaryDirectory() as folder:
        here = _trained(model, "cpu", Path(folder) / "here", epochs=2)
        second_device.uploads.clear()
        try:
            _trained(model, NAME, Path(folder) / "there", epochs=2, progress=die)
        except _Died:
            there = _trained(model, NAME, Path(folder) / "there", epochs=2, resume="auto")
        assert second_device.uploads
        for ours, theirs in zip(there.rows, here.rows, strict=True):
            for name in ("update", "lr", "train_loss", "top1", "ema_top1", "val_loss"):
                assert ours[name] == theirs[name] or abs(ours[name] / theirs[name] - 1) < 1e-4, (name, ours, theirs)
        x = torch.randn(4, 3, *here.model.pretrained_cfg["input_size"][1:])
        torch.testing.assert_close(there.model(x), here.model(x), rtol=1e-3, atol=1e-4)


def waits(updates: int) -> int:
    """How often an epoch of so many updates waits for the device."""
    model = _student()
    with tempfile.TemporaryDirectory() as folder:
        second_device.waits.clear()
        _trained(model, NAME, Path(folder) / "out", images=updates * BATCH)
    return second_device.waits.total()
