"""Law of what is said: every command that is named can be run, and does what it is named for.

Answers, findings, errors and cards name commands.
"""

import re
import shlex
from pathlib import Path

import pytest
import timm
import torch
from support.command_line import FEW, MODEL, QUICK, READER, Capture, named_commands, run_json
from support.sampled_tables import quick

import normswap
from normswap.cli.app import main

FILE = ["export", MODEL, "-o", "file.pt2"]
STARTS = (
    FILE,
    ["demo"],
    ["inspect", MODEL],
    ["schemes"],
    ["doctor", MODEL, "--data", "demo", *FEW],
    ["convert", MODEL, "--to", "folded", "-o", "first"],
    [
        "convert",
        MODEL,
        "--to",
        "groupnorm",
        "--calibrate",
        "demo",
        "--samples",
        "120",
        "-o",
        "fitted",
    ],
    ["recalibrate", MODEL, "--data", "demo", *FEW, "-o", "fresh"],
    ["evaluate", MODEL, "--data", "demo", *FEW],
    ["evaluate", "file.pt2", "--data", "demo", *FEW],
    ["verify", "file.pt2", "--against", MODEL],
)
# Nothing is wrong with the network of the demo.
WARNING = (
    r"\bwarning|too far|NOT ENOUGH|WRONG|NOT PROVED|too few|not measured|not what it was"
    r"|assumed|unverified|\bdead\b"
)


def kind_of(words: list[str]) -> list[str]:
    """The command, and whether its arguments are networks or exported files."""
    return [
        words[0],
        *("file" if word.endswith(".pt2") else "network" for word in words[1:] if word[0] != "-"),
    ]


@pytest.mark.slow
def test_the_next_commands_run_one_after_another_and_nothing_is_warned_of(
    here: Path, capfd: Capture
) -> None:
    ran: list[list[str]] = []
    for start in STARTS:
        words = start
        while words and words[0] not in ("finetune", "push"):
            ran.append(kind_of(words))
            assert main([*words, *(() if words is start else QUICK.get(words[0], ()))]) == 0, (
                shlex.join(words)
            )

            printed = capfd.readouterr()
            assert re.findall(WARNING, "".join(printed)) == [], shlex.join(words)

            last = [line for line in printed.out.splitlines() if line.startswith("next: ")]
            assert len(last) <= 1

            words = next(named_commands(last[0]), []) if last else []
            if words and kind_of(words) in ran:
                break

    assert len(ran) > len(STARTS) + 4


def test_another_source_that_the_user_names_is_no_cause_for_a_warning(
    here: Path, capfd: Capture
) -> None:
    """It has another hash than the recorded source, and the same function."""
    assert main(["convert", MODEL, "--to", "folded", "-o", "folded"]) == 0
    state = normswap.open(MODEL).state_dict()
    state["bn1.num_batches_tracked"] += 1
    torch.save(state, "other.pth")
    capfd.readouterr()

    assert main(["verify", "folded", "--against", MODEL, "--weights", "other.pth"]) == 0

    assert re.findall(WARNING, "".join(capfd.readouterr())) == []


@pytest.mark.parametrize(
    "options", quick([(), ("--private",), ("--deploy",), ("--batch-size", "4")], [("--deploy",)])
)
def test_advice_can_be_followed(options: tuple[str, ...], here: Path, capfd: Capture) -> None:
    body = run_json(capfd, "advise", MODEL, *options)
    for i, advice in enumerate([body["choose"], *body["others"]]):
        for words in named_commands(advice["command"] or ""):
            quick = ("--samples", "40") if "--calibrate" in words else ()
            result = run_json(capfd, *words, *quick, "-o", f"out{i}")
            assert result["steps"][-1]["report"]["passed"]


