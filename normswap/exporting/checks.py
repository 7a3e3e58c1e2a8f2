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
from normswap.exporting.formats import Runs
from normswap.models import calling
from normswap.models.network_input import answer
from normswap.surgery import comparison, running

# relative L2 at the logits. fp16 weights and arithmetic cost deep networks up to 4.4e-3, bf16 weights up to 1.1e-2
# (tests/benchmarks/export.md): the bounds are two to three times that. What int8 may cost is the user's to say
# (`--max-drop`); zeros are off by 1
TOLERANCE = {"fp32": comparison.FLOAT32_TOLERANCE, "fp16": 1e-2, "bf16": 3e-2, "int8": 1.0}
Batch = tuple[Tensor, Tensor | None]  # images (N, C, H, W), and labels (N,) if there are any
_OTHERS = "Only networks with one answer are exported. Convert this one to 'folded', and export that with its own tools"


@dataclass(frozen=True)
class Figures:
    """How far a file is from the network it was made from.

    Args:
        relative_l2: |file - source| / |source|, over the answers to all images.
        largest: max |file - source| / max |source|.
        agreement: fraction of images, or of places in maps, with the same argmax; count: of how many images.
        tolerance: what relative_l2 may be.
        inputs: what both were run on.
        source_top1, top1: in percent, of source and file, where the images have labels.
    """

    relative_l2: float
    largest: float
    agreement: float
    count: int
    tolerance: float
    inputs: str
    source_top1: float | None = None
    top1: float | None = None


def check(
    source: nn.Module,
    runs: Runs,
    batches: Iterable[Batch],
    *,
    dtype: str = "fp32",
    softmax: bool = False,
    raw: Callable[[Tensor], Tensor] = lambda images: images,
    described: str = "given images",
) -> Figures:
    """Run both on the same images and compare.

    Args:
        batches: images (N, C, H, W), preprocessed for `source`, and their labels.
        raw: from those to what the file wants.

    Raises:
        VerificationError: the file computes something else, or does not run.
    """
    sums = _Sums()
    for x, labels in batches:
        logits = answers(source, x)
        try:
            got = runs(raw(x))
        except Exception as error:  # every runtime has its own
            raise VerificationError(f"the exported file does not run on {tuple(x.shape)}", first_line(error)) from None
        sums.add(x, logits, logits.softmax(-1) if softmax else logits, got, labels)
    if not sums.count:
        raise OptionError("no images to check the file on")
    allowed = TOLERANCE[dtype]
    if softmax:  # dp / p = dz - sum p dz, so that |dp| / |p| <= 2 max |dz|
        allowed *= max(1.0, 2 * sums.peak)
    if dtype == "fp32" and sums.relative_l2 > allowed:
        allowed = max(allowed, 4 * sums.stray(source))
    if not sums.relative_l2 <= allowed:
        raise VerificationError(
            f"the exported file computes something else: relative L2 error {sums.relative_l2:.1e}, "
            f"allowed {allowed:.1e}",
            remedy="Nothing was written",
        )
    return Figures(
        sums.relative_l2, sums.largest / sums.top, sums.same / sums.count, sums.count, allowed, described,
        sums.hits("source"), sums.hits("file"),
    )  # fmt: skip


class _Sums:
    """What is gathered over the batches."""

    def __init__(self) -> None:
        self.off = self.whole = self.largest = self.top = self.peak = self.same = 0.0
        self.count = 0
        self.first: tuple[Tensor, Tensor] | None = None
        self.right = {"source": 0, "file": 0}
        self.labelled = 0

    def add(self, x: Tensor, logits: Tensor, expected: Tensor, got: Tensor, labels: Tensor | None) -> None:
        self.first = self.first or (x, logits)
        self.count += len(x)
        self.peak = max(self.peak, float(logits.abs().max()))
        self.top = max(self.top, float(expected.abs().max()))
        self.whole += float(expected.double().square().sum())
        if expected.shape != got.shape or not bool(torch.isfinite(got).all()):
            self.off = self.largest = math.inf
            return
        difference = (expected - got).double()
        self.off += float(difference.square().sum())
        self.largest = max(self.largest, float(difference.abs().max()))
        same = (expected.argmax(1) == got.argmax(1)).double()
        self.same += float(same.sum()) * len(x) / same.numel()
        if labels is not None and expected.ndim == 2 and bool(((labels >= 0) & (labels < expected.shape[1])).all()):
            self.labelled += len(x)
            for who, scores in (("source", expected), ("file", got)):
                self.right[who] += int((scores.argmax(1) == labels).sum())

    def hits(self, who: str) -> float | None:
        """Top-1 in percent; None unless all images have a label that is a class of the network."""
        return 100 * self.right[who] / self.count if self.labelled == self.count else None

    @property
    def relative_l2(self) -> float:
        return math.sqrt(self.off / max(self.whole, 1e-300))

    def stray(self, source: nn.Module) -> float:
        """How far the source itself is from its own float64 values (a chaotic network), on the first batch."""
        assert self.first is not None
        x, logits = self.first
        outputs = running.outputs_double(source, calling.Example((x.double(),)))
        precise = answer(outputs).flatten(1)
        return float((precise - logits.flatten(1)).norm() / precise.norm())


@torch.no_grad()
def answers(source: nn.Module, x: Tensor) -> Tensor:
    """What the source computes for `x`, in float32: its answer, where it gives several things.

    Raises:
        OptionError: it does not run on that, or does not give one tensor.
    """
    try:
        output = answer(source(x))
    except (RuntimeError, AssertionError, ValueError, TypeError) as error:
        why = first_line(error)
        raise OptionError(f"the network does not run on an input of size {_size(x)}", why) from None
    except OptionError as error:
        raise OptionError(error.what, error.why, _OTHERS) from None
    if output.ndim < 2 or len(output) != len(x):
        raise OptionError("the network does not give one tensor, a row per image", remedy=_OTHERS)
    return output.float()


def _size(x: Tensor) -> str:
    return ",".join(map(str, x.shape[1:]))


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
        if size is None and (i or len(images) < 2):
            yield images, labels
            continue
        cuts = [size] * (len(images) // size) if size else [1, len(images) - 1]
        cuts += [rest] if (rest := len(images) - sum(cuts)) else []
        parts = [None] * len(cuts) if labels is None else labels.split(cuts)
        yield from zip(images.split(cuts), parts, strict=True)
