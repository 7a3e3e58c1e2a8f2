"""Law of order and count.

Whatever is sorted is in the order of its numbers, with twelve names that sort otherwise as words.
Whatever is repeated is the same the second time.
"""

import csv
import itertools
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.command_line import MODEL, Capture, run_json
from support.hand_written_networks import PostAct
from support.lived_in_networks import living
from support.sampled_tables import quick
from torch import Tensor, nn

import normswap
from normswap.analysis import summary
from normswap.analysis.block_signals import signal_propagation
from normswap.cli.commands import SUMMARIES
from normswap.images.datasets import make_loader
from normswap.surgery.network import Network
from normswap.training import sweep

TWELVE = range(12)
CLASSIFIER: dict[str, Any] = {
    "input_size": [3, 8, 8],
    "mean": [0.0] * 3,
    "std": [1.0] * 3,
    "interpolation": "bilinear",
    "crop_pct": 1.0,
    "crop_mode": "center",
    "num_classes": 12,
}


def write_images(folder: Path, form: str) -> dict[str, str]:
    """Write an image for each class, whose brightness is 20 times its number; return the labels.

    The files are written, and the labels listed, in an order that is no other's.
    """
    labels: dict[str, str] = {}
    for number in (7, 11, 0, 10, 2, 1, 9, 3, 8, 5, 4, 6):
        label = form.format(number)
        file = folder / label / "image.png"
        file.parent.mkdir(parents=True)
        Image.new("RGB", (8, 8), (20 * number,) * 3).save(file)
        labels[f"{folder.name}/{label}/image.png"] = label
    return labels


def in_folders(place: Path, form: str) -> Path:
    write_images(place / "images", form)
    return place / "images"


def in_tar(place: Path, form: str) -> Path:
    write_images(place / "images", form)
    with tarfile.open(place / "images.tar", "w") as tar:
        tar.add(place / "images", "images")
    return place / "images.tar"


def in_csv(place: Path, form: str) -> Path:
    labels = write_images(place / "images", form)
    with (place / "list.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("file", "label"), *labels.items()])
    return place / "list.csv"


@pytest.mark.parametrize("form", ["{}", "class {}", "c{}-x"])
@pytest.mark.parametrize("container", [in_folders, in_tar, in_csv])
def test_twelve_labels_are_in_the_order_of_their_numbers(
    tmp_path: Path, container: Callable[[Path, str], Path], form: str
) -> None:
    loader = make_loader(CLASSIFIER, str(container(tmp_path, form)), batch_size=5, workers=0)

    for images, labels in loader:
        brightness = (images.mean((1, 2, 3)) * 255 / 20).round()
        assert brightness.tolist() == labels.tolist()


class Deep(nn.Module):
    """A network of twelve residual blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.Sequential(*(PostAct(4) for _ in TWELVE))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.stem(x)).mean((2, 3))


def test_twelve_blocks_are_in_the_order_of_the_forward() -> None:
    paths = [f"blocks.{number}" for number in TWELVE]
    model, x = living(Deep(), 3, 8, 8)
    network = Network(model, x)

    done = normswap.convert(network, "skipinit")

    record = summary.of_conversion(done)[-1]
    norms = [f"{path}.{name}" for path in paths for name in ("bn1", "bn2")]
    assert [block.path for block in network.anatomy.blocks] == paths
    assert [norm.path for norm in network.anatomy.norms] == norms
    assert [site.site for site in done.report.sites] == paths
    assert [point.block for point in signal_propagation(network)] == paths
    assert [path.rpartition(".")[0] for path in record["alphas"]] == paths


def test_rates_are_in_the_order_of_numbers_and_each_counts_once() -> None:
    words = [f"{rate:g}" for rate in (9, 10, 100, 0.5, 2e-05, 3e-4, 1, 20, 0.25, 8, 7, 6)]

    rates = sweep.parse_rates(",".join([*words, "10.0", "2^-1"]))

    assert len(rates) == len(words)
    assert all(low < high for low, high in itertools.pairwise(rates))


def test_lines_of_a_sweep_are_in_the_order_of_rates() -> None:
    rates = [9.0, 10.0, 100.0, 0.5]
    trials = [
        sweep.Trial(lr=lr, seed=seed, state="done", top1=50.0 + seed, seconds=1.0)
        for lr in rates
        for seed in reversed(TWELVE)
    ]

    lines = sweep.lines(trials, len(TWELVE), 10)

    assert [line.lr for line in lines] == sorted(rates)
    # The best ten of twelve seeds have top-1 of 52 to 61.
    assert {line.mean for line in lines} == {56.5}


FEW = ("--data", "demo", "--samples", "20", "--workers", "0")
# How each command is run that can be run twice; what a clock says in its answer is left out.
REPEATED: dict[str, tuple[str, ...]] = {
    "inspect": (MODEL,),
    "convert": (MODEL, "--to", "groupnorm", "--calibrate", "demo", "--samples", "28", "--force"),
    "verify": ("groupnorm",),
    "evaluate": (MODEL, *FEW),
    "schemes": (),
    "advise": (MODEL,),
    "doctor": (MODEL, *FEW),
    "export": (MODEL, "-o", "file.pt2", "--force"),
    "recalibrate": (MODEL, *FEW, "-o", "fresh", "--force"),
    "report": ("groupnorm", "--force"),
    "spp": (MODEL, MODEL, "--samples", "2"),
    "decay": (MODEL,),
    "recipes": (),
}
# Commands whose repetition other tests hold.
ELSEWHERE = {
    "demo": "tests/reporting/test_demo.py",
    "bench": "it measures time alone",
    "push": "tests/storage/test_publishing.py",
    "finetune": "tests/training/test_resume.py",
    "sweep": "tests/training/test_sweep.py",
}
TIMES = ("seconds", "images_per_s", "ms")


def without_times(body: Any) -> Any:
    """The record without what a clock says."""
    if isinstance(body, dict):
        return {key: without_times(item) for key, item in body.items() if key not in TIMES}
    if isinstance(body, list):
        return [without_times(item) for item in body]
    return body


def test_every_command_has_a_row() -> None:
    assert {*REPEATED} | {*ELSEWHERE} == {*SUMMARIES}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "command", quick(REPEATED, ["inspect", "schemes", "decay", "recipes", "spp", "advise"])
)
def test_a_command_says_the_same_the_second_time(command: str, here: Path, capfd: Capture) -> None:
    if "groupnorm" in REPEATED[command][:1]:
        run_json(capfd, "convert", MODEL, "--to", "groupnorm", "-o", "groupnorm")
    words = REPEATED[command]
    if command == "convert":
        words = (*words, "-o", "again")

    first = run_json(capfd, command, *words)
    # A caller's random numbers move nothing.
    torch.rand(5)
    second = run_json(capfd, command, *words)

    assert without_times(first) == without_times(second)


@pytest.mark.slow
def test_a_network_that_is_named_twice_has_one_curve(here: Path, capfd: Capture) -> None:
    random = ("--weights", "random", "--input-size", "3,32,32", "--samples", "2")

    body = run_json(capfd, "spp", "resnet18", "resnet18", *random)

    one, other = body["curves"].values()
    assert one == other
