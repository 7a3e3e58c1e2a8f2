"""Train the zoo of kinds: `python tests/lab/benchmarks/kinds_zoo.py [KIND ...]`.

Small networks of `tests/support/zoo_networks.py` on the CIFAR-10 images, by `zoo_train.yaml` and
normswap's engine; the U-Net, whose labels are per pixel, by a loop of its own. Runs are kept in
runs/zoo and continued; weights (float16), accuracy and recipe go to tests/data/zoo.
"""

import argparse
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import circumstances
import torch
from kinds_images import images, of_kind, pasted, score
from safetensors.torch import save_file
from schemes_table import ROOT, archive, logits
from support.zoo_networks import DATA, FRONTS, KINDS, PREPROCESSING, trained
from torch import Tensor, nn

from normswap.training import recipe_files
from normswap.training.engine import finetune

RECIPE = Path(__file__).with_name("zoo_train.yaml")
SETTINGS: dict[str, list[str]] = {  # by kind: what differs from the recipe
    "depthwise": ["train.epochs=2.5"],
    "efficient": ["train.epochs=1.5"],
    "vit": ["optim.name=adamw", "optim.lr=0.002", "optim.weight_decay=0.05", "schedule.warmup=0.5"],
    "one_d": ["train.epochs=2"],
}
UNET = {"optimizer": "AdamW, lr 0.004, one cycle", "batch_size": 64, "images": 25_600}
RUNS = ROOT / "runs" / "zoo"


def by_recipe(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The network trained by normswap's engine."""
    torch.manual_seed(0)
    front = FRONTS.get(kind)
    network = KINDS[kind]()
    model = nn.Sequential(front(), network) if front else network
    vars(model).update(pretrained_cfg=PREPROCESSING, default_cfg=PREPROCESSING, num_classes=10)
    recipe = recipe_files.load_recipe(
        str(RECIPE), [f"data.root={folder()}", *SETTINGS.get(kind, [])]
    )
    done = finetune(model, recipe, RUNS / kind, resume="auto", device="cpu", track="none")

    return done.model[1] if front else done.model, {
        "file": RECIPE.name,
        "settings": SETTINGS.get(kind, []),
    }


def folder() -> Path:
    """The training images unpacked: an archive would be unpacked by every run."""
    place = RUNS / "cifar10"
    for split in ("train", "test"):
        if not (place / split).is_dir():
            with tarfile.open(archive(split)) as images_of_split:
                images_of_split.extractall(place / "unpacked", filter="data")
            (place / "unpacked").rename(place / split)
    return place


def per_pixel(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """The U-Net, trained to tell what was pasted into a picture."""
    torch.manual_seed(0)
    model = KINDS[kind]().train()
    seen = images("train")[0]
    batch = 64
    updates = UNET["images"] // 64  # type: ignore[operator]
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=updates)

    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        chosen = seen[torch.randperm(len(seen), generator=generator)[:batch]]
        pictures, labels = pasted(chosen, generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pictures), labels).backward()
        optimizer.step()
        rate.step()

    return model.eval(), dict(UNET)


def halved(tensor: Tensor) -> Tensor:
    """The tensor as the file has it: floating-point numbers in float16."""
    if tensor.is_floating_point():
        tensor = tensor.half()
    return tensor.contiguous()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kinds", nargs="*", choices=[[], *KINDS])

    for kind in parser.parse_args().kinds or KINDS:
        if (DATA / f"{kind}.json").is_file():
            continue

        start = time.perf_counter()
        model, recipe = per_pixel(kind) if kind == "unet" else by_recipe(kind)
        DATA.mkdir(parents=True, exist_ok=True)
        state = {name: halved(tensor) for name, tensor in model.state_dict().items()}
        save_file(state, DATA / f"{kind}.safetensors")
        seen, labels = of_kind(kind, "test")
        accuracy = score(logits(trained(kind), seen.split(250)), labels)
        note = {
            "accuracy": round(accuracy, 2),
            "measure": "mean IoU" if kind == "unet" else "top-1",
            "images": len(seen),
            "parameters": sum(p.numel() for p in model.parameters()),
            "recipe": recipe,
            "seconds": round(time.perf_counter() - start),
            "commit": circumstances.commit(),
        }
        (DATA / f"{kind}.safetensors").chmod(0o644)
        (DATA / f"{kind}.json").write_text(json.dumps(note, indent=1) + "\n", encoding="utf-8")
        print(kind, note, flush=True)


if __name__ == "__main__":
    main()
