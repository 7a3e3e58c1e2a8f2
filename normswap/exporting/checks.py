"""PROVE, for files: what a file computes in its own runtime, against the PyTorch network.

As in `comparison`, a float32 file may be off by 1e-5, or by four times the distance between the
source in float32 and in float64, which is measured if 1e-5 is exceeded (in random networks rounding
errors grow from block to block). A file in half precision may be off by a few times what rounding
to that precision costs the network in PyTorch, on the same inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import OptionError, VerificationError, WrongResultError, explained
from normswap.exporting.exported_module import first_missing
from normswap.exporting.formats import Runs
from normswap.exporting.signature import Signature, together
from normswap.graph.anatomy import Anatomy
from normswap.images.accuracy import unit
from normswap.models.calling import Example
from normswap.models.network_input import ANSWERS, answer
from normswap.surgery import comparison, running
from normswap.surgery.departure import Departure, first_layer_apart

# A file may be off by this many times what float32 costs the source, as in `comparison`.
_STRAYING = 4
# Rounding is measured on the first batches, until they hold so many samples.
_ROUNDED = 16
# int8 has no limit of its own: its cost is reported, and the user judges it. A file that always
# answers 0 is off by 1.
_INT8 = 1.0
# Rounding to int8 costs most layers up to 0.05, and layers of one kind about the same. So a layer
# stands out if it is off by more than 0.1, and by more than 5 times the median of its kind.
_INT8_LIMITS = (0.1, 5.0)
# Images (N, C, H, W), or all inputs of the file; and their labels (N,), or None.
Batch = tuple[Tensor | tuple[Tensor, ...], Tensor | None]
# A function that gives a copy of the network in a file, and the file in its runtime as a function
# from inputs to all values inside. Where the runtime tells no values, it gives the file's bytes.
Inside = Callable[[], tuple[nn.Module, Any]]


@dataclass(frozen=True)
class Figures:
    """How far a file is from the network it was made from.

    Args:
        relative_l2: The distance |file - source| / |source|, over the answers to all images.
        agreement: The fraction of images, or of positions in maps, with the same argmax. None where
            no output is the answer, or the answer has no argmax.
        count: The number of images.
        tolerance: The largest `relative_l2` that is allowed.
        inputs: The name of the images that both were run on.
        answers: The number of answers that `agreement` is a fraction of.
        unit: The name of one answer's place: images, pixels, voxels ...
        source_top1: The top-1 of the source in percent. None where the images have no labels.
        top1: The top-1 of the file in percent. None where the images have no labels.
        output: The name of the output that differs most, to which the errors belong. Empty where
            there is one output.
        apart: The first layer that is off, or in int8 the first whose error jumps.
        missing: The first weight or bias that is nowhere in the file. It is looked for where the
            file's runtime gives no values from inside.
    """

    relative_l2: float
    agreement: float | None
    count: int
    tolerance: float
    inputs: str
    answers: int = 0
    unit: str = "images"
    source_top1: float | None = None
    top1: float | None = None
    output: str = ""
    apart: Departure | None = None
    missing: str = ""

    @property
    def place(self) -> str:
        """Where the file is off, as far as that is known."""
        if self.apart:
            return f"first at {self.apart}"
        return f"{self.missing} is nowhere in the file" if self.missing else ""

    @property
    def passed(self) -> bool:
        """Whether the file computes what the network does, within the tolerance."""
        return self.relative_l2 <= self.tolerance

    @property
    def points_lost(self) -> float | None:
        """The points of top-1 that the file loses, or of agreement where there are no labels.

        None where neither is known.
        """
        if self.top1 is not None and self.source_top1 is not None:
            return self.source_top1 - self.top1
        if self.agreement is None:
            return None
        return 100 * (1 - self.agreement)


@dataclass(frozen=True)
class Reference:
    """The answers that a file must compute.

    Args:
        source: The network, in float32.
        signature: The inputs and outputs of the network.
        softmax: Whether the file gives probabilities, the softmax of the source's scores.
        raw: A function from images as `source` takes them to images as the file does.
        rounded: The network with its numbers rounded to the file's precision, called as the file
            is.
        anatomy: The source's anatomy, which tells scores of classes from waves and features. None
            where it cannot be had.
    """

    source: nn.Module
    signature: Signature
    softmax: bool = False
    raw: Callable[[Tensor], Tensor] = lambda images: images
    rounded: Runs | None = None
    anatomy: Anatomy | None = None

    def answers(self, runs: Runs, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The file's answers to inputs of the network."""
        return together(runs(self.raw(x[0]), *x[1:]))


