"""What conversions keep that are calibrated on photographs of something else than the network was trained on.

    pip download --no-deps scikit-image -d photos && unzip -j photos/*.whl 'skimage/data/*' -d photos
    python tests/lab/benchmarks/kinds_photographs.py photos

The networks of kinds.md, trained on CIFAR-10, are calibrated on 100 squares cut at random from five photographs that
come with scikit-image (an astronaut, a cat, a cup of coffee, a motorcycle, a rocket), made 32 x 32; "held out" is what
a quarter of those says. 10,000 test images. What the same conversions keep otherwise: kinds.md.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import circumstances
import torch
from kinds import Way, outputs
from kinds_images import of_kind, score
from PIL import Image
from torch import Tensor
from torchvision.transforms import functional as F
from zoo_networks import FRONTS, KINDS, PREPROCESSING, trained

from normswap.surgery import conversion

FILES = ("astronaut.png", "chelsea.png", "coffee.png", "motorcycle_left.png", "rocket.jpg")
WAYS = (Way("groupnorm", {}, ()), Way("groupnorm", {"group_size": 16}, ()), Way("nf", {}, ()))
COUNT, SIDE, LEAST = 100, 32, 64  # squares, their size then and, at least, before


def squares(folder: Path) -> Tensor:
    """(COUNT, 3, SIDE, SIDE), as the networks take images."""
    drawn, found = random.Random(0), []
    for i in range(COUNT):
        photo = Image.open(folder / FILES[i % len(FILES)]).convert("RGB")
        side = drawn.randrange(LEAST, min(photo.size))
        left, top = (drawn.randrange(whole - side + 1) for whole in photo.size)
        part = photo.crop((left, top, left + side, top + side)).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
        found.append(F.to_tensor(F.hflip(part) if drawn.random() < 0.5 else part))
    mean, std = (torch.tensor(PREPROCESSING[name])[:, None, None] for name in ("mean", "std"))
    return (torch.stack(found) - mean) / std


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, help="folder of scikit-image's photographs")
    cut = squares(parser.parse_args().photos)
    lines = ["# Calibrated on photographs of something else", "",
             *circumstances.lines("python tests/lab/benchmarks/kinds_photographs.py photos", "cpu"),
             (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip(), "",
             "| kind | to | kept | held out |", "|---|---|---|---|"]  # fmt: skip
    for kind in KINDS:
        if kind == "vit":
            continue
        images, labels = of_kind(kind, "test")
        front = FRONTS.get(kind)
        given = front()(cut) if front else cut
        model = trained(kind)
        before = score(outputs(model, images), labels)
        for way in WAYS:
            done = conversion.convert(
                model, way.scheme, calibrate=list(given.split(50)), inputs=images[:8], **way.options
            )
            kept, held = 100 * score(outputs(done.model, images), labels) / before, done.report.kept
            said = f"{100 * held.agreement:.1f} %" if held and held.agreement is not None else ""
            lines.append(f"| {kind} | `{way}` | {kept:.1f} % | {said} |")
            print(lines[-1], flush=True)
    Path(__file__).with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
