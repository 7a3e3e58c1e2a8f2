"""De & Smith's claim at small scale: which deep networks without norms train, by the value their scalars start from.

    nice python tests/lab/benchmarks/de_smith.py --data cifar10 --work DIR -o tests/lab/benchmarks/de_smith.md
    python tests/lab/benchmarks/de_smith.py --device cuda --full --data cifar10 --work DIR -o de_smith-cuda.md

Runs the recipes `de_smith_table1_*` at depth 100 (48 residual blocks), narrow and on small images, for a few hundred
updates at each of a few learning rates; --full: as the paper has it, depths 16, 100 and 1000, 200 epochs. A run that is
there is not repeated, one that was interrupted is continued, one that diverged is a cell of the table.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import circumstances
import trained

from normswap.training import recipe_files

V1 = ("model.args.order=post",)
# one bias moves every pixel of every channel: at the lr of the weights they diverge; a tenth is what Fixup gives them
BIASED = ("convert.to=regularized-skipinit", "convert.options.dropout=0", "optim.scalar_lr=0.1")
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "v2, BatchNorm": ("bn", ()),
    "v2, SkipInit, alpha = 0": ("skipinit_alpha0", ()),
    "v2, SkipInit, alpha = 1/sqrt(d)": ("skipinit_inv_sqrt_depth", ()),
    "v2, alpha = 1": ("skipinit_alpha1", ()),
    "v2, no norm, sums divided by sqrt(2)": ("sqrt2", ()),
    "v1, SkipInit, alpha = 0": ("skipinit_alpha0", V1),
    "v1, the same with scalar biases": ("skipinit_alpha0", (*V1, *BIASED)),
    "v1, SkipInit, alpha = 1/sqrt(d)": ("skipinit_inv_sqrt_depth", V1),
    "v1, that with scalar biases": ("skipinit_inv_sqrt_depth", (*V1, *BIASED)),
}
SMALL = (
    "model.args.width=1", "data.input_size=16", "data.batch_size=32", "data.samples=6400", "data.workers=0",
    "data.validation_samples=1000", "data.augment.padding=0", "train.epochs=1", "schedule.name=constant",
    "schedule.milestones=[]", "train.channels_last=true",
)  # fmt: skip


def folder(work: Path, name: str, depth: int, lr: float) -> Path:
    """Where a run is kept."""
    return work / f"{trained.called(name)}-depth-{depth}-lr-{lr:g}"


def run(name: str, depth: int, lr: float, place: Path, overrides: Sequence[str], device: str) -> None:
    """One run."""
    recipe, own = ROWS[name]
    plan = recipe_files.load_recipe(
        f"de_smith_table1_{recipe}", [*overrides, *own, f"model.args.depth={depth}", f"optim.lr={lr}"]
    )
    trained.attempt(None, plan, place, device)


def cell(place: Path) -> str:
    """Training loss of the last epoch and top-1 after it."""
    if state := trained.missing(place):
        return state
    last = trained.rows(place)[-1]
    return "not finished" if last["train_loss"] is None else f"{last['train_loss']:.3f}, {last['top1']:.1f} %"


def table(work: Path, depths: Sequence[int], lrs: Sequence[float]) -> list[str]:
    """A row per network and depth, a column per lr."""
    out = [f"| network | depth | {' | '.join(f'lr {lr:g}' for lr in lrs)} |", "|---|---|" + "---|" * len(lrs)]
    for name in ROWS:
        for depth in depths:
            cells = (cell(folder(work, name, depth, lr)) for lr in lrs)
            out.append(f"| {name} | {depth} | {' | '.join(cells)} |")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--work", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--lrs", nargs="*", type=float, default=[2.0**-9, 2.0**-6, 2.0**-3])
    parser.add_argument("--full", action="store_true", help="the paper's networks and training")
    parser.add_argument("--table", action="store_true", help="only write the table, of the runs that are there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    depths = (16, 100, 1000) if given.full else (100,)
    command = f"python tests/lab/benchmarks/de_smith.py --device {given.device}{' --full' if given.full else ''}"
    how = ("The paper's setting." if given.full else "Width 1, CIFAR-10 at 16 pixels, 200 updates of 32 images: "
           f"`{' '.join(SMALL)}`.")  # fmt: skip
    head = ["# De & Smith's claim, at small scale", "", (__doc__ or "").splitlines()[0], "",
            f"{how} Mean training loss over all updates (ln 10 = 2.303 is guessing), top-1 on "
            f"{'all' if given.full else 'a thousand'} test images.", "",
            *circumstances.lines(command, given.device)]  # fmt: skip
    for lr in [] if given.table else given.lrs:
        for name in given.rows:
            for depth in depths:
                place = folder(given.work, name, depth, lr)
                given.work.mkdir(parents=True, exist_ok=True)
                options = [f"data.root={given.data}", *(() if given.full else SMALL)]
                run(name, depth, lr, place, options, given.device)
                print(f"{place.name}: {cell(place)}", flush=True)
                given.output.write_text("\n".join([*head, *table(given.work, depths, given.lrs)]) + "\n")
    given.output.write_text("\n".join([*head, *table(given.work, depths, given.lrs)]) + "\n")


if __name__ == "__main__":
    main()
