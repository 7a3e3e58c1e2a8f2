"""The agreement of an approximate conversion, measured on images that nothing was fitted to.

A quarter of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from normswap.calibration.checked_batches import parts
from normswap.models.calling import Example

EVERY = 4  # every fourth image is held out
MOST = 512  # so many are kept in memory
OTHERS = 192  # and so many of the rest, for their margins: three to one if there are 256
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"
NONE = "no calibration image was held out to measure on"
COPIES = "the held-out calibration images are copies of others: give different ones"
TELLING = 4096  # numbers of each tensor of a sample, by which copies are found


@dataclass(frozen=True)
class Kept:
    """How far the answers of source and result go together on held-out images, without labels.

    Args:
        agreement: share of images, or of places in maps, with the same argmax; None where there is no such thing.
        relative_l2: at the outputs.
        count: of images.
        right: the result's expected accuracy as a share of the source's, where the images tell it
            (`expected_accuracy`).
        right_least: the least that it is.
        of: what images they are.
    """

    agreement: float | None
    relative_l2: float
    count: int
    right: float | None = None
    right_least: float | None = None
    of: str = "calibration images"

    @property
    def least(self) -> float | None:
        """The least agreement with 97.5 % confidence (Wilson 1927, as Brown et al. 2001, equation 4).

        Places of one image go together: for maps the bound is too high.
        """
        if self.agreement is None:
            return None
        z, n, p = 1.96, self.count, self.agreement
        middle, spread = p + z * z / (2 * n), z * (p * (1 - p) / n + (z / (2 * n)) ** 2) ** 0.5
        return float((middle - spread) / (1 + z * z / n))


def accuracy_text(right: float | None, least: float | None) -> str:
    """Say what share of the source's accuracy is expected, and the least; empty where nothing is known."""
    if least is None:
        return ""
    bound = f"at least {math.floor(100 * least)} %"  # never more than is known
    return bound if right is None else f"{100 * right:.1f} % ({bound})"


class Dealt:
    """Calls without every fourth image, which goes to `held`: for fitting, as often as they are read.

    Of what cannot be parted every fourth call goes there. `others` are the first of those that are fitted to. Calls are
    as large as suits the device of the network (`checked_batches.parts`). A copy of an image that is fitted to tells
    nothing of others: once all are read, `held` is without them, and `copies` says how many there were.
    """

    def __init__(self, batches: Iterable[Example], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.held: list[Example] = []
        self.others: list[Example] = []
        self.copies = 0

    def __iter__(self) -> Iterator[Example]:
        self.held, self.others = [], []
        room, more, known = MOST, OTHERS, set[bytes]()
        for i, batch in enumerate(self.batches):
            if not batch.tensors():
                yield batch  # whoever reads it says what is wrong
                continue
            out = torch.arange(batch.count) % EVERY == EVERY - 1
            held, rest = batch.take(out), batch.take(~out)
            if batch.count < EVERY or held is None:
                held, rest = (batch, None) if i % EVERY == EVERY - 1 else (None, batch)
            if held is not None and room > 0:
                first = held.first(room)
                self.held += parts(first, self.device)
                room -= first.count
            if rest is not None:
                known.update(_marks(rest))
                if more > 0:
                    first = rest.first(more)
                    self.others += parts(first, self.device)
                    more -= first.count
                yield from parts(rest, self.device)
        held_out = sum(part.count for part in self.held)
        self.held = [left for part in self.held if (left := _without(part, known)) is not None]
        self.copies = held_out - sum(part.count for part in self.held)


def _marks(batch: Example) -> list[bytes]:
    """Numbers of each sample that tell it from others; of what cannot be parted, all of it and the sample's place."""
    rows = [tensor.flatten(1) if tensor.ndim > 1 else tensor[:, None] for tensor in batch.tensors() if tensor.ndim]
    if batch.listed or any(len(row) != batch.count for row in rows):
        rows = [torch.cat([row.flatten() for row in rows]).expand(batch.count, -1), torch.arange(batch.count)[:, None]]
    numbers = [row[:, :: max(row.shape[1] // TELLING, 1)].cpu().double().numpy() for row in rows]
    return [b"".join(row[i].tobytes() for row in numbers) for i in range(batch.count)]


def _without(batch: Example, known: set[bytes]) -> Example | None:
    """The samples that are not known yet, which are known then; None where there are none."""
    new = []
    for mark in _marks(batch):
        new.append(mark not in known)
        known.add(mark)
    return batch.take(torch.tensor(new)) if any(new) else None


def summed(parts: Iterable[tuple[int, float, float | None]]) -> Kept | None:
    """One figure of several batches' (images, relative L2, agreement); None of none."""
    rows = list(parts)
    count = sum(images for images, _, _ in rows)
    if not count:
        return None
    error = (sum(images * l2**2 for images, l2, _ in rows) / count) ** 0.5
    known = [(images, share) for images, _, share in rows if share is not None]
    agreement = sum(images * share for images, share in known) / count if len(known) == len(rows) else None
    return Kept(agreement, error, count)