# A network of which one norm cannot be replaced, and one without BatchNorm.
ODD = """
import torch
from torch import nn


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.hooked = nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 3)
        self.plain = nn.BatchNorm2d(4)
        self.hooked.register_forward_hook(lambda *call: None)

    def forward(self, x):
        x = self.hooked(self.first(x)).relu()
        return self.plain(self.second(x)).mean((2, 3))


def odd():
    return Odd().eval()


def chain():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1)).eval()


def grouped():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.AdaptiveAvgPool2d(1)).eval()
"""
SMALL = ("--input-size", "3,32,32", "--weights", "random")
# Each mistake, and how many remedies its error names.
MISTAKES = (
    (("convert", MODEL, "--to", "nf"), 3),
    (("convert", MODEL, "--to", "centered-weightnorm"), 3),
    (("verify", "demo"), 1),
    (("convert", MODEL, "--to", "foldd"), 1),
    (("convert", MODEL, "--to", "folded", "--only", "layer9"), 3),
    (("convert", MODEL, "--to", "rmsnorm"), 1),
    (("convert", "odd_networks:odd", "--to", "folded", *SMALL), 1),
    (("convert", "odd_networks:odd", "--to", "groupnorm", *SMALL), 1),
    (("convert", "odd_networks:grouped", "--to", "folded", *SMALL), 1),
    (("convert", "odd_networks:grouped", "--to", "skipinit", *SMALL), 0),
    (("convert", "odd_networks:chain", "--to", "skipinit", *SMALL), 1),
    (("convert", "demo", "--to", "folded", "-o", "taken"), 1),
    (("recalibrate", "taken", "--data", "demo", *FEW, "-o", "fresh"), 1),
    (("finetune", "demo"), 1),
    (("recipes", "nope"), 1),
    (("inspect", "resnet5", "--weights", "random"), 3),
    (("inspect", "weights.pth"), 1),
    (("inspect", "seven.pth", "--arch", "resnet18"), 1),
    (("export", "demo"), 1),
    (("export", MODEL, "-o", "file.xyz"), 0),
)


def remedies(mistake: tuple[str, ...], error: str) -> list[list[str]]:
    """The command lines that an error proposes: the mistake mended, or another command."""
    proposed: list[list[str]] = []
    options = [] if "Missing" in error else re.findall(r"[`'](--[^`']+)[`']", error)
    options += re.findall(r"or (--force) to", error)
    for option in options:
        words = [READER.get(word, word) for word in shlex.split(option)]
        if words[0] == "--arch":
            words = ["--arch", "resnet18"]
        if words[0] == "--against":
            words = ["--against", "demo"]
        kept = list(mistake)
        # A target that is proposed takes the place of the one that was asked for.
        if words[0] in kept:
            at = kept.index(words[0])
            del kept[at : at + 2]
        proposed.append([*kept, *words])

    _, _, meant = error.partition("Did you mean ")
    wrong = next((word for word in mistake if f"'{word}'" in error or f"{word} names" in error), "")
    for name in re.findall(r"[\w.]+", meant.partition("?")[0]):
        if name != "or":
            proposed.append([name if word == wrong else word for word in mistake])

    proposed += named_commands(error)
    return proposed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "count"), MISTAKES, ids=[shlex.join(words[:4]) for words, _ in MISTAKES]
)
def test_every_remedy_that_an_error_names_is_run(
    mistake: tuple[str, ...],
    count: int,
    here: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Path("odd_networks.py").write_text(ODD, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    torch.save(timm.create_model("resnet18").state_dict(), "weights.pth")
    torch.save(timm.create_model("resnet18", num_classes=7).state_dict(), "seven.pth")
    assert main(["convert", "demo", "--to", "folded", "-o", "taken"]) == 0
    capfd.readouterr()
    assert main(mistake) == 2

    error = capfd.readouterr().err
    lines = remedies(mistake, error)
    assert len(lines) == count, error
    for number, words in enumerate(lines):
        if words[0] == "convert" and "-o" not in words:
            words += ["-o", f"mended{number}"]
        if words[0] == "convert" and "--calibrate" in words and "synthetic" not in words:
            words += ["--samples", "40"]
        assert main(words) == 0, shlex.join(words)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", quick(["skipinit", "groupnorm", "affine"], ["skipinit"]))
def test_a_card_tells_the_truth(scheme: str, here: Path, capfd: Capture) -> None:
    """The card's Python loads the network, and its commands measure it.

    They bring the source back if the card says so.
    """
    run_json(capfd, "convert", MODEL, "--to", scheme, "-o", "out")
    card = Path("out/README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", card, re.S)
    scope: dict[str, object] = {}
    exec(code.replace('"."', '"out"'), scope)

    assert isinstance(scope["model"], torch.nn.Module)
    assert not scope["model"].training
    assert main(["verify", "out"]) == 0
    assert main(["convert", "out", "--to", "unfold", "-o", "back"]) == (
        0 if "--to unfold" in card else 2
    )

    if "--to unfold" in card:
        assert run_json(capfd, "verify", "back", "--against", MODEL)["passed"]
