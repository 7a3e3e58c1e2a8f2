"""What the schemes' options and data may not be, said in one line each, with nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from commands import DEMO, MODEL, files, refused, run_json
from PIL import Image

from normswap.cli.app import main

Capture = pytest.CaptureFixture[str]
PLAN = ("convert", MODEL, "--from-plan", "p.json")


def pictures(count: int, size: tuple[int, int] = (32, 32), name: str = "a.png") -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / "x").mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", size, (9 * i, 7, 5)).save(folder / "x" / f"{i}-{name}")

    return make


def broken(folder: Path) -> None:
    pictures(3)(folder)
    (folder / "x" / "2-a.png").write_bytes(b"no picture")


# what is wrong; the place that is made and how; the arguments; what the line must say
BAD: list[tuple[str, str, Any, tuple[str, ...], tuple[str, ...]]] = [
    ("groups that are none", "", None, (*DEMO, "groupnorm", "--groups", "0"), ("--groups 0", ">= 1")),
    ("groups, no number", "", None, (*DEMO, "groupnorm", "--groups", "many"), ("--groups",)),
    ("steady", "", None, (*DEMO, "groupnorm", "--steady", "1"), ("--steady", "[0, 1)")),
    ("rule", "", None, (*DEMO, "residual-scale", "--rule", "golden"), ("unknown --rule golden", "rescale")),
    ("init", "", None, (*DEMO, "fixup", "--init", "zero"), ("--init zero",)),
    ("ghost batch", "", None, (*DEMO, "batchnorm", "--ghost-batch", "-1"), ("--ghost-batch -1",)),
    ("another's option", "", None, (*DEMO, "folded", "--ghost-batch", "4"), ("no option ghost-batch",)),
    ("a typo's options", "", None, (*DEMO, "batchnorm", "--groups", "4"), ("no option groups", "ghost-batch")),
    ("alpha 0 and match", "", None, (*DEMO, "skipinit", "--alpha", "match,0"), ("--alpha match,0", "'match'")),
    ("alpha", "", None, (*DEMO, "skipinit", "--alpha", "inf"), ("finite",)),
    ("mean", "", None, (*DEMO, "nf", "--mean", "none"), ("neither 'fit' nor 'keep'",)),
    ("nf without data", "", None, (*DEMO, "nf"), ("--calibrate DATA", "--mean keep")),
    ("data for what has no use", "", None, (*DEMO, "folded", "--calibrate", "demo"), ("no use for calibration",)),
    ("data that are not there", "", None, (*DEMO, "groupnorm", "--calibrate", "nowhere"), ("nowhere does not exist",)),
    ("too few samples", "d", pictures(1), (*DEMO, "groupnorm", "--calibrate", "d"), ("1 calibration images", "2")),
    ("one sample", "", None, (*DEMO, "nf", "--calibrate", "demo", "--samples", "1"), ("--samples",)),
    ("no picture", "d", broken, (*DEMO, "groupnorm", "--calibrate", "d"), ("2-a.png cannot be read",)),
    ("no pictures", "d", lambda folder: folder.mkdir(), (*DEMO, "nf", "--calibrate", "d"), ("d", "images")),
    ("purpose", "", None, (*DEMO, "groupnorm", "--for", "opacs"), ("unknown purpose 'opacs'", "federated|opacus")),
    ("a purpose is no scheme", "", None, (*DEMO, "opacus"), ("--for opacus",)),
    ("purpose of unfold", "", None, (*DEMO, "unfold", "--for", "opacus"), ("purpose",)),
    ("private BatchNorm", "", None, (*DEMO, "batchnorm", "--ghost-batch", "4", "--for", "opacus"), ("from the batch",)),
    ("purpose and plan", "p.json", Path.touch, (*PLAN, "--for", "opacus"), ("--for cannot go with --from-plan",)),
    ("part and plan", "p.json", Path.touch, (*PLAN, "--only", "x"), ("--only cannot go with --from-plan",)),
    ("only nothing", "", None, (*DEMO, "folded", "--only", "layer9"), ("names no norm", "layer4")),
    ("skip nothing", "", None, (*DEMO, "folded", "--skip", "lyer4"), ("--skip lyer4", "layer4")),
    ("no block", "", None, (*DEMO, "skipinit", "--only", "*.bn1"), ("no residual block is chosen",)),
    ("scheme far from any", "", None, (*DEMO, "zzz"), ("unknown scheme 'zzz'", "Known:", "unfold", "weightnorm")),
    ("scheme near unfold", "", None, (*DEMO, "unfld"), ("Did you mean unfold",)),
    ("recalibrate one", "d", pictures(1), ("recalibrate", MODEL, "--data", "d", "-o", "o"), ("at least two",)),
    ("recalibrate nothing", "", None, ("recalibrate", MODEL, "--data", "no", "-o", "o"), ("no does not exist",)),
]  # fmt: skip


@pytest.mark.parametrize(("place", "make", "arguments", "said"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_one_line_each(
    place: str, make: Any, arguments: tuple[str, ...], said: tuple[str, ...], here: Path, capfd: Capture
) -> None:  # fmt: skip
    if make is not None:
        make(here / place)
    refused(arguments, said, here, capfd)


def test_groups_that_do_not_divide_are_explained(here: Path, capfd: Capture) -> None:
    (step,) = run_json(capfd, *DEMO, "groupnorm", "--groups", "7", "-o", "out")["steps"]
    assert any("8 groups, the divisor of its" in note and "nearest to 7" in note for note in step["notes"])


def test_instancenorm_on_one_pixel(here: Path, capfd: Capture) -> None:
    """A 32-pixel input leaves the last stage of a ResNet one pixel: said by path, not by torch."""
    import normswap
    from normswap.errors import RefusedError

    torch.manual_seed(0)
    model = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=5).eval()
    with pytest.raises(RefusedError, match=r"layer4\.0\.bn1 on \(1, 8, 1, 1\).*larger inputs"):
        normswap.convert(model, "instancenorm", size=(3, 32, 32))
    normswap.convert(model, "instancenorm", size=(3, 32, 32), skip="layer4")


def test_plain_pictures_without_classes_do(here: Path, capfd: Capture) -> None:
    """Labels are not needed, nor as many classes as the network has."""
    pictures(8)(here / "d")
    assert main([*DEMO, "groupnorm", "--only", "layer4", "--calibrate", "d", "--samples", "8", "-o", "out"]) == 0
    assert main(["recalibrate", MODEL, "--data", "d", "-o", "new", "--workers", "0"]) == 0


def test_the_presets_from_the_command_line(here: Path, capfd: Capture) -> None:
    body = run_json(capfd, *DEMO, "skipinit", "--for", "opacus", "-o", "out", "--plan", "p.json")
    assert [step["scheme"] for step in body["steps"]] == ["skipinit", "opacus"]
    assert body["steps"][1]["report"]["passed"]
    again = run_json(capfd, *PLAN, "-o", "again")
    assert [step["scheme"] for step in again["steps"]] == ["skipinit", "opacus"]
    dry = run_json(capfd, *DEMO, "skipinit", "--for", "opacus", "--dry-run")
    assert [step["edits"] for step in dry["steps"]] == [step["edits"] for step in body["steps"]]
    assert main(["verify", "out"]) == 0
    assert files(here)


@pytest.mark.parametrize(("option", "kind"), [("--groups", "integer"), ("--steady", "number")])
def test_options_have_kinds(option: str, kind: str, here: Path, capfd: Capture) -> None:
    words = ("convert", MODEL, "--to", "groupnorm", option, "x", "-o", "out")
    refused(words, (f"Invalid value for '{option}'", f"valid {kind}"), here, capfd)
