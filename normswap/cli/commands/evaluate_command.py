"""`normswap evaluate`: accuracy, loss and speed on labelled images."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer

from normswap.cli import progress
from normswap.cli.image_options import ImageOpening, Images
from normswap.cli.options import Json, ModelOrFile, last_part
from normswap.cli.tables import facts, next_step, show
from normswap.models import kinds
from normswap.plan import Body

KEYS = "source, data, top1 (percent), top5 (percent), loss, count, images_per_s"
EXAMPLES = ("evaluate demo --data demo", "evaluate demo.onnx --data demo --samples 100")


@dataclass(frozen=True)
class Labelled(Images):
    """Images that must be named."""

    data: Annotated[str, typer.Option(metavar="PATH", help="As --data elsewhere.")] = field()


def run(model: ModelOrFile, *, images: Labelled, opening: ImageOpening, json: Json = False) -> int:
    """Accuracy, loss and speed on labelled images."""
    net = opening.open(model, device=images.device, runs=True)
    from normswap.images.accuracy import evaluate

    loader = images.loader(net)
    with progress.bar(f"evaluating {model}") as advance:
        result = evaluate(net, loader, progress=advance)
    show({"source": model, "data": images.data, **asdict(result)}, json, _print)
    return 0


def _print(body: Body) -> None:
    facts(
        ("network", body["source"]),
        ("images", f"{body['count']} of {body['data']}"),
        ("top-1", f"{body['top1']:.2f} %"),
        ("top-5", f"{body['top5']:.2f} %"),
        ("loss", f"{body['loss']:.4f}"),
        ("speed", f"{body['images_per_s']:.0f} images/s"),
    )
    source = body["source"]
    if source.lower().endswith(tuple(kinds.EXPORTED)):
        next_step("bench", source)
    else:
        next_step("export", source, "-o", f"{last_part(source)}.onnx")
