"""A network of depthwise convolutions, trained on the CIFAR-10 training images, for int8.py to quantize.

    python tests/lab/benchmarks/depthwise.py [FOLDER]    # about half an hour on one core; runs/depthwise by default

timm's `mobilenetv2_035` at 64 px, its ReLU6 and all, in timm's hub layout as those in ../shared/checkpoints are: plain
SGD with a one-cycle learning rate, flips and crops. Nothing is chosen on the test images.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from normswap.images import datasets

ROOT = Path(__file__).resolve().parents[3]
TRAIN = ROOT.parent / "shared" / "data" / "cifar10" / "train.tar.xz"
PLACE = ROOT / "runs" / "depthwise"
NAME, SIDE, EPOCHS, BATCH, RATE = "mobilenetv2_035", 64, 7, 128, 0.1
CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CONFIG = {
    "input_size": [3, SIDE, SIDE], "mean": [0.4914, 0.4822, 0.4465], "std": [0.247, 0.2435, 0.2616],
    "interpolation": "bilinear", "crop_pct": 1.0, "num_classes": 10, "label_names": CLASSES,
}  # fmt: skip


def images() -> tuple[Tensor, Tensor]:
    """All training images, as bytes, and their labels."""
    plain = {**CONFIG, "mean": [0.0] * 3, "std": [1.0] * 3}
    loader = datasets.make_loader(plain, str(TRAIN), batch_size=500, workers=0)
    parts = [((x * 255).round().byte(), y) for x, y in loader]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def varied(x: Tensor) -> Tensor:
    """Normalized, each image flipped or not, the batch cropped somewhere."""
    mean, std = (torch.tensor(CONFIG[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    x = (x.float() / 255 - mean) / std
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    top, left = torch.randint(0, 17, (2,)).tolist()
    return F.pad(x, (8, 8, 8, 8))[:, :, top : top + SIDE, left : left + SIDE].contiguous()


def train(model: nn.Module, x: Tensor, y: Tensor) -> None:
    steps = EPOCHS * (len(x) // BATCH)
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-5, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps, pct_start=0.25)
    for epoch in range(EPOCHS):
        start, total = time.perf_counter(), 0.0
        for rows in torch.randperm(len(x))[: len(x) // BATCH * BATCH].view(-1, BATCH):
            loss = F.cross_entropy(model(varied(x[rows])), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        seconds = time.perf_counter() - start
        print(f"epoch {epoch + 1}: loss {total * BATCH / len(x):.3f}, {seconds:.0f} s", flush=True)


def main(place: Path = PLACE) -> None:
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=10).train().to(memory_format=torch.channels_last)
    train(model, *images())
    place.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, place / "model.safetensors")
    record = {"architecture": NAME, "num_classes": 10, "pretrained_cfg": CONFIG}
    (place / "config.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
