"""Law: what a command prints, writes and feeds belongs to the network that it is said of.

Where there are two networks, two folders of images or steps of two calls, none stands for another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from support.command_line import MODEL, Capture, run_json
from support.hand_written_networks import PostAct
from support.lived_in_networks import distance, living
from timm.models import _registry
from torch import nn

import normswap
from normswap import plan, provenance
from normswap.cli import early_checks
from normswap.cli.app import load, main
from normswap.cli.commands import export_command, spp_command
from normswap.cli.options import Compared, ImageOpening
from normswap.images.datasets import Loader, make_loader
from normswap.models.preprocessing import state
from normswap.models.stated_images import Preprocessing
from normswap.storage import checkpoint
from normswap.surgery import applying
from normswap.training import engine, recipe_files

# The options that say how a MODEL is opened, each with its least value and with another one.
OPENINGS: dict[str, tuple[tuple[str, ...], ...]] = {
    "weights": (("--weights", "random"), ("--weights", "net.pth")),
    "arch": (("--arch", "resnet18"),),
    "arch_arg": (("--arch-arg", "a=0"), ("--arch-arg", "a=1,2", "--arch-arg", "b=x")),
    "num_classes": (("--num-classes", "0"), ("--num-classes", "7")),
    "in_chans": (("--in-chans", "1"), ("--in-chans", "4")),
    "input_size": (("--input-size", "3,8,8"),),
    "inputs": (("--input", "x=0"), ("--input", "x=2,1600", "--input", "ids=16:int64")),
    "trust_factory": (("--trust-factory",),),
    "image_mean": (("--image-mean", "0"), ("--image-mean", "0.1,0.2,0.3")),
    "image_std": (("--image-std", "1"),),
    "crop_pct": (("--crop-pct", "0.5"),),
    "interpolation": (("--interpolation", "nearest"),),
}


def opening(words: Sequence[str]) -> ImageOpening:
    """The options of a command line that say how a MODEL is opened."""
    context = load("evaluate").make_context("evaluate", [MODEL, "--data", "demo", *words])
    return ImageOpening(
        **{field.name: context.params[field.name] for field in fields(ImageOpening)}
    )


def test_every_option_of_an_opening_has_a_row() -> None:
    assert {*OPENINGS} == {field.name for field in fields(ImageOpening)}


@pytest.mark.parametrize("name", OPENINGS)
def test_the_words_that_open_a_network_open_it_again_alike(name: str) -> None:
    """Alone, and beside every other option."""
    others = [words[-1] for other, words in OPENINGS.items() if other != name]
    beside = [word for words in others for word in words]

    for words in OPENINGS[name]:
        for typed in (words, (*beside, *words)):
            asked = opening(typed)
            assert asked != opening(())
            assert asked.words("net")[0] == "net"
            assert opening(asked.words("net")[1:]) == asked


# What a network is opened with if nothing is typed.
UNASKED: dict[str, Any] = {
    "weights": "pretrained",
    "arch": None,
    "arch_args": {},
    "num_classes": None,
    "in_chans": None,
    "input_size": None,
    "inputs": {},
    "trust_factory": False,
}
# What is typed, what reaches the function that opens a network, and what is stated of its images.
REACHING: list[tuple[str, dict[str, Any], Preprocessing]] = [
    ("", {}, Preprocessing()),
    ("--weights random", {"weights": "random"}, Preprocessing()),
    (
        "--weights net.pth --arch resnet34",
        {"weights": "net.pth", "arch": "resnet34"},
        Preprocessing(),
    ),
    (
        "--arch-arg a=0 --arch-arg b=1,2 --arch-arg c=x --arch-arg d=false --arch-arg e=0.5",
        {"arch_args": {"a": 0, "b": [1, 2], "c": "x", "d": False, "e": 0.5}},
        Preprocessing(),
    ),
    ("--num-classes 0 --in-chans 1", {"num_classes": 0, "in_chans": 1}, Preprocessing()),
    ("--input-size 3,8,16", {"input_size": (3, 8, 16)}, Preprocessing()),
    (
        "--input x=2,1600 --input ids=16:int64",
        {"inputs": {"x": ((2, 1600), "float32"), "ids": ((16,), "int64")}},
        Preprocessing(),
    ),
    ("--trust-factory", {"trust_factory": True}, Preprocessing()),
    (
        "--image-mean 0.1,0.2,0.3 --image-std 0.4 --crop-pct 0.75 --interpolation nearest",
        {},
        Preprocessing((0.1, 0.2, 0.3), (0.4,), 0.75, "nearest"),
    ),
]


@pytest.mark.parametrize(("words", "asked", "stated"), REACHING)
def test_what_is_typed_of_a_network_opens_it_whole(
    words: str,
    asked: dict[str, Any],
    stated: Preprocessing,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (here / "net").mkdir()
    network = nn.Conv2d(3, 2, 1)
    opened: list[tuple[str, dict[str, Any]]] = []

    def open_model(name: str, **given: Any) -> nn.Module:
        opened.append((name, given))
        return network

    monkeypatch.setattr(checkpoint, "open_model", open_model)
    typed = opening(words.split())

    assert typed.open("net") is network
    assert opened == [("net", {**UNASKED, **asked})]
    assert typed.stated() == stated


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
def test_as_much_as_must_be_kept_is_enough_and_less_is_not(share: float) -> None:
    compared = Compared(min_kept=share)

    assert compared.enough(share)
    assert compared.enough(1.0)
    assert not compared.enough(share - 1e-9)
    assert Compared().enough(share - 1e-9)


def small(seed: int, side: int, mean: float) -> nn.Module:
    """A network of one residual block that reads images of its own size, mean and deviation."""
    torch.manual_seed(seed)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), PostAct(4), nn.AdaptiveAvgPool2d(1))
    network, _ = living(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 10)), 3, side, side)
    network.__dict__["pretrained_cfg"] = {"input_size": (3, side, side), "num_classes": 10}
    provenance.attach(network, provenance.of(checkpoint.open_model(MODEL)))
    return state(network, Preprocessing((mean,) * 3, (0.1 + mean,) * 3, 1.0, "bilinear"))


@pytest.fixture
def two(here: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, nn.Module]:
    """Two networks that are opened by the names of two empty folders."""
    networks = {"one": small(0, 8, 0.2), "two": small(1, 14, 0.7)}
    for name in networks:
        (here / name).mkdir()
    monkeypatch.setattr(checkpoint, "open_model", lambda name, **_: networks[name])
    return networks


@torch.no_grad()
def scores_of(network: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """The network's answers on the images as it takes them, and the labels."""
    batches = [*make_loader(network, "demo", samples=40, batch_size=40, workers=0)]
    ((images, labels),) = batches
    return network.eval()(images), labels


