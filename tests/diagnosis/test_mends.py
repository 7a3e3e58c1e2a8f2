"""A law of what the doctor prints: its remedy is run, and all of the fault is gone."""

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import MODEL, QUICK, Capture, here, named_commands, run_json
from test_doctor import FAULTS, norms, opened
from torch import nn

import normswap
from normswap.diagnosis.findings import Finding
from normswap.images.datasets import make_loader

__all__ = ["here"]  # a fixture


# Faults that a file of weights can have. Others are in the network, and are mended by a line of
# Python.
IN_WEIGHTS = (
    "NaN in a variance",
    "infinite mean",
    "mean and variance exchanged",
    "variances of 0",
    "variances far below eps",
    "half of the variances are 0",
    "statistics never updated",
    "one norm never updated",
    "swapped statistics",
    "stale statistics",
    "shuffled channels",
)


def findings(model: nn.Module, name: str) -> list[Finding]:
    return [finding for finding in normswap.diagnose(model).faults if finding.name == name]


def test_small_numbers_are_no_fault() -> None:
    """A layer gives a two-hundredth of what it gave, and its norm knows that."""
    model = opened("demo")
    with torch.no_grad():
        model.get_parameter("layer1.0.conv1.weight").mul_(0.005)
        model.get_buffer("layer1.0.bn1.running_mean").mul_(0.005)
        model.get_buffer("layer1.0.bn1.running_var").mul_(0.005**2)

    assert normswap.diagnose(model).faults == ()


@pytest.mark.parametrize("fault", IN_WEIGHTS)
@pytest.mark.one_in(8)
def test_a_finding_is_mended_by_its_command(fault: str, here: Path, capfd: Capture) -> None:
    """As a user has the network: in a file of weights beside the name of its architecture."""
    plant, name = FAULTS[fault]
    model = opened("demo")
    plant(model)
    torch.nn.init.ones_(model.get_parameter("fc.bias"))
    torch.save(model.state_dict(), "faulty.pth")
    images: tuple[str, ...] = ()
    if fault == "shuffled channels":
        images = ("--data", "demo", "--samples", "96", "--workers", "0")

    ill = run_json(capfd, "doctor", MODEL, "--weights", "faulty.pth", *images, code=1)
    finding = next(each for each in ill["findings"] if each["name"] == name)
    (words,) = named_commands(finding["mend"])
    run_json(capfd, *words, *QUICK[words[0]], "-o", "mended")

    mended = normswap.load("mended")
    assert normswap.diagnose(mended).faults == ()
    assert bool((mended.get_parameter("fc.bias") == 1).all()), (
        "another network than the one with the fault"
    )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("name", "wrong_values"),
    [
        ("eps", [1e-2]),
        ("eps", [1e-2] * 8),
        ("eps", [1e-2] * 6 + [1e-4] * 6),
        ("eps", [1e-2] * 22),
        ("momentum", [0.99] * 8),
        ("momentum", [0.9] * 6 + [0.99] * 6),
        ("momentum", [0.99] * 22),
    ],
)
def test_the_line_of_python_mends_every_norm(name: str, wrong_values: list[float]) -> None:
    model = opened("demo")
    right_values = [getattr(norm, name) for norm in norms(model)]
    other = nn.GroupNorm(2, 4, eps=0.5)
    other.momentum = 0.5  # type: ignore[assignment]
    model.add_module("other", other)
    for norm, value in zip(norms(model), wrong_values, strict=False):
        setattr(norm, name, value)

    found = findings(model, name)
    assert sum(len(finding.paths) for finding in found) == len(wrong_values)
    for finding in found:
        line, _, _ = finding.mend.partition("; then normswap")
        exec(line, {"model": model})

    assert findings(model, name) == []
    assert [getattr(norm, name) for norm in norms(model)] == right_values
    assert getattr(other, name) == 0.5


# Faults whose remedy is another network, or needs a choice of the user's.
BY_HAND = (
    "NaN in a gamma",
    "gammas of 0",
    "half of the gammas are 0",
    "one norm at two places",
    "one buffer in two norms",
)
# Faults that only images show (their command is run above), and remedies that name images.
WITH_IMAGES = ("shuffled channels", "no running statistics", "norms that were fused away")


def mended(model: nn.Module, finding: Finding) -> nn.Module | None:
    """Return the network after the lines of a remedy; None if it has no line that can be run."""
    ran = False
    line = re.split(r"; (?:then|or) normswap", finding.mend)[0]
    if line.startswith(("model.", "for norm in ")):
        exec(line, {"model": model})
        ran = True

    for command, *words in named_commands(finding.mend):
        if command == "convert":
            target = words[words.index("--to") + 1]
            only = [path for word, path in itertools.pairwise(words) if word == "--only"]
            scope = {} if only in ([], ["PATH"]) else {"only": only}
            model = normswap.convert(model, target, **scope).model
            ran = True
        elif command == "recalibrate":
            model = normswap.recalibrate(
                model, make_loader(model, "demo", samples=120, workers=0)
            ).model
            ran = True
    return model if ran else None


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault not in WITH_IMAGES])
@pytest.mark.one_in(8)
def test_a_remedy_that_can_be_run_mends_all_of_its_fault(fault: str) -> None:
    """The whole fault is gone, and no other came."""
    plant, name = FAULTS[fault]
    model = opened("demo")
    plant(model)
    before = {finding.name for finding in normswap.diagnose(model).faults}

    for finding in findings(model, name):
        result = mended(model, finding)
        assert (result is None) is (fault in BY_HAND), finding.mend
        model = result or model

    if fault not in BY_HAND:
        assert findings(model, name) == []
        assert {finding.name for finding in normswap.diagnose(model).faults} < before


def put_behind(model: nn.Module, path: str, count: int) -> None:
    """Put more norms behind one, with statistics that fit."""
    norm: Any = model.get_submodule(path)
    chain = [norm]
    for _ in range(count):
        more = nn.BatchNorm2d(norm.num_features).eval()
        with torch.no_grad():
            more.running_mean.copy_(chain[-1].bias)
            more.running_var.copy_(chain[-1].weight.square())
        chain.append(more)
    model.set_submodule(path, nn.Sequential(*chain))


def test_the_command_for_double_norms_mends_every_pair() -> None:
    model = opened("demo")
    put_behind(model, "layer1.1.bn2", 1)
    put_behind(model, "layer2.0.bn1", 2)

    (finding,) = findings(model, "double-norm")
    assert len(finding.paths) == 5
    ((command, _, *options),) = named_commands(finding.mend)
    assert (command, options[:2]) == ("convert", ["--to", "folded"])
    assert set(options[2::2]) == {"--only"}

    mended = normswap.convert(model, "folded", only=options[3::2]).model
    assert findings(mended, "double-norm") == []
    assert len(norms(mended)) == len(norms(model)) - 3
    # In training mode the last norm decides alone, so it is the one that must stay.
    for path in ("layer1.1.bn2.1", "layer2.0.bn1.2"):
        assert isinstance(mended.get_submodule(path), nn.BatchNorm2d)
