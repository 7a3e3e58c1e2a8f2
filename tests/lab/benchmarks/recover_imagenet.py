"""Recovery of networks of full width without labels: kept at conversion, and after a few hundred updates.

    python tests/lab/benchmarks/recover_imagenet.py -o tests/lab/benchmarks/recover_imagenet.md

The recipe `recover_unlabelled` on the 500 unlabelled photographs beside the repository: conversion, fit to 100 of them,
then distillation; the source's answers are the only target. Kept: top-1 on the 500 labelled photographs as a share of
the source's. Seconds are of the clock, of training alone. Runs are kept in runs/recover_imagenet and continued;
`--networks` and `--rows` choose what is run, KEY=VALUE overrides go to every run, and the table has all that have
trained for an epoch.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import circumstances
import trained
from imagenet import AT_HAND, PHOTOGRAPHS, ROOT, SIDE, packaged
from recover import finished, top
from torch import nn

from normswap.images.accuracy import classify
from normswap.images.datasets import make_loader
from normswap.models import zoo
from normswap.training import recipe_files
from normswap.training.engine import finetune

WORK = ROOT / "runs" / "recover_imagenet"
ROWS: dict[str, tuple[str, ...]] = {
    "groupnorm": (),
    "groupnorm --group-size 16": ("convert.options.group_size=16",),
    "dyt": ("convert.to=dyt",),
    "nf": ("convert.to=nf",),
}
HEAD = "| network | to | at conversion | after | updates | seconds |"


def network(name: str) -> nn.Module:
    """A network at hand that says itself how its images are prepared."""
    model = packaged(name)
    if model is None:
        raise SystemExit(f"{name}: its package {AT_HAND[name]} is not installed")
    model.pretrained_cfg = {**zoo.data_config(model), "num_classes": 1000, **SIDE}
    return model


def place(name: str, row: str) -> Path:
    """Where a run is kept."""
    return WORK / name / trained.called(row)


def source(name: str) -> float:
    """Top-1 of the source, measured once."""
    file = WORK / name / "source.json"
    if not file.is_file():
        model = network(name)
        found, _ = classify(model, make_loader(model, str(PHOTOGRAPHS / "test.tar"), batch_size=50, workers=0))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found.top1))
    return float(json.loads(file.read_text()))


def run(name: str, row: str, overrides: Sequence[str]) -> None:
    """A run, unless it is there."""
    data = [f"data.root={PHOTOGRAPHS / 'calibration.tar'}", f"data.validation={PHOTOGRAPHS / 'test.tar'}"]
    recipe = recipe_files.load_recipe("recover_unlabelled", [*ROWS[row], *data, *overrides])
    finetune(network(name), recipe, place(name, row), resume="auto", device="cpu", track="none")


def table() -> list[str]:
    """Of all runs that have trained for an epoch."""
    lines = [HEAD, "|---|---|" + "---:|" * 4]
    for name in AT_HAND:
        for row in ROWS:
            rows = trained.rows(place(name, row))
            if len(rows) > 1:
                first, last = (f"{100 * top(rows, at) / source(name):.1f} %" for at in (0, -1))
                epochs = recipe_files.load_recipe(place(name, row) / "recipe.yaml").train.epochs
                updates = f"{rows[-1]['update']:.0f}" + (
                    "" if finished(place(name, row)) else f", epoch {len(rows) - 1} of {epochs:.0f}"
                )
                seconds = sum(one["seconds"] or 0.0 for one in rows)
                lines.append(f"| {name} | `{row}` | {first} | {last} | {updates} | {seconds:.0f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=["efficientnet_lite0"], choices=list(AT_HAND))
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--table", action="store_true", help="only write the table, of the runs that are there")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given, overrides = parser.parse_known_args()
    command = f"python tests/lab/benchmarks/recover_imagenet.py {' '.join(overrides)} -o {given.output}"
    said = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    for name in given.networks:
        for row in given.rows:
            if not given.table:
                run(name, row, overrides)
                print(name, row, finished(place(name, row))[-1:], flush=True)
            head = ["# Recovery without labels, at full width", "", *circumstances.lines(command, "cpu"), said, ""]
            given.output.write_text("\n".join([*head, *table()]) + "\n")


if __name__ == "__main__":
    main()