def test_two_networks_are_each_evaluated_on_images_as_they_take_them(
    two: dict[str, nn.Module], capfd: Capture
) -> None:
    few = ("--data", "demo", "--samples", "40", "--workers", "0")

    body = run_json(capfd, "evaluate", "one", "--against", "two", *few)

    scores, labels = scores_of(two["one"])
    others, _ = scores_of(two["two"])
    best = scores.topk(5).indices
    del body["images_per_s"]
    assert body == {
        "source": "one",
        "data": "demo",
        "top1": pytest.approx(100 * float((best[:, 0] == labels).double().mean())),
        "top5": pytest.approx(100 * float((best == labels[:, None]).any(1).double().mean())),
        "loss": pytest.approx(float(nn.functional.cross_entropy(scores, labels)), rel=1e-4),
        "count": 40,
        "against": {
            "source": "two",
            "top1": pytest.approx(100 * float((others.argmax(1) == labels).double().mean())),
            "agreement": pytest.approx(
                float((others.argmax(1) == scores.argmax(1)).double().mean())
            ),
            "enough": True,
            "verdict": "MEASURED",
        },
    }


@pytest.mark.parametrize(("scheme", "count"), [("weightnorm", 1), ("groupnorm", 2)])
def test_a_plan_that_is_written_has_the_steps_of_this_call_and_can_be_carried_out_again(
    scheme: str,
    count: int,
    two: dict[str, nn.Module],
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The network was converted before, so that its own plan has a step more."""
    size = (3, 8, 8)
    before = normswap.convert(two["one"], "folded", input_size=size)
    two["one"] = before.model
    written: list[Any] = []
    monkeypatch.setattr(checkpoint, "save", lambda done, *_, **__: written.append(done))

    body = run_json(capfd, "convert", "one", "--to", scheme, "--plan", "p.json", "-o", "new")

    steps = plan.Plan.from_json(Path("p.json").read_text(encoding="utf-8")).steps
    (done,) = written
    assert [step.scheme for step in before.plan.steps] == ["folded"]
    assert done.plan.steps == (*before.plan.steps, *steps)
    assert len(body["steps"]) == len(steps) == count
    # A fit of GroupNorms also sets values, which no plan holds.
    if scheme == "weightnorm":
        x = torch.randn(2, *size)
        with torch.no_grad():
            again = applying.apply(before.model, steps).eval()
            assert distance(done.model.eval()(x), again(x)) < 1e-5


ROWS = 24
# The first brightness of each folder of images.
IMAGES = {"fitted": 0, "measured": 32}


def folder(place: Path, first: int) -> Path:
    """A folder of images, each with a brightness of its own."""
    for row in range(ROWS):
        label = place / str(row % 4)
        label.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (4 * (first + row),) * 3).save(label / f"{row:02}.png")
    return place


def rows_of(loader: Loader) -> set[int]:
    """The numbers of the images that a loader reads for `small(0, 8, 0.2)`."""
    brightness = [0.3 * image.mean() + 0.2 for images, _ in loader for image in images]
    return {round(float(value) * 255 / 4) for value in brightness}


@pytest.mark.parametrize("data", [None, "fitted", "measured"])
def test_int8_is_measured_on_no_image_that_it_is_calibrated_on(
    data: str | None, here: Path
) -> None:
    network = small(0, 8, 0.2)
    places = {name: str(folder(here / name, first)) for name, first in IMAGES.items()}
    int8 = export_command.Int8(places["fitted"], calibrate_samples=10)
    checked = export_command.Checked(data=None if data is None else places[data])

    fitted, measured = (rows_of(part) for part in int8.parts(checked, network))

    assert len(fitted) == 10
    assert fitted <= {*range(ROWS)}
    if data == "measured":
        assert measured == {*range(IMAGES["measured"], IMAGES["measured"] + ROWS)}
    else:
        assert measured == {*range(ROWS)} - fitted


class Reached(BaseException):
    """A command has called what it is for."""

    def __init__(self, recipe: Any) -> None:
        super().__init__()
        self.recipe = recipe


NAMED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "random": (("--weights", "random"), {"weights": "random", "args": {}}),
    "an argument": (
        ("--arch-arg", "channels=4,4,8,8"),
        {"weights": "pretrained", "args": {"channels": [4, 4, 8, 8]}},
    ),
    "random, two arguments": (
        ("--weights", "random", "--arch-arg", "channels=4,4,8,8", "--arch-arg", "layers=1,1,1,1"),
        {"weights": "random", "args": {"channels": [4, 4, 8, 8], "layers": [1, 1, 1, 1]}},
    ),
}


@pytest.mark.parametrize("case", NAMED)
def test_the_recipe_of_a_run_names_the_network_that_was_typed(
    case: str, two: dict[str, nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reach(_model: nn.Module, recipe: Any, *_: object, **__: object) -> None:
        raise Reached(recipe)

    monkeypatch.setattr(engine, "finetune", reach)
    words, network = NAMED[case]
    command = ("finetune", "one", "--recipe", "cifar10_recover_skipinit", "--data", "demo")

    with pytest.raises(Reached) as reached:
        main([*command, *words, "optim.lr=0.125"])

    recipe = reached.value.recipe
    assert recipe.model.model_dump() == {"name": "one", **network}
    assert (recipe.data.root, recipe.optim.lr) == ("demo", 0.125)
    Path("again.yaml").write_text(recipe_files.dump(recipe), encoding="utf-8")
    assert recipe_files.load_recipe(Path("again.yaml")) == recipe


def test_the_names_that_are_read_without_timm_are_those_of_timm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its networks, and the older names that it still opens."""
    # Another library may have registered networks of its own.
    names = {
        name
        for name in timm.list_models()
        if timm.models.model_entrypoint(name).__module__.startswith("timm.")
    }
    names |= _registry._deprecated_models.keys()
    monkeypatch.delitem(sys.modules, "timm")

    assert early_checks._timm_names() >= names


def test_noise_has_as_many_samples_as_are_asked_for_whatever_a_batch_holds() -> None:
    options = spp_command.ImagesOrNoise(batch_size=2, samples=5)

    calls, described = options.calls(nn.Conv2d(3, 4, 3), seed=0)

    assert [call.count for call in calls] == [5]
    assert described.startswith("5 x N(0, 1) noise")
