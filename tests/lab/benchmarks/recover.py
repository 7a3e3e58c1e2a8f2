"""Recovery: accuracy at conversion, after one epoch and after the recipe, beside BatchNorm fine-tuned the same way.

    nice python tests/lab/benchmarks/recover.py --data cifar10 --work DIR -o tests/lab/benchmarks/recover.md
    python tests/lab/benchmarks/recover.py --device cuda --data cifar10 --work DIR -o recover-cuda.md \\
        train.epochs=10 train.precision=bf16       # longer
    python tests/lab/benchmarks/recover.py --kinds --work DIR -o tests/lab/benchmarks/recover_kinds.md train.epochs=1

Runs the shipped recipes `cifar10_recover_*` in folders of DIR, one per network, row and seed; a run that is there is
not repeated, one that was interrupted is continued. KEY=VALUE overrides go to every recipe alike, BatchNorm's too. The
table is written anew after every run, of all runs that are there, and says what is missing. Two commands with other
`--rows` or `--seeds` can fill one DIR at the same time; `--table` then writes what both made. `--kinds`: networks of
tests/data/zoo that are no ResNets.
"""

import argparse
import itertools
from pathlib import Path
from statistics import mean, stdev

import circumstances
import trained
from kinds_zoo import folder
from torch import nn
from trained import Rows
from zoo_networks import trained as network_of_kind

from normswap.errors import NormswapError
from normswap.training import recipe_files

NETWORKS = [trained.SHARED / "checkpoints" / name for name in ("resnet18_narrow", "resnetv2_18_narrow")]
BN = "bn"
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    BN: ("cifar10_recover_bn", ()),
    "bn, clipped as skipinit": ("cifar10_recover_bn", trained.CLIPPED),
    "skipinit": ("cifar10_recover_skipinit", ()),
    "regularized-skipinit": ("cifar10_recover_regularized_skipinit", ()),
    "fixup": ("cifar10_recover_fixup", ()),
    "groupnorm, fitted": ("cifar10_recover_groupnorm", ()),
    "nf, means fitted": ("cifar10_recover_nf", ()),
}
KIND_ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    BN: ("cifar10_recover_bn", ()),
    "groupnorm": ("cifar10_recover_groupnorm", ()),
    "groupnorm --relative-eps 3": ("cifar10_recover_groupnorm", ("convert.options.relative_eps=3",)),
    "groupnorm --relative-eps 1": ("cifar10_recover_groupnorm", ("convert.options.relative_eps=1",)),
    "nf": ("cifar10_recover_nf", ()),
}
KINDS = ("depthwise", "dense", "plain", "plain_norm_after")
Known = dict[tuple[str, str], dict[int, Rows]]  # by network and row, then by seed
MARGIN = 0.3  # points below BatchNorm that are allowed
HOW = (
    "Top-1 in percent on the 10,000 CIFAR-10 test images, by the recipes `cifar10_recover_*`, all with the same",
    "images, updates and lr; the mean over the runs, which differ in `train.seed`. `after the recipe`: the network",
    "itself; `averaged`: the moving average of its weights, with the standard deviation over the runs, compared with",
    f"BatchNorm's over the same seeds; a converted network may be at most {MARGIN} points below. Images/s where other",
    "work shared the processor say nothing.",
    "",
)


def table(known: Known) -> list[str]:
    """The Markdown rows: what is there, and what is missing."""
    columns = ("network", "to", "runs", "at conversion", "after 1 epoch", "after the recipe", "averaged", "to BN's",
               "images/s")  # fmt: skip
    out = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for (network, name), runs in known.items():
        if not runs:
            out.append(f"| `{network}` | {name} | not run yet | | | | | | |")
            continue
        first, one, last = (mean([rows[at]["top1"] or 0.0 for rows in runs.values()]) for at in (0, 1, -1))
        ends = [end(rows) for rows in runs.values()]
        averaged = f"{mean(ends):.2f}" + (f" ± {stdev(ends):.2f}" if len(ends) > 1 else "")
        speed = mean([rows[-1]["images_per_s"] or 0.0 for rows in runs.values()])
        cells = (str(len(runs)), f"{first:.2f}", f"{one:.2f}", f"{last:.2f}", averaged,
                 against(runs, known[network, BN]), f"{speed:.0f}")  # fmt: skip
        out.append(f"| `{network}` | {name} | {' | '.join(cells)} |")
    return out


def against(runs: dict[int, Rows], rival: dict[int, Rows]) -> str:
    """Points above BatchNorm's, over the seeds that both have."""
    gaps = [end(rows) - end(rival[seed]) for seed, rows in runs.items() if seed in rival]
    if not gaps:
        return "BN not run"
    gap = round(mean(gaps), 2)  # as it is shown: top-1 has steps of a hundredth
    return f"{gap:+.2f}" + (" (misses)" if gap < -MARGIN else "")


def made(place: Path) -> dict[int, Rows]:
    """The runs in `place` that are at their end, by seed."""
    numbered = {int(path.name.partition("-")[2]): finished(path) for path in sorted(place.glob("seed-*"))}
    return {seed: rows for seed, rows in numbered.items() if rows}


def finished(place: Path) -> Rows:
    """The rows of a run that is at its end; none of another."""
    rows = trained.rows(place)
    return rows if rows and rows[-1]["epoch"] == recipe_files.load_recipe(place / "recipe.yaml").train.epochs else ()


def end(rows: Rows) -> float:
    """Top-1 of the averaged weights at the end."""
    return rows[-1].get("ema_top1") or rows[-1]["top1"] or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--data", help="a folder of images [default: CIFAR-10, unpacked]")
    parser.add_argument("--work", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--rows", nargs="*", choices=[*ROWS, *KIND_ROWS], help="to make [default: all]")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1], help="of the runs to make")
    parser.add_argument("--table", action="store_true", help="only write the table, of the runs that are there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given, overrides = parser.parse_known_args()
    wrong = [word for word in overrides if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"{wrong[0]} is no KEY=VALUE")
    networks: dict[str, Path | nn.Module] = {path.name: path for path in NETWORKS}
    recipes = KIND_ROWS if given.kinds else ROWS
    if given.kinds:
        networks = {kind: network_of_kind(kind) for kind in KINDS}
    words = ["--kinds"] * given.kinds + overrides
    command = f"python tests/lab/benchmarks/recover.py --device {given.device} {' '.join(words)}".strip()
    head = ["# Recovery, measured", "", (__doc__ or "").splitlines()[0], "", *HOW]
    head += circumstances.lines(command, given.device)

    def write() -> None:
        rows = itertools.product(networks, recipes)
        known = {(network, name): made(given.work / network / trained.called(name)) for network, name in rows}
        given.output.write_text("\n".join([*head, *table(known)]) + "\n")

    for seed, network, name in () if given.table else itertools.product(given.seeds, networks, given.rows or recipes):
        recipe, own = recipes[name]
        options = [*own, f"data.root={given.data or folder()}", f"train.seed={seed}", *overrides]
        place = given.work / network / trained.called(name) / f"seed-{seed}"
        try:
            trained.run(networks[network], recipe_files.load_recipe(recipe, options), place, given.device)
        except NormswapError as error:
            print(f"{place}: {error}")
        write()
    write()


if __name__ == "__main__":
    main()
