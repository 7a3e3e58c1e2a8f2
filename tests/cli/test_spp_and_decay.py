"""`normswap spp` and `normswap decay` on the command line."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from commands import Capture, run_json

from normswap import demo_files
from normswap.cli.app import main

MODEL = str(demo_files.FOLDER)
IMAGES = str(demo_files.FOLDER / "images.tar")
SMALL = ("resnet18", "--weights", "random", "--arch-arg", "channels=8,8,16,16")
FIELDS = {"block", "stage", "depth", "mean_sq", "variance", "branch_variance", "added_variance"}


def test_spp_before_and_after_a_conversion(here: Path, capfd: Capture) -> None:
    assert main(["convert", MODEL, "--to", "skipinit", "-o", "after"]) == 0
    body = run_json(
        capfd, "spp", MODEL, "after", "-o", "a.png", "--csv", "a.csv", "--data", IMAGES, "--samples", "8",
        "--workers", "0",
    )  # fmt: skip
    before, after = body["curves"].values()
    assert list(body["curves"]) == [demo_files.FOLDER.name, "after"]
    assert set(before[0]) == FIELDS
    for one, other in zip(before, after, strict=True):
        assert other["variance"] == pytest.approx(one["variance"], rel=1e-3)
        assert other["mean_sq"] == pytest.approx(one["mean_sq"], rel=1e-3, abs=1e-6)
    assert body["files"] == ["a.png", "a.csv"]
    assert set(body["inputs"].values()) == {f"8 images of {IMAGES}"}
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")
    with (here / "a.csv").open() as lines:
        assert len(list(csv.DictReader(lines))) == len(before) + len(after)


def test_spp_prints_tables_and_is_reproducible(capfd: Capture) -> None:
    small = ("spp", *SMALL, "--input-size", "3,32,32", "--samples", "2", "--bare")
    assert main([*small]) == 0
    out, err = capfd.readouterr()
    assert err == ""
    assert "resnet18, norms removed" in out
    assert "layer4.1" in out
    assert out.endswith("next: normswap advise resnet18\n")
    first, again = run_json(capfd, *small), run_json(capfd, *small)
    assert first == again
    assert run_json(capfd, *small, "--seed", "1") != first


def test_spp_of_fresh_networks(capfd: Capture) -> None:
    small = ("spp", *SMALL, "--input-size", "3,64,64", "--samples", "4")
    live = run_json(capfd, *small)["curves"]["resnet18"]
    assert [p["branch_variance"] for p in live] == pytest.approx([1.0] * 8, rel=0.01)  # batch statistics, gamma 1
    asleep = run_json(capfd, *small, "--asleep")["curves"]["resnet18"]
    assert [p["added_variance"] for p in asleep] == [0.0] * 8
    running = run_json(capfd, *small, "--statistics", "running")["curves"]["resnet18"]
    assert running[0]["branch_variance"] != pytest.approx(1.0, rel=0.01)


def test_spp_overlays_the_analytic_variance_of_nf_networks(here: Path, capfd: Capture) -> None:
    random = ("--weights", "random", "--arch-arg", "channels=16,32,64,128", "--input-size", "3,64,64", "--samples", "1")
    body = run_json(capfd, "spp", "nf_resnet26", "nf_resnet26", *random, "-o", "a.svg")
    assert list(body["curves"]) == ["nf_resnet26", "nf_resnet26 (2)"]
    assert body["expected"]["nf_resnet26"] == pytest.approx([1.04, 1.08] * 4)
    assert "<!-- nf_resnet26 (2), expected -->" in (here / "a.svg").read_text()


def test_force_replaces(here: Path) -> None:
    (here / "a.png").write_bytes(b"old")
    assert main(["spp", *SMALL, "--input-size", "3,32,32", "--samples", "2", "-o", "a.png", "--force"]) == 0
    assert (here / "a.png").read_bytes().startswith(b"\x89PNG")


def test_decay_says_who_and_why(capfd: Capture) -> None:
    body = run_json(capfd, "decay", "resnet50", "--weight-decay", "0.05")
    roles = {row["role"]: (row["decay"], row["tensors"]) for row in body["roles"]}
    assert roles == {
        "weight": (True, 54), "gamma_last": (True, 16), "gamma_down": (False, 4), "gamma_0": (False, 1),
        "gamma_other": (True, 32), "beta": (False, 53), "bias": (False, 1),
    }  # fmt: skip
    assert {group["name"]: group["weight_decay"] for group in body["groups"]} == {"decay": 0.05, "no-decay": 0.0}
    assert sum(group["values"] for group in body["groups"]) == 25557032
    assert len(body["parameters"]) == 161
    assert main(["decay", *SMALL]) == 0
    assert "gamma_down" in (out := capfd.readouterr().out)
    assert "layer1.0.conv1.weight" not in out
    assert main(["decay", *SMALL, "--each"]) == 0
    assert "layer1.0.conv1.weight" in capfd.readouterr().out


def test_decay_of_a_converted_network_and_by_layer(capfd: Capture) -> None:
    assert main(["convert", MODEL, "--to", "skipinit", "-o", "after"]) == 0
    body = run_json(capfd, "decay", "after")
    assert {row["role"] for row in body["roles"]} >= {"weight", "alpha"}
    assert not any(row["decay"] for row in body["roles"] if row["role"] == "alpha")
    body = run_json(capfd, "decay", "resnet18", "--layer-decay", "0.5", "--policy", "timm")
    scales = {group["lr_scale"] for group in body["groups"]}
    assert max(scales) == 1.0
    assert len(scales) > 5


def test_decay_says_where_its_groups_are_used(capfd: Capture) -> None:
    assert main(["decay", *SMALL]) == 0
    assert capfd.readouterr().out.endswith("next: normswap finetune resnet18 --recipe RECIPE --data IMAGES\n")
