"""Each scheme's result on one small network, under torch.compile against eager mode: forward and
one training step.

    python tests/lab/benchmarks/compiled.py -o tests/lab/benchmarks/compiled.md

On the CPU, of a residual network (for rmsnorm a transformer) that is lived-in, on 4 images.
runs/compiled.jsonl keeps rows, so that an interrupted run goes on.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from support.hand_written_networks import Net, PostAct
from support.lived_in_networks import living
from support.small_transformers import small

import normswap
from normswap import schemes
from normswap.proof import compiling
from normswap.surgery.network import Network


def measured(name: str) -> Row:
    """The distances of the scheme's result from itself in eager mode; "source": of the network
    before.
    """
    model, x = small("vit") if name == "rmsnorm" else living(Net(PostAct), 3, 16, 16)
    # Machine code for one block takes a third of the time.
    model.blocks = model.blocks[:1]
    model = model.float()
    x = torch.cat([x, x.flip(-1)])[:4].float()
    keep = {"mean": "keep"}
    options: dict[str, dict[str, Any]] = {
        "batchnorm": {"ghost_batch": 2},
        "nf": keep,
        "centered-weightnorm": keep,
    }

    result = (
        model
        if name == "source"
        else normswap.convert(model, name, inputs=x, **options.get(name, {})).model
    )
    network = Network(result, x)

    return {
        "departures": [
            vars(departure) for departure in compiling.compare_compiled(network, network.calls[0])
        ]
    }


def line(name: str, row: Row) -> str:
    cells = [name]
    for error in row["departures"]:
        verdict = "" if error["relative_l2"] <= error["allowed"] else "**FAILED** "
        cells += [
            f"{verdict}{error['what']}",
            f"{error['relative_l2']:.1e}",
            f"{error['allowed']:.1e}",
        ]
    return markdown_row(*cells)


def main() -> None:
    args = arguments(__doc__).parse_args()
    kept = Kept(Path(__file__).resolve().parents[3] / "runs" / "compiled.jsonl", fresh=args.fresh)
    lines = [
        "",
        markdown_head(
            "scheme", "forward", "relative L2", "allowed", "one step", "relative L2", "allowed"
        ),
    ]

    for name in ("source", *schemes.names()):
        lines.append(line(name, kept.get((name,), lambda name=name: measured(name))))
        print(lines[-1], flush=True)

    kept.write(
        args.output,
        "The 18 schemes under torch.compile against eager mode, forward and one step",
        lines,
    )


if __name__ == "__main__":
    main()
