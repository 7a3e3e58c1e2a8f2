"""What shall be exported, with all that is to be known of it before any work."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from normswap.errors import OptionError
from normswap.exporting import checks, formats, sidecar
from normswap.exporting.formats import Format
from normswap.exporting.signature import NoAnswerError, Signature
from normswap.models import calling
from normswap.models.calling import Example, Inputs
from normswap.surgery.carrying_out import Conversion


@dataclass(frozen=True)
class Order:
    """What `export` was asked for.

    Args:
        source: a copy on the CPU, in float32 and eval mode.
        size: (C, H, W) of the images, or of the first of the inputs.
        config: the preprocessing of images.
        inputs: calls that everything goes in and comes out of; none where images go in and one answer comes out.
        imaged: these inputs are images, of which the network gives more than an answer.
    """

    source: nn.Module
    file: Path
    form: Format
    dtype: str
    dynamic_batch: bool
    size: tuple[int, ...]
    normalize: bool
    softmax: bool
    config: sidecar.Body
    signature: Signature
    inputs: tuple[Example, ...] = ()
    imaged: bool = False

    @property
    def traced_on(self) -> tuple[Tensor, ...]:
        """What goes in while the file is made: torch.export takes a dimension of 1 for a constant."""
        count = 2 if self.dynamic_batch else 1
        return tuple(self.inputs[0].first(count).tensors()) if self.inputs else (torch.zeros(count, *self.size),)

    @property
    def normalization(self) -> tuple[Tensor, Tensor]:
        """mean and std (C, 1, 1) of the images that the source takes."""
        mean, std = (_per_channel(self.config[key], self.size[0]) for key in ("mean", "std"))
        return mean, std

    def pictures(self, count: int = 16) -> Tensor:
        """Smooth noise (count, C, H, W), as the source takes images."""
        channels, height, width = self.size
        return checks.pictures((channels, height, width), *self.normalization, count=count)

    def answered(self) -> tuple[Order, dict[str, Tensor]]:
        """The order, and what the network gives, by name; where that is no answer the order is for all of it.

        Raises:
            OptionError: the network does not run, or something asks for one answer.
        """
        try:
            return self, self.signature.answers(self.source, self.traced_on)
        except NoAnswerError:
            if self.inputs or not self.form.GRAPH or self.dtype == "int8" or self.normalize or self.softmax:
                raise
        images = self.signature.form.of(self.pictures(count=4))
        whole = _everything(self.source, images, self.dynamic_batch)
        order = replace(self, signature=whole, inputs=(images,), imaged=True)
        return order, whole.answers(self.source, order.traced_on)

    def raw(self, images: Tensor) -> Tensor:
        """From images as the source takes them to images as the file does."""
        if not self.normalize:
            return images
        mean, std = self.normalization
        return images * std + mean


def accepted(
    model: nn.Module | Conversion,
    file: Path,
    format: str | None,
    dtype: str,
    dynamic_batch: bool,
    input_size: Sequence[int] | None,
    normalize: bool,
    softmax: bool,
    inputs: Inputs,
) -> Order:
    """The order that `export` got, if it can be carried out.

    Raises:
        OptionError: as `export`.
    """
    form = formats.choose(file, format)
    if inputs is not None:
        _demand_plain(form, dtype, {"input_size": input_size, "normalize": normalize, "softmax": softmax})
    if not form.GRAPH and (normalize or softmax):
        option = "normalize" if normalize else "softmax"
        raise OptionError(f"{form.NAME} holds tensors, no operators", f"{option} would add some", "Try onnx or pt2")
    given = model.model if isinstance(model, Conversion) else model
    dynamic_batch = dynamic_batch or not form.GRAPH
    source = copy.deepcopy(given).cpu().float().eval()
    config = sidecar.config(source)
    if inputs is not None:
        every = tuple(one.like(source) for one in calling.batches(inputs))
        whole = _everything(source, every[0], dynamic_batch)
        return Order(source, file, form, dtype, dynamic_batch, every[0].size, False, False, config, whole, every)
    size = tuple(config["input_size"] if input_size is None else input_size)
    if len(size) != 3 or any(not isinstance(side, int) or side < 1 for side in size):
        raise OptionError(f"input size {','.join(map(str, size))}", "it is C,H,W: three positive whole numbers")
    classes = getattr(source, "num_classes", None)
    if softmax and classes == 0:
        raise OptionError("the network has no classifier", "a softmax needs classes")
    output = "probabilities" if softmax else "features" if classes == 0 else "logits"
    signature = Signature.of_images(source, output)
    return Order(source, file, form, dtype, dynamic_batch, size, normalize, softmax, config, signature)


def _everything(source: nn.Module, example: Example, dynamic_batch: bool) -> Signature:
    """Every tensor of the example in, every one that the network gives out."""
    whole = Signature.of(source, example.first(2 if dynamic_batch else 1))
    if dynamic_batch and (example.first(2).count != 2 or example.listed):
        raise OptionError("the number of samples cannot be free", "the first of the inputs has no two to be parted")
    return whole


def _demand_plain(form: Format, dtype: str, given: Mapping[str, object]) -> None:
    """Raises:
    OptionError: what is only for images in and an answer out.
    """
    if dtype == "int8":
        raise OptionError("int8 is for images in and one answer out", "inputs= says something else", "Leave it out")
    if not form.GRAPH:
        remedy = "Convert to 'folded' and save that with `normswap.save`"
        raise OptionError(f"{form.NAME} holds tensors, no inputs or outputs", remedy=remedy)
    for name, value in given.items():
        if value:
            raise OptionError(f"{name} is for images in and one answer out", "inputs= says what goes in, as it is")


def _per_channel(values: Sequence[float], channels: int) -> Tensor:
    """(C, 1, 1), from a value per channel or one for all."""
    return torch.tensor(list(values), dtype=torch.float64).expand(channels).reshape(-1, 1, 1).float()
