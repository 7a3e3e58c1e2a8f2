"""`normswap spp` and `normswap decay` on the command line."""

import shlex
from pathlib import Path

import pytest
from commands import Capture, run_json

from normswap import shipped
from normswap.cli.app import main

MODEL = str(shipped.FOLDER)
IMAGES = str(shipped.FOLDER / "images.tar")
SIZE = ("--input-size", "3,32,32")
SMALL = ("resnet18", "--weights", "random", "--arch-arg", "channels=8,8,16,16")
FIELDS = {"block", "stage", "depth", "mean_sq", "variance", "branch_variance", "added_variance"}


def test_spp_before_and_after_a_conversion(here: Path, capfd: Capture) -> None:
    assert main(["convert", MODEL, "--to", "skipinit", "-o", "after"]) == 0
    body = run_json(capfd, "spp", MODEL, "after", "-o", "a.png", "--data", IMAGES, "--samples", "8", "--workers", "0")
    before, after = body["curves"].values()
    assert list(body["curves"]) == [shipped.FOLDER.name, "after"]
    assert set(before[0]) == FIELDS
    for one, other in zip(before, after, strict=True):
        assert other["variance"] == pytest.approx(one["variance"], rel=1e-3)
        assert other["mean_sq"] == pytest.approx(one["mean_sq"], rel=1e-3, abs=1e-6)
    assert body["files"] == ["a.png"]
    assert set(body["inputs"].values()) == {f"8 images of {IMAGES}"}
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")


def test_spp_prints_tables_and_is_reproducible(capfd: Capture) -> None:
    small = ("spp", *SMALL, *SIZE, "--samples", "2")
    assert main([*small]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "layer4.1" in out
    assert out.endswith(f"next: normswap advise {shlex.join([*SMALL[:3], *SIZE, *SMALL[3:]])}\n")
    first, again = run_json(capfd, *small), run_json(capfd, *small)
    assert first == again
    assert run_json(capfd, *small, "--seed", "1") != first


def test_decay_says_who_and_why(capfd: Capture) -> None:
    body = run_json(capfd, "decay", "resnet50")
    roles = {row["role"]: (row["decay"], row["tensors"]) for row in body["roles"]}
    assert roles == {
        "weight": (True, 54), "gamma_last": (True, 16), "gamma_down": (False, 4), "gamma_0": (False, 1),
        "gamma_other": (True, 32), "beta": (False, 53), "bias": (False, 1),
    }  # fmt: skip
    assert sum(row["values"] for row in body["roles"]) == 25557032
    assert len(body["parameters"]) == 161
    assert main(["decay", *SMALL]) == 0
    assert "gamma_down" in (out := capfd.readouterr().out)
    assert out.endswith(f"next: normswap finetune {shlex.join(SMALL)} --recipe RECIPE --data IMAGES\n")
