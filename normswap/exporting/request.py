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
# The number of samples of random inputs. A file is traced on two at most, and checked on one and on
# the others.
_DRAWN = 3


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
        imaged: Whether `inputs` are images. So they are if the network takes images but none of its
            outputs is the answer, and all outputs go into the file.
        drawn: Whether the values of `inputs` are random.
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
        """Check the arguments of a call of `export`, and return them as a request.

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
            inputs = network_input.drawn_calls(source, batch=_DRAWN)
            if inputs is None and settings.input_size is None and len(config["input_size"]) != 3:
                inputs = network_input.DrawnCalls(
                    [network_input.noise(source, config["input_size"], batch=_DRAWN)]
                )

        # With inputs, the file takes and gives all tensors of the network. The options for images
        # do not fit such a file.
        if inputs is not None:
            _refuse_image_options(settings)
            calls = tuple(call.like(source) for call in calling.batches(inputs))
            # `whole` is the signature of the file: it names all inputs and outputs of the network,
            # and says how the network is called with them.
            whole = _signature_of_all_tensors(source, calls[0], settings.dynamic_batch)
            return cls(
                source=source,
                file=file,
                form=form,
                settings=settings,
                size=calls[0].size,
                config=config,
                signature=whole,
                inputs=calls,
                drawn=drawn,
            )

        # Without inputs, the file takes images of this size and gives one answer.
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
        return cls(
            source=source,
            file=file,
            form=form,
            settings=settings,
            size=size,
            config=config,
            signature=Signature.of_images(source, output),
        )

    @property
    def traced_on(self) -> tuple[Tensor, ...]:
        """The input tensors on which the network is traced to write the file.

        They hold one sample. If the file is to take any number of samples, they hold two, because
        torch.export would take the number 1 for a constant.
        """
        count = 2 if self.settings.dynamic_batch else 1
        if not self.inputs:
            return (torch.zeros(count, *self.size),)
        return tuple(self.inputs[0].first(count).tensors())

    @property
    def example(self) -> Example:
        """A call of the network on its first inputs, or on four images of noise.

        It is made to see what the network returns.
        """
        if self.inputs:
            return self.inputs[0]
        return self.signature.form.of(self.pictures(count=4))

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """The mean and the standard deviation by which images are normalized for the network.

        Each is a tensor (C, 1, 1).
        """
        # A single number in the record stands for all channels, so it is expanded.
        mean, std = (
            torch.tensor(list(self.config[key]), dtype=torch.float64)
            .expand(self.size[0])
            .reshape(-1, 1, 1)
            .float()
            for key in ("mean", "std")
        )
        return mean, std

    def pictures(self, count: int = 16) -> Tensor:
        """Return images of smooth noise (count, C, H, W), normalized as the network's images are.

        Args:
            count: The number of images. The default is enough to check a file on.
        """
        mean, std = self.normalization
        # The sigmoid brings the noise, of unit variance, into the range of pixels, 0..1.
        return (torch.sigmoid(2 * pink(count, self.size, 0)) - mean) / std

    def answered(self) -> tuple[ExportRequest, dict[str, Tensor]]:
        """Run the network once, to see whether it gives one answer, such as the logits.

        Returns:
            A request and the network's outputs on its `traced_on`, by name. The request is this one
            if there is an answer. Otherwise it is a copy by which the file gives all outputs.

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

        # No output is the answer, so images go in and all outputs come out. `whole` is the file's
        # signature with all of them.
        whole = _signature_of_all_tensors(self.source, self.example, settings.dynamic_batch)
        request = replace(self, signature=whole, inputs=(self.example,), imaged=True)

        return request, whole.answers(self.source, request.traced_on)

    def raw(self, images: Tensor) -> Tensor:
        """Turn images that are normalized for the network into images for the file.

        A file that normalizes images itself takes pixels in 0..1, so the normalization is undone.
        For any other file, the images are returned as they are.

        Args:
            images: The normalized images, (N, C, H, W).
        """
        if not self.settings.normalize:
            return images
        mean, std = self.normalization
        return images * std + mean

    def quantization(
        self, calibrate: Batches | None, images: Batches | None
    ) -> Quantization | None:
        """Return the calibration images and the bits of a weight, for a file in int8.

        For any other file, the result is None.

        Args:
            calibrate: Batches of images, which set the ranges of activations.
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

        # The quantizers run the file, so they get images as the file takes them. All batches must
        # have one size, so the batch size divides the number of images.
        file_images = self.raw(torch.cat(batches))
        divisor = _largest_divisor(len(file_images), at_most=_BATCH)
        batch_size = divisor if self.settings.dynamic_batch else 1
        bits = self.settings.weight_bits or self.form.weight_bits[0]
        return Quantization(file_images.split(batch_size), bits)

    def reference(self, rounded: formats.Runs | None = None) -> checks.Reference:
        """Return what the file is compared with when it is checked.

        It is the network, with the normalization and the softmax that the file adds to it.

        Args:
            rounded: The network with its numbers rounded to the file's precision. None if the
                precision is float32.
        """
        # The check works without the network's recorded structure, too.
        anatomy = None
        with suppress(TraceError):
            anatomy = self.network.anatomy
        return checks.Reference(
            source=self.source,
            signature=self.signature,
            softmax=self.settings.softmax,
            raw=self.raw,
            rounded=rounded,
            anatomy=anatomy,
            dynamic_batch=self.settings.dynamic_batch,
        )

    @cached_property
    def network(self) -> Network:
        """The `Network` record that conversions such as folding take: the source and its inputs."""
        return Network(self.source, list(self.inputs) or None, self.size)

    def on_noise(self, images: Batches | None) -> bool:
        """Whether the file is checked on random inputs alone, and on none of the user's.

        Args:
            images: The user's images to check the file on, or None.
        """
        return images is None and (not self.inputs or self.imaged or self.drawn)

    def batches(self, images: Batches | None = None) -> tuple[Iterable[checks.Batch], str]:
        """Return the inputs to check the file on, and a few words that name them in reports.

        The inputs are pairs of a batch and its labels, or None in place of the labels.

        Args:
            images: Batches of the user. Without them, the file is checked on the request's inputs,
                or on smooth noise.
        """
        described = "given images"
        if self.on_noise(images):
            described = "random inputs, seed 0" if self.drawn else "smooth noise, seed 0"
        elif self.inputs:
            described = "given inputs"

        # A file with all inputs of the network is checked without labels. Batches of images may
        # come with labels, which are dropped.
        if self.inputs:
            calls: Batches = self.inputs
            if images is not None:
                calls = (x for x, _ in labelled(images)) if self.imaged else images
            return self._calls(calls), described

        pairs = labelled(self.pictures() if images is None else images)
        return checks.split(pairs, singly=not self.settings.dynamic_batch), described

    def _calls(self, batches: Iterable[object]) -> Iterator[checks.Batch]:
        """Yield the input tensors of the file for each call, paired with None in place of labels.

        If the file takes one sample at a time, each batch is split into calls of one sample. If it
        takes any number, the last sample of the first batch is a call by itself, so that the file
        is also tested at another batch size.

        Args:
            batches: Inputs of the network, as the user gives them.
        """
        for i, batch in enumerate(batches):
            example = self.signature.form.read(batch)[0].like(self.source)
            calls = [example]
            if not self.settings.dynamic_batch:
                calls = example.parted(1)
            elif i == 0:
                # The larger part comes first, as the first call is also run on changed values.
                is_last = torch.arange(example.count) == example.count - 1
                parts = (example.take(~is_last), example.take(is_last))
                # A batch that cannot be split stays whole.
                calls = [part for part in parts if part is not None] or [example]
            for call in calls:
                yield tuple(call.tensors()), None


def _largest_divisor(number: int, *, at_most: int) -> int:
    """Return the largest divisor of a number that is at most `at_most`."""
    return next(size for size in range(min(at_most, number), 0, -1) if not number % size)


def labelled(images: Batches) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield pairs of a batch of images in float32 and its labels, or None if it has no labels.

    Args:
        images: One batch as a tensor, or batches. Each may be a tensor, or a pair of images and
            labels.
    """
    for batch in [images] if isinstance(images, Tensor) else images:
        x, labels = batch if isinstance(batch, (tuple, list)) else (batch, None)
        yield x.float(), labels


def _signature_of_all_tensors(
    source: nn.Module, example: Example, dynamic_batch: bool
) -> Signature:
    """Return the signature of a file that takes and gives all tensors of the network.

    Args:
        source: The network.
        example: A call of the network.
        dynamic_batch: Whether the file takes any number of samples at a time.

    Raises:
        OptionError: The network does not run, or the number of samples cannot be free.
    """
    # For a file that takes any number of samples, the network is traced with two. A list of images
    # has no batch dimension, so two of them do not make a batch.
    whole = Signature.of(source, example.first(2 if dynamic_batch else 1))
    has_two_samples = example.first(2).count == 2 and not example.listed
    if dynamic_batch and not has_two_samples:
        raise OptionError(
            "the number of samples cannot be free",
            "the first of the inputs has no two to be parted",
        )
    return whole


def _refuse_image_options(settings: FileSettings) -> None:
    """Refuse options that only a file that takes images and gives one answer can have.

    Args:
        settings: The options of the file.

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
