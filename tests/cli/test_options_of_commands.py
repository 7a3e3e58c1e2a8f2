"""Law: an option of a command reaches the function underneath, alone and beside each other option.

The rows are the options themselves, so that a new one that does nothing fails by itself. What a
command calls outside `normswap/cli` is recorded with its arguments. Slow functions are run once,
and give the same result to every later call.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from support.command_line import MODEL, Capture
from support.hand_written_networks import PostAct
from support.handed_on import Call, calls_across, told
from support.lived_in_networks import living
from support.sampled_tables import quick, weight
from torch import nn

import normswap
from normswap import provenance, schemes
from normswap.cli.app import load, main
from normswap.cli.commands import SUMMARIES
from normswap.cli.options import ImageOpening
from normswap.copying import duplicate
from normswap.images.accuracy import Evaluation
from normswap.images.datasets import make_loader
from normswap.storage import checkpoint
from normswap.training.sweep import Objective, Sweep

TAR = str(Path(MODEL) / "images.tar")
RECIPE = "cifar10_recover_skipinit"
# How each command is called. MADE is a converted network, and FILE an exported one.
BASE: dict[str, tuple[str, ...]] = {
    "advise": (MODEL,),
    "bench": (MODEL,),
    "convert": (MODEL, "--to", "groupnorm"),
    "decay": (MODEL,),
    "doctor": (MODEL,),
    "evaluate": (MODEL, "--data", "demo"),
    "export": (MODEL, "-o", "file.pt2"),
    "finetune": (MODEL, "--recipe", RECIPE, "--data", "demo"),
    "inspect": (MODEL,),
    "push": ("made", "me/net", "--license", "other"),
    "recalibrate": (MODEL, "--data", "demo"),
    "report": ("made",),
    "spp": (MODEL,),
    "sweep": (RECIPE, MODEL, "data.root=demo", "data.validation=demo", "--lr", "0.1,0.2"),
    "verify": ("made",),
}
# Commands without options, or whose options choose what is printed alone.
WITHOUT = {"demo", "schemes", "recipes"}
# Slow functions: the first result of each is given to all calls.
ONCE = (
    "analysis.advice:advise",
    "analysis.block_signals:signal_propagation",
    "images.accuracy:classify",
    "images.accuracy:evaluate",
    "images.datasets:make_loader",
    "storage.checkpoint:load",
    "storage.checkpoint:open_model",
    "storage.checkpoint:save",
    "storage.publishing:check",
    "surgery.conversion:convert",
    "surgery.recalibration:changed_answers",
    "surgery.recalibration:recalibrate",
    "surgery.reverification:again",
    "surgery.reverification:first_converted_layer_apart",
    "surgery.reverification:on_images",
)
# Slow functions behind which a command hands on nothing more: there it ends.
ENDS = (
    "analysis.plots:plot",
    "analysis.summary:of_network",
    "analysis.weight_decay:by_role",
    "benchmarking.timing:run",
    "diagnosis.doctor:diagnose",
    "exporting.exporter:export",
    "proof.compiling:compare_compiled",
    "reporting.report:collect",
    "storage.publishing:push",
    "training.engine:finetune",
    "training.trials:Trials",
)
# Two values of each option, neither of them a default. A flag has none.
VALUES: dict[str, tuple[str, ...]] = {
    "--against": (MODEL, f"{MODEL}/"),
    "--arch": ("resnet18", "resnet34"),
    "--arch-arg": ("channels=4,4,8,8", "layers=1,1,1,1"),
    "--batch-size": ("3", "5"),
    "--best": ("1", "2"),
    "--calibrate": ("demo", TAR),
    "--calibrate-samples": ("7", "9"),
    "--crop-pct": ("0.7", "0.8"),
    "--data": (TAR, MODEL),
    "--device": ("cpu", "auto"),
    "--for": ("opacus", "federated"),
    "--format": ("pt2", "onnx"),
    "--image-mean": ("0.1,0.2,0.3", "0.3"),
    "--image-std": ("0.3,0.2,0.1", "0.3"),
    "--in-chans": ("1", "2"),
    "--input": ("x=2,16", "ids=16:int64"),
    "--input-size": ("3,48,48", "3,40,40"),
    "--interpolation": ("nearest", "lanczos"),
    "--license": ("mit", "apache-2.0"),
    "--lr": ("0.3,0.4", "2^-3"),
    "--message": ("one", "two"),
    "--min-kept": ("0.5", "1.0"),
    "--minutes": ("0.5", "1.5"),
    "--num-classes": ("3", "4"),
    "--only": ("layer1", "layer2"),
    "--output": ("one.pt2", "two.pt2"),
    "--plan": ("one.json", "two.json"),
    "--policy": ("timm", "all"),
    "--precision": ("fp16", "bf16"),
    "--recipe": ("cifar10_recover_nf", "demo_train"),
    "--resume": ("auto",),
    "--samples": ("7", "9"),
    "--seconds": ("0.5", "1.5"),
    "--seed": ("3", "4"),
    "--seeds": ("2", "3"),
    "--skip": ("layer1", "layer2"),
    "--split": ("training", "test"),
    "--storage": ("sqlite:///one.db", "sqlite:///two.db"),
    "--to": ("folded", "skipinit"),
    "--track": ("none", "wandb"),
    "--weight-bits": ("7", "8"),
    "--weights": ("random", "file.pth"),
    "--workers": ("1", "3"),
}


# Options that other tests hold, or that change what is printed alone.
ELSEWHERE = {
    ("convert", "--from-plan"): "tests/cli/test_cli.py",
    ("evaluate", "--min-kept"): "tests/cli/test_cli.py",
    ("verify", "--min-kept"): "tests/cli/test_cli.py",
}
OTHER_VALUES: dict[tuple[str, str], tuple[str, ...]] = {
    ("spp", "--output"): ("one.png", "two.svg"),
    ("export", "--format"): ("pt2",),
    ("report", "--output"): ("one.html", "two.html"),
}
# Options of a command that say nothing beside another one, with the reason.
SILENT: dict[tuple[str, str, str], str] = {}
# Words without which an option means nothing to a command.
NEEDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("advise", "--device"): ("--data", "demo"),
    ("advise", "--minutes"): ("--data", "demo"),
    ("convert", "--samples"): ("--calibrate", "demo"),
    ("convert", "--seed"): ("--calibrate", "demo"),
    ("export", "--calibrate"): ("--precision", "int8"),
    ("export", "--calibrate-samples"): ("--precision", "int8", "--calibrate", "demo"),
    ("export", "--weight-bits"): ("--precision", "int8", "--calibrate", "demo"),
    ("recalibrate", "--means-only"): ("--against", MODEL),
    ("push", "--device"): ("--data", "demo"),
    ("spp", "--force"): ("--output", "one.png"),
    ("sweep", "--best"): ("--seeds", "5"),
}
# Options that say how images are read, and mean nothing without images.
OF_OPENING = tuple(
    "--" + field.name.replace("_", "-").replace("inputs", "input") for field in fields(ImageOpening)
)
OF_IMAGES = ("--batch-size", "--workers", "--samples", "--split")


class Reached(BaseException):
    """A command has called what it is for."""


class Underneath:
    """Slow functions that are run once or never, and the calls of them.

    Args:
        results: The results of functions that have run, by name, which all commands share.
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.calls: list[Call] = []

    def instead(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a command calls in the place of a slow function."""

        @functools.wraps(function)
        def called(*args: Any, **keywords: Any) -> Any:
            given = inspect.signature(function).bind(*args, **keywords).arguments
            self.calls.append((name, {key: told(value) for key, value in given.items()}))
            if name in ENDS:
                raise Reached
            if name not in self.results:
                self.results[name] = function(*args, **keywords)
            result = self.results[name]
            return duplicate(result, {}) if isinstance(result, nn.Module) else result

        return called


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    """The results of slow functions that nothing here need compute."""
    network = small_network()
    converted = normswap.convert(network, "skipinit", inputs=torch.rand(2, 3, 8, 8))
    return {
        "images.accuracy:evaluate": Evaluation(50.0, 90.0, 1.0, count=12, images_per_s=100.0),
        "images.datasets:make_loader": make_loader(
            network, "demo", samples=12, batch_size=6, workers=0
        ),
        "storage.checkpoint:load": converted.model,
        "storage.checkpoint:open_model": network,
        "storage.checkpoint:save": None,
        "storage.publishing:check": None,
        "surgery.conversion:convert": converted,
        "surgery.recalibration:changed_answers": None,
        "surgery.recalibration:recalibrate": replace(converted, notes=("read",)),
    }


def small_network() -> nn.Module:
    """Return a network of one residual block, with the record of the demo's images."""
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), PostAct(4), nn.AdaptiveAvgPool2d(1))
    network, _ = living(nn.Sequential(*layers, nn.Flatten(), nn.Linear(4, 10)), 3, 8, 8)
    record = provenance.of(checkpoint.open_model("demo"))
    provenance.attach(network, record)
    return network


