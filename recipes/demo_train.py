"""Train the demo network of `normswap demo`: a narrow stock timm ResNet on the CIFAR-10 JPEGs, on a CPU.

    nice -n 19 python recipes/demo_train.py --train cifar10/train --test cifar10/test --out demo_net \\
        --epochs 34 --minutes 32 --threads 1
    python recipes/demo_train.py --sample cifar10/test --out demo_net     # images.tar

on one of two AMD EPYC cores (avx512_bf16) shared with other work: 780 images/s on average, so that --minutes ended the
run within epoch 30. Result: 86.46 % top-1 on the 10,000 test images, 87.2 % on the 500 of images.tar; 728,666
parameters, 2.94 MB. These are the files in normswap/demo_data. Where --minutes ends a run, the lr schedule followed the
clock, so another run gives slightly other weights. On idle cores --threads 2 trains at 1,450 images/s; beside other
processes it was several times slower than one thread.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import tarfile
import time
from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from timm.data import create_dataset, create_transform, resolve_data_config
from torch import Tensor, nn

ARCH, SIZE = "resnet18", 64
MODEL_ARGS = {"channels": [32, 64, 80, 96], "stem_type": "deep", "stem_width": 16}
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.247, 0.2435, 0.2616)
PAD, CUT = 4, 8  # random crop from the image padded by PAD; a CUT x CUT square set to the mean
BATCH, PEAK_LR, WARMUP, WEIGHT_DECAY, SMOOTHING = 128, 0.2, 0.2, 5e-4, 0.05


def write_atomically(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def write_sample(test_root: Path, out: Path, per_class: int) -> None:
    """Pack the first images of each class, JPEG bytes unmodified, into an uncompressed, reproducible tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for folder in sorted(p for p in test_root.iterdir() if p.is_dir()):
            for image in sorted(folder.glob("*.jpg"))[:per_class]:
                data = image.read_bytes()
                info = tarfile.TarInfo(f"{folder.name}/{image.name}")  # uid, gid and mtime are 0 unless set
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    write_atomically(out / "images.tar", buffer.getvalue())


def load_folder(root: Path) -> tuple[Tensor, Tensor, list[str]]:
    """Decode an image folder into uint8 images (N, 3, 32, 32), labels (N,) and the sorted class names."""
    names = sorted(p.name for p in root.iterdir() if p.is_dir())
    files = [(f, label) for label, name in enumerate(names) for f in sorted((root / name).glob("*.jpg"))]
    pixels = np.stack([np.asarray(Image.open(f).convert("RGB")) for f, _ in files])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous(), torch.tensor([y for _, y in files]), names


