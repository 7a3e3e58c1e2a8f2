"""The demo: a small trained network that ships with the package, converted, saved, loaded and measured. Offline."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap.analysis import summary
from normswap.demo_files import IMAGES, NAME
from normswap.images.accuracy import agreement, classify
from normswap.images.datasets import make_loader
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import comparison
from normswap.surgery.conversion import convert
from normswap.surgery.network import Network

SCHEMES = ("folded", "skipinit")
_FEW = 4  # batches that errors are measured on
_ROUNDS = 50  # passes timed
Batches = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Row:
    """One network, measured.

    Args:
        norms: normalization layers left; parameters: trainable values.
        top1: in percent; agreement: fraction of the images with the source's answer.
        relative_l2: |logits - the source's| / |the source's|.
        speed: images per second, as a multiple of the source's.
    """

    network: str
    norms: int
    parameters: int
    top1: float
    agreement: float
    relative_l2: float
    speed: float


@dataclass(frozen=True)
class Demo:
    """The demo's figures; `anatomy` is the source's summary without its long lists."""

    passed: bool
    seconds: float
    images: int
    anatomy: Body
    rows: tuple[Row, ...]


def run(say: Callable[[str], None] = lambda what: None) -> Demo:
    """Inspect, convert, save, load, verify, evaluate.

    Args:
        say: called with what is going on.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # so small a network is fastest on one, above all where other work keeps the cores busy
    try:
        return _run(say)
    finally:
        torch.set_num_threads(threads)


def _run(say: Callable[[str], None]) -> Demo:
    start = time.perf_counter()
    say("opening and inspecting the network")
    source = checkpoint.open_model(NAME)
    anatomy = summary.of_network(Network(source), "demo")
    anatomy["skips"] = dict(Counter(block["skip"] for block in anatomy.pop("blocks")))
    del anatomy["sites"]
    networks = {"source": source}
    with tempfile.TemporaryDirectory(prefix="normswap-demo-") as folder:
        for scheme in SCHEMES:
            say(f"converting to {scheme}, saving, loading again")
            networks[scheme] = checkpoint.load(checkpoint.save(convert(source, scheme), Path(folder) / scheme))
    say("reading the images")
    batches: Batches = list(make_loader(source, str(IMAGES), workers=0))
    rows, passed = _measure(networks, batches, say)
    count = sum(len(labels) for _, labels in batches)
    return Demo(passed, time.perf_counter() - start, count, anatomy, rows)


def _measure(
    networks: dict[str, nn.Module], batches: Batches, say: Callable[[str], None]
) -> tuple[tuple[Row, ...], bool]:
    """Return a row for each network, the source first, and whether all agree with it."""
    source, images = networks["source"], [batch for batch, _ in batches[:_FEW]]
    results, errors, passed = {}, {"source": 0.0}, True
    for name, model in networks.items():
        say(f"verifying and evaluating {name}")
        results[name] = classify(model, batches)
        if model is not source:
            report = comparison.verify(source, model, images)
            errors[name] = report.worst.relative_l2
            passed = passed and report.passed
    say("timing")
    speed = _speeds(networks, images[0][:16])
    first, truth = results["source"]
    rows = []
    for name, (evaluation, answers) in results.items():
        same = agreement(truth, answers)
        passed = passed and same == 1 and evaluation.top1 == first.top1
        size = summary.norms(networks[name]), summary.parameters(networks[name])
        rows.append(Row(name, *size, evaluation.top1, same, errors[name], speed[name] / speed["source"]))
    return tuple(rows), passed


def _speeds(networks: dict[str, nn.Module], images: Tensor) -> dict[str, float]:
    """Passes per second over `images` (N, C, H, W), the median of many in random order.

    In processor time, which on one thread is what an idle machine would take. Few images: the time for many hangs on
    what the allocator gives back to the system (measured: 0.8 to 1.1 of the source's speed, in page faults alone).
    """
    turns, order = list(networks), random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(_ROUNDS):
        order.shuffle(turns)
        for name in turns:
            start = time.process_time()
            with torch.inference_mode():
                networks[name](images)
            seconds[name].append(time.process_time() - start)
    return {name: 1 / statistics.median(measured) for name, measured in seconds.items()}
