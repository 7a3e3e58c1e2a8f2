"""Held-out images: every fourth of the user's, on which source and result are compared."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normswap.calibration.checked_batches import hashes, parts, without_copies
from normswap.graph.anatomy import Anatomy
from normswap.models.calling import Example
from normswap.proof import running
from normswap.proof.distance import OutputDistances

# Every fourth image is held out.
EVERY = 4
# At most so many held-out images stay in memory.
MOST = 512
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"


@dataclass(frozen=True)
class Kept:
    """How well the answers of source and result agree on held-out images, without labels.

    Args:
        agreement: The share of images, or of places in maps, with the same argmax. None if no
            output is scores of classes.
        relative_l2: The distance |result - source| / |source| at the outputs.
        count: The number of images.
        answer: The output and axis that the argmax is taken of, in words, such as "the largest of
            21 on axis 1 of out". Of several outputs it is the one that agrees least, followed by
            the agreement of the others.
        axis: The axis of the argmax. None where outputs have names.
    """

    agreement: float | None
    relative_l2: float
    count: int
    answer: str = ""
    axis: int | None = None

    @property
    def least(self) -> float | None:
        """The lower bound of the agreement with 97.5 % confidence. None if there is no agreement.

        Source: Wilson 1927, as Brown et al. 2001, equation 4. The places of one map are not
        independent of one another, so for maps the bound is too high.
        """
        if self.agreement is None:
            return None
        # z for 97.5 %, n images, and the share p on which the answers are the same.
        z = 1.96
        n = self.count
        p = self.agreement
        middle = p + z * z / (2 * n)
        spread = z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
        return float((middle - spread) / (1 + z * z / n))

    @property
    def least_percent(self) -> int | None:
        """The lower bound of the agreement (`least`) in whole percent, or None if there is none.

        It is rounded down, so that it is still a lower bound.
        """
        return None if self.least is None else math.floor(100 * self.least)

    def __str__(self) -> str:
        images = f"{self.count} held-out images"
        distance = f"relative L2 {self.relative_l2:.1e}"
        if self.agreement is None or self.least is None:
            return f"{distance} on {images}"

        sure = f"at least {self.least_percent} %, with 97.5 % confidence"
        # The text says which output was compared, unless it is a classifier's scores (axis 1).
        compared = ""
        if self.answer and self.axis != 1:
            compared = f", {self.answer}"
        return (
            f"same prediction on {100 * self.agreement:.1f} % of {images} ({sure}{compared}),"
            f" {distance}"
        )


class HeldOutSplit:
    """Iterates over the calls that values are fitted to, and holds out every fourth image.

    It can be iterated repeatedly. Calls are cut to a size that suits the device
    (`checked_batches.parts`). A call that cannot be split into samples is fitted to or held out as
    a whole: the fourth call is held out, the eighth, and so on.

    Args:
        batches: The calls.
        device: The device that the network runs on.
        whole: Whether calls stay whole, for a network whose forward fixes its number of images.

    Attributes:
        held: The calls that were held out, after an iteration. Copies of images that were fitted
            to, or of one another, are left out. A call that stays whole is left out if all of its
            images are copies.
        copies: How many such copies were left out.
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
        """Yield the calls to fit values to. When all are read, `held` has the held-out calls."""
        self.held = []
        # The number of images that can still be held out.
        room = MOST
        # The hashes of the images that values are fitted to.
        fitted_to: set[bytes] = set()

        # The number of images in the calls before.
        position = 0
        for i, batch in enumerate(self.batches):
            # A call without tensors has nothing to hold out.
            if not batch.tensors():
                yield batch
                continue

            # With `whole`, calls stay as they are. Otherwise they are cut into parts of few images.
            held_out, fitted = self._split(batch, i, position)
            position += batch.count
            if held_out is not None and room > 0:
                first = held_out if self.whole else held_out.first(room)
                self.held += [first] if self.whole else parts(first, self.device)
                room -= first.count
            if fitted is not None:
                fitted_to.update(hashes(fitted))
                yield from [fitted] if self.whole else parts(fitted, self.device)

        # The result was fitted to an image, so a held-out copy of it says nothing about other
        # images. The copies are dropped, and those of images that were held out before.
        count = sum(call.count for call in self.held)
        different = [without_copies(call, fitted_to, whole=self.whole) for call in self.held]
        self.held = [call for call in different if call is not None]
        self.copies = count - sum(call.count for call in self.held)

    def _split(
        self, batch: Example, index: int, position: int
    ) -> tuple[Example | None, Example | None]:
        """Return the part of a call that is held out, and the part that values are fitted to.

        A part is None if no image is in it.

        Args:
            batch: The call.
            index: The number of calls before it.
            position: The number of images in the calls before it.
        """
        # Of every `EVERY` images, the last is held out. `take` returns the marked images, or None
        # if none is marked, and also if the call cannot be split.
        is_held_out = torch.arange(position, position + batch.count) % EVERY == EVERY - 1
        held_out = None if self.whole else batch.take(is_held_out)
        fitted = None if self.whole else batch.take(~is_held_out)
        if held_out is not None or fitted is not None:
            return held_out, fitted

        # A call that cannot be split is held out or fitted to as a whole.
        is_fourth_call = index % EVERY == EVERY - 1
        return (batch, None) if is_fourth_call else (None, batch)


def measured(
    source: nn.Module, result: nn.Module, held: Iterable[Example], anatomy: Anatomy | None = None
) -> Kept | None:
    """Return how well the outputs of both networks agree on some calls. None if there are no calls.

    Args:
        source: The source.
        result: The converted network.
        held: The calls that were held out.
        anatomy: The source's recorded structure, which tells scores of classes from other outputs.

    Raises:
        VerificationError: One of the networks does not run.
    """
    # No error is reported from here, so no precision is named. `like` gives a call the network's
    # device and dtype.
    distances = OutputDistances("", exact=False, anatomy=anatomy)
    for example in held:
        pair = running.both(source, result, example.like(source))
        # It is None only for a call of another size than the first. Here each call is the first.
        assert pair is not None, "there is no second size"
        (before, _), (after, _) = pair
        distances.add(example, before, after)

    if not distances.count:
        return None
    agreement, answer = distances.least_agreement()
    relative_l2 = distances.error().relative_l2
    return Kept(agreement, relative_l2, distances.count, answer, distances.axis)
