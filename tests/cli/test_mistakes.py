"""Mistakes by kind, a few of each: one line, exit code 2, nothing written.

Mistakes that need no network are said before torch is imported.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file
from support.command_line import DEMO, MODEL, Capture, environment, refused

from normswap import shipped
from normswap.plan import VERSION

CONVERT = ("convert", "demo", "--to", "skipinit", "-o", "out")
PLAN = ("convert", "demo", "--from-plan", "p.json", "-o", "out")
EDIT = {"path": "conv1.0", "layer": "Folded", "args": {}, "reads": ["conv1.1"], "takes": []}


def plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:

    def write(here: Path) -> None:
        step = {"scheme": "folded", "options": {}, "edits": [dict(EDIT)], "outcomes": {}}
        body: dict[str, Any] = {"version": VERSION, "steps": [step]}
        change(body)
        (here / "p.json").write_text(json.dumps(body), encoding="utf-8")

    return write


def edit(**changed: object) -> Callable[[Path], None]:
    return plan(lambda body: body["steps"][0]["edits"][0].update(changed))


def text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda here: (here / name).write_bytes(content) and None


def images(**shown: str) -> Callable[[Path], None]:
    """Lay a file of an image for each name; a text that is no mode of Pillow's is its content."""

    def write(here: Path) -> None:
        for name, content in shown.items():
            (here / "images" / name).mkdir(parents=True)
            if content in ("RGB", "L"):
                Image.new(content, (40, 40)).save(here / "images" / name / "x.png")
            else:
                (here / "images" / name / "x.png").write_text(content, encoding="utf-8")

    return write


def empty(here: Path) -> None:
    (here / "empty").mkdir()


def dangling(here: Path) -> None:
    (here / "out").symlink_to("gone")


def network(here: Path) -> None:
    shutil.copytree(shipped.FOLDER, here / "net", ignore=shutil.ignore_patterns("images*"))


def weights(**changed: torch.Tensor | None) -> Callable[[Path], None]:
    """Lay a weights file of a small ResNet.

    Tensors that are named are replaced or added; None leaves one out.
    """

    def write(here: Path) -> None:
        state = dict(
            timm.create_model("resnet18", channels=(8, 8, 16, 16), num_classes=5).state_dict()
        )
        state |= {name.replace("__", "."): tensor for name, tensor in changed.items()}
        kept = {name: tensor.clone() for name, tensor in state.items() if tensor is not None}
        save_file(kept, here / "net.safetensors")

    return write


