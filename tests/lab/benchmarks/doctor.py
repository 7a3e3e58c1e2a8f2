"""Networks with a planted fault, and healthy ones: what the doctor says, what its mend is worth.

    export PYTHONPATH=tests:tests/diagnosis
    python tests/lab/benchmarks/doctor.py -o tests/lab/benchmarks/doctor.md

Faults that the network shows by itself are those of tests/diagnosis/test_doctor.py, those that
images show are those of test_doctor_on_images.py; red and blue are exchanged for every network.
Top-1 on CIFAR-10 test images that no check has
seen: of the network as it was, with the fault, and after the mend that the finding names, where
that is a command or a line. What is measured is kept, a line each, in runs/doctor.jsonl; `--fresh`
measures it again.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import test_doctor
import test_doctor_on_images
import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from kinds_images import score
from schemes_table import NETWORKS, ROOT, logits, shuffled
from support import zoo_networks
from torch import Tensor, nn

import normswap
from normswap.diagnosis.findings import Finding
from normswap.errors import NormswapError
from normswap.models.preprocessing import data_config
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

BATCH = 32
LOOKED_AT = 256
TESTED = 512
COLUMNS = (
    "fault",
    "network",
    "named first",
    "right",
    "top-1 before",
    "with the fault",
    "after its mend",
)
NOTE = (
    "Each row is one network with one fault, or with none. Red and blue are exchanged (`BGR`) for "
    "every network. Five healthy networks were brought to another domain by new statistics, and "
    "are looked at with its images. Named first is the first fault of `diagnose` with 256 images. "
    "Top-1 is of 512 other CIFAR-10 test images. The mend is what the finding names, where that "
    "is a command or a line of Python. The eps of `demo` is wrong and does no harm. Keras' "
    "momentum is no fault where the statistics fit the images: `diagnose` remarks on it then. The "
    "checks' limits were set on networks of these kinds; faults that were held out: "
    "[doctor_unseen.md](doctor_unseen.md)."
)
WITHOUT = ("infinite mean",)  # NaN in a mean's place is as much
HARMLESS = {
    "another eps everywhere": "demo",
    "another eps in one norm": "demo",
}  # whose library is known
HEALTHY = (
    *NETWORKS,
    "depthwise",
    "efficient",
    "dense",
    "regnet",
    "preact",
    "plain",
    "plain_norm_after",
)

Prepare = Callable[[Tensor], Tensor]
Plant = Callable[
    [nn.Module, list[Tensor]], list[Tensor]
]  # changes the network, or returns other batches


@dataclass(frozen=True)
class Images:
    """Images as a network is given them, those that are looked at and those that are tested on."""

    seen: list[Tensor]
    test: list[Tensor]
    labels: Tensor

    def prepared(self, prepare: Prepare) -> Images:
        return Images([prepare(x) for x in self.seen], [prepare(x) for x in self.test], self.labels)


@dataclass(frozen=True)
class Fault:
    """A fault by what it is called, the network that has it, how it is planted, and the names that
    are right.
    """

    label: str
    network: str
    plant: Plant
    right: tuple[str, ...]


def opened(name: str) -> nn.Module:
    return (
        open_model(str(NETWORKS[name]))
        if name in NETWORKS
        else copy.deepcopy(zoo_networks.trained(name))
    )


def mean_and_std(model: nn.Module) -> list[Tensor]:
    """Of the network's images, (3, 1, 1) each."""
    return [torch.tensor(data_config(model)[name]).reshape(-1, 1, 1) for name in ("mean", "std")]


def images_for(model: nn.Module, count: int = TESTED) -> Images:
    x, y = shuffled(model, "test", LOOKED_AT + count, seed=3)
    return Images(list(x[:LOOKED_AT].split(BATCH)), list(x[LOOKED_AT:].split(BATCH)), y[LOOKED_AT:])


