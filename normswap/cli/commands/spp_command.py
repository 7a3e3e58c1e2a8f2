"""`normswap spp`: how the signal propagates, block by block."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from normswap.analysis import plots
from normswap.cli.options import Force, Images, Json, Opening, last_part, output_option
from normswap.cli.progress import working
from normswap.cli.tables import show, table
from normswap.cli.terminal import say
from normswap.plan import Body
from normswap.storage import atomic_write

if TYPE_CHECKING:
    from torch import nn

    from normswap.models.calling import Example

KEYS = "curves (by network, a point per block), inputs (what each network was run on), files"
EXAMPLES = (
    "spp resnet50 nf_resnet50 --weights random",
    "spp resnet50 --weights random --bare",
    "spp demo demo-skipinit --data demo -o signal.png",
)
_COLUMNS = ("block", "squared mean", "variance", "branch variance", "added variance")
_QUANTITIES = ("block", "mean_sq", "variance", "branch_variance", "added_variance")


@dataclass(frozen=True)
class ImagesOrNoise(Images):
    """The options of the images, or the noise, that the networks are run on."""

    data: Annotated[
        str, Option(metavar="PATH|noise", help="Images, as in `evaluate`, or N(0, 1).")
    ] = "noise"
    batch_size: Annotated[int, Option(min=1, metavar="N")] = 16
    samples: Annotated[int, Option(min=1, metavar="N", help="Take this many images.")] = 16

    def calls(self, model: nn.Module, seed: int) -> tuple[list[Example], str]:
        """Return batches of inputs to run the network on, and a description of them in words.

        Each batch holds the arguments with which the network is called.

        Args:
            model: The network.
            seed: The seed of the noise.
        """
        from normswap.models import calling, network_input

        if self.data != "noise":
            form = calling.form(model)
            calls = [form.read(batch)[0] for batch in self.loader(model)]
            return calls, f"{sum(call.count for call in calls)} images of {self.data}"

        # Noise in the form of images would not fit a network whose record states other inputs.
        drawn = network_input.drawn_calls(model, self.samples, seed)
        if drawn is not None:
            return drawn, f"{self.samples} samples of random inputs, seed {seed}"

        size = network_input.size(model)
        noise = network_input.noise(model, size, self.samples, seed)
        sides = " x ".join(map(str, size[1:]))
        return [noise], f"{self.samples} x N(0, 1) noise, {sides}, seed {seed}"


def run(
    models: Annotated[
        list[str], Argument(metavar="MODEL...", show_default=False, help="As in `inspect`.")
    ],
    *,
    output: Annotated[Path | None, output_option("FILE", "Picture: .png, .svg ...")] = None,
    force: Force = False,
    images: ImagesOrNoise,
    seed: Annotated[int, Option(metavar="N", help="Of the noise, and of random weights.")] = 0,
    bare: Annotated[bool, Option("--bare", help="Every norm becomes the identity first.")] = False,
    opening: Opening,
    json: Json = False,
) -> int:
    """Plot mean and variance of the signal, block by block.

    Squared mean and variance after every residual sum, and the variance of the branch; several
    networks in one figure. With --weights random, branches that timm starts from zero are switched
    on, and BatchNorms take the statistics of the batch, as in the paper's plots (Brock et al.
    2021).
    """
    # The name of the picture is checked before anything is measured.
    if output is not None:
        plots.format_of(output)
        atomic_write.check_writable(output, force=force)
    import torch

    from normswap.analysis.block_signals import (
        Point,
        awake,
        bare as without_norms,
        signal_propagation,
    )
    from normswap.models import network_input
    from normswap.surgery.network import Network

    network_input.require_seed(seed)
    curves: dict[str, list[Point]] = {}
    inputs: dict[str, str] = {}
    # In a network with random weights, residual branches may start from zero (`awake` switches them
    # on), and running statistics are not measured yet, so those of the batch are taken.
    is_random = opening.weights == "random"
    for source in models:
        torch.manual_seed(seed)
        model = opening.open(source, device=images.device)
        name = last_part(source)
        # Two MODELs may end with the same name.
        if name in curves:
            name = f"{name} ({len(curves) + 1})"
        calls, inputs[name] = images.calls(model, seed)
        with working(f"measuring {name}"):
            if bare:
                model = without_norms(model)
            network = Network(awake(model) if is_random else model)
            curves[name] = signal_propagation(network, calls, batch_statistics=is_random)

    body: Body = {"curves": {}, "inputs": inputs, "files": []}
    for name, points in curves.items():
        body["curves"][name] = [asdict(point) for point in points]
    if output is not None:
        shown_inputs = "; ".join(dict.fromkeys(inputs.values()))
        body["files"].append(plots.plot(curves, output, shown_inputs))
    show(body, json, _print, "advise", *opening.words(models[0]))
    return 0


def _print(body: Body) -> None:
    """Print a table of the signal's mean and variance for each network."""
    for name, points in body["curves"].items():
        rows = []
        for point in points:
            rows.append([point[quantity] for quantity in _QUANTITIES])
        table(f"{name}, on {body['inputs'][name]}", _COLUMNS, rows, right=_COLUMNS[1:])
    for file in body["files"]:
        say(f"written to {file}")