class Evil:
    """A pickle that makes a file when it is executed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("executed", "w")


def pickled(here: Path) -> None:
    torch.save(Evil(), here / "w.pth")


FIT = (*DEMO, "groupnorm", "-o", "out", "--calibrate")
TRAIN = ("finetune", "demo", "-o", "run", "--recipe")
NET = (
    "inspect",
    "net.safetensors",
    "--arch",
    "resnet18",
    "--arch-arg",
    "channels=8,8,16,16",
    "--num-classes",
    "5",
)
W = ("inspect", "w.pth", "--arch", "resnet18")
# What is wrong, what is laid into the folder, the arguments, and what the line must say.
Mistake = tuple[str, Callable[[Path], None] | None, tuple[str, ...], tuple[str, ...]]
# These are seen in the command line and in small files: they are said before torch, which takes
# seconds, is imported.
EARLY: list[Mistake] = [
    ("unknown option", None, ("inspect", "demo", "--nope"), ("--nope",)),
    ("unknown command", None, ("inspct", "demo"), ("Did you mean",)),
    (
        "no number",
        None,
        (*DEMO, "groupnorm", "--groups", "x"),
        ("--groups", "must be a whole number"),
    ),
    ("empty argument", None, (*DEMO, "folded", "-o", "", "--force"), ("an argument is empty",)),
    (
        "no target",
        None,
        ("convert", MODEL),
        ("nothing says what to convert to. Give --to", "folded", "unfold"),
    ),
    (
        "a scheme's typo",
        None,
        (*DEMO, "skipint"),
        ("unknown scheme 'skipint'", "Did you mean skipinit"),
    ),
    ("option of another scheme", None, (*DEMO, "folded", "--alpha", "1"), ("no option alpha",)),
    (
        "out of range",
        None,
        (*DEMO, "groupnorm", "--relative-eps", "-3"),
        ("--relative-eps -3.0", "[0, inf)"),
    ),
    (
        "two of one",
        None,
        (*DEMO, "groupnorm", "--groups", "4", "--group-size", "4"),
        ("--groups and --group-size",),
    ),
    ("unfold takes no plan", None, (*DEMO, "unfold", "--dry-run"), ("takes no --dry-run",)),
    (
        "a plan and a target",
        text("p.json", b"{}"),
        (*CONVERT, "--from-plan", "p.json"),
        ("--to cannot go with",),
    ),
    (
        "no folder for the plan",
        None,
        (*CONVERT, "--plan", "no/p.json"),
        ("no/p.json", "there is no directory no"),
    ),
    ("no plan", None, PLAN, ("cannot read the plan p.json",)),
    ("plan no JSON", text("p.json", b"{"), PLAN, ("p.json: it is not JSON",)),
    ("plan of the future", plan(lambda body: body.update(version=99)), PLAN, ("version 99",)),
    ("output exists", text("out", b""), CONVERT, ("out is a file",)),
    (
        "weights of no architecture",
        text("w.pth", b"x"),
        ("inspect", "w.pth"),
        ("holds weights only", "--arch NAME"),
    ),
    ("no size", None, ("inspect", "demo", "--input-size", "3,x"), ("--input-size 3,x", "C,H,W")),
    (
        "mean of bytes",
        None,
        ("evaluate", "demo", "--data", "demo", "--image-mean", "123,116,103"),
        ("mean 123,116,103", "0..1", "divided by 255"),
    ),
    (
        "options of no source",
        None,
        ("verify", ".", "--weights", "random", "--arch", "x"),
        ("--weights and --arch without --against",),
    ),
    ("recipe not there", None, (*TRAIN, "nope"), ("no recipe", "normswap recipes")),
    (
        "recipe no YAML",
        text("r.yaml", b"optim:\n\tlr: 1\n"),
        (*TRAIN, "r.yaml"),
        ("r.yaml is not YAML", "line 2"),
    ),
    (
        "negative rate",
        None,
        (*TRAIN, "finetune_imagenet_skipinit", "optim.lr=-1"),
        ("optim.lr", "above 0"),
    ),
    (
        "a sweep without rates",
        None,
        ("sweep", "finetune_imagenet_skipinit"),
        ("--lr is not given", "0.05,0.1"),
    ),
    ("no such format", None, ("export", "demo", "-o", "x.foo"), ("'.foo'", ".onnx")),
    (
        "int8 of nothing",
        None,
        ("export", "demo", "-o", "x.onnx", "--precision", "int8"),
        ("needs --calibrate",),
    ),
    (
        "a report into a network",
        network,
        ("report", "net", "-o", "net/r.html"),
        ("lies in", "place beside it"),
    ),
    (
        "a report of another ending",
        empty,
        ("report", "empty", "-o", "r.txt"),
        ("r.txt has another ending", "r.html"),
    ),
    ("picture of no kind", None, ("spp", "demo", "-o", "a.xyz"), ("'xyz'", "svg")),
]
LATE: list[Mistake] = [
    ("model is a link to nothing", dangling, ("inspect", "out"), ("unknown model 'out'",)),
    ("nothing to push", None, ("push", "nope", "a/b"), ("nope does not exist",)),
    (
        "unknown model",
        None,
        ("inspect", "resnet5o"),
        ("unknown model 'resnet5o'", "Did you mean", "resnet50"),
    ),
    (
        "not converted",
        None,
        ("verify", MODEL),
        ("holds no plan. Name what `normswap convert` wrote",),
    ),
    ("unknown layer in a plan", edit(layer="Nope"), PLAN, ("Nope",)),
    (
        "a factory that leaves",
        text("leaving.py", b"import sys\ndef net(): sys.exit('bye')\n"),
        ("inspect", "leaving:net"),
        ("leaving:net cannot be built", "bye"),
    ),
    (
        "shapes of weights",
        weights(fc__weight=torch.zeros(7, 16)),
        NET,
        ("fc.weight is (7, 16)", "(5, 16)"),
    ),
    ("NaN among weights", weights(fc__bias=torch.full((5,), torch.nan)), NET, ("NaN", "fc.bias")),
    ("a pickle", pickled, W, ("never executes",)),
    ("no weights file", text("w.pth", b"hello"), W, ("not a readable", "it is no pickle")),
    (
        "an export of bytes",
        text("x.onnx", b"junk"),
        ("inspect", "x.onnx"),
        ("x.onnx is no readable onnx file",),
    ),
    ("only nothing", None, (*CONVERT, "--only", "nope"), ("--only nope", "normswap inspect")),
    ("nf without images", None, (*DEMO, "nf"), ("--calibrate DATA", "--calibrate synthetic")),
    ("no images", empty, (*FIT, "empty"), ("empty is not a dataset of images",)),
    (
        "broken image",
        images(a="RGB", b="hi", c="L"),
        (*FIT, "images"),
        ("b/x.png", "cannot be read"),
    ),
    (
        "another number of classes",
        images(a="RGB", b="L"),
        ("evaluate", "demo", "--data", "images"),
        ("2 classes",),
    ),
    (
        "a device that is not here",
        None,
        ("evaluate", "demo", "--data", "demo", "--device", "mps"),
        ("not available",),
    ),
    (
        "a role that is none",
        None,
        ("decay", MODEL, "--policy", "weight,gama"),
        ("unknown policy gama. Known",),
    ),
    (
        "a side too few",
        None,
        ("inspect", "demo", "--input-size", "3,64"),
        ("does not run on it; it takes", "3,64,64"),
    ),
    ("a seed below", None, ("spp", "demo", "--seed", "-1"), ("--seed -1", "whole number from 0")),
    (
        "no residual blocks",
        None,
        (
            "spp",
            "vgg11",
            "--weights",
            "random",
            "--arch-arg",
            "mlp_ratio=0.01",
            "--input-size",
            "3,32,32",
        ),
        ("no residual blocks",),
    ),
]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("mistake", LATE, ids=lambda mistake: mistake[0])
def test_a_mistake_is_one_line(mistake: Mistake, here: Path, capfd: Capture) -> None:
    _, lay, arguments, said = mistake
    if lay is not None:
        lay(here)
    refused(arguments, said, here, capfd)


def test_a_plan_with_a_wrong_result_ends_with_one(here: Path, capfd: Capture) -> None:
    edit(path="bn1", layer="Vacant", reads=[])(here)
    refused(PLAN, ("is wrong", "relative L2"), here, capfd, code=1)


def test_mistakes_of_the_command_line_are_said_before_torch_is_imported(here: Path) -> None:
    for i, (_, lay, _, _) in enumerate(EARLY):
        (here / str(i)).mkdir()
        if lay is not None:
            lay(here / str(i))
    code = f"""
import os, sys
from normswap.cli.app import main
for i, arguments in enumerate({[arguments for _, _, arguments, _ in EARLY]}):
    before = sorted(os.listdir(str(i)))
    os.chdir(str(i))
    code = main(arguments)
    os.chdir("..")
    print(i, code, "torch" in sys.modules, before == sorted(os.listdir(str(i))), flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(),
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.splitlines() == [f"{i} 2 False True" for i in range(len(EARLY))], (
        done.stderr[-500:]
    )

    for (name, _, _, said), line in zip(EARLY, done.stderr.splitlines(), strict=True):
        assert line.startswith("error: "), name
        assert all(words in line for words in said), (name, line)
