"""How far the values of a result are from those of its source, summed over batches."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from normswap.graph.anatomy import Anatomy
from normswap.models.calling import Example

Outputs = dict[str, Tensor]


@dataclass(frozen=True)
class Error:
    """How far a result (b) is from its reference (a), at one value.

    Args:
        site: The path of the module at whose output it was measured, or "logits".
        precision: The precision that both networks ran in.
        size: The size of the input.
        relative_l2: The distance |a - b| / |a|. Of labels, masks and counts it is the share of
            entries that differ.
        largest: The largest difference, max |a - b| / max |a|.
        agreement: The fraction of inputs, or of places in maps, with the same argmax. It is None
            unless it is an error at logits of more than one class.
        output: The name of the worst output, where there are several.
        answer: The output and the axis that the argmax is taken of, in words. Empty without an
            argmax.
        axis: The axis of the argmax. None where outputs have names.
    """

    site: str
    precision: str
    size: tuple[int, ...]
    relative_l2: float
    largest: float
    agreement: float | None = None
    output: str = ""
    answer: str = ""
    axis: int | None = None


class Distance:
    """How far one value of a result is from the source's, summed over batches.

    Attributes:
        is_comparable: Whether all values had the source's shapes, and finite numbers. -inf stands
            for a class that is masked out, if it is there in both.
        are_labels: Whether the values are labels, masks or counts, which are equal or not.
        peak: The largest absolute value of the source, times the factor by which all numbers are
            scaled (`_add_numbers`).
    """

    def __init__(self) -> None:
        self.is_comparable = True
        self.are_labels = False
        self.peak = 0.0
        # Of labels: the number of entries, the number that differ, and how often each label occurs
        # in the source.
        self._entries = 0
        self._unequal = 0
        self._frequencies: dict[int, int] = {}
        # Of numbers: the factor that keeps their squares from becoming zero. None before the first
        # batch.
        self._scale: Tensor | None = None
        # Times that factor: the L2 norms of the source, of the result and of their difference, and
        # the largest difference.
        self._size = 0.0
        self._other_size = 0.0
        self._off = 0.0
        self._most = 0.0

    def add(self, expected: Tensor, values: Tensor) -> None:
        """Add the values of one batch, whose distance is measured together with the others'.

        Args:
            expected: The source's value.
            values: The result's value. With another shape, nothing can be compared any more.
        """
        are_labels = not (expected.is_floating_point() or expected.is_complex())
        if expected.shape != values.shape or expected.is_complex() != values.is_complex():
            self.is_comparable = False
        elif not expected.numel():
            return
        elif self.are_labels != are_labels and (self._entries or self._scale is not None):
            # Numbers in one batch and labels in another have no common measure.
            self.is_comparable = False
        elif expected.is_floating_point() or expected.is_complex():
            self._add_numbers(_numbers(expected), _numbers(values))
        else:
            self._add_labels(expected, values)

    def add_nothing(self, expected: Tensor) -> None:
        """Add a batch for which the result gives nothing comparable, as an error of 1.

        Args:
            expected: The source's value.
        """
        # If the source's value is empty, the batch counts as the number 1 where 0 is expected.
        if not expected.numel():
            self._add_numbers(torch.zeros(1).double(), torch.ones(1).double())
        # Zeros in place of all numbers have the relative L2 |a - 0| / |a| = 1. Of labels, the
        # negation differs in every entry.
        elif expected.is_floating_point() or expected.is_complex():
            self.add(expected, torch.zeros_like(expected))
        else:
            self.add(expected, expected.logical_not())

    def _add_labels(self, expected: Tensor, values: Tensor) -> None:
        """Count the entries, the entries that differ, and how often each label occurs.

        Args:
            expected: The source's labels.
            values: The result's labels, of the same shape.
        """
        self.are_labels = True
        self._entries += expected.numel()
        self._unequal += int((expected != values).sum())
        labels, counts = expected.unique(return_counts=True)
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            self._frequencies[label] = self._frequencies.get(label, 0) + count

    def _add_numbers(self, expected: Tensor, values: Tensor) -> None:
        """Add a batch to the running L2 norms and maxima of the values and their difference.

        Args:
            expected: The source's numbers, in one dimension, in float64.
            values: The result's numbers, in one dimension, in float64.
        """
        # Scores of classes that are masked out are -inf in both outputs. They are left out, unless
        # nothing else is there.
        masked = (expected == values) & (expected == -math.inf)
        if bool(masked.any()) and not bool(masked.all()):
            expected = expected[~masked]
            values = values[~masked]

        # The squares of numbers below 1e-154 are zero in float64. So all numbers are divided by a
        # power of two near the peak of the first batch. That rounds nothing.
        if self._scale is None:
            peak = expected.abs().max().nan_to_num(1.0, 1.0, 1.0)
            exponent = torch.frexp(peak).exponent.clamp(-1000, 1000)
            self._scale = torch.pow(2.0, -exponent.double())
        expected = expected * self._scale
        values = values * self._scale

        difference = expected - values
        numbers = (
            expected.norm(),
            values.norm(),
            difference.norm(),
            difference.abs().max(),
            expected.abs().max(),
            values.abs().max(),
        )

        # The numbers are stacked, so that a GPU is waited for once. `hypot` adds the norm of this
        # batch to that of the batches before: sqrt(a^2 + b^2).
        size, other_size, off, most, peak, other_peak = torch.stack(numbers).tolist()
        self.is_comparable &= math.isfinite(peak) and math.isfinite(other_peak)
        self._size = math.hypot(self._size, size)
        self._other_size = math.hypot(self._other_size, other_size)
        self._off = math.hypot(self._off, off)
        self._most = max(self._most, most)
        self.peak = max(self.peak, peak)

    @property
    def relative_l2(self) -> float:
        """The distance |a - b| / |a| of the result (b) from the source (a).

        For labels it is the share of them that differ. It is infinite if the values cannot be
        compared, and |b| if the source's values are exactly zero.
        """
        if not self.is_comparable:
            return math.inf
        if self.are_labels:
            return self._unequal / max(self._entries, 1)
        if not self._size:
            return self._other_size
        return self._off / self._size

    @property
    def largest(self) -> float:
        """The largest difference, max |a - b| / max |a|, or of labels the share that differs."""
        if not self.is_comparable or self.are_labels or not self._size:
            return self.relative_l2
        return self._most / self.peak

    @property
    def of_guesses(self) -> float:
        """The share of labels that random guesses get wrong.

        The guesses give each label as often as it occurs. A label of frequency p is guessed with
        probability p where it stands, so the share of right guesses is the sum of all p^2.
        """
        squares = sum((count / self._entries) ** 2 for count in self._frequencies.values())
        return 1.0 - squares

    def error(self, site: str, precision: str, size: Sequence[int]) -> Error:
        """Return the distance as an `Error`, with the place and the conditions of the measurement.

        Args:
            site: The path of the module at whose output it was measured, or "logits".
            precision: The precision that both networks ran in.
            size: The size of the input.
        """
        error = Error(site, precision, tuple(size), self.relative_l2, self.largest)
        # The distance of labels is the share of entries that differ.
        if self.are_labels and self.is_comparable:
            return replace(error, agreement=1.0 - self.relative_l2)
        return error


def distance(expected: Tensor, values: Tensor) -> Distance:
    """Return how far one tensor is from another, as a `Distance` over a single batch.

    Args:
        expected: The source's value.
        values: The result's value.
    """
    measured = Distance()
    measured.add(expected, values)
    return measured


def _numbers(value: Tensor) -> Tensor:
    """Return all numbers of a tensor in one dimension, in float64.

    A complex number is two: its real and its imaginary part.
    """
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.double().flatten()


@dataclass
class Agreement:
    """How often two networks give the same argmax, summed over batches.

    Args:
        answer: The output and the axis that the argmax is taken of, in words.
        unit: The word for the places that have an argmax: images, pixels, voxels or places.
        places: The number of argmaxes that were compared: one for each image, or for each place of
            a map.
        same: The number of argmaxes that are the same.
        samples: The number of samples that were compared.
    """

    answer: str
    unit: str = "images"
    places: int = 0
    same: int = 0
    samples: int = 0

    @property
    def share(self) -> float:
        """The share of the compared argmaxes that are the same in both networks."""
        return self.same / self.places


def _unit(scores: Tensor) -> str:
    """Return the noun for the places in scores (N, classes, ...), each of which has one argmax.

    It is "images" for scores (N, classes), "pixels" for maps, "voxels" for volumes, else "places".
    """
    return {2: "images", 4: "pixels", 5: "voxels"}.get(scores.ndim, "places")


class OutputDistances:
    """How far a result's outputs are from its source's, by name, summed over batches.

    Args:
        precision: The precision that both networks run in.
        exact: Whether the result claims to compute the source's function. If it does not, it may
            give another number of rows, such as other boxes. That counts as an error of 1.
        anatomy: The source's recorded structure (`graph.anatomy`), which tells scores of classes
            from other outputs, such as features. None if the source could not be recorded.
    """

    def __init__(
        self, precision: str, *, exact: bool = True, anatomy: Anatomy | None = None
    ) -> None:
        self.precision = precision
        self.exact = exact
        self.anatomy = anatomy
        # By the name of an output: its distance, and how often its argmax is the same.
        self.by_output: dict[str, Distance] = {}
        self.agreements: dict[str, Agreement] = {}
        # The number of samples so far.
        self.count = 0
        # For each output that holds scores of classes, by its name: the axis of the classes, as it
        # was found in the last batch.
        self.axes: dict[str, int] = {}
        # The size of the first batch's images.
        self._size: tuple[int, ...] = ()
        # Whether both networks had outputs of the same names in every batch.
        self._are_named_alike = True

    def add(self, example: Example, outputs: Outputs, others: Outputs) -> None:
        """Add the distances of a batch, for each output.

        Args:
            example: The call. Errors state the size of its images.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        self._size = self._size or tuple(example.images.shape)
        self.count += example.count
        if not outputs or outputs.keys() != others.keys():
            self._are_named_alike = False
            return

        # An approximate result may find another number of boxes, which cannot be compared row by
        # row. The batch then counts as an error of 1.
        have_same_shapes = all(outputs[name].shape == others[name].shape for name in outputs)
        if not have_same_shapes and not self.exact and _differ_in_rows(outputs, others):
            for name, expected in outputs.items():
                self.by_output.setdefault(name, Distance()).add_nothing(expected)
            return

        for name, expected in outputs.items():
            self.by_output.setdefault(name, Distance()).add(expected, others[name])
        self._add_agreements(example.count, outputs, others)

    def _add_agreements(self, count: int, outputs: Outputs, others: Outputs) -> None:
        """Count the equal argmaxes of outputs that are scores of classes.

        Args:
            count: The number of samples of the batch.
            outputs: The source's outputs by name.
            others: The result's outputs by name.
        """
        self.axes = class_axes(outputs, self.anatomy)
        for name, axis in self.axes.items():
            expected = outputs[name]
            if not self.by_output[name].is_comparable or not expected.numel():
                continue

            same = expected.argmax(axis) == others[name].argmax(axis)
            answer = f"the largest of {expected.shape[axis]} on axis {axis}"
            if name:
                answer += f" of {name}"
            agreement = self.agreements.setdefault(name, Agreement(answer, _unit(expected)))
            agreement.places += same.numel()
            agreement.same += int(same.sum())
            agreement.samples += count

    @property
    def axis(self) -> int | None:
        """The axis of the classes, in the last batch, of a network with one output.

        None if the outputs have names, or the output is no scores of classes.
        """
        return self.axes.get("")

    @property
    def worst_name(self) -> str:
        """The name of the output that differs most. It is empty if no output was compared."""
        return max(self.by_output, key=lambda name: self.by_output[name].relative_l2, default="")

    def error(self) -> Error:
        """Return the error of the output that differs most.

        Its `agreement`, how often source and result choose the same class, may be about another
        output: the one with the lowest share (`least_agreement`). The error is infinite if the
        networks' outputs have different names, or if there are no outputs.
        """
        # `answer` is a text that says which output the agreement is about.
        agreement, answer = self.least_agreement()
        if not self._are_named_alike or not self.by_output:
            return Error("logits", self.precision, self._size, math.inf, math.inf)

        # The `site` of an error is the path of a module. The network's outputs have "logits" in its
        # place, whatever they are, and the name of the output beside it.
        name = self.worst_name
        error = self.by_output[name].error("logits", self.precision, self._size)
        error = replace(error, output=name)
        if agreement is None:
            return error
        return replace(error, agreement=agreement, answer=answer, axis=self.axis)

    def least_agreement(self) -> tuple[float | None, str]:
        """Return how often source and result choose the same class, and a text that explains it.

        Each output that holds scores of classes has a share of inputs for which both have the same
        argmax. The lowest of these shares is returned. The text says which output and axis it is
        about, and lists the shares of the other outputs. An output whose values were no scores in
        some batch is left out. If none is left, the share is None.
        """
        # An output that was no scores in some batch has counted fewer samples.
        complete = [
            agreement for agreement in self.agreements.values() if agreement.samples == self.count
        ]
        if not complete:
            return None, ""

        least = min(complete, key=lambda agreement: agreement.share)
        words = [least.answer]
        for agreement in complete:
            if agreement is not least:
                words.append(f"{agreement.share:.1%} by {agreement.answer}")
        return least.share, "; ".join(words)


