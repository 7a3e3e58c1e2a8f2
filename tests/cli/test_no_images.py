"""Networks that take no images, by command, from a factory to a file that is verified.

On the way they are fitted to arrays.
"""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import save_file
from support.command_line import Capture, refused
from support.lived_in_networks import run
from support.sampled_tables import quick
from torch import Tensor, nn

from normswap.cli.app import main

FACTORY = """
from test_no_images import *

def signal():
    convolution = [nn.Conv1d(2, 8, 9, 4), nn.BatchNorm1d(8), nn.ReLU()]
    return seeded([*convolution, nn.Flatten(), nn.Linear(184, 5)])

def volume():
    convolution = [nn.Conv3d(1, 8, 3, 2), nn.BatchNorm3d(8), nn.ReLU()]
    return seeded([*convolution, nn.Flatten(), nn.Linear(432, 5)])

def two():
    return seeded([Two()])[0]
"""


def seeded(layers: list[nn.Module]) -> nn.Sequential:
    """The layers with random numbers in every norm, the same in every process."""
    model = nn.Sequential(*layers)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(
                torch.rand(tensor.shape, generator=generator) * 0.5
                + (0.5 if "var" in name else -0.25)
            )
    return model.eval()


class Two(nn.Module):
    """A picture and words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 8)
        self.norm = nn.BatchNorm1d(8)
        self.conv = nn.Conv2d(1, 8, 3)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, picture: Tensor, ids: Tensor) -> Tensor:
        words = self.norm(self.words(ids).mean(1))
        answer: Tensor = self.head(words + self.norm2(self.conv(picture)).relu().mean((2, 3)))
        return answer


TAKES = {
    "signal": {"input": (2, 100)},
    "volume": {"input": (1, 7, 8, 14)},
    "two": {"picture": (1, 9, 9), "ids": (6,)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(TAKES, ["two"]))
def test_to_a_verified_file(
    name: str, here: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def printed(*arguments: str) -> Any:
        assert main([*arguments, "--json"]) == 0
        return json.loads(capfd.readouterr().out)

    (here / "no_images.py").write_text(FACTORY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(here))
    source = f"no_images:{name}"
    shapes = TAKES[name]
    samples = {key: torch.randn(40, *shape) for key, shape in shapes.items()}
    options = ["--input-size", ",".join(map(str, shapes.get("input", ())))]
    (here / "arrays").mkdir()
    if name == "two":
        samples["ids"] = torch.randint(50, (40, 6))
        save_file(
            {**samples, "labels": torch.zeros(40, dtype=torch.long)},
            here / "arrays/all.safetensors",
        )
        options = ["--input", "picture=1,9,9", "--input", "ids=6:int64"]
    else:
        for i, sample in enumerate(samples["input"]):
            np.save(here / f"arrays/{i:02}.npy", sample.numpy())
    data = ("--data", "arrays", "--workers", "0")
    fitted = printed(
        "convert", source, *options, "--to", "groupnorm", "--calibrate", "arrays", "-o", "out"
    )

    assert fitted["steps"][0]["report"]["kept"]["count"] == 10
    assert printed("verify", "out", "--trust-factory", *data)["data"]["count"] == 40

    printed("convert", source, *options, "--to", "folded", "-o", "folded")
    written = printed(
        "export", "folded", "--trust-factory", "-o", "it.onnx", "--samples", "40", *data
    )

    assert written["figures"]["count"] == 40
    assert printed("verify", "it.onnx", "--against", source, *data, "--min-kept", "1")["passed"]

    session = onnxruntime.InferenceSession("it.onnx")
    expected = run(getattr(importlib.import_module("no_images"), name)(), *samples.values())
    actual = [
        session.run(None, {key: value[i : i + 1].numpy() for key, value in samples.items()})[0]
        for i in range(3)
    ]
    np.testing.assert_allclose(np.concatenate(actual), expected[:3].numpy(), rtol=1e-3, atol=1e-4)
    np.save(here / "arrays/00.npy", np.zeros(7, dtype="float32"))

    refused(("evaluate", source, *options, *data), ("arrays/00.npy",), here, capfd)

    if name == "two":
        refused(
            ("bench", source, *options), ("bench times networks that take one tensor",), here, capfd
        )
        refused(
            ("evaluate", "it.onnx", *data),
            ("`normswap verify it.onnx --against MODEL`",),
            here,
            capfd,
        )
    else:
        refused(
            ("inspect", "no_images:two"),
            ("takes 2 tensors. Say what each is: '--input NAME=SHAPE'",),
            here,
            capfd,
        )
