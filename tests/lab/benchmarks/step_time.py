"""Time of a training step of converted networks against the same network with BatchNorm, in one interleaved run.

    python tests/lab/benchmarks/step_time.py [--arch resnet50] [--side 64] [--batch 32] [--rounds 10]
    python tests/lab/benchmarks/step_time.py --device cuda --precision bf16 --side 224 --batch 256

A step is forward, backward and SGD with momentum on one fixed batch, as the engine does it (autocast, channels_last).
On a CPU the time is that of the process, so that others on the machine hardly count; on a GPU it is the clock's.
Every round times each network once, BatchNorm first; a ratio is taken within a round, and the median of them printed.
MiB are what the forward pass keeps for the backward pass in float32, beside the parameters.
Writes step_time.md beside this file, or where --out says.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normswap
from normswap.training import filter_means

SCHEMES = {"batchnorm": {}, "skipinit": {}, "regularized-skipinit": {}, "nf": {"mean": "keep"}, "groupnorm": {},
           "fixup": {}, "tune": {}}  # fmt: skip


def network(arch: str, scheme: str, side: int) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=10, zero_init_last=False).eval()
    if scheme != "batchnorm":
        model = normswap.convert(model, scheme, input_size=(3, side, side), **SCHEMES[scheme]).model
    for layer in filter_means.kept(model):
        nn.init.zeros_(layer.mean)
    return filter_means.drop(model)  # the means gone, as after `anneal.means`: timm's own layer


def stepper(model: nn.Module, args: argparse.Namespace) -> Callable[[], None]:
    device = torch.device(args.device)
    model.to(device).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9, nesterov=True)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.batch, 3, args.side, args.side, generator=generator).to(device)
    x = x.contiguous(memory_format=torch.channels_last)
    y = torch.randint(0, 10, (args.batch,), generator=generator).to(device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=args.precision == "bf16"):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()

    return step


def memory(model: nn.Module, side: int) -> tuple[float, float]:
    """MiB that the forward pass keeps for the backward pass beside parameters: per image of the batch, and once."""
    two, four = kept(model, 2, side), kept(model, 4, side)
    return (four - two) / 2, 2 * two - four


def kept(model: nn.Module, batch: int, side: int) -> float:
    model.to(memory_format=torch.channels_last).train()
    storages = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in storages:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(batch, 3, side, side).contiguous(memory_format=torch.channels_last)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(x).sum()
    del loss
    return sum(found.values()) / 2**20


def seconds(step: Callable[[], None], steps: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(steps):
        step()
    return (clock() - start) / steps


def table(times: dict[str, list[float]], mib: dict[str, tuple[float, float]], args: argparse.Namespace) -> str:
    lines = [
        "| network | ms per step | to batchnorm | lowest | highest | MiB an image | to batchnorm | MiB once |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for scheme, own in times.items():
        ratios = [mine / base for mine, base in zip(own, times["batchnorm"], strict=True)]
        lines.append(f"| {scheme} | {1000 * statistics.median(own):.1f} | {statistics.median(ratios):.2f} "
                     f"| {min(ratios):.2f} | {max(ratios):.2f} | {mib[scheme][0]:.1f} "
                     f"| {mib[scheme][0] / mib['batchnorm'][0]:.2f} | {mib[scheme][1]:.0f} |")  # fmt: skip
    name = torch.cuda.get_device_name() if args.device == "cuda" else f"{platform.processor() or platform.machine()}"
    threads = f", {torch.get_num_threads()} threads" if args.device == "cpu" else ""
    load = f", load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, process time" if args.device == "cpu" else ""
    machine = f"{args.device}: {name}{threads}{load}; torch {torch.__version__}, timm {timm.__version__}."
    return "\n".join([*lines, "", machine])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="resnet50")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="no", choices=["no", "bf16"])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="steps in a row that are timed together")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    args = parser.parse_args()
    networks = {scheme: network(args.arch, scheme, args.side) for scheme in SCHEMES}
    mib = {scheme: memory(model, args.side) for scheme, model in networks.items()}  # float32, wherever the steps run
    steps = {scheme: stepper(model, args) for scheme, model in networks.items()}
    times: dict[str, list[float]] = {scheme: [] for scheme in SCHEMES}
    clock = time.perf_counter if args.device == "cuda" else time.process_time
    for step in steps.values():
        seconds(step, 2, clock)
    for done in range(args.rounds):
        for scheme, step in steps.items():
            times[scheme].append(seconds(step, args.steps, clock))
        print(f"round {done + 1} of {args.rounds}", file=sys.stderr)
    found = table(times, mib, args)
    command = "python tests/lab/benchmarks/step_time.py " + " ".join(sys.argv[1:])
    title = f"# Time of a training step: {args.arch}, {args.batch} images of {args.side} px, precision {args.precision}"
    args.out.write_text(f"{title}\n\n`{command.strip()}`\n\n{found}\n")
    print(found)


if __name__ == "__main__":
    main()
