"""Law of what is said: every command that is named can be run, and does what it is named for.

Answers, findings, errors and cards name commands.
"""

import re
import shlex
from pathlib import Path

import pytest
import torch
from support.command_line import FEW, MODEL, QUICK, READER, Capture, named_commands, run_json
from support.sampled_tables import quick

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


MISTAKES = (
    ("convert", MODEL, "--to", "nf"),
    ("convert", MODEL, "--to", "centered-weightnorm"),
    ("verify", "gone"),
    ("convert", MODEL, "--to", "foldd"),
    ("convert", MODEL, "--to", "folded", "--only", "layer9"),
    ("export", MODEL, "-o", "file.xyz"),
)


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda words: shlex.join(words[-2:]))
def test_what_an_error_proposes_is_right(
    mistake: tuple[str, ...], here: Path, capfd: Capture
) -> None:
    assert main(mistake) == 2

    error = capfd.readouterr().err
    for option in re.findall(r"[`'](--[^`']+)[`']", error):
        words = [READER.get(word, word) for word in shlex.split(option)]
        extra = ("--samples", "40") if "demo" in words else ()
        assert main([*mistake, *words, *extra, "--dry-run"]) == 0, option

    for words in named_commands(error):
        if words[0] in ("schemes", "inspect"):
            assert main([*words, *((MODEL,) if words == ["inspect"] else ())]) == 0


@pytest.mark.parametrize("scheme", quick(["skipinit", "groupnorm", "affine"], ["skipinit"]))
def test_a_card_tells_the_truth(scheme: str, here: Path, capfd: Capture) -> None:
    """The card's Python loads the network, and its commands measure it.

    They bring the source back if the card says so.
    """
    run_json(capfd, "convert", MODEL, "--to", scheme, "-o", "out")
    card = Path("out/README.md").read_text()
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
