"""Mistakes in files, plans and options: each is one line, exit code 2, and nothing is written."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import Capture, environment, refused
from PIL import Image

from normswap import demo_files
from normswap.plan import VERSION

CONVERT = ("convert", "demo", "--to", "skipinit", "-o", "out")
PLAN = ("convert", "demo", "--from-plan", "p.json", "-o", "out")
EDIT = {"path": "conv1.0", "layer": "Folded", "args": {}, "reads": ["conv1.1"], "takes": []}


def plan(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write a plan of one edit, changed."""

    def write(here: Path) -> None:
        step = {"scheme": "folded", "options": {}, "edits": [dict(EDIT)], "outcomes": {}}
        body: dict[str, Any] = {"version": VERSION, "steps": [step]}
        change(body)
        (here / "p.json").write_text(json.dumps(body))

    return write


def edit(**changed: object) -> Callable[[Path], None]:
    return plan(lambda body: body["steps"][0]["edits"][0].update(changed))


def text(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda here: (here / name).write_bytes(content) and None


def images(**shown: str) -> Callable[[Path], None]:
    """Lay files of images; a mode of Pillow's says which, anything else is their text."""

    def write(here: Path) -> None:
        for name, content in shown.items():
            (here / "images" / name).mkdir(parents=True)
            if content in ("RGB", "L"):
                Image.new(content, (40, 40)).save(here / "images" / name / "x.png")
            else:
                (here / "images" / name / "x.png").write_text(content)

    return write


def table(*rows: str) -> Callable[[Path], None]:
    """Lay an image, and a CSV of these rows."""

    def write(here: Path) -> None:
        Image.new("RGB", (40, 40)).save(here / "x.png")
        (here / "l.csv").write_text("\n".join(rows))

    return write


def deep(here: Path) -> None:
    """Lay two images, one of 16 bits."""
    for name, mode in (("a", "L"), ("b", "I;16")):
        (here / "images" / name).mkdir(parents=True)
        Image.new(mode, (40, 40), 200).save(here / "images" / name / "x.png")


def empty(here: Path) -> None:
    (here / "empty").mkdir()


def dangling(here: Path) -> None:
    """Lay links to what is not there."""
    for name in ("out", "out.png"):
        (here / name).symlink_to("gone")


FIT = ("convert", "demo", "--to", "groupnorm", "-o", "out", "--calibrate")
TRAIN = ("finetune", "demo", "-o", "run", "--recipe")


def network(here: Path) -> None:
    """Lay a converted network."""
    shutil.copytree(demo_files.FOLDER, here / "net", ignore=shutil.ignore_patterns("images*"))


# what is wrong; what is laid there; the arguments; what the line says
MISTAKES: list[tuple[str, Callable[[Path], None] | None, tuple[str, ...], tuple[str, ...]]] = [
    ("no folder for the plan", None, (*CONVERT, "--plan", "no/p.json"), ("no/p.json", "there is no directory no")),
    ("plan is a folder", lambda here: (here / "d").mkdir(), (*CONVERT, "--plan", "d"), ("d is a directory",)),
    ("plan exists", text("p.json", b"{}"), (*CONVERT, "--plan", "p.json"), ("p.json exists", "--force")),
    ("output is a file", text("out", b""), CONVERT, ("out is a file",)),
    ("no plan", None, PLAN, ("cannot read the plan p.json",)),
    ("plan no JSON", text("p.json", b"{"), PLAN, ("p.json is not JSON",)),
    ("plan no text", text("p.json", b"\xff\xfe\xfa"), PLAN, ("cannot read the plan p.json", "no text")),
    ("plan of the future", plan(lambda body: body.update(version=99)), PLAN, ("version 99",)),
    ("steps no list", plan(lambda body: body.update(steps=5)), PLAN, ("p.json", "list")),
    ("unknown layer", edit(layer="Nope"), PLAN, ("Nope",)),
    ("path of no module", edit(path="nope.x"), PLAN, ("nope.x",)),
    ("path no text", edit(path=None), PLAN, ("p.json", "path")),
    ("weights of nothing", text("w.safetensors", b""), ("inspect", "w.safetensors", "--arch", "resnet18"),
     ("w.safetensors is not a readable",)),
    ("a pickle", text("w.pth", pickle.dumps(print)), ("inspect", "w.pth", "--arch", "resnet18"), ("never executes",)),
    ("no weights file", text("w.pth", b"x" * 99), ("inspect", "w.pth", "--arch", "resnet18"), ("not a readable",)),
    ("no class folders", text("f.txt", b"hi"), ("convert", "demo", "--to", "groupnorm", "--calibrate", "f.txt"),
     ("f.txt is not a dataset of images",)),
    ("no such module", None, ("inspect", "no.such:thing"), ("cannot be imported",)),
    ("no network in it", None, ("inspect", "os.path:join"), ("os.path:join",)),
    ("size of two", None, ("inspect", "demo", "--input-size", "3,64"), ("--input-size 3,64", "C,H,W")),
    ("unknown option", None, ("inspect", "demo", "--nope"), ("--nope",)),
    ("no network of that library", None, ("inspect", "torchvision:resnet19"), ("no model 'resnet19'", "Did you mean")),
    ("weights of no architecture", text("w.pth", b"x"), ("inspect", "w.pth"), ("holds weights only", "--arch NAME")),
    ("no weights by its name", text("a.md", b"x"), ("inspect", "a.md"), ("a.md is no MODEL", ".safetensors")),
    ("empty model", None, ("inspect", ""), ("an argument is empty",)),
    ("empty output", None, ("convert", "demo", "--to", "folded", "-o", "", "--force"), ("an argument is empty",)),
    ("empty folder as model", empty, ("inspect", "empty"), ("empty has no config.json",)),
    ("only nothing", None, (*CONVERT, "--only", "nope"), ("--only nope", "normswap inspect")),
    ("skip all", None, (*CONVERT, "--skip", "*"), ("no residual block is chosen",)),
    ("option of another scheme", None, (*CONVERT, "--groups", "4"), ("skipinit", "no option groups")),
    ("negative groups", None, (*FIT, "demo", "--groups", "-3"), ("--groups -3", ">= 1")),
    ("share above one", None, (*FIT, "demo", "--steady", "3"), ("--steady 3", "[0, 1)")),
    ("two of one", None, (*FIT, "demo", "--groups", "4", "--group-size", "4"), ("--groups and --group-size",)),
    ("scalar no number", None, (*CONVERT, "--alpha", "nan"), ("--alpha nan", "match")),
    ("images for nothing", None, (*CONVERT, "--calibrate", "demo"), ("no use for calibration data",)),
    ("no images", empty, (*FIT, "empty"), ("empty is not a dataset of images",)),
    ("one image", images(a="RGB"), (*FIT, "images"), ("1 calibration images", "at least 2")),
    ("broken image", images(a="RGB", b="hi", c="L"), (*FIT, "images"), ("b/x.png", "no image that Pillow knows")),
    ("deep pixels", deep, (*FIT, "images"), ("b/x.png", "16 bits", "scale them to 8")),
    ("another number of classes", images(a="RGB", b="L"), ("evaluate", "demo", "--data", "images"), ("2 classes",)),
    ("part that is not there", None, ("evaluate", "demo", "--data", "demo", "--split", "nope"), ("no part nope",)),
    ("deviation of zero", None, ("evaluate", "demo", "--data", "demo", "--image-std", "0,0,0"), ("positive",)),
    ("crop above one", None, ("evaluate", "demo", "--data", "demo", "--crop-pct", "7"), ("crop-pct 7", "share")),
    ("no such resizing", None, ("evaluate", "demo", "--data", "demo", "--interpolation", "x"), ("bilinear",)),
    ("recipe not there", None, (*TRAIN, "nope"), ("no recipe", "normswap recipes")),
    ("recipe no YAML", text("r.yaml", b"a: [\n"), (*TRAIN, "r.yaml"), ("r.yaml is not YAML", "line 2")),
    ("negative rate", None, (*TRAIN, "finetune_imagenet_skipinit", "optim.lr=-1"), ("optim.lr", "greater than 0")),
    ("device of no kind", None, (*TRAIN, "finetune_imagenet_skipinit", "--device", "tpu"), ("'tpu'", "cuda")),
    ("no such format", None, ("export", "demo", "-o", "x.foo"), ("'.foo'", ".onnx")),
    ("two formats", None, ("export", "demo", "-o", "x.xml", "--format", "onnx"), ("x.xml ends as openvino",)),
    ("int8 of nothing", None, ("export", "demo", "-o", "x.onnx", "--precision", "int8"), ("needs --calibrate",)),
    ("int4", None, ("export", "demo", "-o", "x.onnx", "--precision", "int4"), ("'int4'", "int8")),
    ("no folder for the file", None, ("export", "demo", "-o", "no/x.onnx"), ("there is no directory no",)),
    ("no such runtime", None, ("bench", "demo", "--runtime", "nope"), ("'nope'", "onnxruntime")),
    ("a sweep without rates", None, ("sweep", "finetune_imagenet_skipinit"), ("no --lr: it says which", "0.05,0.1")),
    ("a sweep without validation", None,
     ("sweep", "cifar10_recover_bn", "demo", "--lr", "0.1", "data.root=demo"), ("no validation images", "by top-1")),
    ("a sweep into a file", text("out", b""),
     ("sweep", "finetune_imagenet_skipinit", "--lr", "0.1", "-o", "out"), ("out is a file", "Name a directory")),
    ("a report into a folder", empty, ("report", "empty", "-o", "."), (". is a directory",)),
    ("negative decay", None, ("decay", "demo", "--weight-decay", "-1"), ("--weight-decay -1",)),
    ("decay above one", None, ("decay", "demo", "--layer-decay", "2"), ("--layer-decay 2",)),
    ("average of nothing", None, ("doctor", "demo", "--beside", "nope"), ("--beside nope", "no such file")),
    ("no such name on the hub", empty, ("push", "empty", "x"), ("owner/name",)),
    ("a report of another ending", empty, ("report", "empty", "-o", "r.txt"), ("r.txt has another ending", "r.html")),
    ("a report into a network", network, ("report", "net", "-o", "net/r.html"), ("lies in", "place beside it")),
    ("a classifier of one class", images(a="RGB"), ("evaluate", "demo", "--data", "images"), ("has 1 class (a)",)),
    ("nothing to train on", empty, (*TRAIN, "finetune_imagenet_skipinit", "--data", "empty"), ("empty is not a",)),
    ("a run into a folder of something", text("run", b""),
     (*TRAIN, "finetune_imagenet_skipinit", "--data", "demo"), ("run exists",)),
    ("options of no source", None, ("verify", "demo", "--weights", "random", "--arch", "x"),
     ("--weights and --arch without --against",)),
    ("a report on nothing", None, ("report", "nope"), ("nope is no directory",)),
    ("nothing to push", None, ("push", "nope", "a/b"), ("nope is no directory",)),
    ("output is a link to nothing", dangling, CONVERT, ("out is a link to gone, which does not exist", "Remove")),
    ("a picture over a link to nothing", dangling, ("spp", "demo", "-o", "out.png"), ("out.png is a link to gone",)),
    ("model is a link to nothing", dangling, ("inspect", "out"), ("out is a link to gone, which does not exist",)),
    ("directory is a link to nothing", dangling, ("inspect", "local-dir:out"), ("out is a link to gone",)),
    ("a seed beyond", None, (*FIT, "demo", "--seed", str(2**63)), ("--seed 9223372036854775808", "2**63 - 1")),
    ("a seed below", None, ("spp", "demo", "--seed", "-1"), ("--seed -1", "whole number from 0")),
    ("two labels of one image", table("x.png,cat", "x.png,dog"), ("evaluate", "demo", "--data", "l.csv"),
     ("line 2", "x.png is of 'dog', and of 'cat'")),
    ("pointer of Git LFS", text("w.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
     ("inspect", "w.safetensors", "--arch", "resnet18"), ("`git lfs pull`",)),
    ("a page for weights", text("w.pth", b"<html>"), ("inspect", "w.pth", "--arch", "resnet18"), ("a page of text",)),
    ("no bytes", text("w.pth", b""), ("inspect", "w.pth", "--arch", "resnet18"), ("it is empty",)),
    ("picture of no bytes", images(a="RGB", b=""), (*FIT, "images"), ("b/x.png", "no image that Pillow knows")),
    ("a device that is not here", None, ("evaluate", "demo", "--data", "demo", "--device", "mps"), ("not available",)),
    ("no samples", None, (*FIT, "demo", "--samples", "0"), ("--samples", "greater than or equal to 2")),
    ("a negative size", None, (*CONVERT, "--input-size", "3,-64,64"), ("--input-size 3,-64,64", "C,H,W")),
    ("mean of bytes", None, ("evaluate", "demo", "--data", "demo", "--image-mean", "123,116,103"),
     ("mean 123,116,103", "0..1", "divided by 255")),
    ("a key twice", None, (*TRAIN, "cifar10_recover_bn", "optim.lr=1", "optim.lr=2"), ("optim.lr is given 2 times",)),
    ("a file for a folder", text("f", b""), ("convert", "demo", "--to", "folded", "-o", "f/out"), ("f is a file",)),
    ("a factory that leaves", text("leaving.py", b"import sys\ndef net(): sys.exit('bye')\n"),
     ("inspect", "leaving:net"), ("leaving:net cannot be built", "bye")),
    ("a tab in a recipe", text("r.yaml", b"optim:\n\tlr: 1\n"), (*TRAIN, "r.yaml"), ("r.yaml is not YAML", "line 2")),
    ("a key twice in a recipe", text("r.yaml", b"a: 1\na: 2\n"), (*TRAIN, "r.yaml"), ("line 2", "duplicate key")),
    ("a plan and a target", text("p.json", b"{}"), (*CONVERT, "--from-plan", "p.json"), ("--to cannot go with",)),
    ("a folder in place of a file", lambda here: (here / "x.onnx").mkdir(), ("export", "demo", "-o", "x.onnx"),
     ("x.onnx is a directory",)),
    ("an export of bytes", text("x.onnx", b"junk"), ("inspect", "x.onnx"), ("x.onnx is no readable onnx file",)),
    ("no XML", text("x.xml", b"junk"), ("inspect", "x.xml"), ("x.xml is no readable openvino file", "no XML")),
    ("an export to convert", text("x.onnx", b"junk"), ("convert", "x.onnx", "--to", "folded"), ("exported file",)),
    ("unknown command", None, ("inspct", "demo"), ("Did you mean",)),
]  # fmt: skip


@pytest.mark.parametrize(("lay", "arguments", "said"), [row[1:] for row in MISTAKES], ids=[row[0] for row in MISTAKES])
def test_a_mistake_is_one_line(
    lay: Callable[[Path], None] | None, arguments: tuple[str, ...], said: tuple[str, ...], here: Path, capfd: Capture
) -> None:
    if lay is not None:
        lay(here)
    refused(arguments, said, here, capfd)


# these are seen in the command line and in small files: they are said before torch, which takes seconds, is imported
EARLY = (
    "no folder for the plan", "plan is a folder", "plan exists", "output is a file", "no plan", "plan no JSON",
    "plan no text", "plan of the future", "steps no list", "weights of no architecture", "size of two",
    "unknown option", "empty model", "no weights by its name", "a report of another ending",
    "empty output", "option of another scheme", "negative groups", "share above one", "scalar no number",
    "recipe not there", "recipe no YAML", "negative rate", "no such format", "two formats", "int8 of nothing", "int4",
    "no folder for the file", "no such runtime", "a sweep without rates", "a report into a folder",
    "a report into a network", "average of nothing", "options of no source", "unknown command", "path no text",
    "a sweep into a file", "negative decay", "decay above one", "deviation of zero", "crop above one",
    "no such resizing", "two of one", "picture of no kind", "no such name on the hub", "empty folder as model",
    "a report on nothing", "nothing to push", "output is a link to nothing", "a picture over a link to nothing",
    "model is a link to nothing", "directory is a link to nothing", "no samples", "a negative size",
    "mean of bytes", "a key twice", "a file for a folder", "a tab in a recipe", "a key twice in a recipe",
    "a plan and a target", "a folder in place of a file",
)  # fmt: skip
_SEEN = "the network is looked at, and that takes torch"
_DATA = "the images are opened by timm's reader, which imports torch"
_FILE = "what torch.load or safetensors says of the file decides"
_NAMED = "the library that has the names imports torch"
# of the others: why not
LATE = {
    "unknown layer": "the layers that plans may name are found by importing them",
    "path of no module": _SEEN,
    "only nothing": _SEEN,
    "skip all": _SEEN,
    "weights of nothing": _FILE,
    "a pickle": _FILE,
    "no weights file": _FILE,
    "no such module": "a factory is imported where it is called, after torch, which nearly every one imports itself",
    "no network in it": "the factory is called, and what it gives is compared with torch's class",
    "no such encoder": _NAMED,
    "no network of that library": _NAMED,
    "images for nothing": "whether a scheme fits anything is a function of its file, which imports torch",
    "device of no kind": "torch says which devices there are",
    "a device that is not here": "torch says which devices there are",
    "a seed beyond": "a generator of torch's takes it",
    "a seed below": "a generator of torch's takes it",
    "two labels of one image": _DATA,
    "picture of no bytes": _DATA,
    "pointer of Git LFS": _FILE,
    "a page for weights": _FILE,
    "no bytes": _FILE,
    "an export of bytes": _FILE,
    "an export to convert": "whether a MODEL is a file that runs by itself, its format says, by what opens it",
    "no XML": _FILE,
    "a factory that leaves": "a factory is imported where it is called, after torch",
    "no class folders": _DATA,
    "no images": _DATA,
    "one image": _DATA,
    "broken image": _DATA,
    "deep pixels": _DATA,
    "another number of classes": _SEEN,
    "part that is not there": _DATA,
    "a classifier of one class": _SEEN,
    "nothing to train on": _DATA,
    "a sweep without validation": _DATA,
    "a run into a folder of something": "the run is found or refused by what trains, beside its state",
}


def test_of_every_mistake_it_is_known_when_it_is_said() -> None:
    assert sorted([*EARLY, *LATE]) == sorted(name for name, *_ in MISTAKES)


def test_mistakes_of_the_command_line_are_said_before_torch_is_imported(here: Path) -> None:
    code = """
import os, pathlib, sys
from test_mistakes import EARLY, MISTAKES
from normswap.cli.app import main
rows = {name: row for name, *row in MISTAKES}
for i, name in enumerate(EARLY):
    lay, arguments, said = rows[name]
    folder = pathlib.Path(str(i)).absolute()
    folder.mkdir()
    if lay is not None:
        lay(folder)
    os.chdir(folder)
    code = main(arguments)
    os.chdir(folder.parent)
    if code != 2 or "torch" in sys.modules:
        sys.exit(f"{name}: {code}")
"""
    known = environment()
    known["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), known["PYTHONPATH"]])
    done = subprocess.run(
        [sys.executable, "-c", code], env=known, cwd=here, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.count("\n")) == (0, len(EARLY)), done.stderr[-500:]