def top1(model: nn.Module, images: Images) -> float:
    """In the mode that the network is in; of a network that answers by pixel, the mean IoU."""
    return score(logits(copy.deepcopy(model), images.test), images.labels)


def _set_eps(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    value = float(re.findall(r"eps = ([\d.e-]+\d)", finding.mend)[0])
    for path in finding.paths:
        vars(model.get_submodule(path))["eps"] = value
    return model, images


def _stated(text: str) -> list[Tensor]:
    """The mean and the std that a finding states, (3, 1, 1) each."""
    numbers = [re.findall(rf"{name} ([\d.,e-]*\d)", text)[0].split(",") for name in ("mean", "std")]
    return [torch.tensor([*map(float, channels)]).reshape(-1, 1, 1) for channels in numbers]


def _exchange_colours(model: nn.Module, images: Images) -> tuple[nn.Module, Images]:
    """Return the network, and its images with red and blue exchanged before they are normalized."""
    mean, std = mean_and_std(model)
    return model, images.prepared(lambda x: ((x * std + mean).flip(1) - mean) / std)


def _prepare(model: nn.Module, images: Images, finding: Finding) -> tuple[nn.Module, Images]:
    if finding.evidence.startswith("with red and blue exchanged"):
        return _exchange_colours(model, images)

    now, _, best = finding.evidence.rpartition("; with ")
    mean, std = _stated(best)
    _, is_stated, statement = now.partition("given with")
    present_mean, present_std = _stated(statement) if is_stated else mean_and_std(model)

    def prepare(x: Tensor) -> Tensor:
        are_pixels = "given as" in finding.evidence and not is_stated
        pixels = x if are_pixels else x * present_std + present_mean
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


Networked = tuple[nn.Module, Images]  # a network with its images
Load = Callable[[str], Networked]  # opens a network by name
MENDS = {
    "eps": _set_eps,
    "preprocessing": _prepare,
    "training-mode": _evaluate,
    "thawed": _evaluate,
    "no-statistics": _track,
    "not-finite": _recalibrate,
    "negative-variance": _recalibrate,
    "zero-variance": _recalibrate,
    "never-updated": _recalibrate,
    "swapped-statistics": _recalibrate,
    "stale-statistics": _recalibrate,
    "wrong-statistics": _recalibrate,
    "drifted-domain": _recalibrate,
    "momentum": _recalibrate,
}


def fault_row(fault: Fault, model: nn.Module, images: Images) -> Row:
    """Return the row of a planted fault, and whether one of the right names comes first.

    Args:
        fault: The fault.
        model: The network, in which the fault is planted.
        images: Its images.
    """
    before = top1(model, images)
    batches = fault.plant(model, [*images.seen, *images.test])
    images = Images(batches[: len(images.seen)], batches[len(images.seen) :], images.labels)
    faults = normswap.diagnose(model, images=images.seen, name="MODEL").faults
    name = "-"

    after = "-"
    if faults:
        name = faults[0].name
        if name in MENDS and not faults[0].mend.startswith("load"):
            try:
                after = f"{top1(*MENDS[name](copy.deepcopy(model), images, faults[0])):.1f}"
            except (NormswapError, LookupError) as error:
                after = f"refused: {error}"

    is_right = name in fault.right
    verdict = "yes" if is_right else "NO"
    figures = (verdict, f"{before:.1f}", f"{top1(model, images):.1f}", after)
    return {"cells": (fault.label, f"`{fault.network}`", name, *figures), "is_right": is_right}


def healthy_row(label: str, model: nn.Module, images: Images) -> Row:
    """Return the row of a network without a fault, and whether no alarm is raised.

    Args:
        label: How the table calls the network.
        model: The network.
        images: Its images.
    """
    faults = [
        finding.name
        for finding in normswap.diagnose(model, images=images.seen, name="MODEL").faults
    ]
    figures = (", ".join(faults) or "-", "NO" if faults else "yes", f"{top1(model, images):.1f}")
    return {"cells": ("none", f"`{label}`", *figures, "-", "-"), "is_right": not faults}


def measured(
    kept: Kept,
    faults: Iterable[Fault],
    healthy: Iterable[str],
    load: Load,
    others: Mapping[str, Callable[[], Networked]] | None = None,
) -> Iterator[str]:
    """Yield the lines of the table: each fault, each healthy network, and the count of both.

    Args:
        kept: The rows that were measured before; new ones are added.
        faults: The planted faults.
        healthy: The names of the healthy networks.
        load: Opens a network by name, with its images.
        others: Makes each further healthy network, by its label.
    """

    def planted_row(fault: Fault) -> Row:
        return kept.get(
            (fault.label, fault.network), lambda: fault_row(fault, *load(fault.network))
        )

    makers = {name: functools.partial(load, name) for name in healthy} | dict(others or {})
    planted_rows = [planted_row(fault) for fault in faults]
    healthy_rows = [
        kept.get(("none", label), functools.partial(_made_row, label, make))
        for label, make in makers.items()
    ]

    yield markdown_head(*COLUMNS)
    for row in (*planted_rows, *healthy_rows):
        yield markdown_row(*row["cells"])
    named = sum(row["is_right"] for row in planted_rows)
    alarms = sum(not row["is_right"] for row in healthy_rows)
    yield ""
    yield (
        f"A right cause first in {named} of {len(planted_rows)}; false alarms: {alarms} of"
        f" {len(healthy_rows)}."
    )


def _made_row(label: str, make: Callable[[], Networked]) -> Row:
    """Return the row of a healthy network that is made now."""
    return healthy_row(label, *make())


def other_domains() -> dict[str, Callable[[], Networked]]:
    """Networks that were brought to another domain by new statistics, with images of it."""
    shifts: dict[str, tuple[str, Prepare]] = {
        "resnet18_narrow": ("dark", lambda x: 0.4 * x - 0.8),
        "plain": (
            "blurred",
            lambda x: nn.functional.avg_pool2d(x, 5, 1, 2, count_include_pad=False),
        ),
        "depthwise": ("little contrast", lambda x: 0.3 * x),
        "regnet": (
            "noise on it",
            lambda x: x + 0.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
        ),
        "preact": ("inverted", lambda x: -x),
    }
    return {
        f"{name}, {label}": functools.partial(_at_home_elsewhere, name, shift)
        for name, (label, shift) in shifts.items()
    }


def _at_home_elsewhere(name: str, shift: Prepare) -> Networked:
    """Return a network with the statistics of shifted images, and such images."""
    model = opened(name)
    other = images_for(model, 1024).prepared(shift)
    return recalibrate(model, other.test).model, images_for(model).prepared(shift)


def in_network(change: Callable[[nn.Module], None]) -> Plant:
    """The network is changed, the images are not."""

    def plant(model: nn.Module, batches: list[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            change(model)
        return batches

    return plant


def planted() -> Iterator[Fault]:
    for label, (change, right) in test_doctor.FAULTS.items():
        if label not in WITHOUT:
            yield Fault(label, HARMLESS.get(label, "resnet18_narrow"), in_network(change), (right,))
    for label, (plant, right, _) in test_doctor_on_images.PLANTED.items():
        yield Fault(label, "plain", plant, (right,))
    for network in HEALTHY:
        if network != "plain":
            yield Fault("BGR", network, test_doctor_on_images.blue_first, ("preprocessing",))


def load(name: str) -> tuple[nn.Module, Images]:
    model = opened(name)
    return model, images_for(model)


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "doctor.jsonl", fresh=given.fresh)
    table = [*measured(kept, planted(), HEALTHY, load, other_domains())]
    kept.write(
        given.output, "The doctor: planted faults and healthy networks", ["", NOTE, "", *table]
    )


if __name__ == "__main__":
    main()
