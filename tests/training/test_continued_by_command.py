"""Law of continued runs: the command that is printed opens the very network the run began with."""

import shlex
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.command_line import Capture, here
from torch import Tensor, nn

from normswap.cli.app import main
from normswap.cli.commands import finetune_command
from normswap.cli.options import ImageOpening
from normswap.models.preprocessing import stated
from normswap.training import assembly, engine, recipe_files
from normswap.training.engine import Result
from normswap.training.recipe import Recipe

__all__ = ["here"]  # a fixture

SMALL = (
    *("resnet18", "--weights", "random"),
    *("--arch-arg", "channels=4,4,8,8", "--arch-arg", "layers=1,1,1,1"),
)
# How a MODEL is typed; a recipe says all of the first, and not all of the others.
TYPED: dict[str, tuple[str, ...]] = {
    "arguments": SMALL,
    "a new head": (*SMALL, "--num-classes", "10"),
    "other channels": (*SMALL, "--in-chans", "1", "--image-mean", "0.5", "--image-std", "0.25"),
    "a size": (*SMALL, "--input-size", "3,32,32"),
    "a file": ("resnet18", "--weights", "net.pth", *SMALL[3:]),
    "how images are prepared": (*SMALL, "--image-mean", "0.5", "--interpolation", "bilinear"),
    "a function of one's own": ("test_continued_by_command:factory",),
}


def factory() -> nn.Module:
    sizes: dict[str, Any] = {"channels": (4, 4, 8, 8), "layers": (1, 1, 1, 1)}
    return timm.create_model("resnet18", **sizes)


class Begun:
    """Stands for a training that is stopped at once, and keeps what it began with."""

    def __init__(self) -> None:
        self.networks: list[nn.Module] = []
        self.recipes: list[Recipe] = []

    def __call__(self, model: nn.Module | None, recipe: Recipe, out: Path, **_: object) -> Result:
        network = assembly.begin(model, recipe).source
        self.networks.append(network)
        self.recipes.append(recipe)
        out.mkdir(exist_ok=True)
        (out / "recipe.yaml").write_text(recipe_files.dump(recipe), encoding="utf-8")
        return Result(
            best=out / "best",
            last=out / "last",
            model=network,
            rows=(),
            best_epoch=None,
            updates=0,
            finished=False,
            notes=(),
        )


def begin(case: str, monkeypatch: pytest.MonkeyPatch) -> Begun:
    """Begin a run in the folder `run` with a MODEL of `TYPED`, and return what it began with."""
    begun = Begun()
    monkeypatch.setattr(engine, "finetune", begun)
    if case == "a file":
        write_weights()
    words = ("--recipe", "cifar10_recover_skipinit", "--data", "demo", "train.seed=5", "-o", "run")
    assert main(["finetune", *TYPED[case], *words]) == 0
    return begun


@pytest.mark.parametrize("case", TYPED)
def test_the_command_that_is_printed_goes_on_with_the_same_network(
    case: str, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = begin(case, monkeypatch)
    (line,) = [line for line in capfd.readouterr().out.splitlines() if "next: " in line]
    # Whatever was drawn meanwhile, the network's own numbers are drawn as before.
    torch.rand(3)
    assert main(shlex.split(line)[2:]) == 0

    first, second = begun.networks
    assert tensors(first).keys() == tensors(second).keys()
    assert all(torch.equal(value, tensors(second)[name]) for name, value in tensors(first).items())
    assert dict(stated(first)) == dict(stated(second))
    assert begun.recipes[0] == begun.recipes[1]


@pytest.mark.parametrize("case", TYPED)
def test_the_folder_alone_opens_the_same_network_or_none(
    case: str, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe in a run's folder names the network only if it can say all of how it is opened."""
    begun = begin(case, monkeypatch)
    capfd.readouterr()

    code = main(["finetune", "--resume", "auto", "-o", "run"])

    if case == "arguments":
        assert code == 0
        first, second = begun.networks
        assert dict(stated(first)) == dict(stated(second))
    else:
        assert code == 2
        assert "neither a MODEL is given nor does the recipe name one" in capfd.readouterr().err


OPENED = {
    "weights": "random",
    "arch": "resnet18",
    "arch-arg": "layers=1,1,1,1",
    "num-classes": "10",
    "in-chans": "1",
    "input-size": "3,32,32",
    "image-mean": "0.5",
    "image-std": "0.5",
    "crop-pct": "0.9",
    "interpolation": "bilinear",
    "trust-factory": "",
}


def test_every_option_that_opens_a_network_is_here() -> None:
    assert {option.partition("=")[0] for option in OPENED} == {
        entry.name.replace("_", "-") for entry in fields(ImageOpening)
    } - {"inputs"}


@pytest.mark.parametrize("option", OPENED)
@pytest.mark.parametrize("command", ["finetune", "sweep"])
def test_an_option_that_opens_a_network_is_refused_where_none_is_named(
    command: str, option: str, here: Path, capfd: Capture
) -> None:
    """The recipe names one, which is opened as the recipe says."""
    text = "summary: s\nmodel: {name: resnet18, weights: random}\n"
    (here / "r.yaml").write_text(text, encoding="utf-8")
    words = [f"--{option}", OPENED[option]] if OPENED[option] else [f"--{option}"]
    recipe = ["r.yaml", "--lr", "0.1"] if command == "sweep" else ["--recipe", "r.yaml"]

    assert main([command, *recipe, *words, "-o", "run"]) == 2

    assert f"--{option} says how a MODEL is opened" in capfd.readouterr().err
    assert not (here / "run").exists()


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.state_dict())


def write_weights() -> None:
    """Write the weights of a small network into a file."""
    sizes: dict[str, Any] = {"channels": (4, 4, 8, 8), "layers": (1, 1, 1, 1)}
    torch.save(timm.create_model("resnet18", **sizes).state_dict(), "net.pth")


def test_another_seed_draws_other_weights(
    here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = Begun()
    monkeypatch.setattr(engine, "finetune", begun)
    words = ("finetune", *SMALL, "--recipe", "cifar10_recover_skipinit", "--data", "demo")

    for seed in (0, 1):
        assert main([*words, f"train.seed={seed}", "-o", f"run{seed}"]) == 0

    first, second = (tensors(network)["conv1.weight"] for network in begun.networks)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("top1", "command"), [(91.0, "evaluate"), (None, "verify")])
def test_the_next_command_measures_the_best_network(top1: float | None, command: str) -> None:
    result = Result(
        best=Path("run/best"),
        last=Path("run/last"),
        model=nn.Identity(),
        rows=({"top1": top1},),
        best_epoch=3,
        updates=7,
        finished=True,
        notes=(),
        validated=None,
    )
    to_continue = ["finetune", "--resume", "auto"]

    words = finetune_command._next_command(result, to_continue, ["--trust-factory"], "images")
    unfinished = replace(result, finished=False)
    words_of_unfinished = finetune_command._next_command(unfinished, to_continue, [], "images")

    assert words == [command, Path("run/best"), "--trust-factory", "--data", "images"]
    assert words_of_unfinished == to_continue
