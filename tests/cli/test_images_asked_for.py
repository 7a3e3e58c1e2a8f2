"""A command asks the reader of images for what was typed.

It asks for the right images, as many at a time, drawn by the right seed.
"""

from typing import Any

import pytest
from support.command_line import MODEL

from normswap.cli.app import main
from normswap.errors import SourceError
from normswap.images import datasets

FEW = ("--workers", "0", "--split", "test", "--samples", "7")
LOADED = (*FEW, "--batch-size", "3")
GIVEN: dict[str, Any] = {"batch_size": 3, "workers": 0, "split": "test", "samples": 7, "seed": 0}
INT8 = ("--format", "onnx", "--precision", "int8", "-o", "net.onnx")
ASKED: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "evaluate": (("--data", "demo", *LOADED), {**GIVEN, "labelled": True}),
    "doctor": (("--data", "demo", *LOADED), {**GIVEN, "labelled": False}),
    "recalibrate": (
        ("--data", "demo", *LOADED, "--seed", "5", "-o", "out"),
        {**GIVEN, "seed": 5, "labelled": False},
    ),
    "spp": (("--data", "demo", *LOADED, "-o", "out.png"), {**GIVEN, "labelled": True}),
    "export": (
        ("-o", "net.pt2", "--data", "demo", *FEW),
        {**GIVEN, "batch_size": 64, "labelled": None},
    ),
    "export, int8": (
        (*INT8, "--calibrate", "demo", *FEW),
        {**GIVEN, "batch_size": 64, "labelled": None, "samples": None, "split": "train"},
    ),
    "convert": (
        ("--to", "groupnorm", "--calibrate", "demo", "--samples", "7", "--seed", "5", "-o", "out"),
        {
            "batch_size": 64,
            "workers": 2,
            "split": "train",
            "samples": 7,
            "seed": 5,
            "labelled": False,
        },
    ),
    "convert, a thousand": (
        ("--to", "groupnorm", "--calibrate", "demo", "-o", "out"),
        {
            "batch_size": 64,
            "workers": 2,
            "split": "train",
            "samples": 1000,
            "seed": 0,
            "labelled": False,
        },
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_is_typed_is_asked_for(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, dict[str, Any]]] = []

    def read(_model: object, data: str, **asked: Any) -> None:
        seen.append((data, asked))
        raise SourceError("that is enough")

    monkeypatch.setattr(datasets, "make_loader", read)
    words, asked = ASKED[case]

    assert main([case.partition(",")[0], MODEL, *words]) == 2
    assert seen == [("demo", asked)]
