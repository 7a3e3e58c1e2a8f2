"""Thirty networks with a fault planted each, and fifteen healthy ones: what the doctor says, what its mend is worth.

    PYTHONPATH=tests:tests/diagnosis python tests/lab/benchmarks/doctor.py [--images N] > FILE.md

Faults that the network shows by itself are those of tests/diagnosis/test_doctor.py, those that images show are those
of test_doctor_on_images.py. Top-1 on CIFAR-10 test images that no check has seen: of the network as it was, with the
fault, and after the mend that the finding names, where that is a command or a line.
"""

from __future__ import annotations

import argparse
import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import test_doctor
import test_doctor_on_images
import torch
import zoo_networks
from torch import Tensor, nn
from trained_networks import IMAGES, NETWORKS

import normswap
from normswap.diagnosis.findings import Diagnosis, Finding
from normswap.errors import NormswapError
from normswap.images.datasets import make_loader
from normswap.models.preprocessing import data_config
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

BATCH, LOOKED_AT = 32, 256
WITHOUT = ("infinite mean",)  # NaN in a mean's place is as much
HARMLESS = {"another eps everywhere": "demo", "another eps in one norm": "demo"}  # whose library is known

Prepare = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Images:
    """Images as a network is given them, those that are looked at and those that are tested on."""

    seen: list[Tensor]
    test: list[Tensor]
    labels: Tensor

    def prepared(self, prepare: Prepare) -> Images:
        return Images([prepare(x) for x in self.seen], [prepare(x) for x in self.test], self.labels)


def opened(name: str) -> nn.Module:
    return open_model(str(NETWORKS[name])) if name in NETWORKS else copy.deepcopy(zoo_networks.trained(name))


def images_for(model: nn.Module, count: int) -> Images:
    loader = make_loader(model, str(IMAGES), batch_size=BATCH, workers=1, samples=LOOKED_AT + count, seed=3)
    pairs = list(loader)
    x, y = torch.cat([pair[0] for pair in pairs]), torch.cat([pair[1] for pair in pairs])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Images(list(x[:LOOKED_AT].split(BATCH)), list(x[LOOKED_AT:].split(BATCH)), y[LOOKED_AT:])


@torch.no_grad()
def top1(model: nn.Module, images: Images) -> float:
    """In the mode that the network is in."""
    model = copy.deepcopy(model)
    answers = torch.cat([model(x).argmax(1) for x in images.test])
    return 100 * float((answers == images.labels).double().mean())