def between(
    example: Example,
    outputs: Outputs,
    others: Outputs,
    *,
    precision: str,
    exact: bool = True,
    anatomy: Anatomy | None = None,
) -> Error:
    """Return how far a result's outputs are from its source's on one call.

    Args:
        example: The call.
        outputs: The source's outputs by name.
        others: The result's outputs by name.
        precision: The precision that both ran in.
        exact: Whether the result claims to compute the source's function. If not, another number of
            rows (such as other boxes) counts as an error of 1.
        anatomy: The source's recorded structure (`graph.anatomy`), which tells scores of classes
            from other outputs. None if the source could not be recorded.
    """
    distances = OutputDistances(precision, exact=exact, anatomy=anatomy)
    distances.add(example, outputs, others)
    return distances.error()


def _differ_in_rows(outputs: Outputs, others: Outputs) -> bool:
    """Whether a result's outputs are finite, and have the source's shapes but for dimension 0.

    The rows of a detector's output are boxes, of which another network may find more or fewer.

    Args:
        outputs: The source's outputs by name.
        others: The result's outputs by the same names.
    """
    have_same_rest = all(outputs[name].shape[1:] == others[name].shape[1:] for name in outputs)
    return have_same_rest and all(bool(torch.isfinite(value).all()) for value in others.values())


