"""`normswap doctor`: BatchNorm troubles found and named, with the command that mends each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.image_options import ImageOpening, Images
from normswap.cli.options import Json, Model
from normswap.cli.tables import entry, facts, few, listing, show
from normswap.errors import OptionError
from normswap.plan import Body

_SAMPLES = 256  # images, unless --samples says more
KEYS = (
    "source, norms (how many), faults (how many), notes, findings (name, paths, evidence, certainty, cost, mend, "
    "fault; the root of the trouble first)"
)
EXAMPLES = (
    "doctor demo",
    "doctor demo --data demo",
    "doctor resnet50 --weights ema.pth --beside last.pth",
)


def run(
    model: Model,
    *,
    beside: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Weights of the same training: those that MODEL is an average of (EMA, SWA)."
        ),
    ] = None,
    images: Images,
    opening: ImageOpening,
    json: Json = False,
) -> int:
    """Find and name BatchNorm troubles, and how to mend them.

    With --data also what images show: whether they are prepared as in training, whether statistics fit them (drift,
    beside its sampling error), whether another eps does, and from which batch size on eval and train mode agree.

    Exit code 1 where something is wrong.
    """
    if beside is not None and not beside.is_file():
        raise OptionError(f"--beside {beside}", "there is no such file", "Name a .safetensors or .pth file")
    from normswap.models.weight_files import with_broken_statistics

    with with_broken_statistics():
        opened = opening.open(model)
    from normswap.diagnosis.doctor import body_of, diagnose
    from normswap.models import devices

    net = devices.place(opened, images.device)
    seen = (
        None if images.data is None else replace(images, samples=images.samples or _SAMPLES).loader(net, labelled=False)
    )
    other = None if beside is None else replace(opening, weights=str(beside), arch=None).open(opening.arch or model)
    with progress.working("looking"):
        diagnosis = diagnose(net, images=seen, other=other, name=opening.said(model), data=images.data or "IMAGES")
    show(body_of(diagnosis, model), json, _print)
    return 1 if diagnosis.faults else 0


def _print(body: Body) -> None:
    facts(("network", body["source"]), ("norms", body["norms"]), ("faults", body["faults"]))
    for row in body["findings"]:
        kind = "fault" if row["fault"] else "remark"
        lines = [row["evidence"], f"where: {few(row['paths'])}", f"sure: {row['certainty']}", f"cost: {row['cost']}"]
        entry(f"{kind}: {row['name']}", [*lines, f"mend: {row['mend']}"])
    listing("note", body["notes"])