@pytest.fixture
def underneath(
    results: dict[str, Any], here: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> Underneath:
    made = Underneath(results)
    # The directory need only be there.
    shutil.copytree(MODEL, "made")
    for name in (*ONCE, *ENDS):
        home, _, attribute = name.partition(":")
        module = importlib.import_module(f"normswap.{home}")
        function = getattr(module, attribute)
        monkeypatch.setattr(module, attribute, made.instead(name, function))

    begin_one_run(made, monkeypatch)
    return made


def begin_one_run(underneath: Underneath, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a sweep open no database, and begin one run."""

    def begin(self: Sweep, *args: Any) -> None:
        underneath.calls.append(("Sweep", {"given": told(args)}))
        self.recipe = args[0]

    def work(self: Sweep, objective: Objective, **_: object) -> bool:
        return objective(self.recipe, Path("run")) is not None

    monkeypatch.setattr(Sweep, "__init__", begin)
    monkeypatch.setattr(Sweep, "work", work)


class Option(NamedTuple):
    """An option of a command.

    Args:
        name: Its long name.
        values: The words that two values are given by. A flag is given or not.
    """

    name: str
    values: tuple[tuple[str, ...], ...]


def options(command: str) -> list[Option]:
    """Return the options of a command, from its own parser."""
    found: list[Option] = []
    for parameter in load(command).params:
        names = [name for name in parameter.opts if name.startswith("--")]
        if not names or names[0] in ("--help", "--json") or (command, names[0]) in ELSEWHERE:
            continue
        name = names[0]
        if parameter.is_flag:
            found.append(Option(name, ((), (name,))))
            continue
        values = tuple((name, value) for value in values_of(command, name))
        # Where there is one other value, it is compared with the default.
        found.append(Option(name, values if len(values) > 1 else ((), *values)))
    return found


def values_of(command: str, name: str) -> tuple[str, ...]:
    if (command, name) in OTHER_VALUES:
        return OTHER_VALUES[command, name]
    if name in VALUES:
        return VALUES[name]
    option, _ = SCHEME_OPTIONS[name.removeprefix("--").replace("-", "_")]
    if option.choices:
        return tuple(map(str, option.choices[:2]))
    return ("2", "4") if option.kind is int else ("0.25", "0.5")


SCHEME_OPTIONS = schemes.all_options()


def needed(command: str, option: Option) -> tuple[str, ...]:
    """Return the words without which an option means nothing to a command."""
    owners = SCHEME_OPTIONS.get(option.name.removeprefix("--").replace("-", "_"))
    if command == "convert" and owners:
        return ("--to", owners[1][0])
    words = NEEDS.get((command, option.name), ())
    if option.name in OF_IMAGES and command in (
        "doctor",
        "export",
        "push",
        "report",
        "spp",
        "verify",
    ):
        words = ("--data", "demo", *words)
    if command == "verify" and option.name in OF_OPENING:
        words = ("--against", MODEL, *words)
    return words


def observed(underneath: Underneath, command: str, words: Sequence[str]) -> tuple[int, str]:
    """Run a command, and return its exit code, and what it has handed on as text."""
    underneath.calls = []
    code = 0
    border = calls_across("normswap/cli/", "normswap/", without=("normswap/errors.py",))
    with border as calls, suppress(Reached):
        code = main([command, *BASE[command], *words])
    return code, repr((calls, underneath.calls))


def hands_on(
    underneath: Underneath, command: str, option: Option, beside: Sequence[str] = ()
) -> bool | None:
    """Whether two values of an option differ in what a command hands on. None if it is refused."""
    found: list[str] = []
    for value in option.values:
        code, calls = observed(underneath, command, (*beside, *needed(command, option), *value))
        if code == 2:
            return None
        found.append(calls)
    return len(set(found)) == len(found)


def test_every_command_has_a_row() -> None:
    assert {*BASE} | WITHOUT == {*SUMMARIES}


def beside(
    underneath: Underneath, command: str, option: Option, others: Iterable[Option]
) -> Iterator[tuple[Option, bool]]:
    """Yield other options, and whether the option is handed on beside each.

    Options that are refused beside it are left out.
    """
    for other in others:
        words = (*needed(command, other), *other.values[-1])
        found = hands_on(underneath, command, option, words)
        if found is not None:
            yield other, found


# A tenth of the options runs by default.
PARTS = 10


@pytest.mark.parametrize("part", quick(range(PARTS), [0], pytest.mark.long))
@pytest.mark.parametrize("command", BASE)
def test_an_option_is_handed_on(command: str, part: int, underneath: Underneath) -> None:
    """Alone, and beside the first of the others that it is not refused with."""
    every = options(command)
    for option in every:
        if weight(command, option.name) % PARTS != part:
            continue
        drawn = sorted(
            (other for other in every if other.name != option.name),
            key=lambda other: weight(command, option.name, other.name),
        )

        assert hands_on(underneath, command, option) is True, option.name
        for other, found in beside(underneath, command, option, drawn):
            assert found or (command, option.name, other.name) in SILENT, (option, other)
            break


@pytest.mark.long
@pytest.mark.parametrize("command", BASE)
def test_an_option_is_handed_on_beside_every_other(command: str, underneath: Underneath) -> None:
    every = options(command)
    lost: list[tuple[str, str]] = []
    for option in every:
        others = [
            other
            for other in every
            if other.name != option.name and (command, option.name, other.name) not in SILENT
        ]
        for other, found in beside(underneath, command, option, others):
            if not found:
                lost.append((option.name, other.name))

    assert lost == []
