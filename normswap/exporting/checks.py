"""PROVE, for files: what a file computes in its own runtime, against the PyTorch network.

As for networks, a float32 file may be off by a relative L2 of 1e-5. If it is off by more, the
effect of rounding on the source is measured: the source is run in float64, and with another last
digit of its input or its weights. Four times that effect is allowed, because in random networks
rounding errors grow from block to block. A file in half precision may be off by a few times what
rounding to that precision changes in the PyTorch network, on the same inputs. int8 claims nothing:
its error is only measured. So is that of a file that gives labels alone, since equal labels do not
show that the scores behind them are right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import (
    NormswapError,
    OptionError,
    VerificationError,
    WrongResultError,
    explained,
)
from normswap.exporting.exported_module import first_missing
from normswap.exporting.formats import Runs
from normswap.exporting.signature import Signature, together
from normswap.graph.anatomy import Anatomy
from normswap.models import calling
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import full_precision
from normswap.models.network_input import ANSWERS, answer
from normswap.proof import allowance, running, verdict
from normswap.proof.allowance import Allowance
from normswap.proof.distance import Agreement, Distance, OutputDistances, Outputs, distance
from normswap.proof.where import Departure, first_layer_apart

# Rounding is measured on the first batches, until they hold so many samples.
_ROUNDED = 16
# Answers below this are nearly zero: of a sigmoid that saturates, runtimes give what they like.
_NEARLY_ZERO = 1e-6
# Inputs are kept until they hold so many samples, to run a file of the source on them.
_KEPT = 64
# Such a file may be off by twice what a file of the source itself is off by, but by no more than a
# file that gives 0.
_AS_UNFOLDED = 2
_OF_ZEROS = 1.0
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
        unit: The name of the things that have an answer each: images, pixels, voxels ...
        source_top1: The top-1 of the source in percent. None where the images have no labels.
        top1: The top-1 of the file in percent. None where the images have no labels.
        output: The name of the output that differs most, to which the errors belong. Empty where
            there is one output.
        apart: The first layer that is off. In int8 it is the first whose error is much larger than
            that of the other layers of its kind. None if it was not looked for, or not found.
        missing: The first weight or bias that is nowhere in the file. It is looked for only if the
            runtime does not show the values inside of a file.
        exact: Whether the file claims to compute what the network does, up to the rounding of its
            precision. int8 does not, nor does a file whose outputs are all labels.
        unproved: Why no comparison could have shown an error. Empty if one could.
        remark: A sentence on the tolerance, or on what was compared, that the reader must know.
            Empty if there is none.
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
    exact: bool = True
    unproved: str = ""
    remark: str = ""

    @property
    def verdict(self) -> str:
        """One word for the result of the check: PROVED, MEASURED, NOT PROVED or WRONG.

        A file that passed is PROVED if it claims to be exact, and else MEASURED. A file that did
        not pass is NOT PROVED if no mistake could have shown, and else WRONG.
        """
        return verdict.word(exact=self.exact, passed=self.passed, unproved=bool(self.unproved))

    @property
    def place(self) -> str:
        """Words for an error that say where the file is wrong first.

        They name the first layer that computes something else, or a weight that is nowhere in the
        file. They are empty if neither is known.
        """
        if self.apart:
            return f"first at {self.apart}"
        return f"{self.missing} is nowhere in the file" if self.missing else ""

    @property
    def passed(self) -> bool:
        """Whether the file passed the check: its error is at most the tolerance.

        A comparison in which a mistake could not have shown (`unproved`) is not passed.
        """
        return self.relative_l2 <= self.tolerance and not self.unproved

    @property
    def points_lost(self) -> float | None:
        """How many percentage points of top-1 the file has less than the network.

        Without labels, it is the percentage of images for which the answers of the two differ. It
        is None if neither is known.
        """
        if self.top1 is not None and self.source_top1 is not None:
            return self.source_top1 - self.top1
        if self.agreement is None:
            return None
        return 100 * (1 - self.agreement)


@dataclass(frozen=True)
class Reference:
    """What a file is compared with: the network, and what the file computes besides it.

    Args:
        source: The network, in float32.
        signature: The inputs and outputs of the network.
        softmax: Whether the file gives probabilities, the softmax of the source's scores.
        raw: A function that takes images as `source` takes them and returns them as the file takes
            them. A file that normalizes images itself takes pixels in 0..1.
        rounded: The network with its numbers rounded to the file's precision, called as the file
            is. None where the precision is float32, or the rounding is not measured.
        anatomy: What is known of the source's layers (`graph.anatomy`), by which scores of classes
            are told from other outputs. None where the source cannot be traced.
        dynamic_batch: Whether the file takes any number of samples at a time.
        unfolded: Returns a context manager, which yields a file of the source without folded
            layers, in its runtime. It is called where the file's answers are nearly zero and wrong.
            None if such a file is not compared.
    """

    source: nn.Module
    signature: Signature
    softmax: bool = False
    raw: Callable[[Tensor], Tensor] = lambda images: images
    rounded: Runs | None = None
    anatomy: Anatomy | None = None
    dynamic_batch: bool = False
    unfolded: Callable[[], AbstractContextManager[Runs]] | None = None

    def expected(self, answers: Outputs) -> Outputs:
        """Return the outputs that the file must give, by name.

        They are the network's outputs, or their softmax if the file gives probabilities.

        Args:
            answers: The network's outputs, by name.
        """
        if not self.softmax:
            return answers
        return {name: logits.softmax(-1) for name, logits in answers.items()}

    def answers(self, runs: Runs, x: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run a file on the network's inputs, and return its outputs in order.

        Args:
            runs: The file in its runtime: a function from input tensors to output tensors.
            x: The inputs as the network takes them. The first of them, the images, are turned into
                what the file takes (`raw`).
        """
        inputs = (self.raw(x[0]), *x[1:])
        # A file may write into its input, as the network's forward did.
        return together(runs(*(tensor.clone() for tensor in inputs)))


