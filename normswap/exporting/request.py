"""The request to `export`: what it is to do, checked before any work."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap.calibration.synthetic_images import pink
from normswap.errors import OptionError, TraceError, spelled
from normswap.exporting import checks, formats, sidecar
from normswap.exporting.formats import Format
from normswap.exporting.settings import FileSettings, Quantization
from normswap.exporting.signature import NoAnswerError, Signature
from normswap.models import calling, network_input
from normswap.models.calling import Example, Inputs
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

Batches = Iterable[object] | Tensor
# Images at a time, at most, while a file is quantized.
_BATCH = 64


@dataclass(frozen=True)
class ExportRequest:
    """The request to `export`.

    Args:
        source: a copy on the CPU, in float32 and eval mode.
        size: (C, H, W) of the images, or of the first of the inputs.
        config: the preprocessing of images.
        inputs: calls with all inputs of a file that gives all outputs; none for images in and one
            answer out.
        imaged: these inputs are images, for which the network gives more than one answer.
        drawn: the values of these inputs are random.
    """

    source: nn.Module
    file: Path
    form: Format
    settings: FileSettings
    size: tuple[int, ...]
    config: sidecar.Body
    signature: Signature
    inputs: tuple[Example, ...] = ()
    imaged: bool = False
    drawn: bool = False

    @classmethod
    def of(
        cls,
        model: nn.Module | Conversion,
        file: Path,
        form: Format,
        inputs: Inputs,
        settings: FileSettings,
    ) -> ExportRequest:
        """The request, checked; raises OptionError as `export` does."""
        network = network_input.require_module(model)
        network_input.check_values(network)
        source = copy.deepcopy(network).cpu().float().eval()
        config = sidecar.config(source)
        drawn = inputs is None
        if inputs is None:
            inputs = network_input.drawn_calls(source)
            if inputs is None and settings.input_size is None and len(config["input_size"]) != 3:
                inputs = network_input.DrawnCalls(
                    [network_input.noise(source, config["input_size"], batch=2)]
                )
        if inputs is not None:
            _require_plain(settings)
            calls = tuple(call.like(source) for call in calling.batches(inputs))
            whole = _everything(source, calls[0], settings.dynamic_batch)
            return cls(
                source, file, form, settings, calls[0].size, config, whole, calls, drawn=drawn
            )
        size = tuple(settings.input_size or config["input_size"])
        if len(size) != 3 or any(not isinstance(side, int) or side < 1 for side in size):
            raise OptionError(
                f"input size {','.join(map(str, size))}",
                "it is C,H,W: three positive whole numbers",
            )
        encoder = getattr(source, "num_classes", None) == 0
        if settings.softmax and encoder:
            raise OptionError("the network has no classifier", "a softmax needs classes")
        output = "features" if encoder else "logits"
        if settings.softmax:
            output = "probabilities"
        return cls(source, file, form, settings, size, config, Signature.of_images(source, output))

    @property
    def traced_on(self) -> tuple[Tensor, ...]:
        """The inputs for tracing: two samples for a free dimension, as torch.export takes 1 for a
        constant.
        """
        count = 1 + self.settings.dynamic_batch
        if not self.inputs:
            return (torch.zeros(count, *self.size),)
        return tuple(self.inputs[0].first(count).tensors())

    @property
    def example(self) -> Example:
        """A call to look at the network with."""
        if self.inputs:
            return self.inputs[0]
        return self.signature.form.of(self.pictures(count=4))

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """mean and std (C, 1, 1) of the images that the source takes."""
        mean, std = (
            torch.tensor(list(self.config[key]), dtype=torch.float64)
            .expand(self.size[0])
            .reshape(-1, 1, 1)
            .float()
            for key in ("mean", "std")
        )
        return mean, std

    def pictures(self, count: int = 16) -> Tensor:
        """Smooth noise in 0..1, normalized (count, C, H, W), as the source takes images."""
        mean, std = self.normalization
        return (torch.sigmoid(2 * pink(count, self.size, 0)) - mean) / std

    def answered(self) -> tuple[ExportRequest, dict[str, Tensor]]:
        """This request, or one for all outputs where none is the answer; and the network's outputs
        by name.

        Raises OptionError: the network does not run, or an option needs one answer.
        """
        settings = self.settings
        try:
            return self, self.signature.answers(self.source, self.traced_on)
        except NoAnswerError:
            special = settings.dtype == "int8" or settings.normalize or settings.softmax
            if self.inputs or special:
                raise
        whole = _everything(self.source, self.example, settings.dynamic_batch)
        request = replace(self, signature=whole, inputs=(self.example,), imaged=True)
        return request, whole.answers(self.source, request.traced_on)

    def raw(self, images: Tensor) -> Tensor:
        """From images as the source takes them to images as the file does."""
        if not self.settings.normalize:
            return images
        mean, std = self.normalization
        return images * std + mean

    def quantization(
        self, calibrate: Batches | None, images: Batches | None
    ) -> Quantization | None:
        """The quantizer's input, for int8: from batches `calibrate`; `images` must be others, to
        measure on.

        Raises OptionError: something is missing, or does not go together.
        """
        if self.settings.dtype != "int8":
            if calibrate is not None:
                raise OptionError(
                    f"{self.settings.dtype} is not calibrated",
                    remedy="Choose int8, or leave it out",
                )
            return None
        if calibrate is None or images is None:
            what = "images to calibrate on" if calibrate is None else "other images to measure on"
            raise OptionError(
                f"int8 needs {what}", remedy=f"Give {spelled('calibrate', metavar='DATA')}"
            )
        form = self.signature.form
        if form.kwargs or form.listed:
            raise OptionError(
                "int8 is for networks that take images as one tensor, by position",
                "this one does not",
            )
        batches = [x for x, _ in labelled(calibrate)]
        if not batches:
            raise OptionError("no images to calibrate on")
        for x in batches:
            if tuple(x.shape[1:]) != self.size:
                taken, shown = (",".join(map(str, size)) for size in (self.size, x.shape[1:]))
                remedy = "Resize them, or give input_size"
                raise OptionError(
                    f"images to calibrate on are {shown}", f"the file takes {taken}", remedy
                )
        every = self.raw(torch.cat(batches))
        # The tools want batches of one size.
        even = next(size for size in range(min(_BATCH, len(every)), 0, -1) if not len(every) % size)
        bits = self.settings.weight_bits or self.form.weight_bits[0]
        return Quantization(every.split(even if self.settings.dynamic_batch else 1), bits)

    def reference(self, rounded: formats.Runs | None = None) -> checks.Reference:
        """The answers that the file must compute; `rounded`: the network in the file's precision."""
        anatomy = None
        with suppress(TraceError):
            anatomy = self.network.anatomy
        return checks.Reference(
            self.source, self.signature, self.settings.softmax, self.raw, rounded, anatomy
        )

    @cached_property
    def network(self) -> Network:
        """The record of the source."""
        return Network(self.source, list(self.inputs) or None, self.size)

    def on_noise(self, images: Batches | None) -> bool:
        """Whether the file is checked on noise alone, not on images or inputs of the user's."""
        return images is None and (not self.inputs or self.imaged or self.drawn)

    def batches(self, images: Batches | None = None) -> tuple[Iterable[checks.Batch], str]:
        """The inputs to check the file on (images, the inputs, or smooth noise), and their name in
        reports.
        """
        described = "given images"
        if self.on_noise(images):
            described = "random inputs, seed 0" if self.drawn else "smooth noise, seed 0"
        elif self.inputs:
            described = "given inputs"
        if self.inputs:
            calls: Batches = self.inputs
            if images is not None:
                calls = (x for x, _ in labelled(images)) if self.imaged else images
            return self._calls(calls), described
        pairs = labelled(self.pictures() if images is None else images)
        return checks.split(pairs, singly=not self.settings.dynamic_batch), described

    def _calls(self, batches: Iterable[object]) -> Iterator[checks.Batch]:
        """The file's inputs, call by call; one sample each where their number is not free."""
        for batch in batches:
            example = self.signature.form.read(batch)[0].like(self.source)
            for call in [example] if self.settings.dynamic_batch else example.parted(1):
                yield tuple(call.tensors()), None


def labelled(images: Batches) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Batches of images, with their labels where they have some."""
    for batch in [images] if isinstance(images, Tensor) else images:
        x, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
        yield x.float(), labels


def _everything(source: nn.Module, example: Example, dynamic_batch: bool) -> Signature:
    whole = Signature.of(source, example.first(1 + dynamic_batch))
    if dynamic_batch and (example.first(2).count != 2 or example.listed):
        raise OptionError(
            "the number of samples cannot be free",
            "the first of the inputs has no two to be parted",
        )
    return whole


def _require_plain(settings: FileSettings) -> None:
    """Raise OptionError for options of files that take images and give one answer."""
    asked = [name for name in ("input_size", "normalize", "softmax") if getattr(settings, name)]
    if settings.dtype == "int8":
        asked = ["int8"]
    if asked:
        raise OptionError(
            f"{asked[0]} is for images in and one answer out", "inputs= says what goes in, as it is"
        )
