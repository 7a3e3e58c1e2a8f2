"""Recovery: accuracy at conversion, after one epoch and after the recipe, beside BatchNorm fine-tuned the same way.

    nice python tests/benchmarks/recover.py --data cifar10 --work DIR -o tests/benchmarks/recover.md
    python tests/benchmarks/recover.py --device cuda --data cifar10 --work DIR -o recover-cuda.md \\
        train.epochs=10 train.precision=bf16       # longer

Runs the shipped recipes `cifar10_recover_*` in folders of DIR; a run that is there is not repeated, one that was
interrupted is continued. KEY=VALUE overrides go to every recipe alike, BatchNorm's too. The table is written anew
after every run, and says what is missing.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import circumstances

from normswap import checkpoint
from normswap.errors import NormswapError
from normswap.recover import curves, load
from normswap.recover.engine import finetune

SHARED = Path(__file__).resolve().parents[3] / "shared"
CLIPPED = ("optim.clip.mode=agc", "optim.clip.value=0.02")
KEPT = ("convert.options.mean=keep", "convert.calibrate=false", "anneal.means=0.5")
CLIPPED_BN = "bn, clipped like the others"
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bn": ("cifar10_recover_bn", ()),
    CLIPPED_BN: ("cifar10_recover_bn", CLIPPED),
    "skipinit": ("cifar10_recover_skipinit", ()),
    "regularized-skipinit": ("cifar10_recover_regularized_skipinit", ()),
    "fixup": ("cifar10_recover_fixup", ()),
    "groupnorm, fitted": ("cifar10_recover_groupnorm", ()),
    "nf, means fitted": ("cifar10_recover_nf", ()),
    "nf, means kept and annealed": ("cifar10_recover_nf", KEPT),
}
Rows = tuple[dict[str, float | None], ...]
MARGIN = 0.3  # points below BatchNorm that are allowed
HOW = (
    "Top-1 in percent on the 10,000 CIFAR-10 test images, by the recipes `cifar10_recover_*`, all with the same",
    "images, updates and lr. `after the recipe`: the network itself; `averaged`: the moving average of its weights,",
    "compared with BatchNorm's, trained with the same clipping (AGC 0.02, without which SkipInit does not survive this",
    f"lr) and without any; a converted network may be at most {MARGIN} points below. Images/s where other work shared",
    "the processor say nothing.",
    "",
)


def run(name: str, network: Path, place: Path, overrides: Sequence[str], device: str) -> float:
    """One row; returns the processor seconds it took (of this process)."""
    recipe, own = ROWS[name]
    plan = load.read(recipe, [*own, *overrides])
    before = time.process_time()
    finetune(checkpoint.open_model(str(network)), plan, place, resume="auto", device=device, track="none")
    return time.process_time() - before


def table(places: dict[tuple[str, str], Path]) -> list[str]:
    """The Markdown rows: what is there, and what is missing."""
    columns = ("network", "to", "at conversion", "after 1 epoch", "after the recipe", "averaged", "to BN's",
               "to BN's, not clipped", "images/s")  # fmt: skip
    out = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    known = {key: rows for key, place in places.items() if (rows := finished(place))}
    for (network, name), place in places.items():
        rows = known.get((network, name))
        if not rows:
            state = "not finished" if (place / "metrics.csv").is_file() else "not run yet"
            out.append(f"| `{network}` | {name} | {state} | | | | | | |")
            continue
        one = next((row for row in rows if row["epoch"] == 1), {})
        cells = [rows[0]["top1"], one.get("top1"), rows[-1]["top1"], end(rows)]
        shown = " | ".join("" if value is None else f"{value:.2f}" for value in cells)
        verdicts = " | ".join(against(known, network, rows, rival) for rival in (CLIPPED_BN, "bn"))
        out.append(f"| `{network}` | {name} | {shown} | {verdicts} | {rows[-1]['images_per_s']:.0f} |")
    return out


def against(known: dict[tuple[str, str], Rows], network: str, rows: Rows, rival: str) -> str:
    """Points above BatchNorm's."""
    if (network, rival) not in known:
        return ""
    gap = end(rows) - end(known[network, rival])
    return f"{gap:+.2f}" + (" (misses)" if gap < -MARGIN else "")


def finished(place: Path) -> Rows:
    """The rows of a run that is at its end; none of another."""
    if not (place / "metrics.csv").is_file():
        return ()
    (found,) = curves.read([place])
    last = found.rows[-1]["epoch"] if found.rows else 0
    return found.rows if last == load.read(place / "recipe.yaml").train.epochs else ()


def end(rows: Rows) -> float:
    """Top-1 of the averaged weights at the end."""
    return rows[-1].get("ema_top1") or rows[-1]["top1"] or 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", type=Path, default=[SHARED / "checkpoints" / "resnet18_narrow"])
    parser.add_argument("--data", default=str(SHARED / "data" / "cifar10"))
    parser.add_argument("--work", type=Path, required=True, help="where the runs are kept")
    parser.add_argument("--rows", nargs="*", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--table", action="store_true", help="only write the table, of the runs that are there")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-o", "--output", type=Path, required=True)
    given, overrides = parser.parse_known_args()
    wrong = [word for word in overrides if "=" not in word or word.startswith("-")]
    if wrong:
        parser.error(f"{wrong[0]} is no KEY=VALUE")
    places = {(network.name, name): given.work / network.name / name.replace(", ", "-").replace(" ", "-")
              for network in given.networks for name in ROWS}  # fmt: skip
    command = f"python tests/benchmarks/recover.py --device {given.device} {' '.join(overrides)}".strip()
    summary = (__doc__ or "").splitlines()[0]
    head = ["# Recovery, measured", "", summary, "", *HOW, *circumstances.lines(command, given.device)]

    def write() -> None:
        given.output.write_text("\n".join([*head, *table(places)]) + "\n")

    options = [f"data.root={given.data}", *overrides]
    for (network, name), place in places.items() if not given.table else ():
        if name in given.rows:
            source = next(path for path in given.networks if path.name == network)
            try:
                print(f"{network}, {name}: {run(name, source, place, options, given.device):.0f} processor seconds")
            except NormswapError as error:
                print(f"{network}, {name}: {error}")
            write()
    write()


if __name__ == "__main__":
    main()