@full_precision()
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
    """Run a file and its network on the same images, and return how far their outputs differ.

    Args:
        reference: The network, and how the file's inputs and outputs differ from the network's.
        runs: The file in its runtime, a function from inputs to outputs.
        batches: Images (N, C, H, W), preprocessed for the source, or all inputs, each with labels.
        dtype: The precision of the file.
        described: What the images are called in reports.
        what: What the file is called in errors.
        refuse: Whether an error is raised if the file is wrong or cannot be proved right. Otherwise
            the returned figures say so.
        inside: A function that returns the network, and the file as a function that returns the
            values of all its layers. It is called if the file is wrong, or in int8, to find the
            first wrong layer. With None no layer is looked for.

    Raises:
        OptionError: There are no images.
        VerificationError: The file computes something else, does not run, gives another number of
            tensors, or answers every image alike, so that nothing proves it.
    """
    compared = _Compared(reference, runs, dtype, what)
    for batch, labels in batches:
        compared.add(together(batch), labels)
    if compared.first is None:
        raise OptionError("no images to check the file on")

    figures = compared.figures(described)
    example = compared.with_other_values or compared.first
    figures = _with_first_wrong_layer(figures, reference, inside, example, dtype)

    # Near zero, a runtime may be inexact without any mistake in the file. So another file is
    # written, of the network without folding. The error may be a multiple of the error of that file
    # (`_AS_UNFOLDED`), up to a limit (`_OF_ZEROS`).
    if not figures.passed and _is_nearly_zero(figures, compared):
        unfolded_error = compared.error_of_unfolded()
        allowed = Allowance(dtype, figures.tolerance, unfolded_error, _AS_UNFOLDED, _OF_ZEROS)
        remark = (
            "its answers are nearly zero, and a file of the source itself is off by "
            f"{unfolded_error:.1e} here"
        )
        figures = replace(figures, tolerance=allowed.most, remark=remark)

    if refuse and figures.unproved:
        remedy = "Give images that it has an answer to"
        raise VerificationError(f"nothing proves {what}", figures.unproved, remedy)
    if refuse and not figures.passed:
        where = f" at {figures.output}" if figures.output else ""
        raise WrongResultError(
            f"{what} computes something else: relative L2 error {figures.relative_l2:.1e}{where}, "
            f"allowed {figures.tolerance:.1e}",
            figures.place,
            remedy="Nothing was written",
        )

    return figures