def augment(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random crop, flip and cutout of normalized images, then the bilinear upsampling of timm's eval transform."""
    n, _, h, w = x.shape
    dy, dx = torch.randint(0, 2 * PAD + 1, (2, n, 1), generator=generator)
    flip = torch.rand(n, 1, generator=generator) < 0.5
    rows, cols = dy + torch.arange(h), dx + torch.arange(w)
    cols = torch.where(flip, cols.flip(1), cols)
    x = F.pad(x, (PAD, PAD, PAD, PAD), mode="reflect")
    x = x[torch.arange(n)[:, None, None], :, rows[:, :, None], cols[:, None, :]].permute(0, 3, 1, 2)
    top, left = torch.randint(0, h - CUT + 1, (2, n, 1), generator=generator)
    in_rows = (torch.arange(h) >= top) & (torch.arange(h) < top + CUT)
    in_cols = (torch.arange(w) >= left) & (torch.arange(w) < left + CUT)
    x = x.masked_fill((in_rows[:, :, None] & in_cols[:, None, :])[:, None], 0.0)
    return F.interpolate(x, size=(SIZE, SIZE), mode="bilinear").contiguous(memory_format=torch.channels_last)


@torch.inference_mode()
def evaluate(model: nn.Module, root: Path, cfg: dict) -> float:
    """Top-1 in percent through timm's own eval transform on the JPEG files (a class folder or a tar of one)."""
    dataset = create_dataset("", root=str(root), transform=create_transform(**resolve_data_config(cfg)))
    loader = torch.utils.data.DataLoader(dataset, batch_size=250)
    model.eval()
    hits = sum(int((model(x).argmax(1) == y).sum()) for x, y in loader)
    return 100 * hits / len(dataset)


def save_checkpoint(model: nn.Module, out: Path, cfg: dict, top1: float | None) -> None:
    """Weights and config.json in the layout of timm's hub; rebuild with create_model(architecture, **model_args)."""
    config = {"architecture": ARCH, "num_classes": cfg["num_classes"], "model_args": MODEL_ARGS, "pretrained_cfg": cfg}
    if top1 is not None:
        config["top1"] = round(top1, 2)
    state = {name: t.contiguous() for name, t in model.state_dict().items()}
    write_atomically(out / "model.safetensors", save(state, metadata={"format": "pt"}))
    write_atomically(out / "config.json", (json.dumps(config, indent=1) + "\n").encode())


def train(args: argparse.Namespace) -> tuple[nn.Module, dict]:
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    images, labels, names = load_folder(args.train)
    cfg = {"input_size": [3, SIZE, SIZE], "mean": MEAN, "std": STD, "interpolation": "bilinear", "crop_pct": 1.0}
    cfg |= {"num_classes": len(names), "label_names": names}
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) * 255 for v in (MEAN, STD))
    model = timm.create_model(ARCH, num_classes=len(names), **MODEL_ARGS).to(memory_format=torch.channels_last)
    decay = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]  # norm weights and every bias
    groups = [{"params": decay, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(groups, lr=PEAK_LR, momentum=0.9, nesterov=True)
    steps, step, start = len(images) // BATCH, 0, time.monotonic()
    for epoch in range(args.epochs):
        model.train()
        loss_sum, hits = torch.zeros(()), torch.zeros(())
        for batch in torch.randperm(len(images), generator=generator)[: steps * BATCH].split(BATCH):
            minutes = (time.monotonic() - start) / 60
            done = min(max(step / (steps * args.epochs), minutes / args.minutes), 1.0)
            for group in optimizer.param_groups:  # one cycle: linear up to the peak, linear down to zero
                group["lr"] = PEAK_LR * min(done / WARMUP, (1 - done) / (1 - WARMUP))
            x, y = augment((images[batch] - mean) / std, generator), labels[batch]
            with torch.autocast("cpu", torch.bfloat16, enabled=not args.float32):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y, label_smoothing=SMOOTHING)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            loss_sum, hits = loss_sum + loss.detach(), hits + (logits.argmax(1) == y).sum()
        loss, top1, speed = loss_sum / steps, 100 * hits / (steps * BATCH), step * BATCH / (time.monotonic() - start)
        print(f"epoch {epoch + 1} loss {loss:.3f} train top1 {top1:.1f} {speed:.0f} img/s", flush=True)
        save_checkpoint(model, args.out, cfg, None)
        if done >= 1:
            break
    return model, cfg


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", type=Path, help="class folders of training JPEGs")
    parser.add_argument("--test", type=Path, help="class folders of test JPEGs, for the top-1 in config.json")
    parser.add_argument("--sample", type=Path, help="class folders of test JPEGs to pack 50 per class into images.tar")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="anneal early enough to end by then")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--float32", action="store_true", help="no bfloat16 autocast (CPUs without avx512_bf16)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.sample:
        write_sample(args.sample, args.out, per_class=50)
    if args.train:
        model, cfg = train(args)
        top1 = evaluate(model, args.test, cfg) if args.test else None
        save_checkpoint(model, args.out, cfg, top1)
        print(f"test top1 {top1}")


if __name__ == "__main__":
    main()