def check(
    reference: Reference,
    runs: Runs,
    batches: Iterable[Batch],
    *,
    dtype: str = "fp32",
    described: str = "given images",
    what: str = "the exported file",
    refuse: bool = True,
    inside: Inside | None = None,
) -> Figures:
    """Run a file and its network on the same images, and hold the file to the network.

    Args:
        reference: The network, as the file must compute it.
        runs: The file in its runtime, a function from inputs to answers.
        batches: Images (N, C, H, W), preprocessed for the source, or all inputs, each with labels.
        dtype: The precision of the file.
        described: The name of the images in reports.
        what: The name of the file in errors.
        refuse: Whether an error is raised if the file computes something else.
        inside: Returns a network and the file's runtime with the values inside of the file, so that
            the first layer that is off can be found. It is called where the file is wrong, or in
            int8.

    Raises:
        VerificationError: The file computes something else, does not run, or gives another number
            of tensors.
    """
    signature = reference.signature
    by_output = {name: _AnswerSums() for name in signature.outputs}

    first: Example | None = None
    for batch, labels in batches:
        x = together(batch)
        example = signature.example(x)
        if not example.count:
            continue

        answers = signature.answers(reference.source, x)
        if any(value.is_complex() or value.is_sparse for value in answers.values()):
            remedy = "Let it give both parts: torch.view_as_real, or x.to_dense()"
            raise OptionError(
                "the network gives complex numbers or a sparse tensor", "files hold neither", remedy
            )

        with explained(VerificationError, f"{what} does not run on {example}"):
            outputs = reference.answers(runs, x)
        if len(outputs) != len(answers):
            raise VerificationError(
                f"{what} gives {len(outputs)} tensors", f"the network gives {len(answers)}"
            )

        # What rounding costs is measured on the first batches only.
        measures = reference.rounded and next(iter(by_output.values())).count < _ROUNDED
        rounded = (
            reference.answers(reference.rounded, x)
            if measures and reference.rounded
            else [None] * len(outputs)
        )

        axes = comparison.class_axes(answers, reference.anatomy)
        for (name, logits), values, lossy in zip(answers.items(), outputs, rounded, strict=True):
            expected = logits.softmax(-1) if reference.softmax else logits
            by_output[name].add(example.count, logits, expected, values, labels, axes.get(name))
            if lossy is not None:
                by_output[name].rounding.add(expected, lossy)

        first = first or example

    if first is None:
        raise OptionError("no images to check the file on")

    # The error is that of the worst output. Agreement and top-1 are those of the answer, if one of
    # the outputs is the answer.
    name, sums = max(by_output.items(), key=lambda pair: pair[1].distance.relative)
    allowed = _allowed(reference, dtype, first, name, sums)
    shown = next(
        (by_output[answer_name] for answer_name in ANSWERS if answer_name in by_output),
        sums if len(by_output) == 1 else _AnswerSums(),
    )
    figures = Figures(
        sums.distance.relative,
        shown.agreement,
        sums.count,
        allowed,
        described,
        shown.places,
        shown.unit,
        shown.hits("source"),
        shown.hits("file"),
        name if len(by_output) > 1 else "",
    )

    figures = _looked_into(figures, reference, inside, first, dtype)
    if refuse and not figures.passed:
        where = f" at {figures.output}" if figures.output else ""
        raise WrongResultError(
            f"{what} computes something else: relative L2 error {figures.relative_l2:.1e}{where}, "
            f"allowed {figures.tolerance:.1e}",
            figures.place,
            remedy="Nothing was written",
        )

    return figures


def _looked_into(
    figures: Figures, reference: Reference, inside: Inside | None, example: Example, dtype: str
) -> Figures:
    """Return the figures with the place where the file is off, if it can be found."""
    # Whatever fails here, the user is told how far the file is off.
    with suppress(Exception):
        if inside and (dtype == "int8" or not figures.passed):
            network, runs = inside()
            if isinstance(runs, bytes):
                return replace(figures, missing=first_missing(network, runs, example, dtype))
            values = reference.answers(runs, tuple(example.tensors()))
            limits = _INT8_LIMITS if dtype == "int8" else (figures.tolerance,)
            return replace(figures, apart=first_layer_apart(network, example, values, *limits))

    return figures


def _allowed(
    reference: Reference, dtype: str, first: Example, name: str, sums: _AnswerSums
) -> float:
    """Return the relative L2 error that is allowed at one output.

    The source's rounding is measured on the first batch.
    """
    if dtype == "int8":
        # The squared error of labels may be half of what guessing gives.
        return 0.5**0.5 if sums.distance.discrete else _INT8

    allowed = comparison.FLOAT32_TOLERANCE
    # For p = softmax(z), dp / p = dz - sum p dz, so |dp| / |p| <= 2 max |dz|.
    if reference.softmax:
        allowed *= max(1.0, 2 * sums.peak)
    # Eleven files in half precision were off by 0.1 to 1.4 times what rounding costs.
    allowed = max(allowed, comparison.ROUNDING * sums.rounding.relative)
    if sums.distance.relative > allowed:
        allowed = max(allowed, _STRAYING * _stray(reference, first, name, sums))

    return allowed