def _with_first_wrong_layer(
    figures: Figures, reference: Reference, inside: Inside | None, example: Example, dtype: str
) -> Figures:
    """Return the figures of a check, with the first wrong layer of the file added.

    The layer is looked for if the file did not pass, and in every int8 file. If it is not found,
    the figures are returned as they are.

    Args:
        figures: The figures of the check.
        reference: The network, and how the file's inputs and outputs differ from the network's.
        inside: A function that returns the network, and the file as a function that returns all
            values inside. None if no layer is looked for.
        example: A call of the network.
        dtype: The precision of the file.
    """
    # A failure here must not hide the figures, which tell the user how far the file is off.
    with suppress(Exception):
        if inside and (dtype == "int8" or not figures.passed):
            network, runs = inside()
            # This runtime does not show the values inside. `runs` is then the file's content.
            if isinstance(runs, bytes):
                return replace(figures, missing=first_missing(network, runs, example, dtype))
            values = reference.answers(runs, tuple(example.tensors()))
            # In int8, a wrong layer exceeds an error and a multiple of the usual error of its kind.
            # Otherwise it exceeds the tolerance.
            limits = _INT8_LIMITS if dtype == "int8" else (figures.tolerance,)
            return replace(figures, apart=first_layer_apart(network, example, values, *limits))

    return figures


def _is_nearly_zero(figures: Figures, compared: _Compared) -> bool:
    """Whether a file is wrong only in values that are nearly zero.

    This is so if the network's outputs are nearly zero, and its value in the first wrong layer of
    the file is, too. All layers before that layer are right. So rounding near zero in the runtime
    may explain the error.

    Args:
        figures: The figures of the check, with the first wrong layer.
        compared: The comparison that the figures are from.
    """
    if not compared.peaks or max(compared.peaks.values()) >= _NEARLY_ZERO:
        return False
    return figures.apart is not None and abs(figures.apart.network) < _NEARLY_ZERO


