"""Twenty faults that no check was made with, and ten further healthy networks: what the doctor says.

    PYTHONPATH=tests:tests/diagnosis:tests/lab/benchmarks python tests/lab/benchmarks/doctor_held_out.py > FILE.md

Each fault has the names that count as right. Images are CIFAR-10's, as `doctor.py` has them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import doctor
import torch
from test_doctor import norms
from torch import Tensor, nn
from torch.nn.utils import prune

import normswap
from normswap.diagnosis.findings import Finding
from normswap.models.preprocessing import data_config
from normswap.surgery.recalibration import recalibrate

Fault = Callable[[nn.Module, list[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Planted:
    """A network by name, how the fault is planted, and the names that are right."""

    network: str
    plant: Fault
    right: tuple[str, ...]


def pixels(model: nn.Module, batch: Tensor) -> Tensor:
    mean, std = (torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    return batch * std + mean


def again(model: nn.Module, batch: Tensor) -> Tensor:
    """Normalized, given pixels in 0..1."""
    mean, std = (torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std"))
    return (batch - mean) / std


def on_images(change: Callable[[nn.Module, Tensor], Tensor]) -> Fault:
    return lambda model, batches: [change(model, batch) for batch in batches]


def on_norms(change: Callable[[list[Any]], object]) -> Fault:
    def plant(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            change(norms(model))
        return batches

    return plant


def deviations(every: list[Any]) -> None:
    """Standard deviations in the place of variances: another framework's files."""
    for norm in every:
        norm.running_var.copy_(norm.running_var.sqrt())


def inverses(every: list[Any]) -> None:
    """1 / sqrt(var + eps) in the place of variances."""
    for norm in every:
        norm.running_var.copy_(1 / (norm.running_var + norm.eps).sqrt())


def no_means(every: list[Any]) -> None:
    for norm in every:
        norm.running_mean.zero_()


def no_variances(every: list[Any]) -> None:
    for norm in every:
        norm.running_var.fill_(1.0)


def signs(every: list[Any]) -> None:
    for norm in every:
        norm.running_mean.neg_()


