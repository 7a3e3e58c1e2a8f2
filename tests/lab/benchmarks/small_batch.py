"""Training with two and four images per update: BatchNorm takes its statistics from so few, converted networks do not.

    nice python tests/lab/benchmarks/small_batch.py --data cifar10 --work DIR -o tests/lab/benchmarks/small_batch.md
    python tests/lab/benchmarks/small_batch.py --device cuda --updates 20000 --data cifar10 --work DIR -o small-cuda.md

The recipes `cifar10_recover_*` with labels alone (no teacher, no averaging), the same images and lr for all. A run that
is there is not repeated, one that was interrupted is continued.
"""

import argparse
from pathlib import Path

import circumstances
import trained
from trained import CLIPPED

from normswap.training import recipe_files

HALF = "convert.options.relative_eps=1"  # what the recipe said when the table was made
ROWS = {
    "bn": ("cifar10_recover_bn", ()),
    "bn, clipped as skipinit": ("cifar10_recover_bn", CLIPPED),
    "skipinit": ("cifar10_recover_skipinit", ()),
    "nf, means kept": ("cifar10_recover_nf", trained.KEPT),
    "nf, means fitted": ("cifar10_recover_nf", ()),
    "groupnorm, fitted": ("cifar10_recover_groupnorm", (*CLIPPED, HALF)),
    "groupnorm, not fitted": ("cifar10_recover_groupnorm", (*CLIPPED, HALF, "convert.calibrate=false")),
    "fixup": ("cifar10_recover_fixup", ()),
}
NETWORK = trained.SHARED / "checkpoints" / "resnet18_narrow"
BATCHES, LR, TESTED = (2, 4), 0.0005, 2000
PLAIN = ("distill=null", "train.ema=null", "train.epochs=2", "schedule.name=constant", "schedule.warmup=0.1")


def row(name: str, batch: int, place: Path) -> str:
    """A row of the table."""
    if state := trained.missing(place):
        return f"| {batch} | {name} | {state} | | | |"
    rows = trained.rows(place)
    losses = " then ".join(f"{one['train_loss']:.3f}" for one in rows[1:])
    first, last = rows[0]["top1"] or 0.0, rows[-1]["top1"] or 0.0
    return f"| {batch} | {name} | {first:.2f} | {last:.2f} | {last - first:+.2f} | {losses} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=str(trained.SHARED / "data" / "cifar10"))
    parser.add_argument("--work", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    cells = [(batch, name) for batch in BATCHES for name in ROWS]
    places = {(batch, name): given.work / f"{trained.called(name)}-{batch}" for batch, name in cells}
    command = f"python tests/lab/benchmarks/small_batch.py --device {given.device} --updates {given.updates}"
    how = (f"`{NETWORK.name}`, {given.updates} updates at lr {LR:g} (the same images twice), top-1 on "
           f"{TESTED} test images, mean training loss of the first and the second pass.")  # fmt: skip
    head = ["# Small batches, measured", "", (__doc__ or "").splitlines()[0], "", how, "",
            *circumstances.lines(command, given.device),
            "| batch | to | top-1 before | after | change | training loss |", "|---|---|---|---|---|---|"]  # fmt: skip
    given.work.mkdir(parents=True, exist_ok=True)
    for (batch, name), place in places.items():
        images = batch * given.updates // 2
        options = [f"data.root={given.data}", f"data.batch_size={batch}", f"optim.lr={LR}", f"data.samples={images}",
                   f"data.validation_samples={TESTED}"]  # fmt: skip
        recipe, own = ROWS[name]
        trained.attempt(NETWORK, recipe_files.load_recipe(recipe, [*own, *PLAIN, *options]), place, given.device)
        print(row(name, batch, place), flush=True)
        rows = (row(name, batch, at) for (batch, name), at in places.items())
        given.output.write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    main()