def class_axes(outputs: Mapping[str, Tensor], anatomy: Anatomy | None) -> dict[str, int]:
    """Return the axis of the classes for each output that is scores of classes, by name.

    An output is scores if the size of some axis is the number of channels of a last linear layer.
    If no last layers are known, only outputs (N, classes) are scores. Maps of several sizes, as a
    feature pyramid gives, are never scores, and a network that returns features has none.

    Args:
        outputs: The outputs by name.
        anatomy: The recorded structure of the network (`graph.anatomy`). None if it could not be
            recorded.
    """
    if anatomy is not None and anatomy.features:
        return {}

    candidates: dict[str, Tensor] = {}
    for name, value in outputs.items():
        if value.is_floating_point() and value.ndim > 1:
            candidates[name] = value

    widths = frozenset[int]() if anatomy is None else anatomy.widths
    map_sizes = {value.shape[2:] for value in candidates.values() if value.ndim > 3}
    axes: dict[str, int] = {}
    for name, value in candidates.items():
        axis = _class_axis(value, widths)
        has_one_size = value.ndim < 4 or len(map_sizes) == 1
        if axis is not None and value.shape[axis] > 1 and has_one_size:
            axes[name] = axis

    return axes


def _class_axis(value: Tensor, widths: Collection[int]) -> int | None:
    """Return the axis of an output whose size is that of a last linear layer's output, or None.

    Args:
        value: The output, with two dimensions or more.
        widths: The numbers of channels that the last linear layers of the network give. If none are
            known, the classes of an output (N, classes) are in its dimension 1.
    """
    if not widths:
        return 1 if value.ndim == 2 else None

    # Classes are in dimension 1, or last.
    for axis in (1, value.ndim - 1):
        if value.shape[axis] in widths:
            return axis
    return None