def one_batch(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Statistics of the last two images, as with torch's momentum of 1."""
    model.train()
    for norm in norms(model):
        norm.momentum = 1.0
    with torch.no_grad():
        model(batches[0][:2])
    for norm in norms(model):
        norm.momentum = 0.1
    model.eval()
    return batches


@torch.no_grad()
def by_noise(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """Somebody ran it in training mode on noise."""
    model.train()
    for _ in range(50):
        model(torch.randn(16, *batches[0].shape[1:]))
    model.eval()
    return batches


@torch.no_grad()
def sparse(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            prune.l1_unstructured(module, "weight", amount=0.6)
            prune.remove(module, "weight")
    return batches


@torch.no_grad()
def shifted(every: list[Any]) -> None:
    """One inner norm's channels are moved by one."""
    norm = every[len(every) // 2]
    for name in ("running_mean", "running_var", "weight", "bias"):
        value = getattr(norm, name)
        value.copy_(value.roll(1).clone())


@torch.no_grad()
def larger(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
    """The weights of every convolution before a norm are 1.6 times as large."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.mul_(1.6)
    return batches


def eps_of_one(every: list[Any]) -> None:
    every[len(every) // 2].eps = 0.1


def tracked_none(every: list[Any]) -> None:
    norm = every[-1]
    norm.running_mean = norm.running_var = norm.num_batches_tracked = None
    norm.track_running_stats = False


def halves(every: list[Any]) -> None:
    """Half precision's overflow."""
    every[2].running_var[:2] = float("inf")


def underflow(every: list[Any]) -> None:
    """Variances that half precision rounds to 0."""
    for norm in every:
        norm.running_var[norm.running_var < norm.running_var.quantile(0.5)] = 0.0


def awake(every: list[Any]) -> None:
    for norm in every:
        norm.train()


def minus(every: list[Any]) -> None:
    every[1].momentum = -0.1


FAULTS: dict[str, Planted] = {
    "deviations for variances": Planted(
        "resnet18_narrow", on_norms(deviations), ("wrong-statistics", "stale-statistics", "drifted-domain")
    ),
    "inverse deviations for variances": Planted(
        "demo", on_norms(inverses), ("wrong-statistics", "stale-statistics", "drifted-domain")
    ),
    "means are 0, variances trained": Planted(
        "resnet18_narrow", on_norms(no_means), ("never-updated", "wrong-statistics", "stale-statistics")
    ),
    "variances are 1, means trained": Planted(
        "plain", on_norms(no_variances), ("never-updated", "wrong-statistics", "stale-statistics")
    ),
    "signs of means": Planted("demo", on_norms(signs), ("stale-statistics", "wrong-statistics")),
    "statistics of two images": Planted(
        "depthwise", one_batch, ("wrong-statistics", "stale-statistics", "drifted-domain")
    ),
    "statistics of noise": Planted("demo", by_noise, ("wrong-statistics", "stale-statistics", "drifted-domain")),
    "60% pruned": Planted("plain", sparse, ("wrong-statistics", "stale-statistics", "drifted-domain")),
    "one norm's channels moved by one": Planted(
        "resnet18_narrow", on_norms(shifted), ("stale-statistics", "swapped-statistics", "wrong-statistics")
    ),
    "weights 1.6 times as large": Planted(
        "dense", larger, ("wrong-statistics", "stale-statistics", "drifted-domain")
    ),
    "eps of 0.1 in one norm": Planted("plain", on_norms(eps_of_one), ("uneven-eps", "eps")),
    "the last norm keeps no statistics": Planted("efficient", on_norms(tracked_none), ("no-statistics",)),
    "infinite variances": Planted("regnet", on_norms(halves), ("not-finite",)),
    "half of all variances rounded to 0": Planted("depthwise", on_norms(underflow), ("zero-variance",)),
    "all norms in training mode": Planted("preact", on_norms(awake), ("training-mode",)),
    "momentum below 0 in one norm": Planted("plain", on_norms(minus), ("momentum",)),
    "normalized twice": Planted("resnet18_narrow", on_images(again), ("preprocessing", "drifted-domain")),
    "mean alone subtracted": Planted(
        "demo",
        on_images(lambda model, x: pixels(model, x) - torch.tensor(data_config(model)["mean"]).reshape(-1, 1, 1)),
        ("preprocessing",),
    ),
    "-1..1 for its own": Planted(
        "resnetv2_18_narrow", on_images(lambda model, x: pixels(model, x) * 2 - 1), ("preprocessing",)
    ),
    "grey images": Planted(
        "demo", on_images(lambda model, x: x.mean(1, keepdim=True).expand_as(x)), ("drifted-domain", "preprocessing")
    ),
}  # fmt: skip


def healthy() -> list[tuple[str, nn.Module, doctor.Images]]:
    """Networks, with images of theirs."""

    def conv(model: nn.Module, count: int = 512) -> doctor.Images:
        return doctor.images_for(model, count)

    rows: list[tuple[str, nn.Module]] = []
    one = doctor.opened("plain")
    rows.append(("plain, norms frozen", normswap.convert(one, "frozen-bn").model))
    rows.append(("demo, folded and back", _back("demo")))
    ghost = normswap.convert(doctor.opened("resnet18_narrow"), "batchnorm", ghost_batch=8).model
    rows.append(("resnet18_narrow, ghost batches", ghost))
    rows.append(("depthwise, float64", doctor.opened("depthwise").double()))
    pruned = doctor.opened("resnet18_narrow")
    sparse(pruned, [])
    images = conv(pruned, 1024)
    rows.append(("resnet18_narrow, pruned and recalibrated", recalibrate(pruned, images.test).model))
    rows.append(("dense, in training mode", doctor.opened("dense").train()))
    rows.append(("regnet, fine-tuned", tuned("regnet")))
    rows.append(("efficient, fine-tuned", tuned("efficient")))
    rows.append(("preact, few channels pruned to 0", few_dead("preact")))
    rows.append(("demo, merged from two", mean_of("demo")))
    made = []
    for label, model in rows:
        given = conv(model)
        double = next(model.parameters()).dtype == torch.float64
        made.append((label, model, given.prepared(lambda x: x.double()) if double else given))
    return made


def _back(name: str) -> nn.Module:
    folded = normswap.convert(doctor.opened(name), "folded")
    return normswap.convert(folded, "batchnorm").model


def tuned(name: str) -> nn.Module:
    model = doctor.opened(name)
    images = doctor.images_for(model, 1024)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    labels = images.labels.split(doctor.BATCH)
    for _ in range(3):
        for x, y in zip(images.test, labels, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def few_dead(name: str) -> nn.Module:
    model = doctor.opened(name)
    norm = norms(model)[2]
    norm.weight[0], norm.bias[0] = 0.0, 0.0
    return recalibrate(model, doctor.images_for(model, 1024).test).model


@torch.no_grad()
def mean_of(name: str) -> nn.Module:
    one = doctor.opened(name)
    other = copy.deepcopy(one)
    for parameter in other.parameters():
        parameter.add_(0.02 * parameter.std(correction=0) * torch.randn(parameter.shape))
    return recalibrate(other, doctor.images_for(one, 1024).test).model


def planted_row(label: str, planted: Planted, model: nn.Module, images: doctor.Images) -> tuple[Finding, ...]:
    """Plant the fault, print its row, and return what the doctor names."""
    before = doctor.top1(model, images)
    batches = planted.plant(model, [*images.seen, *images.test])
    images = doctor.Images(batches[: len(images.seen)], batches[len(images.seen) :], images.labels)
    faults = doctor.diagnosed(model, images).faults
    print(f"| {label} | `{planted.network}` | {faults[0].name if faults else '-'} "
          f"| {'yes' if is_right(planted, faults) else 'NO'} | {before:.1f} | {doctor.top1(model, images):.1f} |",
          flush=True)  # fmt: skip
    return faults


def is_right(planted: Planted, faults: Sequence[Finding]) -> bool:
    """Whether a right cause is named first."""
    return bool(faults) and faults[0].name in planted.right


def main() -> None:
    torch.manual_seed(0)
    print("| fault | network | named first | right | top-1 before | with the fault |\n|---|---|---|---|---|---|")
    right = 0
    for label, planted in FAULTS.items():
        model = doctor.opened(planted.network)
        images = doctor.images_for(model, 512)
        faults = planted_row(label, planted, model, images)
        right += is_right(planted, faults)
    alarms = 0
    for label, model, images in healthy():
        faults = doctor.diagnosed(model, images).faults
        alarms += bool(faults)
        print(f"| none | {label} | {', '.join(one.name for one in faults) or '-'} | {'NO' if faults else 'yes'} "
              f"| {doctor.top1(model, images):.1f} | - |", flush=True)  # fmt: skip
    print(f"\nA right cause first in {right} of {len(FAULTS)}; false alarms: {alarms} of 10.")


if __name__ == "__main__":
    main()
