"""Small trainings: a tiny network, a few random images, a recipe.

As a script it is one process of a run:

    python tests/support/small_trainings.py IMAGES OUT SCHEME '{"train": {...}}'
        [--resume auto] [--kill UPDATE] [--nap SECONDS]
"""

import argparse
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn

import normswap
from normswap.copying import duplicate
from normswap.training.engine import Result, TrainingProgress, finetune
from normswap.training.recipe import Recipe

# One block without a projection, and some with one.
TINY: dict[str, Any] = {"channels": (4, 4, 8, 8), "layers": (2, 1, 1, 1)}
CLASSES = [f"class{i}" for i in range(10)]


def write_images(
    folder: Path, per_class: int = 4, classes: list[str] = CLASSES, side: int = 32
) -> Path:
    random = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(per_class):
            pixels = random.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")
    return folder


def network(scheme: str = "batchnorm", *, double: bool = False, **options: Any) -> nn.Module:
    """A tiny ResNet for images of 32 px, converted to the scheme."""
    model = duplicate(made(scheme, **options), {})
    return model.double() if double else model


@functools.cache
def made(scheme: str, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10, **TINY, zero_init_last=False)
    known = {
        **model.pretrained_cfg,
        "input_size": (3, 32, 32),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
    }
    model.__dict__.update(pretrained_cfg=known, default_cfg=known)
    # Statistics of the network's own: alphas are matched to them.
    with torch.no_grad():
        model.train()(torch.randn(64, 3, 32, 32))
    model = model.eval()
    if scheme != "batchnorm":
        model = normswap.convert(model, scheme, input_size=(3, 32, 32), **options).model

    return model


def recipe(images: Path | str, **parts: Any) -> Recipe:
    """A recipe of two epochs, four updates in each; only the order of the images is random."""
    base: dict[str, Any] = {
        "summary": "a test",
        "data": {"root": str(images), "validation": str(images), "batch_size": 8, "workers": 0},
        "optim": {"lr": 0.01},
        "train": {"epochs": 2},
    }
    base["data"]["augment"] = {"hflip": 0.0}
    return Recipe.model_validate(merged(base, parts))


def merged(base: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
    """The keys of both tables; where both have one, the value of `parts`. So in inner tables."""
    both = {
        key: merged(base[key], value)
        for key, value in parts.items()
        if isinstance(base.get(key), dict) and isinstance(value, dict)
    }
    return {**base, **parts, **both}


def train(model: nn.Module, plan: Recipe, out: Path, **options: Any) -> Result:
    """`finetune` on the CPU without trackers."""
    return finetune(model, plan, out, **{"device": "cpu", "track": "none", **options})


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def command(*words: object) -> list[str]:
    return [sys.executable, str(Path(__file__)), *map(str, words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("images", "out", "scheme", "parts"):
        parser.add_argument(name)
    parser.add_argument("--resume")
    kill_help = "SIGKILL process 1, or the only one, once, at this update"
    parser.add_argument("--kill", type=int, default=0, help=kill_help)
    parser.add_argument("--device", default="cpu")
    nap_help = "seconds per update, so that it can be killed"
    parser.add_argument("--nap", type=float, default=0.0, help=nap_help)
    given = parser.parse_args()
    parts = json.loads(given.parts)
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

    def watch(moment: TrainingProgress) -> None:
        time.sleep(given.nap)

    if given.kill and is_first and os.environ.get("RANK", "1") == "1":
        from normswap.training.engine import TrainingRun

        update = TrainingRun.update

        def dying(self: TrainingRun, batches: Any) -> None:
            if self.at.update == given.kill:
                # The test looks for this file: another death is no kill.
                Path(f"{given.out}-killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            update(self, batches)

        TrainingRun.update = dying  # type: ignore[method-assign]

    model = network(given.scheme, double=parts.pop("double", False))
    train(
        model,
        recipe(given.images, **parts),
        Path(given.out),
        resume=given.resume,
        progress=watch,
        device=given.device,
    )


if __name__ == "__main__":
    main()
