"""Recovery: accuracy at conversion, after one epoch and after the recipe, beside BatchNorm fine-tuned the same way.

    nice python tests/benchmarks/recover.py --data cifar10 --work DIR -o tests/benchmarks/recover.md
    python tests/benchmarks/recover.py --device cuda --data cifar10 --work DIR -o recover-cuda.md \\
        data.samples=null train.epochs=10 train.precision=bf16       # full size: all images, longer

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
ROWS: dict[str, tuple[str, tuple[str, ...]]] = {
    "bn": ("cifar10_recover_bn", ()),
    "skipinit": ("cifar10_recover_skipinit", ()),
    "regularized-skipinit": ("cifar10_recover_regularized_skipinit", ()),
    "nf, means kept and annealed": ("cifar10_recover_nf", ()),
    "nf, means fitted": (
        "cifar10_recover_nf",
        ("convert.options.mean=fit", "convert.calibrate=true", "convert.samples=1000", "anneal=null"),
    ),
    "groupnorm, fitted": ("cifar10_recover_groupnorm", ()),
    "fixup": ("cifar10_recover_fixup", ()),
}
MARGIN = 0.3  # points below BatchNorm that are allowed
HOW = (
    "Top-1 in percent on the 10,000 CIFAR-10 test images, by the recipes `cifar10_recover_*`, all with the same",
    "images and updates. `after the recipe`: the network itself; `averaged`: the moving average of its weights, the",
    f"one compared with BatchNorm's; a converted network may be at most {MARGIN} points below.",
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
    """The Markdown rows of the runs that are there."""
    columns = ("network", "to", "at conversion", "after 1 epoch", "after the recipe", "averaged", "to BN's", "images/s")
    out = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    final: dict[str, float] = {}
    for (network, name), place in places.items():
        if not (place / "metrics.csv").is_file():
            out.append(f"| `{network}` | {name} | not run yet | | | | | |")
            continue
        (found,) = curves.read([place])
        at = {round(row["epoch"] or 0, 3): row for row in found.rows}
        first, last = found.rows[0], found.rows[-1]
        one = at.get(1.0, {})
        end = last.get("ema_top1") or last["top1"] or 0.0
        final.setdefault(network, end if name == "bn" else float("nan"))
        gap = end - final[network]
        verdict = "" if name == "bn" else f"{gap:+.2f}" + (" (misses)" if gap < -MARGIN else "")
        speed = last.get("images_per_s")
        cells = [f"{v:.2f}" if v is not None else "" for v in (first["top1"], one.get("top1"), last["top1"], end)]
        out.append(f"| `{network}` | {name} | {' | '.join(cells)} | {verdict} | {speed:.0f} |")
    return out


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