class _Compared:
    """The comparison of a file with its network, summed over the batches that were added.

    Args:
        reference: The network, and how the file's inputs and outputs differ from the network's.
        runs: The file in its runtime.
        dtype: The precision of the file.
        what: The name of the file in errors.

    Attributes:
        first: The call of the first batch, or None before it.
        with_other_values: A call on changed values of the first batch, on which both were run, too.
            None if the given batches tell enough.
        distances: How far the file is from the network, over all batches.
        of_other_values: By output, how far the file is from the network on changed values. Empty
            where these were not compared.
        rounding: By output, how far the network moves if its numbers are rounded to the file's
            precision, on the first batches.
        peaks: By output, the largest absolute value of the source's scores.
        outputs: The source's outputs on the first batch.
        outputs_on_other_values: The source's outputs on `with_other_values`.
        hits: By output, for how many images the top class is the label.
        changes: By output, the largest relative L2 distance between two samples. It shows whether
            the output depends on the input at all.
        changes_in_batch: By output, the largest distance between two samples of one batch.
        expected: The right answers of the file to the first batch: `outputs`, or their softmax.
        of_samples: The names of the outputs that had a row for each sample in every batch.
        inputs: The inputs of the first batches, with about `_KEPT` samples in all.
    """

    def __init__(self, reference: Reference, runs: Runs, dtype: str, what: str) -> None:
        self.reference = reference
        self.runs = runs
        self.dtype = dtype
        self.what = what
        self.first: Example | None = None
        self.with_other_values: Example | None = None
        # A file gives float32, whatever its own precision.
        self.distances = OutputDistances("float32", anatomy=reference.anatomy)
        self.of_other_values: dict[str, Distance] = {}
        names = reference.signature.outputs
        self.rounding = {name: Distance() for name in names}
        self.peaks = dict.fromkeys(names, 0.0)
        self.outputs: Outputs = {}
        self.outputs_on_other_values: Outputs = {}
        self.hits = {name: _Hits() for name in names}
        self.changes = dict.fromkeys(names, 0.0)
        self.changes_in_batch = dict.fromkeys(names, 0.0)
        self.expected: Outputs = {}
        self.of_samples = set(names)
        self.inputs: list[tuple[Tensor, ...]] = []

    def add(self, tensors: tuple[Tensor, ...], labels: Tensor | None) -> None:
        """Run the network and the file on a batch, and measure the distance of their answers.

        Args:
            tensors: The inputs.
            labels: The true classes (N,), or None.
        """
        reference = self.reference
        example = reference.signature.example(tensors)
        # An empty batch compares nothing.
        if not example.count:
            return

        # Run the network, then the file.
        answers = reference.signature.answers(reference.source, tensors)
        if any(value.is_complex() or value.is_sparse for value in answers.values()):
            remedy = "Let it give both parts: torch.view_as_real, or x.to_dense()"
            raise OptionError(
                "the network gives complex numbers or a sparse tensor", "files hold neither", remedy
            )
        values = self._of_file(tensors)
        if len(values) != len(answers):
            raise VerificationError(
                f"{self.what} gives {len(values)} tensors", f"the network gives {len(answers)}"
            )

        # Compare their outputs.
        expected = reference.expected(answers)
        actual = dict(zip(answers, values, strict=True))
        self._add_change(example, expected)
        if self.distances.count < _ROUNDED:
            self._add_rounding(tensors, expected)
        self._add_peaks(answers)
        self.distances.add(example, expected, actual)
        for name, logits in answers.items():
            has_row_for_each_sample = logits.ndim > 0 and len(logits) == example.count
            if not has_row_for_each_sample:
                self.of_samples.discard(name)

            # Top-1 is counted only for scores (N, classes), whose classes lie along axis 1.
            # `distances.axes` has the axis of classes of each output.
            axis = self.distances.axes.get(name)
            is_comparable = self.distances.by_output[name].is_comparable
            if axis == 1 and is_comparable and labels is not None:
                self.hits[name].add(expected[name], actual[name], labels)

        # Keep what later measurements need: the first batch with its outputs, and the inputs of the
        # first batches.
        if self.distances.count <= _KEPT:
            self.inputs.append(tensors)
        self.first = self.first or example
        self.outputs = self.outputs or answers
        self.expected = self.expected or expected

    def _of_file(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Run the file on the network's inputs, and return its outputs in order.

        Args:
            tensors: The inputs.

        Raises:
            VerificationError: The file does not run on them.
        """
        example = self.reference.signature.example(tensors)
        with explained(VerificationError, f"{self.what} does not run on {example}"):
            return self.reference.answers(self.runs, tensors)

    def _add_peaks(self, answers: Outputs) -> None:
        """Note the largest absolute value of each output of the network.

        Args:
            answers: The network's outputs by name.
        """
        for name, logits in answers.items():
            if logits.numel():
                # The score of a class that is masked out is -inf.
                peak = logits.double().nan_to_num(0.0, 0.0, 0.0).abs().max()
                self.peaks[name] = max(self.peaks[name], float(peak))

    def _add_change(self, example: Example, expected: Outputs) -> None:
        """Note how far each output moves between two samples of this batch, or of two batches.

        Args:
            example: The call of this batch.
            expected: The outputs that the file must give for this batch.
        """
        for name, value in expected.items():
            # Compare all samples of this batch with its first.
            if value.ndim and len(value) == example.count > 1:
                moved = distance(value, value[:1].expand_as(value)).relative_l2
                self.changes[name] = max(self.changes[name], moved)
                self.changes_in_batch[name] = max(self.changes_in_batch[name], moved)

            # Compare the first samples of this batch and of the very first batch.
            first = self.expected.get(name, value)
            if first.ndim and value.ndim:
                first = first[:1]
                value = value[:1]
            self.changes[name] = max(self.changes[name], distance(first, value).relative_l2)

    def _unproved(self, allowed: dict[str, float]) -> str:
        """Return a reason why this comparison proves nothing about the file, or "" if it does.

        A mistake shows in an output that changes by more than its allowed error between two inputs.

        Args:
            allowed: The relative L2 that is allowed, by output.
        """
        # A file in int8 does not claim to compute what the network does. Nothing is to be proved.
        if self.dtype == "int8":
            return ""
        if min(allowed.values()) >= allowance.PROVES_NOTHING:
            return f"rounding in {self.dtype} moves the output by as much as an error would"

        # With a single sample, or if all samples have one output, the batches show no change. The
        # network was then also run on other values (`_compare_other_values`).
        if not any(change > allowed[name] for name, change in self.changes.items()):
            return "every image gives the same numbers, up to rounding: nothing was compared"
        return ""

    def _is_too_alike(self, allowed: dict[str, float]) -> bool:
        """Whether a file could pass although it is wrong for other samples than the given ones.

        If all samples have the same answer, a file that always gives that answer passes. If no
        batch has two different answers, so does a file that gives every sample of a batch the
        answer of the first one. A file in int8 does not claim to be right.

        Args:
            allowed: The relative L2 that is allowed, by output.
        """
        changes = self.changes_in_batch if self.reference.dynamic_batch else self.changes
        return self.dtype != "int8" and all(changes[name] <= allowed[name] for name in changes)

    def _compare_other_values(self) -> None:
        """Run the network and the file on changed values of the first batch, and compare them.

        A file that takes any number of samples gets these values and the first batch at once. The
        samples are not counted, as they are not the user's.
        """
        assert self.first is not None
        reference = self.reference
        other = None
        for changed in running.with_other_values(self.first):
            joined = _joined(self.first, changed) if reference.dynamic_batch else None
            tensors = tuple((joined or changed).tensors())
            # The forward is the user's, and may refuse other numbers.
            with suppress(NormswapError):
                moved = reference.signature.answers(reference.source, tuple(changed.tensors()))
                answers = reference.signature.answers(reference.source, tensors)
                other = joined or changed
                break
        # If it takes no others, and there are no samples to compare, every output counts as one
        # that depends on the input: its change is infinite.
        if other is None:
            if self.distances.count == 1:
                self.changes = dict.fromkeys(self.changes, math.inf)
            return

        for name, value in reference.expected(moved).items():
            change = distance(self.expected[name], value).relative_l2
            self.changes[name] = max(self.changes[name], change)

        # What the network itself has no answer to is no test of the file. The score of a class that
        # is masked out is -inf.
        if not all(bool((value < math.inf).all()) for value in answers.values()):
            return

        self.with_other_values = other
        self.outputs_on_other_values = answers
        self.inputs.append(tensors)
        expected = reference.expected(answers)
        self._add_rounding(tensors, expected)
        self._add_peaks(answers)
        for (name, value), actual in zip(expected.items(), self._of_file(tensors), strict=True):
            self.of_other_values[name] = distance(value, actual)

    def _error(self, name: str) -> float:
        """Return the relative L2 distance of the file from the network at one output.

        It is the one on changed values if that is larger. The two are not summed: among many
        samples, the few of changed values would not count.

        Args:
            name: The name of the output.
        """
        measured = [self.distances.by_output[name]]
        if name in self.of_other_values:
            measured.append(self.of_other_values[name])
        return max(distance.relative_l2 for distance in measured)

    def _add_rounding(self, tensors: tuple[Tensor, ...], expected: Outputs) -> None:
        """Measure how far rounding to the file's precision moves the outputs of the network.

        Args:
            tensors: The inputs of a batch.
            expected: The outputs that the file must give for this batch.
        """
        rounded = self.reference.rounded
        if rounded is None:
            return
        rounded_outputs = self.reference.answers(rounded, tensors)
        for (name, value), rounded_value in zip(expected.items(), rounded_outputs, strict=True):
            self.rounding[name].add(value, rounded_value)

    def figures(self, described: str) -> Figures:
        """Return how far the file is from the network, over all batches that were added.

        The error belongs to the output that exceeds its allowed error the most. Agreement and top-1
        belong to the answer, if one of the outputs is the answer.

        Args:
            described: The name of the images in reports.
        """
        by_output = self.distances.by_output
        allowed_at = {name: self._allowed(name) for name in by_output}

        def excess(name: str) -> float:
            # A ratio above 1 means that the error is too large. 1e-300 takes the place of an
            # allowed error of 0, by which nothing can be divided.
            return self._error(name) / max(allowed_at[name], 1e-300)

        # A file that is wrong already needs no further test.
        if max(map(excess, by_output)) <= 1 and self._is_too_alike(allowed_at):
            self._compare_other_values()
            allowed_at = {name: self._allowed(name) for name in by_output}

        worst = max(by_output, key=excess)
        relative_l2 = self._error(worst)
        agreement, hits = self._answer_figures()

        # If the error is too large, the file is wrong, and a proof is out of the question.
        unproved = ""
        if relative_l2 <= allowed_at[worst]:
            unproved = self._unproved(allowed_at)

        # A file with labels claims to be exact only if numbers change with the input, too: equal
        # labels do not show that the scores behind them are right.
        labels = [name for name, distance in by_output.items() if distance.are_labels]
        moving_numbers = [
            name
            for name in by_output
            if name not in labels and self.changes[name] > allowed_at[name]
        ]
        claims_exactness = self.dtype != "int8" and bool(moving_numbers or not labels)

        return Figures(
            relative_l2=relative_l2,
            agreement=None if agreement is None else agreement.share,
            count=self.distances.count,
            tolerance=allowed_at[worst],
            inputs=described,
            answers=0 if agreement is None else agreement.places,
            unit="images" if agreement is None else agreement.unit,
            source_top1=hits.top1("source", self.distances.count),
            top1=hits.top1("file", self.distances.count),
            output=worst if len(by_output) > 1 else "",
            exact=claims_exactness,
            unproved=unproved,
            remark=self._remark_on_labels(labels),
        )

    def _answer_figures(self) -> tuple[Agreement | None, _Hits]:
        """Return how often the file agrees with the network, and how often both are right.

        Both are counted at the output that is the network's answer, such as the logits.

        Returns:
            The share of equal answers, or None if no output is the answer or if the share was not
            measured on all samples. And the counts of images whose top class is their label, which
            are 0 if no output is the answer.
        """
        by_output = self.distances.by_output
        # Among several outputs, the answer is told by its name. A single output is the answer.
        names = [name for name in ANSWERS if name in by_output]
        if len(by_output) == 1:
            names = list(by_output)
        # The answer has a row for each sample.
        names = [name for name in names if name in self.of_samples]
        if not names:
            return None, _Hits()

        agreement = self.distances.agreements.get(names[0])
        if agreement is not None and agreement.samples != self.distances.count:
            agreement = None
        return agreement, self.hits[names[0]]

    def _remark_on_labels(self, labels: list[str]) -> str:
        """Return a remark for the user that labels were compared, and not the scores behind them.

        Equal labels hide small errors of the scores. The remark is empty if no output is labels, if
        the file is in int8, and if the labels could not be compared.

        Args:
            labels: The names of the outputs that are labels.
        """
        # The distance of two outputs that are labels is the share of labels that differ. A file in
        # int8 needs no remark, as it does not claim to be exact.
        differing = [self.distances.by_output[name].relative_l2 for name in labels]
        if not labels or self.dtype == "int8" or not math.isfinite(max(differing)):
            return ""
        where = ""
        if len(self.distances.by_output) > 1:
            where = f" of {', '.join(labels[:4])}"
        equal = f"{100 * (1 - max(differing)):.4g} %"
        return f"only labels were compared{where}, not the scores behind them: {equal} are equal"

    def _allowed(self, name: str) -> float:
        """Return the relative L2 error that is allowed at one output of the file.

        Args:
            name: The name of the output.
        """
        if self.dtype == "int8":
            # If the output is labels, the error is the share of labels that differ. Half as many
            # may differ as random guesses would get wrong. Any other output has a fixed limit.
            distance_of_file = self.distances.by_output[name]
            return distance_of_file.of_guesses / 2 if distance_of_file.are_labels else _INT8

        base = allowance.FLOAT32_BASE
        # A softmax enlarges errors: for p = softmax(z), dp / p = dz - sum p dz, so |dp| / |p| <= 2
        # max |dz|. A score of size `peaks` is off by up to `base` times its size.
        if self.reference.softmax:
            base *= max(1.0, 2 * self.peaks[name])
        # Eleven files in half precision were off by 0.1 to 1.4 times what rounding costs.
        cost = self.rounding[name].relative_l2
        allowed = Allowance(self.dtype, base, cost, allowance.ROUNDING).most
        # Measuring how much this network enlarges rounding errors takes several runs of it. So it
        # is measured only if the error exceeds what every network is allowed.
        if self._error(name) <= allowed:
            return allowed
        return Allowance(self.dtype, allowed, self._own_change(name), allowance.STRAYING).most

    def error_of_unfolded(self) -> float:
        """Return the relative L2 error of a file of the network that was written without folding.

        It shows how inexact the runtime itself is. The file is run on the first batches, which were
        kept for this. The result is 0 if such a file is not compared.
        """
        reference = self.reference
        if reference.unfolded is None:
            return 0.0
        distances = OutputDistances("float32")
        with reference.unfolded() as runs:
            for tensors in self.inputs:
                answers = reference.signature.answers(reference.source, tensors)
                expected = reference.expected(answers)
                values = reference.answers(runs, tensors)
                example = reference.signature.example(tensors)
                distances.add(example, expected, dict(zip(expected, values, strict=True)))
        return distances.error().relative_l2

    def _own_change(self, name: str) -> float:
        """Return how far rounding alone moves one output of the network, as a relative L2.

        The network is run in float64, and in its own precision with the last digit of its input or
        of its weights changed. The largest distance of these outputs from the usual ones is
        returned. It is large if the network enlarges rounding errors from block to block.

        Args:
            name: The name of the output.
        """
        assert self.first is not None
        changes = self._own_changes(name, self.first, self.outputs)
        if self.with_other_values is not None:
            other = self.with_other_values
            changes += self._own_changes(name, other, self.outputs_on_other_values)
        # A last digit may change the number of boxes, so that the distance is infinite. Then it
        # says nothing about rounding.
        return max(filter(math.isfinite, changes), default=0.0)

    def _own_changes(self, name: str, example: Example, outputs: Outputs) -> list[float]:
        """Return how far each kind of rounding moves one output of the network on one call.

        Args:
            name: The name of the output.
            example: The call.
            outputs: The network's outputs for this call, by name.
        """
        source = self.reference.source
        answers = self.reference.signature.answers
        # `outputs_double` returns all tensors that the network gives, in order.
        in_double = example.map_floats(Tensor.double)
        double_outputs = list(running.outputs_double(source, in_double).values())

        other_runs = allowance.in_other_digits(source, example, calling.anchor(source).dtype)
        by_last_digit = [
            answers(network, tuple(call.tensors()))[name] for network, call in other_runs
        ]
        others = (double_outputs[self._place(name)], *by_last_digit)
        return [distance(output, outputs[name]).relative_l2 for output in others]

    def _place(self, name: str) -> int:
        """Return the position of an output of the file among all tensors that the network returns.

        Args:
            name: The name of the output.
        """
        assert self.first is not None
        signature = self.reference.signature
        if signature.whole:
            return signature.outputs.index(name)

        # A file that is not `whole` has one output, the network's answer. The network may return
        # other tensors beside it, so the answer is looked for among all of them.
        with torch.no_grad():
            output = self.first.call_on_copies(self.reference.source)
        chosen = answer(output)
        tensors = [value for _, value in named_tensors(output)]
        return next(place for place, value in enumerate(tensors) if value is chosen)


class _Hits:
    """Counts the images whose top class is their label, for the network and for its file.

    `labelled` is the number of images that have a usable label. `right` is the number of them whose
    top class is the label, for `source` and for `file`.
    """

    def __init__(self) -> None:
        self.labelled = 0
        self.right = {"source": 0, "file": 0}

    def add(self, expected: Tensor, actual: Tensor, labels: Tensor) -> None:
        """Count the images of a batch, and how many the source and the file each classify rightly.

        An image is classified rightly if the class with the highest score is its label.

        Args:
            expected: The scores of the source, (N, classes).
            actual: The scores of the file, (N, classes).
            labels: The true classes, (N,). If one of them is no class of the network, the batch is
                left out.
        """
        are_classes = expected.ndim == 2 and bool(
            ((labels >= 0) & (labels < expected.shape[1])).all()
        )
        if not are_classes:
            return
        self.labelled += len(labels)
        for who, scores in (("source", expected), ("file", actual)):
            self.right[who] += int((scores.argmax(1) == labels).sum())

    def top1(self, who: str, count: int) -> float | None:
        """Return the top-1 accuracy of `source` or `file` in percent, or None.

        The result is None unless each of `count` images has a label that is a class of the network.

        Args:
            who: `source` or `file`.
            count: The number of all images, labelled or not.
        """
        # All of at least one image must have a usable label.
        if not self.labelled == count > 0:
            return None
        return 100 * self.right[who] / count


def _joined(first: Example, second: Example) -> Example | None:
    """Return one batch of the samples of two calls, or None if a tensor has no row per sample.

    Args:
        first: A call of a network.
        second: The same call with other values.
    """
    tensors = first.tensors()
    if first.listed or any(not tensor.ndim or len(tensor) != first.count for tensor in tensors):
        return None
    # `map` goes through the tensors of the first call in the order of `tensors`.
    others = iter(second.tensors())
    return first.map(lambda tensor: torch.cat([tensor, next(others)]))


def split(batches: Iterable[Batch], *, singly: bool) -> Iterator[Batch]:
    """Yield the same images with their labels, in batches of other sizes.

    Args:
        batches: Pairs of images and labels, which may be None.
        singly: Whether each image is yielded alone, for a file that takes one at a time. Otherwise
            only the first image of all is yielded alone, so that the file is also tested at another
            batch size.
    """
    for i, (images, labels) in enumerate(batches):
        assert isinstance(images, Tensor)
        sizes = [len(images)]
        if singly:
            sizes = [1] * len(images)
        elif i == 0 and len(images) > 1:
            sizes = [1, len(images) - 1]
        label_parts = [None] * len(sizes) if labels is None else labels.split(sizes)
        yield from zip(images.split(sizes), label_parts, strict=True)
