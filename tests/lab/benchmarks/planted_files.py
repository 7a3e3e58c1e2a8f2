"""A fault planted in one layer of a file, in each format, and the layer that `verify` names.

    python tests/lab/benchmarks/planted_files.py -o tests/lab/benchmarks/planted_files.md

A layer's weight is 1.3 times as large in the file (3 times in int8) as in the network that `verify`
holds it to: the first, the middle and the last linear layer, one after the other. Healthy files are
looked at in the same way. The demo's network with 64 of its images, the others, with random
weights, with smooth noise (in int8 only the demo).
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import timm
import torch
from kept import Kept, Row, arguments, markdown_head, markdown_row
from rich.progress import track
from support.lived_in_networks import lived_in
from torch import Tensor, nn

import normswap
from normswap import shipped
from normswap.errors import NormswapError, first_line
from normswap.exporting import exported_file, formats
from normswap.images.datasets import make_loader
from normswap.models import zoo

NETWORKS = ("demo", "mobilenetv2_035", "vit_tiny_patch16_224")
COLUMNS = (
    "format",
    "weights",
    "network",
    "named",
    "seconds of `verify`",
    "healthy file names",
    "what was not named",
)


def network(name: str) -> tuple[nn.Module, Tensor | None, Tensor | None]:
    """A network; images to check its files on, and others for the ranges of int8, where there are
    some.
    """
    if name == "demo":
        model = zoo.open_source(shipped.NAME).eval()
        images = next(iter(make_loader(model, str(shipped.IMAGES), batch_size=128, workers=0)))[0]
        return model, images[:64], images[64:]
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)
    return lived_in(model, torch.randn(2, 3, 224, 224)).float(), None, None


def measured(name: str, form: str, dtype: str) -> Row:
    """For each planted layer, and for none: the layer named, how far the file is off, and the
    seconds of `verify`.
    """
    model, images, ranges = network(name)
    linear = [
        path for path, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Linear))
    ]

    rows = []
    for planted in ("", linear[0], linear[len(linear) // 2], linear[-1]):
        other = copy.deepcopy(model)
        if planted:
            other.get_parameter(f"{planted}.weight").data.mul_(3 if dtype == "int8" else 1.3)

        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / f"network{formats.get(form).ending}"
            normswap.export(
                other,
                file,
                dtype=dtype,
                images=images,
                calibrate=ranges if dtype == "int8" else None,
            )
            found = exported_file.ExportedFile.find(str(file))

            assert found

            start = time.perf_counter()
            figures = exported_file.verify(found, model, images)
            seconds = time.perf_counter() - start

        named = figures.apart.site if figures.apart else figures.missing.rpartition(".")[0]
        rows.append(
            {"planted": planted, "named": named, "off": figures.relative_l2, "seconds": seconds}
        )

    return {"rows": rows}


def line(form: str, dtype: str, name: str, row: Row) -> str:
    healthy, *planted = row["rows"]
    right = [each for each in planted if each["named"] == each["planted"]]
    wrong = [
        f"{each['planted']}: {each['named'] or 'nothing'}" for each in planted if each not in right
    ]
    seconds = [each["seconds"] for each in planted]
    took = f"{min(seconds):.1f} to {max(seconds):.1f}"

    return markdown_row(
        form,
        dtype,
        name,
        f"{len(right)} of {len(planted)}",
        took,
        healthy["named"] or "nothing",
        "; ".join(wrong),
    )


def main() -> None:
    (parser := arguments(__doc__)).add_argument(
        "--kept", action="store_true", help="measure nothing more"
    )
    args = parser.parse_args()
    kept = Kept(
        Path(__file__).resolve().parents[3] / "runs" / "planted_files.jsonl", fresh=args.fresh
    )
    lines = ["", markdown_head(*COLUMNS)]

    kinds = [*itertools.product(formats.names(), ("fp32", "int8"))]
    for form, dtype in track(kinds, transient=True):
        for name in NETWORKS[: 1 if dtype == "int8" else None]:
            if args.kept and (form, dtype, name) not in kept.rows:
                continue
            try:
                row = kept.get((form, dtype, name), functools.partial(measured, name, form, dtype))
                lines.append(line(form, dtype, name, row))
            except NormswapError as error:
                lines.append(markdown_row(form, dtype, name, first_line(error), "", "", ""))

    kept.write(args.output, "Faults planted in files, and the layer that `verify` names", lines)


if __name__ == "__main__":
    main()
