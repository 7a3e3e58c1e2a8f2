"""`normswap spp`: how the signal propagates, block by block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from normswap.analysis import picture_formats
from normswap.cli import progress
from normswap.cli.image_options import Images
from normswap.cli.naming import label, last_part
from normswap.cli.options import Json, Opening
from normswap.cli.tables import next_step, show, table, written
from normswap.errors import OptionError
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from torch import Tensor, nn

KEYS = (
    "curves (by network: block, stage, depth, mean_sq, variance, branch_variance, added_variance), expected (analytic "
    "variances, by network), inputs (what each network was run on), files"
)
EXAMPLES = (
    "spp resnet50 nf_resnet50 --weights random",
    "spp demo demo-skipinit --data demo -o signal.png",
)
_STATISTICS = ("auto", "batch", "running")
_COLUMNS = ("block", "squared mean", "variance", "expected", "branch variance", "added variance")


@dataclass(frozen=True)
class Drawn:
    """Where the picture and the table go, if anywhere."""

    GROUP: ClassVar[str] = "Files to write"
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="Picture: .png, .svg ...")
    ] = None
    csv: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", show_default=False, help="The same as a table.")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False


@dataclass(frozen=True)
class Seen(Images):
    """The inputs that the networks run on: images, or noise."""

    data: Annotated[str, typer.Option(metavar="PATH|noise", help="Images, as in `evaluate`, or N(0, 1).")] = "noise"
    batch_size: Annotated[int, typer.Option(min=1, metavar="N")] = 16
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Take this many images.")] = 16


@dataclass(frozen=True)
class Look:
    """How they are looked at."""

    seed: Annotated[int, typer.Option(metavar="N", help="Of the noise, and of random weights.")] = 0
    statistics: Annotated[
        str,
        typer.Option(metavar="auto|batch|running", help="Of BatchNorm; auto: those of the batch for random weights."),
    ] = "auto"
    asleep: Annotated[
        bool, typer.Option("--asleep", help="With random weights: leave zeroed last gammas and gains at 0.")
    ] = False
    bare: Annotated[bool, typer.Option("--bare", help="Show the networks without their norms as well.")] = False


def run(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", show_default=False, help="As in `inspect`.")],
    *,
    drawn: Drawn,
    images: Seen,
    look: Look,
    opening: Opening,
    json: Json = False,
) -> int:
    """Plot mean and variance of the signal, block by block.

    Squared mean and variance after every residual sum, and the variance of the branch; several networks in one figure.
    For NF networks the analytic variance is drawn with them. With --weights random, branches that timm starts from
    zero are switched on, as in the paper's plots (Brock et al. 2021).
    """
    if look.statistics not in _STATISTICS:
        raise OptionError(f"--statistics {look.statistics!r} is none of {', '.join(_STATISTICS)}")
    if drawn.output is not None:
        picture_formats.check(drawn.output)
    for file in filter(None, (drawn.output, drawn.csv)):
        atomic_write.check_writable(file, force=drawn.force)
    show(_measure(models, opening, images, look, drawn), json, partial(_print, models))
    return 0


def _measure(names: Sequence[str], opening: Opening, images: Seen, look: Look, drawn: Drawn) -> Body:
    import torch

    from normswap.analysis import plots
    from normswap.analysis.signal_propagation import Point, awake, expected_nf, signal, unnormalized
    from normswap.models import devices, network_input
    from normswap.surgery.network import Network

    network_input.require_seed(look.seed)
    curves: dict[str, list[Point]] = {}
    expected: dict[str, list[float]] = {}
    inputs: dict[str, str] = {}
    for source in names:
        torch.manual_seed(look.seed)
        model, fresh = devices.place(opening.open(source), images.device), opening.weights == "random"
        batches, what = _batches(model, images, look)
        model = awake(model) if fresh and not look.asleep else model
        batch = look.statistics == "batch" or (look.statistics == "auto" and fresh)
        name = label(last_part(source), curves)
        with progress.working(f"measuring {name}"):
            network = Network(model)
            seen = network.anatomy
            curves[name], inputs[name] = signal(network, batches, batch_statistics=batch), what
            if look.bare and seen.norms:
                bare = label(f"{name}, norms removed", curves)
                curves[bare], inputs[bare] = signal(Network(unnormalized(model), batches)), what
        if (known := expected_nf(seen)) is not None:
            expected[name] = known
    overlay = {f"{name}, expected": values for name, values in expected.items()}
    files = [plots.plot(curves, drawn.output, expected=overlay)] if drawn.output else []
    files += [plots.write_csv(curves, drawn.csv)] if drawn.csv else []
    return {**plots.to_json(curves, expected), "inputs": inputs, "files": files}


def _batches(model: nn.Module, images: Seen, look: Look) -> tuple[list[Tensor], str]:
    import torch

    from normswap.models import network_input

    if images.data != "noise":
        loaded = [x for x, _ in images.loader(model)]
        return loaded, f"{sum(len(x) for x in loaded)} images of {images.data}"
    size = network_input.size(model)
    x = torch.randn(images.samples, *size, generator=torch.Generator().manual_seed(look.seed))
    return [x], f"{images.samples} x N(0, 1) noise, {size[1]} x {size[2]}, seed {look.seed}"


def _print(models: Sequence[str], body: Body) -> None:
    """The signal at every residual block, one table per network."""
    for name, points in body["curves"].items():
        expected = body["expected"].get(name) or [None] * len(points)
        rows = [(p["block"], p["mean_sq"], p["variance"], value, p["branch_variance"], p["added_variance"])
                for p, value in zip(points, expected, strict=True)]  # fmt: skip
        table(f"{name}, on {body['inputs'][name]}", _COLUMNS, rows, right=_COLUMNS[1:])
    written(body["files"])
    next_step("advise", models[0])
