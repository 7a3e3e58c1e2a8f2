"""Thirty-three networks with a planted fault, fifteen healthy ones: what the doctor says, what its mend is worth.

    PYTHONPATH=tests:tests/diagnosis python tests/lab/benchmarks/doctor.py > FILE.md

Faults that the network shows by itself are those of tests/diagnosis/test_doctor.py, those that images show are those
of test_doctor_on_images.py. Top-1 on CIFAR-10 test images that no check has seen: of the network as it was, with the
fault, and after the mend that the finding names, where that is a command or a line.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import test_doctor
import test_doctor_on_images
import torch
import zoo_networks
from kinds_images import score
from schemes_table import NETWORKS, archive, logits, read
from torch import Tensor, nn

import normswap
from normswap.diagnosis.findings import Finding
from normswap.errors import NormswapError
from normswap.models.preprocessing import data_config
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

BATCH, LOOKED_AT, TESTED = 32, 256, 512
HEAD = "| fault | network | named first | right | top-1 before | with the fault | after its mend |\n" + "|---" * 7 + "|"
WITHOUT = ("infinite mean",)  # NaN in a mean's place is as much
HARMLESS = {"another eps everywhere": "demo", "another eps in one norm": "demo"}  # whose library is known
HEALTHY = (*NETWORKS, "depthwise", "efficient", "dense", "regnet", "preact", "plain", "plain_norm_after")

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


def images_for(model: nn.Module, count: int = TESTED) -> Images:
    x, y = read(model, archive("test"), LOOKED_AT + count, seed=3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return Images(list(x[:LOOKED_AT].split(BATCH)), list(x[LOOKED_AT:].split(BATCH)), y[LOOKED_AT:])


def top1(model: nn.Module, images: Images) -> float:
    """In the mode that the network is in; of a network that answers by pixel, the mean IoU."""
    return score(logits(copy.deepcopy(model), images.test), images.labels)


def _set_eps(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    value = float(re.findall(r"eps = ([\d.e-]+\d)", finding.mend)[0])
    for path in finding.paths:
        vars(model.get_submodule(path))["eps"] = value
    return model, images


def _column(numbers: str) -> Tensor:
    return torch.tensor([float(part) for part in numbers.split(",")]).reshape(-1, 1, 1)


def _prepare(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    now, _, best = finding.evidence.rpartition("; with ")
    mean, std = (_column(re.findall(rf"{name} ([\d.,e-]*\d)", best)[0]) for name in ("mean", "std"))
    config = data_config(model)
    present = [torch.tensor(config[name]).reshape(-1, 1, 1) for name in ("mean", "std")]

    def prepare(x: Tensor) -> Tensor:
        pixels = x if "given as" in finding.evidence else x * present[1] + present[0]
        if "given with" in now:
            given = now.partition("given with")[2]
            means, stds = (_column(re.findall(rf"{name} ([\d.,e-]*\d)", given)[0]) for name in ("mean", "std"))
            pixels = x * stds + means
        pixels = pixels / 255 if "0..255" in finding.evidence else pixels
        pixels = pixels.flip(1) if "BGR" in finding.evidence else pixels
        return (pixels - mean) / std

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


def fault_row(label: str, network: str, model: nn.Module, images: Images, right: Sequence[str], before: float) -> bool:
    """Print a row of the table for a network with a fault; whether one of the right names comes first."""
    faults = normswap.diagnose(model, images=images.seen, name="MODEL").faults
    first = faults[0] if faults else None
    after = "-"
    if first is not None and first.name in MENDS and not first.mend.startswith("load"):
        try:
            after = f"{top1(*MENDS[first.name](copy.deepcopy(model), images, first)):.1f}"
        except (NormswapError, LookupError) as error:
            after = f"refused: {error}"
    name = first.name if first else "-"
    print(f"| {label} | `{network}` | {name} | {'yes' if name in right else 'NO'} | {before:.1f} "
          f"| {top1(model, images):.1f} | {after} |", flush=True)  # fmt: skip
    return name in right


def healthy_row(network: str, model: nn.Module, images: Images) -> bool:
    """Print a row of the table for a network without a fault; whether the alarm is raised."""
    faults = [finding.name for finding in normswap.diagnose(model, images=images.seen, name="MODEL").faults]
    named, well = ", ".join(faults) or "-", "NO" if faults else "yes"
    print(f"| none | `{network}` | {named} | {well} | {top1(model, images):.1f} | - | - |", flush=True)
    return bool(faults)


def damaged(images: Images, plant: Callable[[list[Tensor]], list[Tensor]]) -> Images:
    """All images as a fault leaves them."""
    batches = plant([*images.seen, *images.test])
    return Images(batches[: len(images.seen)], batches[len(images.seen) :], images.labels)


def other_domains() -> list[tuple[str, nn.Module, Images]]:
    """Networks that were brought to another domain by new statistics, with images of it."""
    shifts: dict[str, tuple[str, Prepare]] = {
        "resnet18_narrow": ("dark", lambda x: 0.4 * x - 0.8),
        "plain": ("blurred", lambda x: nn.functional.avg_pool2d(x, 5, 1, 2, count_include_pad=False)),
        "depthwise": ("little contrast", lambda x: 0.3 * x),
        "regnet": ("noise on it", lambda x: x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))),
        "preact": ("inverted", lambda x: -x),
    }
    rows = []
    for name, (label, shift) in shifts.items():
        model = opened(name)
        other = images_for(model, 1024).prepared(shift)
        rows.append((f"{name}, {label}", recalibrate(model, other.test).model, images_for(model).prepared(shift)))
    return rows


def main() -> None:
    print(HEAD)
    named: list[bool] = []
    for label, (plant, right) in test_doctor.FAULTS.items():
        if label in WITHOUT:
            continue
        network = HARMLESS.get(label, "resnet18_narrow")
        model = opened(network)
        images = images_for(model)
        before = top1(model, images)
        with torch.no_grad():
            plant(model)
        named.append(fault_row(label, network, model, images, (right,), before))
    for label, (damage, right, _) in test_doctor_on_images.PLANTED.items():
        model = opened("plain")
        images = images_for(model)
        before = top1(model, images)
        images = damaged(images, functools.partial(damage, model))
        named.append(fault_row(label, "plain", model, images, (right,), before))
    cases = [(name, model, images_for(model)) for name, model in ((name, opened(name)) for name in HEALTHY)]
    alarms = [healthy_row(*case) for case in [*cases, *other_domains()]]
    print(f"\nThe right cause first in {sum(named)} of {len(named)}; false alarms: {sum(alarms)} of {len(alarms)}.")


if __name__ == "__main__":
    main()
