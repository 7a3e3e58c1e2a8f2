"""int8: the equalization, the runtime's own quantizer, and what came of it, measured where nothing was set by it.

The equalization is the one in which rounding costs the network least, in PyTorch, on calibration images.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from normswap.errors import OptionError, VerificationError, spelled
from normswap.exporting import bias_correction, formats, sensitivity, weight_rounding
from normswap.exporting.checks import Figures
from normswap.exporting.equalization import AS_FOLDED, Equalizer, equalizations
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.exporting.formats import Quantizer
from normswap.exporting.request import Batches, ExportRequest, labelled
from normswap.exporting.settings import LEVELS, Int8Settings, Quantization
from normswap.exporting.weight_grid import WeightGrid

_WORTH = 0.9  # of the error as folded: what is estimated as nearer than that may be none in the file
_BATCH = 64  # images at a time, and those on which layers are rounded
Log = Callable[[str], None]


@dataclass(frozen=True)
class Quantized:
    """How a file was quantized.

    Args:
        calibrated_on: images.
        gauge: the equalization that was chosen; per_channel, weight_bits: of the weights.
        fp32: paths of the layers that stayed in fp32, and what each would have cost alone (relative L2).
    """

    calibrated_on: int
    gauge: str
    per_channel: bool
    weight_bits: int
    fp32: dict[str, float]


@dataclass(frozen=True)
class Calibration:
    """The images and settings of a conversion to int8.

    Args:
        images: (N, C, H, W), as the source takes them; fed: as the file does.
        tool: what quantizes.
    """

    images: Tensor
    fed: Tensor
    settings: Int8Settings
    tool: Quantizer

    @classmethod
    def of(
        cls, request: ExportRequest, calibrate: Batches | None, images: Batches | None, settings: Int8Settings | None
    ) -> Calibration | None:
        """None where something else than int8 is wanted.

        Args:
            calibrate: batches of images as the source takes them; images: others, to measure on.

        Raises:
            OptionError: something is missing, or does not go together.
        """
        if request.settings.dtype != "int8":
            if calibrate is not None or settings is not None:
                what = f"{request.settings.dtype} is not calibrated"
                raise OptionError(what, remedy="Choose int8, or leave its options out")
            return None
        settings = settings or Int8Settings()
        if calibrate is None or images is None:
            what = "images to calibrate on" if calibrate is None else "other images to measure on"
            raise OptionError(f"int8 needs {what}", remedy=f"Give {spelled('calibrate', metavar='DATA')}")
        if settings.weight_bits not in LEVELS:
            known = " and ".join(map(str, LEVELS))
            raise OptionError(f"weights of {settings.weight_bits} bits", f"there are {known}")
        form = request.signature.form
        if form.kwargs or form.listed:
            raise OptionError("int8 is for networks that take images as one tensor, by position", "this one does not")
        batches = [x for x, _ in labelled(calibrate)]
        if not batches:
            raise OptionError("no images to calibrate on")
        other = next((x for x in batches if tuple(x.shape[1:]) != request.size), None)
        if other is not None:
            taken, shown = (",".join(map(str, size)) for size in (request.size, other.shape[1:]))
            what, remedy = f"images to calibrate on are {shown}", "Resize them, or give input_size"
            raise OptionError(what, f"the file takes {taken}", remedy)
        every = torch.cat(batches)
        return cls(every, request.raw(every), settings, formats.quantizer(request.form.NAME))

    @property
    def grid(self) -> WeightGrid:
        """The grid that the tool rounds weights to."""
        levels = functools.partial(self.tool.levels, bits=self.settings.weight_bits)
        return WeightGrid(levels, self.settings.per_channel)


@dataclass(frozen=True)
class Equalized:
    """A network that computes what it did, equalized so that int8 costs little.

    Args:
        batches: what its inner network reads.
        layers: paths of those that will be rounded; fp32: of those that will not, and what each would cost alone.
    """

    network: Shipped
    gauge: str
    batches: tuple[Tensor, ...]
    layers: tuple[str, ...]
    fp32: dict[str, float]

    @classmethod
    def of(cls, shipped: Shipped, calibration: Calibration) -> Equalized:
        """The network under the equalization with which rounding all that is to be rounded costs least."""
        settings, grid = calibration.settings, calibration.grid
        batches = shipped.prepared(calibration.fed).split(_BATCH)
        x = batches[0]
        equalizer = Equalizer(shipped.network, batches, per_channel=settings.per_channel)
        kinds = calibration.tool.LAYERS
        able = [path for path, module in equalizer.network.named_modules() if isinstance(module, kinds)]
        if settings.sensitive >= len(able):
            what = f"{spelled('sensitive', settings.sensitive)} leaves nothing in int8"
            raise OptionError(what, f"the network has {len(able)} layers to quantize", "Give a smaller number")
        costs = sensitivity.costs(equalizer.network, x, able, grid) if settings.sensitive else {}
        fp32 = dict([*costs.items()][: settings.sensitive])
        layers = tuple(path for path in able if path not in fp32)
        made = {
            equalization: equalizer.equalized(equalization)
            for equalization in equalizations(per_channel=settings.per_channel)
        }
        errors = {equalization: sensitivity.error(network, x, layers, grid) for equalization, network in made.items()}
        best = min(errors, key=lambda equalization: errors[equalization])
        equalization = best if errors[best] < _WORTH * errors[AS_FOLDED] else AS_FOLDED
        equalizer.settle_(made[equalization])
        return cls(shipped.around(made[equalization]), equalization.name, batches, layers, fp32)


def write(contents: FileContents, file: Path, equalized: Equalized, calibration: Calibration, log: Log) -> Quantized:
    """Write the file in int8.

    Args:
        contents: of the file in fp32.
    """
    settings, count = calibration.settings, len(calibration.images)
    log("rounding")
    contents = replace(contents, network=_rounded(equalized, calibration.grid))
    images = calibration.fed.split(_even(count) if contents.dynamic else 1)
    log("quantizing")
    calibration.tool.write_int8(contents, file, Quantization(images, settings, tuple(equalized.fp32)))
    return Quantized(count, equalized.gauge, settings.per_channel, settings.weight_bits, equalized.fp32)


def _rounded(equalized: Equalized, grid: WeightGrid) -> Shipped:
    """The network with weights that the file's tool will round to those that were chosen, and biases that fit these."""
    network = copy.deepcopy(equalized.network.network)
    rounded = weight_rounding.weights(network, equalized.batches, equalized.layers, grid)
    bias_correction.correct(network, equalized.batches, {path: one.held for path, one in rounded.items()})
    for path, one in rounded.items():
        network.get_parameter(f"{path}.weight").data.copy_(one.given)
    return equalized.network.around(network)


def check_drop(figures: Figures, most: float | None) -> float | None:
    """How many points the file loses: of top-1, or of agreement where there are no labels; None where there is neither.

    Raises:
        VerificationError: more than `most`, or nobody knows.
    """
    if figures.top1 is not None and figures.source_top1 is not None:
        what, lost = f"top-1 on {figures.count} images", figures.source_top1 - figures.top1
    elif figures.agreement is not None:
        what, lost = f"agreement on {figures.answers} {figures.unit}", 100 * (1 - figures.agreement)
    elif most is None:
        return None
    else:
        raise VerificationError(
            "what int8 loses cannot be counted in points", "the network gives no scores of classes",
            f"Nothing was written; without {spelled('max_drop')} the relative L2 stands beside the file",
        )  # fmt: skip
    if most is not None and not lost <= most:
        raise VerificationError(
            f"int8 loses {lost:.2f} points of {what}, allowed {most:g}",
            remedy=f"Nothing was written; try {spelled('sensitive', 4)}, more images, or others",
        )
    return lost


def _even(count: int) -> int:
    """The largest batch by which `count` images come out even, as the runtimes' tools want them."""
    return next(size for size in range(min(_BATCH, count), 0, -1) if not count % size)
