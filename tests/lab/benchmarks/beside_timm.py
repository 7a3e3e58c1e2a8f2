"""`normswap finetune` beside timm's train.py: images per CPU second and memory of one training by both.

    python tests/lab/benchmarks/beside_timm.py --train-py TIMM/train.py -o tests/lab/benchmarks/beside_timm.md

The same ResNet-18 with random weights, photographs of at most 320 pixels cropped to 224, flips, batches, optimizer and
loader worker; one epoch, by both at once and on one core, so that whatever else runs slows both. A run on many images
less a run on a batch of them leaves what an image costs: imports, validation, checkpoints and what else is done once
for each epoch is not counted. Seconds are of the processor, over all processes; memory is the most that any one process
had. train.py is not in timm's wheel; it is run, and not part of this repository.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import circumstances
import torch

PHOTOGRAPHS = Path(__file__).resolve().parents[4] / "shared/data/imagenet/test.tar"
VALIDATION = 8  # images
RECIPE = """
summary: as timm's train.py is told to
data: {{root: {images}, batch_size: {batch}, workers: 1, input_size: 224, augment: {{scale: [0.08, 1.0], hflip: 0.5}}}}
optim: {{name: sgd, lr: 0.01, momentum: 0.9, weight_decay: 2.0e-5}}
schedule: {{name: cosine}}
train: {{epochs: 1}}
"""


def write(folder: Path, images: int) -> None:
    """Photographs in class folders: so many to train on, and a few to validate on."""
    with tarfile.open(PHOTOGRAPHS) as tar:
        members = [member for member in tar.getmembers() if member.isfile()]
        for at, member in enumerate(members[: images + VALIDATION]):
            member.name = f"{'train' if at < images else 'val'}/class{at % 2}/{at}{Path(member.name).suffix}"
            tar.extract(member, folder, filter="data")


def commands(folder: Path, train_py: Path, batch: int, out: Path) -> dict[str, list[str]]:
    """How each is started."""
    recipe = out / "recipe.yaml"
    recipe.write_text(RECIPE.format(images=folder, batch=batch))
    ours = ["-m", "normswap", "finetune", "resnet18", "--weights", "random", "--arch-arg", "num_classes=2"]
    ours += ["--recipe", str(recipe), "--device", "cpu", "--track", "none", "-o", str(out / "ours")]
    timms = [
        str(train_py),
        "--data-dir",
        str(folder),
        "--val-split",
        "val",
        "--model",
        "resnet18",
        "--num-classes",
        "2",
    ]
    timms += ["--img-size", "224", "-b", str(batch), "-j", "1", "--device", "cpu", "--epochs", "1"]
    timms += ["--opt", "sgd", "--lr", "0.01", "--weight-decay", "2e-5", "--warmup-epochs", "0", "--smoothing", "0"]
    timms += ["--color-jitter", "0", "--train-interpolation", "bicubic", "--output", str(out / "timms")]
    return {"normswap finetune": [sys.executable, *ours], "timm's train.py": [sys.executable, *timms]}


def costs(commands: dict[str, list[str]]) -> dict[str, tuple[float, float]]:
    """Seconds of the processor and MiB of each run, its loader's processes included; all run at the same time."""
    quiet = subprocess.DEVNULL
    started = {name: subprocess.Popen(command, stdout=quiet, stderr=quiet) for name, command in commands.items()}
    costs = {}
    for name, process in started.items():
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"this failed: {' '.join(commands[name])}")
        costs[name] = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024
    return costs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train-py", type=Path, required=True, help="timm's, of its repository")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, help="Markdown file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(OMP_NUM_THREADS="1")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rates: dict[str, list[float]] = {}
    peaks: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as place:
        sizes = {"many": args.images, "few": args.batch}
        for size, images in sizes.items():
            write(Path(place) / size, images)
        for turn in range(args.rounds):
            seconds: dict[str, list[float]] = {}
            for size, images in sizes.items():
                out = Path(place) / f"{size}-{turn}"
                out.mkdir()
                both = costs(commands(Path(place) / size, args.train_py, args.batch, out))
                for name, (time, mib) in both.items():
                    seconds.setdefault(name, []).append(time)
                    peaks.setdefault(name, []).append(mib)
                    print(
                        f"{turn + 1} of {args.rounds}: {name}, {images} images: {time:.1f} s, {mib:.0f} MiB", flush=True
                    )
            for name, (many, few) in seconds.items():
                rates.setdefault(name, []).append((args.images - args.batch) / (many - few))
    timms, least = rates["timm's train.py"], max(peaks["timm's train.py"])
    shown = " ".join(["python", "tests/lab/benchmarks/beside_timm.py", *sys.argv[1:]])
    lines = ["# Fine-tuning beside timm's train.py", "", *circumstances.lines(shown, "cpu")]
    lines += [" ".join((__doc__ or "").split("\n\n")[2].split()), f"{args.rounds} rounds.", ""]
    lines += ["| run by | images per CPU second | to timm's, median | lowest | highest | peak, MiB | to timm's |"]
    lines += ["|---" * 7 + "|"]
    for name, values in rates.items():
        ratios = [mine / base for mine, base in zip(values, timms, strict=True)]
        peak = max(peaks[name])
        lines.append(f"| {name} | {statistics.median(values):.1f} | {statistics.median(ratios):.2f} "
                     f"| {min(ratios):.2f} | {max(ratios):.2f} | {peak:.0f} | {peak / least:.2f} |")  # fmt: skip
    print("\n".join(lines))
    if args.output:
        args.output.write_text("\n".join([*lines, ""]))


if __name__ == "__main__":
    main()
