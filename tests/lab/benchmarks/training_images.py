"""Training images of one process: how many a second of CPU time, beside timm's dataset with the same transform.

    python tests/lab/benchmarks/training_images.py -o tests/lab/benchmarks/training_images.md

JPEGs of 500 x 375 pixels, random crops to 224, flips, float tensors. Read one by one in this process, in turns, so that
nothing else that runs counts; `in a worker` leaves out what a worker of the loader leaves out; `timm, bytes` has pixels
of 8 bits, which timm's train.py makes floats of in the main process. `reading` is Pillow's decoding, which all have.
Not the whole loader: queues and collating are not in it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import circumstances
import numpy as np
import torch
from PIL import Image
from timm.data import create_dataset, create_transform

from normswap.training import training_images
from normswap.training.recipe import Augment, Data

COUNT = 96
RECORD = {"input_size": (3, 224, 224), "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def write(folder: Path) -> None:
    """Two classes of smooth random images."""
    drawn = np.random.default_rng(0)
    for i in range(COUNT):
        place = folder / f"class{i % 2}" / f"{i}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(drawn.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize((500, 375), Image.Resampling.BICUBIC).save(place, quality=90)


def seconds(read: Callable[[int], object]) -> float:
    """CPU time of one image."""
    start = time.process_time()
    for i in range(COUNT):
        read(i)
    return (time.process_time() - start) / COUNT


def measured(rounds: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        data = Data(root=folder, batch_size=8, augment=Augment(scale=(0.08, 1.0), hflip=0.5))
        record = {**RECORD, "interpolation": "bicubic", "num_classes": 2}
        ours = training_images.TrainingImages(record, data, 0, labelled=True).images
        plain, timms, timms_bytes = (create_dataset("", root=folder, split="train") for _ in range(3))
        for images, as_bytes in ((timms, False), (timms_bytes, True)):
            images.transform = create_transform(
                **RECORD,
                is_training=True,
                interpolation="bicubic",
                hflip=0.5,
                color_jitter=None,
                use_prefetcher=as_bytes,
            )
        reads: list[tuple[str, Callable[[int], object]]] = [
            ("ours", lambda i: ours[0, i]), ("ours, in a worker", lambda i: ours[0, i]), ("timm", lambda i: timms[i]),
            ("timm, bytes", lambda i: timms_bytes[i]), ("reading", lambda i: plain[i]),
        ]  # fmt: skip
        times: dict[str, list[float]] = {name: [] for name, _ in reads}
        for turn in range(rounds):
            first = turn % len(reads)
            for name, read in reads[first:] + reads[:first]:  # none is always the first
                with mock.patch.object(
                    training_images, "get_worker_info", return_value=name.endswith("worker") or None
                ):
                    times[name].append(seconds(read))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=45)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    command = " ".join(["python", "tests/lab/benchmarks/training_images.py", *sys.argv[1:]])
    lines = ["# Training images a second, beside timm's", "", *circumstances.lines(command, "cpu")]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), f"{args.rounds} rounds.", ""]
    lines += ["| images | fastest, images/s | median, images/s | of timm's, median (quartiles) |", "|---" * 4 + "|"]
    times = measured(args.rounds)
    usual = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        low, ratio, high = statistics.quantiles((b / a for a, b in zip(values, times["timm"], strict=True)), n=4)
        lines.append(
            f"| {name} | {1 / min(values):.0f} | {1 / usual[name]:.0f} | {ratio:.2f} ({low:.2f} to {high:.2f}) |"
        )
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
