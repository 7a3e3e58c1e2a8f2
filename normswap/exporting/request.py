"""The request to `export`: what it is to do, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap import copying
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
    """A request to `export`, checked before any work.

    Args:
        source: A copy of the network on the CPU, in float32 and eval mode.
        file: The path to write.
        form: The format of the file.
        settings: The options of the file.
        size: The size (C, H, W) of an image, or of the first of the inputs.
        config: The preprocessing of images.
        signature: The names of the inputs and outputs.
        inputs: Calls with all inputs, of a file that gives all outputs. It is empty where images go
            in and one answer comes out.
        imaged: Whether these inputs are images, for which the network gives several answers.
        drawn: Whether the values of these inputs are random.
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
        """Return the request of `export`'s arguments.

        Raises:
            OptionError: An option does not fit the network or the format (`export`).
        """
        network = network_input.require_module(model)
        network_input.check_values(network)
        source = copying.duplicate(network, {}).cpu().float().eval()
        config = sidecar.config(source)

        drawn = inputs is None
        if inputs is None:
            inputs = network_input.drawn_calls(source)
            if inputs is None and settings.input_size is None and len(config["input_size"]) != 3:
                inputs = network_input.DrawnCalls(
                    [network_input.noise(source, config["input_size"], batch=2)]
                )

        # With inputs, all tensors of the network are the file's.
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
        """The inputs for tracing.

        If the number of samples is free, the inputs are two samples, because torch.export takes 1
        for a constant.
        """
        count = 1 + self.settings.dynamic_batch
        if not self.inputs:
            return (torch.zeros(count, *self.size),)
        return tuple(self.inputs[0].first(count).tensors())

    @property
    def example(self) -> Example:
        """The call of the network from which its outputs are known."""
        if self.inputs:
            return self.inputs[0]
        return self.signature.form.of(self.pictures(count=4))

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """The mean and standard deviation, (C, 1, 1) each, of images that the source takes."""
        mean, std = (
            torch.tensor(list(self.config[key]), dtype=torch.float64)
            .expand(self.size[0])
            .reshape(-1, 1, 1)
            .float()
            for key in ("mean", "std")
        )
        return mean, std

    def pictures(self, count: int = 16) -> Tensor:
        """Return smooth noise (count, C, H, W), normalized as the source takes images."""
        mean, std = self.normalization
        return (torch.sigmoid(2 * pink(count, self.size, 0)) - mean) / std

    def answered(self) -> tuple[ExportRequest, dict[str, Tensor]]:
        """Return a request whose outputs the network gives, and these outputs by name.

        The request is this one, or a request for all outputs if none of them is the answer.

        Raises:
            OptionError: The network does not run, or an option needs one answer.
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
        """Return images as the file takes them, from images as the source takes them."""
        if not self.settings.normalize:
            return images
        mean, std = self.normalization
        return images * std + mean

    def quantization(
        self, calibrate: Batches | None, images: Batches | None
    ) -> Quantization | None:
        """Return the quantizer's input for a file in int8, None for another precision.

        Args:
            calibrate: Batches that set the ranges.
            images: Other batches, which the cost of int8 is measured on.

        Raises:
            OptionError: Batches are missing, or do not go together with the network or the file.
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
        # The tools want batches of one size: the largest that divides the number of images.
        even = next(size for size in range(min(_BATCH, len(every)), 0, -1) if not len(every) % size)
        bits = self.settings.weight_bits or self.form.weight_bits[0]
        return Quantization(every.split(even if self.settings.dynamic_batch else 1), bits)

    def reference(self, rounded: formats.Runs | None = None) -> checks.Reference:
        """Return the answers that the file must compute.

        Args:
            rounded: The network with its numbers rounded to the file's precision, if that is lower.
        """
        anatomy = None
        with suppress(TraceError):
            anatomy = self.network.anatomy
        return checks.Reference(
            self.source, self.signature, self.settings.softmax, self.raw, rounded, anatomy
        )

    @cached_property
    def network(self) -> Network:
        """The source with its inputs, as conversions take it."""
        return Network(self.source, list(self.inputs) or None, self.size)

    def on_noise(self, images: Batches | None) -> bool:
        """Whether the file is checked on noise alone, and not on images or inputs of the user."""
        return images is None and (not self.inputs or self.imaged or self.drawn)

    def batches(self, images: Batches | None = None) -> tuple[Iterable[checks.Batch], str]:
        """Return the inputs to check the file on, and their name in reports.

        Args:
            images: Batches of the user. Without them, the file is checked on the request's inputs,
                or on smooth noise.
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
        """Yield the file's inputs, call by call. A call is one sample if their number is fixed."""
        for batch in batches:
            example = self.signature.form.read(batch)[0].like(self.source)
            for call in [example] if self.settings.dynamic_batch else example.parted(1):
                yield tuple(call.tensors()), None


def labelled(images: Batches) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield batches of images, with their labels if they have some."""
    for batch in [images] if isinstance(images, Tensor) else images:
        x, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
        yield x.float(), labels


def _everything(source: nn.Module, example: Example, dynamic_batch: bool) -> Signature:
    """Return the signature of a file that takes and gives all tensors of the network."""
    whole = Signature.of(source, example.first(1 + dynamic_batch))
    if dynamic_batch and (example.first(2).count != 2 or example.listed):
        raise OptionError(
            "the number of samples cannot be free",
            "the first of the inputs has no two to be parted",
        )
    return whole


def _require_plain(settings: FileSettings) -> None:
    """Refuse options of files that take images and give one answer.

    Raises:
        OptionError: One of these options was given.
    """
    asked = [name for name in ("input_size", "normalize", "softmax") if getattr(settings, name)]
    if settings.dtype == "int8":
        asked = ["int8"]
    if asked:
        raise OptionError(
            f"{asked[0]} is for images in and one answer out", "inputs= says what goes in, as it is"
        )
