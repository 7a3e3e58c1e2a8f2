"""Recovery of networks that are not ResNets: one epoch of the recipes, beside BatchNorm fine-tuned the same way.

    python tests/lab/benchmarks/recover_kinds.py -o tests/lab/benchmarks/recover_kinds.md

Top-1 in percent on the 10,000 CIFAR-10 test images, by the recipes `cifar10_recover_*` with `train.epochs=1` and
nothing else changed: the same images, updates and learning rate for all. Networks of the zoo (tests/data/zoo). The mean
over the seeds; `averaged`: the moving average of the weights, which is what a run keeps. Runs are kept in
runs/recover_kinds and continued.
"""

from __future__ import annotations

import argparse
from itertools import product
from pathlib import Path
from statistics import mean

import circumstances
import trained
from kinds_images import ROOT
from kinds_zoo import folder
from recover import MARGIN, against, end, finished, top
from zoo_networks import trained as network

from normswap.training import recipe_files
from normswap.training.engine import finetune

ROWS = {
    "bn": ("cifar10_recover_bn", ()),
    "groupnorm": ("cifar10_recover_groupnorm", ()),
    "groupnorm --relative-eps 3": ("cifar10_recover_groupnorm", ("convert.options.relative_eps=3",)),
    "groupnorm --relative-eps 1": ("cifar10_recover_groupnorm", ("convert.options.relative_eps=1",)),
    "nf": ("cifar10_recover_nf", ()),
}
SEEDS = (0, 1)
ON = ("depthwise", "dense", "plain", "plain_norm_after")
WORK = ROOT / "runs" / "recover_kinds"


def place(kind: str, name: str, seed: int) -> Path:
    """Where a run is kept."""
    return WORK / kind / trained.called(name) / f"seed-{seed}"


def run(kind: str, name: str, seed: int) -> None:
    """One epoch, unless it is there."""
    recipe, own = ROWS[name]
    options = [*own, f"data.root={folder()}", f"train.seed={seed}", "train.epochs=1"]
    finetune(network(kind), recipe_files.load_recipe(recipe, options), place(kind, name, seed), resume="auto",
             device="cpu", track="none")  # fmt: skip


def table() -> list[str]:
    """Of all runs that are at their end."""
    lines = ["| network | to | runs | at conversion | after 1 epoch | averaged | to BN's |", "|---" * 7 + "|"]
    for kind in ON:
        done = {name: {s: rows for s in SEEDS if (rows := finished(place(kind, name, s)))} for name in ROWS}
        for name, runs in done.items():
            if runs:
                first, last = (mean([top(rows, at) for rows in runs.values()]) for at in (0, -1))
                ends = mean([end(rows) for rows in runs.values()])
                lines.append(f"| {kind} | `{name}` | {len(runs)} | {first:.2f} | {last:.2f} | {ends:.2f} | "
                             f"{against(runs, done['bn'])} |")  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    said = (__doc__ or "").partition("\n\n")[2].partition("\n\n")[2].strip()
    for seed, kind, name in product(SEEDS, ON, ROWS):
        run(kind, name, seed)
        rows = finished(place(kind, name, seed))
        if not rows:
            raise SystemExit(f"{kind} {name} {seed} was stopped: the same command goes on with it")
        print(kind, name, seed, rows[-1], flush=True)
        head = ["# Recovery by kind of network", "",
                *circumstances.lines(f"python tests/lab/benchmarks/recover_kinds.py -o {given.output}", "cpu"),
                said, f"A converted network may be at most {MARGIN} points below BatchNorm.", ""]  # fmt: skip
        given.output.write_text("\n".join([*head, *table()]) + "\n")


if __name__ == "__main__":
    main()
