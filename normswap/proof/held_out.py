"""Held-out images: every fourth of the user's, on which source and result are compared."""

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normswap.calibration.checked_batches import parts
from normswap.graph.anatomy import Anatomy
from normswap.models.calling import Example
from normswap.proof import running
from normswap.proof.distance import OutputDistances

# Every fourth image is held out, and at most so many stay in memory.
EVERY = 4
MOST = 512
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"


@dataclass(frozen=True)
class Kept:
    """How well the answers of source and result agree on held-out images, without labels.

    Args:
        agreement: The share of images, or of places in maps, with the same argmax. None where the
            outputs have no argmax.
        relative_l2: The distance |result - source| / |source| at the outputs.
        count: The number of images.
        answer: The output that the argmax is taken of. Of several outputs it is the one that agrees
            least, with the agreement of the others.
        axis: The axis of the argmax. None where outputs have names.
    """

    agreement: float | None
    relative_l2: float
    count: int
    answer: str = ""
    axis: int | None = None

    @property
    def least(self) -> float | None:
        """The least agreement with 97.5 % confidence.

        Source: Wilson 1927, as Brown et al. 2001, equation 4. Places of one image go together: for
        maps the bound is too high.
        """
        if self.agreement is None:
            return None
        z = 1.96
        n = self.count
        p = self.agreement
        middle = p + z * z / (2 * n)
        spread = z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
        return float((middle - spread) / (1 + z * z / n))

    @property
    def least_percent(self) -> int | None:
        """The least agreement in whole percent, rounded down, so that it stays a bound."""
        return None if self.least is None else math.floor(100 * self.least)

    def __str__(self) -> str:
        images = f"{self.count} held-out images"
        distance = f"relative L2 {self.relative_l2:.1e}"
        if self.agreement is None or self.least is None:
            return f"{distance} on {images}"
        sure = f"97.5 % sure: at least {self.least_percent} %"
        # A classifier's scores, on axis 1, need no word.
        answer = f", {self.answer}" * bool(self.answer and self.axis != 1)
        return (
            f"same prediction on {100 * self.agreement:.1f} % of {images} ({sure}{answer}),"
            f" {distance}"
        )


class HeldOutSplit:
    """The calls to fit to; every fourth image is held out, and stands in `held`.

    It can be iterated repeatedly. Of calls that cannot be split, every fourth call is held out; so
    too with `whole`, for a network whose forward fixes its number of images. Calls are cut to a
    size that suits the device (`checked_batches.parts`). After an iteration, `held` is without the
    `copies` of images that were fitted to.
    """

    def __init__(
        self, batches: Iterable[Example], device: torch.device, *, whole: bool = False
    ) -> None:
        self.batches = batches
        self.whole = whole
        self.device = device
        self.held: list[Example] = []
        self.copies = 0

    def __iter__(self) -> Iterator[Example]:
        self.held = []
        room = MOST
        fitted_to: set[bytes] = set()

        position = 0
        for i, batch in enumerate(self.batches):
            if not batch.tensors():
                yield batch
                continue

            out = torch.arange(position, position + batch.count) % EVERY == EVERY - 1
            position += batch.count
            held_out = None if self.whole else batch.take(out)
            fitted = None if self.whole else batch.take(~out)

            if held_out is None and fitted is None:
                held_out, fitted = (batch, None) if i % EVERY == EVERY - 1 else (None, batch)
            if held_out is not None and room > 0:
                first = held_out if self.whole else held_out.first(room)
                self.held += [first] if self.whole else parts(first, self.device)
                room -= first.count

            if fitted is not None:
                fitted_to.update(_hashes(fitted))
                yield from [fitted] if self.whole else parts(fitted, self.device)

        count = sum(call.count for call in self.held)
        if not self.whole:
            different = (_without(call, fitted_to) for call in self.held)
            self.held = [call for call in different if call is not None]
        self.copies = count - sum(call.count for call in self.held)


def _hashes(call: Example) -> list[bytes]:
    """A hash of each sample; none of a call that cannot be split."""
    if call.listed or any(
        tensor.ndim == 0 or len(tensor) != call.count for tensor in call.tensors()
    ):
        return []
    rows = zip(*(tensor.cpu().double().numpy() for tensor in call.tensors()), strict=True)
    return [hashlib.sha256(b"".join(value.tobytes() for value in row)).digest() for row in rows]


def _without(call: Example, fitted_to: set[bytes]) -> Example | None:
    """Return the samples of a call that were not fitted to, or None if all were.

    The hashes of those samples are added to `fitted_to`, so that each counts once.
    """
    hashes = _hashes(call)
    if not hashes:
        return call
    new = torch.tensor(
        [mark not in fitted_to and mark not in hashes[:i] for i, mark in enumerate(hashes)]
    )
    fitted_to.update(hashes)
    return call.take(new)


def measured(
    source: nn.Module, result: nn.Module, held: Iterable[Example], anatomy: Anatomy | None = None
) -> Kept | None:
    """The agreement of both networks on these calls, or None without calls.

    `anatomy`, the source's, tells scores of classes from other outputs.

    Raises:
        VerificationError: One of the networks does not run.
    """
    distances = OutputDistances("", exact=False, anatomy=anatomy)
    for example in held:
        pair = running.both(source, result, example.like(source))
        assert pair is not None, "there is no second size"
        (before, _), (after, _) = pair
        distances.add(example, before, after)

    if not distances.count:
        return None
    agreement, answer = distances.least_agreement()
    relative_l2 = distances.error().relative_l2
    return Kept(agreement, relative_l2, distances.count, answer, distances.axis)
