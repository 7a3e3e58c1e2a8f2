"""Advice: the rules, one row each; every command it names can be planned; nothing is foretold."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
from support.command_line import as_documented
from support.model_sources import SMALL_IMAGES, small
from torch import nn

import normswap
from normswap import shipped
from normswap.analysis import advice
from normswap.cli.app import main
from normswap.errors import OptionError, RefusedError
from normswap.surgery import conversion
from normswap.surgery.network import Network

TESTS = Path(__file__).parents[1]


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1)
    ).eval()


def blocks() -> nn.Module:
    return small(layers=(1, 1, 1, 1))


def depthwise() -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.BatchNorm2d(4)).eval()


def preactivated() -> nn.Module:
    return timm.create_model(
        "resnetv2_18", channels=(8, 8, 8, 8), pretrained_cfg_overlay=SMALL_IMAGES
    ).eval()


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("make", "batch", "purpose", "chosen", "refused"),
    [
        (blocks, 256, {}, "batchnorm", []),
        (blocks, 16, {}, "batchnorm", []),
        (blocks, 15, {}, "skipinit", []),
        (blocks, 1, {}, "skipinit", []),
        (blocks, 64, {"private": True}, "skipinit", []),
        (blocks, 64, {"deploy": True}, "folded", []),
        (chain, 4, {}, "groupnorm", ["skipinit"]),  # no residual blocks
        (chain, 4, {"private": True}, "groupnorm", ["skipinit"]),
        (chain, 4, {"deploy": True}, "folded", []),
    ],
)
def test_the_rules(
    make: Callable[[], nn.Module],
    batch: int,
    purpose: dict[str, bool],
    chosen: str,
    refused: list[str],
) -> None:
    model = make()
    is_private = bool(purpose.get("private"))

    possible, not_possible = advice.advise(Network(model), "net", batch, **purpose)

    assert possible[0].scheme == chosen
    assert list(not_possible) == refused
    for advised in possible:
        assert ("--for opacus" in advised.command) == is_private
        if advised.command:
            words = advised.command.split()
            target = words[words.index("--to") + 1]
            options = {"purpose": "opacus"} if is_private else {}
            assert list(conversion.plan_steps(Network(model), target, **options))


# The options that advised commands may have, as Python takes them.
TYPED: dict[str, tuple[str, Callable[[str], object]]] = {
    "--for": ("purpose", str),
    "--relative-eps": ("relative_eps", float),
}


@pytest.mark.parametrize("purpose", [{}, {"private": True}, {"deploy": True}])
@pytest.mark.parametrize("make", [blocks, chain])
def test_python_is_told_the_options_that_a_terminal_is_told(
    make: Callable[[], nn.Module], purpose: dict[str, bool]
) -> None:
    """`convert(model, advice.scheme, **advice.options)` does what the command does."""
    possible, _ = advice.advise(Network(make()), "net", 8, **purpose)

    for advised in possible:
        words = advised.command.split()[3:]
        values = dict(zip(words[::2], words[1::2], strict=True))
        if advised.command:
            assert values.pop("--to") == advised.scheme
        assert ("--calibrate" in values) is not (advised.exact or not advised.command)
        values.pop("--calibrate", None)
        typed = {TYPED[key][0]: TYPED[key][1](value) for key, value in values.items()}
        assert dict(advised.options) == typed


@pytest.mark.parametrize(
    ("make", "batch", "private", "about"),
    [
        (blocks, 64, False, "CIFAR-10, 128 images an update, labels alone"),
        (blocks, 2, False, "CIFAR-10, two images an update, labels alone"),
        (preactivated, 64, False, "a pre-activation network, 128"),
        (depthwise, 64, False, "a network of depthwise convolutions, 128"),
        (blocks, 64, True, "blurred CIFAR-10, privately"),
    ],
)
def test_where_targets_ended_on_a_network_of_this_kind(
    make: Callable[[], nn.Module], batch: int, private: bool, about: str
) -> None:
    network = Network(make())

    task, ended = advice.elsewhere(network, batch, private=private)

    assert task.startswith(about)
    possible, _ = advice.advise(network, "net", batch, private=private)
    assert {advised.target for advised in possible} <= ended.keys()

    table = (TESTS / "lab" / "benchmarks" / "after_training.md").read_text(encoding="utf-8")
    section = next(part for part in table.split("\n## ") if part.startswith(about))
    measured = re.findall(r"\| `skipinit` \|.*\| (.*?) \| \d \|", section)
    assert measured[0] == ended["skipinit"]


def test_bad_questions() -> None:
    with pytest.raises(OptionError, match="batch_size=0"):
        advice.advise(Network(small()), "net", 0)
    with pytest.raises(OptionError, match="private=True and deploy=True"):
        advice.advise(Network(small()), "net", 8, private=True, deploy=True)
    with pytest.raises(RefusedError, match="no target fits"):
        advice.advise(Network(nn.Sequential(nn.Conv2d(3, 4, 3)).eval()), "net", 8)


def test_the_command(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(shipped.FOLDER), "--batch-size", "4", "--json"]) == 0

    body = as_documented(capfd.readouterr().out, "advise")
    assert body["choose"]["scheme"] == "skipinit"
    assert body.keys() == {
        "source",
        "batch_size",
        "private",
        "deploy",
        "choose",
        "others",
        "refused",
        "elsewhere",
        "ready",
        "measured",
    }
    is_exact = {
        advised["scheme"]: advised["exact"] for advised in (body["choose"], *body["others"])
    }
    assert is_exact == {"skipinit": True, "groupnorm": False, "frozen-bn": True, "tune": True}


def test_the_command_foretells_nothing_from_other_networks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main(["advise", str(shipped.FOLDER), "--private"]) == 0

    out = capfd.readouterr().out
    assert "--to skipinit --for opacus" in out
    assert "on this one nothing was measured" in " ".join(out.split())
    assert not re.search(r"\d %", out)


def test_the_command_that_is_advised_can_be_typed(capfd: pytest.CaptureFixture[str]) -> None:
    network = ["resnet18", "--weights", "random", "--num-classes", "10"]
    network += ["--arch-arg", "channels=8,16,24,32"]
    assert main(["advise", *network, "--batch-size", "4", "--json"]) == 0

    command = shlex.split(json.loads(capfd.readouterr().out)["choose"]["command"])
    assert command[: 2 + len(network)] == ["normswap", "convert", *network]
    assert main([*command[1:], "--dry-run"]) == 0


def test_the_command_wants_a_batch() -> None:
    assert main(["advise", str(shipped.FOLDER), "--batch-size", "0"]) == 2


def test_a_large_batch_is_not_called_too_small() -> None:
    """A network without BatchNorm has none to keep, however many images share statistics."""
    folded = normswap.convert(normswap.open("demo"), "folded").model
    found, _ = advice.advise(folded, batch_size=64)
    assert not any("too few" in each.why for each in found)
    assert "no BatchNorm to keep" in found[0].why
