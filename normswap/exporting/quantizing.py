"""int8: let the runtime's own quantizer round the folded network, and measure on images that did not calibrate it.

Where all weights of a layer share a step, the network is equalized first, if rounding then costs it less, in PyTorch,
on calibration images. Weights with a step for each output channel need no levelling.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.errors import OptionError, spelled
from normswap.exporting.checks import Figures
from normswap.exporting.equalization import Equalizer
from normswap.exporting.exported_module import Shipped
from normswap.exporting.request import Batches, ExportRequest, labelled
from normswap.exporting.settings import LEVELS, Int8Settings, Quantization
from normswap.graph.node_reader import LINEAR
from normswap.models.network_input import answer

# Of the error as folded: what is estimated as nearer than that may be no gain in the file.
_WORTH = 0.9
# Images at a time, and those on which the equalization is judged.
_BATCH = 64
# Of the activations, whose bytes are unsigned.
_STEPS = 255


@dataclass(frozen=True)
class Quantized:
    """How a file was quantized.

    Args:
        calibrated_on: images.
        gauge: `weights` where it was equalized, else `as folded`.
        per_channel, weight_bits: of the weights.
    """

    calibrated_on: int
    gauge: str
    per_channel: bool
    weight_bits: int


@dataclass(frozen=True)
class Calibration:
    """The images and settings of a conversion to int8.

    Args:
        images: (N, C, H, W), as the source takes them; fed: as the file does.
    """

    images: Tensor
    fed: Tensor
    settings: Int8Settings

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
        return cls(every, request.raw(every), settings)

    def quantization(self, *, dynamic: bool) -> Quantization:
        """What the runtime's quantizer is given: batches of one size, as the tools want them, or of one image."""
        count = len(self.images)
        even = next(size for size in range(min(_BATCH, count), 0, -1) if not count % size)
        return Quantization(self.fed.split(even if dynamic else 1), self.settings)


def equalized(shipped: Shipped, calibration: Calibration) -> tuple[Shipped, Quantized]:
    """The network, equalized where rounding costs it less then; it computes what it did."""
    settings, gauge = calibration.settings, "as folded"
    if not settings.per_channel:
        batches = shipped.prepared(calibration.fed).split(_BATCH)
        network = Equalizer(shipped.network, batches).equalized()
        error, error_as_folded = (
            rounding_error(each, batches[0], settings.levels) for each in (network, shipped.network)
        )  # fmt: skip
        if error < _WORTH * error_as_folded:
            shipped, gauge = shipped.around(network), "weights"
    return shipped, Quantized(len(calibration.images), gauge, settings.per_channel, settings.weight_bits)


@torch.no_grad()
def rounding_error(network: nn.Module, x: Tensor, levels: int) -> float:
    """Relative L2 error of the answers to x (N, C, H, W) with all layers rounded, weights and what they read.

    Args:
        levels: steps of a layer's weights on either side of 0.
    """
    twin = copy.deepcopy(network)
    for module in twin.modules():
        if isinstance(module, LINEAR):
            step = (module.weight.abs().max() / levels).clamp_min(torch.finfo(x.dtype).tiny)
            module.weight.copy_((module.weight / step).round() * step)
            module.register_forward_pre_hook(_round_input)
    expected = answer(network(x))
    return float((answer(twin(x)) - expected).norm() / expected.norm())


def _round_input(_module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """To 255 steps between the least value (or 0) and the largest."""
    x = args[0]
    low, high = x.amin().clamp(max=0), x.amax().clamp(min=0)
    step = ((high - low) / _STEPS).clamp_min(torch.finfo(x.dtype).tiny)
    return (((x - low) / step).round() * step + low, *args[1:])


def points_lost(figures: Figures) -> float | None:
    """Points of top-1 that the file loses, or of agreement where there are no labels; None where there is neither."""
    if figures.top1 is not None and figures.source_top1 is not None:
        return figures.source_top1 - figures.top1
    return None if figures.agreement is None else 100 * (1 - figures.agreement)
