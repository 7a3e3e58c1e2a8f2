"""PROVE, for files: what a file computes in its own runtime, against the PyTorch network it was made from.

As in `comparison`, a float32 file may be off by 1e-5 or, where float32 itself costs the source more than that (a
network whose rounding errors grow from block to block, as random ones' do and trained ones' do not), by four times what
the source is off from its own float64 values. That is measured only if 1e-5 is exceeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normswap.errors import OptionError, VerificationError, first_line
from normswap.exporting.formats import Given, Runs
from normswap.exporting.signature import Signature, together
from normswap.models.calling import Example
from normswap.models.network_input import ANSWERS, answer
from normswap.surgery import comparison, running

# relative L2 at the logits. fp16 weights and arithmetic cost deep networks up to 4.4e-3, bf16 weights up to 1.1e-2
# (tests/lab/benchmarks/export.md): the bounds are two to three times that. What int8 may cost is the user's to say
# (`--max-drop`); zeros are off by 1
TOLERANCE = {"fp32": comparison.FLOAT32_TOLERANCE, "fp16": 1e-2, "bf16": 3e-2, "int8": 1.0}
Batch = tuple[Given, Tensor | None]  # images (N, C, H, W), or all that goes in, and labels (N,) if there are any


@dataclass(frozen=True)
class Figures:
    """How far a file is from the network it was made from.

    Args:
        relative_l2: |file - source| / |source|, over the answers to all images.
        largest: max |file - source| / max |source|.
        agreement: fraction of images, or of places in maps, with the same argmax, where there is one answer; count: of
            how many images.
        tolerance: what relative_l2 may be.
        inputs: what both were run on.
        source_top1, top1: in percent, of source and file, where the images have labels.
        output: of several outputs the one that differs most, which the errors are of.
    """

    relative_l2: float
    largest: float
    agreement: float | None
    count: int
    tolerance: float
    inputs: str
    source_top1: float | None = None
    top1: float | None = None
    output: str = ""


def check(
    source: nn.Module,
    runs: Runs,
    batches: Iterable[Batch],
    signature: Signature | None = None,
    *,
    dtype: str = "fp32",
    softmax: bool = False,
    raw: Callable[[Tensor], Tensor] = lambda images: images,
    described: str = "given images",
) -> Figures:
    """Run both on the same images and compare.

    Args:
        batches: images (N, C, H, W), preprocessed for `source`, or all that goes in, and their labels.
        signature: what goes in and comes out; by default images and an answer.
        raw: from those to what the file wants.

    Raises:
        VerificationError: the file computes something else, or does not run.
    """
    signature = signature or Signature.of_images(source, "logits")
    every = {name: _Sums() for name in signature.outputs}
    first: Example | None = None
    for batch, labels in batches:
        x = together(batch)
        example = signature.example(x)
        if not example.count:
            continue
        first = first or example
        answers = signature.answers(source, x)
        try:
            got = together(runs(raw(x[0]), *x[1:]))
        except Exception as error:  # every runtime has its own
            raise VerificationError(f"the exported file does not run on {example}", first_line(error)) from None
        if len(got) != len(answers):
            raise VerificationError(f"the exported file gives {len(got)} tensors", f"the network gives {len(answers)}")
        for (name, logits), own in zip(answers.items(), got, strict=True):
            every[name].add(example.count, logits, logits.softmax(-1) if softmax else logits, own, labels)
    if first is None:
        raise OptionError("no images to check the file on")
    name, sums = max(every.items(), key=lambda pair: pair[1].relative_l2)
    allowed = TOLERANCE[dtype]
    if softmax:  # dp / p = dz - sum p dz, so that |dp| / |p| <= 2 max |dz|
        allowed *= max(1.0, 2 * sums.peak)
    if dtype == "fp32" and sums.relative_l2 > allowed:
        allowed = max(allowed, 4 * _stray(source, first, signature, name, sums))
    if not sums.relative_l2 <= allowed:
        where = f" at {name}" if len(every) > 1 else ""
        raise VerificationError(
            f"the exported file computes something else: relative L2 error {sums.relative_l2:.1e}{where}, "
            f"allowed {allowed:.1e}",
            remedy="Nothing was written",
        )
    told = next((every[one] for one in ANSWERS if one in every), sums if len(every) == 1 else _Sums())
    return Figures(
        sums.relative_l2, sums.largest / (sums.top or 1.0), told.agreement, sums.count, allowed, described,
        told.hits("source"), told.hits("file"), name if len(every) > 1 else "",
    )  # fmt: skip


def _stray(source: nn.Module, first: Example, signature: Signature, name: str, sums: _Sums) -> float:
    """How far the source itself is from its own float64 values (a chaotic network), on the first batch."""
    outputs = running.outputs_double(source, running.double(first))
    wide = list(outputs.values())[signature.outputs.index(name)] if signature.whole else answer(outputs)
    assert sums.first is not None
    precise = wide.double().flatten()
    return float((precise - sums.first.flatten()).norm() / precise.norm())


class _Sums:
    """What is gathered over the batches."""

    def __init__(self) -> None:
        self.off = self.whole = self.largest = self.top = self.peak = self.same = 0.0
        self.count = self.argued = 0
        self.first: Tensor | None = None
        self.right = {"source": 0, "file": 0}
        self.labelled = 0

    def add(self, count: int, logits: Tensor, expected: Tensor, got: Tensor, labels: Tensor | None) -> None:
        self.first = logits if self.first is None else self.first
        self.count += count
        self.peak = max(self.peak, _largest(logits))
        self.top = max(self.top, _largest(expected))
        self.whole += float(expected.double().square().sum())
        if expected.shape != got.shape or not bool(torch.isfinite(got).all()):
            self.off = self.largest = math.inf
            return
        difference = (expected - got).double()
        self.off += float(difference.square().sum())
        self.largest = max(self.largest, _largest(difference))
        if expected.ndim < 2 or expected.shape[1] < 2 or len(expected) != count:
            return
        self.argued += count
        same = (expected.argmax(1) == got.argmax(1)).double()
        self.same += float(same.sum()) * count / same.numel()
        if labels is not None and expected.ndim == 2 and bool(((labels >= 0) & (labels < expected.shape[1])).all()):
            self.labelled += count
            for who, scores in (("source", expected), ("file", got)):
                self.right[who] += int((scores.argmax(1) == labels).sum())

    def hits(self, who: str) -> float | None:
        """Top-1 in percent; None unless all images have a label that is a class of the network."""
        return 100 * self.right[who] / self.count if self.labelled == self.count > 0 else None

    @property
    def agreement(self) -> float | None:
        """None where it is no row of scores per image."""
        return self.same / self.count if self.argued == self.count > 0 else None

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.off / max(self.whole, 1e-300))


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if values.numel() else 0.0


def pictures(size: tuple[int, int, int], mean: Tensor, std: Tensor, *, count: int = 16, seed: int = 0) -> Tensor:
    """Inputs (count, C, H, W) that are smooth as images are: noise of many scales, in 0..1, then normalized
    by mean and std (C, 1, 1).
    """
    generator = torch.Generator().manual_seed(seed)
    channels, height, width = size
    total = torch.zeros(count, channels, height, width)
    side = 2
    while side <= 2 * max(height, width):
        grid = torch.randn(count, channels, min(side, height), min(side, width), generator=generator)
        total += F.interpolate(grid, (height, width), mode="bilinear", align_corners=False) / side**0.5
        side *= 2
    return (torch.sigmoid(2 * total) - mean) / std


def split(batches: Iterable[Batch], size: int | None) -> Iterator[Batch]:
    """The same images, `size` at a time; None: as they come, but of more than one size (a short one first)."""
    for i, (images, labels) in enumerate(batches):
        assert isinstance(images, Tensor)
        if size is None and (i or len(images) < 2):
            yield images, labels
            continue
        cuts = [size] * (len(images) // size) if size else [1, len(images) - 1]
        cuts += [rest] if (rest := len(images) - sum(cuts)) else []
        parts = [None] * len(cuts) if labels is None else labels.split(cuts)
        yield from zip(images.split(cuts), parts, strict=True)
