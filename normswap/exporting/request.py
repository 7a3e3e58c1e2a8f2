"""The request to `export`: the arguments of the call, checked before any work."""

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
        config: timm's preprocessing record of the images: mean, std, input_size and others.
        signature: The names of the inputs and outputs, and the call of the network.
        inputs: Calls of the network, for a file with all of its inputs and outputs. It is empty for
            a file that takes images and gives one answer.
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
        """Return the request that `export`'s arguments make.

        Args:
            model: The network, or the result of a conversion.
            file: The path to write.
            form: The format of the file.
            inputs: The inputs of the network. With None, images go in and one answer comes out,
                unless the network's record says that it takes other inputs.
            settings: The options of the file.

        Raises:
            OptionError: An option does not fit the network or the format (`export`).
        """
        network = network_input.require_module(model)
        network_input.check_values(network)
        source = copying.duplicate(network, {}).cpu().float().eval()
        config = sidecar.config(source)

        # A network whose record names its inputs, or states a size that is no image's (C, H, W),
        # gets random inputs. For any other network, `inputs` stays None.
        drawn = inputs is None
        if inputs is None:
            inputs = network_input.drawn_calls(source)
            if inputs is None and settings.input_size is None and len(config["input_size"]) != 3:
                inputs = network_input.DrawnCalls(
                    [network_input.noise(source, config["input_size"], batch=2)]
                )

        # With inputs, the file takes and gives all tensors of the network.
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

        # timm's networks without a classifier have 0 classes.
        has_no_classifier = getattr(source, "num_classes", None) == 0
        if settings.softmax and has_no_classifier:
            raise OptionError("the network has no classifier", "a softmax needs classes")
        output = "features" if has_no_classifier else "logits"
        if settings.softmax:
            output = "probabilities"
        return cls(source, file, form, settings, size, config, Signature.of_images(source, output))

    @property
    def traced_on(self) -> tuple[Tensor, ...]:
        """The inputs for tracing: one sample, or two if the number of samples is free.

        torch.export would take the number 1 for a constant.
        """
        count = 2 if self.settings.dynamic_batch else 1
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
        # The sigmoid brings the noise, of unit variance, into the range of pixels, 0..1.
        return (torch.sigmoid(2 * pink(count, self.size, 0)) - mean) / std

    def answered(self) -> tuple[ExportRequest, dict[str, Tensor]]:
        """Run the network, and return a request for the outputs that it has, with their values.

        Returns:
            This request, or a request for all outputs if none of them is the answer. The values are
            the network's outputs on `traced_on`, by name.

        Raises:
            OptionError: The network does not run, or an option needs one answer.
        """
        settings = self.settings
        try:
            return self, self.signature.answers(self.source, self.traced_on)
        except NoAnswerError:
            needs_answer = settings.dtype == "int8" or settings.normalize or settings.softmax
            if self.inputs or needs_answer:
                raise

        whole = _everything(self.source, self.example, settings.dynamic_batch)
        request = replace(self, signature=whole, inputs=(self.example,), imaged=True)

        return request, whole.answers(self.source, request.traced_on)

    def raw(self, images: Tensor) -> Tensor:
        """Return images as the file takes them, from images as the source takes them.

        A file that normalizes images itself takes pixels in 0..1, so the normalization is undone.
        """
        if not self.settings.normalize:
            return images
        mean, std = self.normalization
        return images * std + mean

    def quantization(
        self, calibrate: Batches | None, images: Batches | None
    ) -> Quantization | None:
        """Return the input of the quantizer, or None for a file that is not in int8.

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

        call = self.signature.form
        takes_one_tensor = not (call.kwargs or call.listed)
        if not takes_one_tensor:
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

        # The tools run the file, so images are given as the file takes them, and in batches of one
        # size.
        file_images = self.raw(torch.cat(batches))
        divisor = _largest_divisor(len(file_images), at_most=_BATCH)
        batch_size = divisor if self.settings.dynamic_batch else 1
        bits = self.settings.weight_bits or self.form.weight_bits[0]
        return Quantization(file_images.split(batch_size), bits)

    def reference(self, rounded: formats.Runs | None = None) -> checks.Reference:
        """Return the record by which the file is checked: the network, and what the file adds.

        Args:
            rounded: The network with its numbers rounded to the file's precision. None if the
                precision is float32.
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

        The inputs are batches, each with labels or None.

        Args:
            images: Batches of the user. Without them, the file is checked on the request's inputs,
                or on smooth noise.
        """
        described = "given images"
        if self.on_noise(images):
            described = "random inputs, seed 0" if self.drawn else "smooth noise, seed 0"
        elif self.inputs:
            described = "given inputs"

        # A file with all inputs of the network is checked without labels, which are taken off if
        # the inputs are images.
        if self.inputs:
            calls: Batches = self.inputs
            if images is not None:
                calls = (x for x, _ in labelled(images)) if self.imaged else images
            return self._calls(calls), described

        pairs = labelled(self.pictures() if images is None else images)
        return checks.split(pairs, singly=not self.settings.dynamic_batch), described

    def _calls(self, batches: Iterable[object]) -> Iterator[checks.Batch]:
        """Yield the file's input tensors for each call, with None in place of labels.

        If the file takes one sample at a time, each batch is parted into calls of one sample.

        Args:
            batches: Inputs of the network, as the user gives them.
        """
        for batch in batches:
            example = self.signature.form.read(batch)[0].like(self.source)
            for call in [example] if self.settings.dynamic_batch else example.parted(1):
                yield tuple(call.tensors()), None


def _largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of a number that is not above `at_most`."""
    return next(size for size in range(min(at_most, number), 0, -1) if not number % size)


def labelled(images: Batches) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield batches of images in float32, each with its labels, or None if it has none."""
    for batch in [images] if isinstance(images, Tensor) else images:
        x, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
        yield x.float(), labels


def _everything(source: nn.Module, example: Example, dynamic_batch: bool) -> Signature:
    """Return the signature of a file that takes and gives all tensors of the network.

    Args:
        source: The network.
        example: A call of the network.
        dynamic_batch: Whether the file takes any number of samples at a time.

    Raises:
        OptionError: The network does not run, or the number of samples cannot be free.
    """
    # A free number is traced with two samples (`ExportRequest.traced_on`).
    whole = Signature.of(source, example.first(2 if dynamic_batch else 1))
    has_two_samples = example.first(2).count == 2 and not example.listed
    if dynamic_batch and not has_two_samples:
        raise OptionError(
            "the number of samples cannot be free",
            "the first of the inputs has no two to be parted",
        )
    return whole


def _require_plain(settings: FileSettings) -> None:
    """Refuse options that only a file with images in and one answer out can have.

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