def _stray(reference: Reference, first: Example, name: str, sums: _AnswerSums) -> float:
    """Return how far the source is from its own float64 values, on the first batch.

    In a network that enlarges rounding errors from block to block, that is far.
    """
    signature = reference.signature
    outputs = running.outputs_double(reference.source, first.map_floats(Tensor.double))
    wide = (
        list(outputs.values())[signature.outputs.index(name)]
        if signature.whole
        else answer(outputs)
    )

    assert sums.first is not None

    own = Distance()
    own.add(wide, sums.first)
    return own.relative


class Distance:
    """The relative L2 distance between values, summed over batches.

    The error of labels, masks and counts is relative to the error of guessing.
    """

    def __init__(self) -> None:
        self.off = self.sum = self.squares = 0.0
        self.count = 0
        self.discrete = False

    def add(self, expected: Tensor, values: Tensor) -> None:
        """Add a batch. Values of another shape, or not finite, are infinitely far off."""
        self.discrete = not expected.is_floating_point()
        fits = expected.shape == values.shape and bool(torch.isfinite(values).all())
        expected = expected.double()
        values = values.double()
        self.off += float((expected - values).square().sum()) if fits else math.inf
        self.sum = self.sum + float(expected.sum())
        self.squares = self.squares + float(expected.square().sum())
        self.count += expected.numel()

    @property
    def relative(self) -> float:
        whole = self.squares
        if self.discrete:
            # Guesses with the frequencies of the labels are off by twice the labels' variance.
            whole = 2 * (self.squares - self.sum**2 / max(self.count, 1))
        return math.sqrt(self.off / max(whole, 1e-300))


class _AnswerSums:
    """How one output of a file compares with the source's, counted over all batches.

    Attributes:
        distance: The distance of the file from the source.
        rounding: The distance of the rounded network from the source, on the first batches.
        peak: The largest absolute value of the source's output.
        count: The number of samples.
        compared: The number of samples whose classes were compared.
        places: The number of classes that were compared: one for each image, or for each position
            of a map.
        same: The number of them that are the same in file and source.
        unit: The name of one such place: images, pixels, voxels ...
        first: The source's output on the first batch.
        labelled: The number of images whose label is a class of the network.
        right: The number of images whose class is the label, for the source and for the file.
    """

    def __init__(self) -> None:
        self.distance = Distance()
        self.rounding = Distance()
        self.peak = 0.0
        self.count = self.places = self.same = self.compared = 0
        self.unit = "images"
        self.first: Tensor | None = None
        self.right = {"source": 0, "file": 0}
        self.labelled = 0

    def add(
        self,
        count: int,
        logits: Tensor,
        expected: Tensor,
        actual: Tensor,
        labels: Tensor | None,
        axis: int | None,
    ) -> None:
        """Add a batch.

        Args:
            count: The number of its images.
            logits: The answers of the source.
            expected: The answers that the file should give.
            actual: The answers that the file gives.
            labels: The true classes, or None.
            axis: The axis of the classes, or None where the answers are no scores.
        """
        if self.first is None:
            self.first = logits
        self.distance.add(expected, actual)
        self.count += count
        if logits.numel():
            self.peak = max(self.peak, float(logits.double().abs().max()))
        # An argmax is a class only where the output has scores of classes, for each sample, and
        # where the file's numbers are finite and of the same shape.
        if axis is None or not math.isfinite(self.distance.off) or len(expected) != count:
            return

        self.compared += count
        same = expected.argmax(axis) == actual.argmax(axis)
        self.places = self.places + same.numel()
        self.same = self.same + int(same.sum())
        self.unit = unit(expected)

        if (
            labels is not None
            and expected.ndim == 2
            and bool(((labels >= 0) & (labels < expected.shape[1])).all())
        ):
            self.labelled += count
            for who, scores in (("source", expected), ("file", actual)):
                self.right[who] += int((scores.argmax(1) == labels).sum())

    def hits(self, who: str) -> float | None:
        """Return the top-1 of `source` or `file` in percent.

        It is None unless all images have a label that is a class of the network.
        """
        if not self.labelled == self.count > 0:
            return None
        return 100 * self.right[who] / self.count

    @property
    def agreement(self) -> float | None:
        """The share of places with the same class; None unless all samples have classes."""
        if not self.compared == self.count > 0:
            return None
        return self.same / self.places


def split(batches: Iterable[Batch], *, singly: bool) -> Iterator[Batch]:
    """Yield the same images with their labels, in other batches.

    Args:
        batches: Pairs of images and labels, which may be None.
        singly: Whether each image is a batch by itself. If not, the first image is sent alone, so
            that the file is also tested at another batch size.
    """
    for i, (images, labels) in enumerate(batches):
        assert isinstance(images, Tensor)
        sizes = [len(images)]
        if singly:
            sizes = [1] * len(images)
        elif i == 0 and len(images) > 1:
            sizes = [1, len(images) - 1]
        parts = [None] * len(sizes) if labels is None else labels.split(sizes)
        yield from zip(images.split(sizes), parts, strict=True)