def _set_eps(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    value = float(re.findall(r"eps = ([\d.e-]+\d)", finding.mend)[0])
    for path in finding.paths:
        vars(model.get_submodule(path))["eps"] = value
    return model, images


def _column(numbers: str) -> Tensor:
    return torch.tensor([float(part) for part in numbers.split(",")]).reshape(-1, 1, 1)


def _prepare(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    mean, std = (
        torch.tensor([float(part) for part in re.findall(rf"{name} ([\d.,e-]*\d)", finding.evidence)[0].split(",")])
        for name in ("mean", "std")
    )
    config = data_config(model)
    present = [torch.tensor(config[name]).reshape(-1, 1, 1) for name in ("mean", "std")]

    def prepare(x: Tensor) -> Tensor:
        pixels = x if "given as" in finding.evidence else x * present[1] + present[0]
        if "given with" in finding.evidence:
            means, stds = (re.findall(rf"{name} ([\d.,e-]*\d)", finding.evidence)[1] for name in ("mean", "std"))
            pixels = x * _column(stds) + _column(means)
        pixels = pixels / 255 if "0..255" in finding.evidence else pixels
        pixels = pixels.flip(1) if "BGR" in finding.evidence else pixels
        return (pixels - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)

    return model, images.prepared(prepare)


def _recalibrate(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    return recalibrate(model, images.seen).model, images


def _evaluate(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    return model.eval(), images


def _track(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    for path in finding.paths:
        norm: Any = model.get_submodule(path)
        norm.track_running_stats = True
        norm.register_buffer("running_mean", torch.zeros(norm.num_features))
        norm.register_buffer("running_var", torch.ones(norm.num_features))
        norm.register_buffer("num_batches_tracked", torch.tensor(0))
    return recalibrate(model, images.seen).model, images


MENDS = {
    "eps": _set_eps, "preprocessing": _prepare, "training-mode": _evaluate, "thawed": _evaluate,
    "no-statistics": _track,
    "not-finite": _recalibrate, "negative-variance": _recalibrate, "zero-variance": _recalibrate,
    "never-updated": _recalibrate, "swapped-statistics": _recalibrate, "stale-statistics": _recalibrate,
    "wrong-statistics": _recalibrate, "drifted-domain": _recalibrate, "momentum": _recalibrate,
}  # fmt: skip


def diagnosed(model: nn.Module, images: Images) -> Diagnosis:
    return normswap.diagnose(model, images=images.seen, name="MODEL")


def row(label: str, network: str, model: nn.Module, images: Images, wanted: str, before: float) -> bool:
    """Print a row of the table of faults; whether the right cause was named first."""
    found = diagnosed(model, images)
    first = found.faults[0] if found.faults else None
    right = first is not None and first.name == wanted
    after, faulty = "", top1(model, images)
    if first is not None and first.name in MENDS and not first.mend.startswith("load"):
        try:
            after = f"{top1(*MENDS[first.name](copy.deepcopy(model), images, first)):.1f}"
        except (NormswapError, KeyError) as error:
            after = f"refused: {error}"
    print(f"| {label} | `{network}` | {first.name if first else '-'} | {'yes' if right else 'NO'} | {before:.1f} "
          f"| {faulty:.1f} | {after or '-'} |", flush=True)  # fmt: skip
    return right


def healthy() -> list[tuple[str, Callable[[], nn.Module]]]:
    names = (*NETWORKS, "depthwise", "efficient", "dense", "regnet", "preact", "plain", "plain_norm_after")
    return [(name, lambda name=name: opened(name)) for name in names]


def other_domains(count: int) -> list[tuple[str, nn.Module, Images]]:
    """Networks that were brought to another domain by new statistics, with images of it."""
    shifts: dict[str, Prepare] = {
        "dark": lambda x: 0.4 * x - 0.8,
        "blurred": lambda x: nn.functional.avg_pool2d(x, 5, 1, 2, count_include_pad=False),
        "little contrast": lambda x: 0.3 * x,
        "noise on it": lambda x: x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
        "inverted": lambda x: -x,
    }
    rows = []
    for (label, shift), name in zip(
        shifts.items(), ("resnet18_narrow", "plain", "depthwise", "regnet", "preact"), strict=True
    ):
        model = opened(name)
        images = images_for(model, count).prepared(shift)
        other = images_for(model, 1024).prepared(shift)
        rows.append((f"{name}, {label}", recalibrate(model, other.test).model, images))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=512)
    count = parser.parse_args().images
    print("| fault | network | named first | right | top-1 before | with the fault | after its mend |")
    print("|---|---|---|---|---|---|---|")
    right, total = 0, 0
    for label, (plant, wanted) in test_doctor.FAULTS.items():
        if label in WITHOUT:
            continue
        network = HARMLESS.get(label, "resnet18_narrow")
        model = opened(network)
        images = images_for(model, count)
        before = top1(model, images)
        with torch.no_grad():
            plant(model)
        right, total = right + row(label, network, model, images, wanted, before), total + 1
    for label, (damage, wanted, _) in test_doctor_on_images.PLANTED.items():
        model = opened("plain")
        images = images_for(model, count)
        before = top1(model, images)
        batches = damage(model, [*images.seen, *images.test])
        images = Images(batches[: len(images.seen)], batches[len(images.seen) :], images.labels)
        right, total = right + row(label, "plain", model, images, wanted, before), total + 1
    alarms, networks = 0, 0
    cases = [(name, make(), None) for name, make in healthy()]
    for name, model, given in [*cases, *other_domains(count)]:
        images = images_for(model, count) if given is None else given
        faults = [finding.name for finding in diagnosed(model, images).faults]
        alarms, networks = alarms + bool(faults), networks + 1
        named, well = ", ".join(faults) or "-", "NO" if faults else "yes"
        print(f"| none | `{name}` | {named} | {well} | {top1(model, images):.1f} | - | - |", flush=True)
    print(f"\nThe right cause first in {right} of {total}; false alarms: {alarms} of {networks}.")


if __name__ == "__main__":
    main()
