"""Images that nothing is fitted to: every fourth of the user's, on which source and result are compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn

from normswap.calibration.checked_batches import parts
from normswap.models.calling import Example
from normswap.surgery import comparison, running
from normswap.surgery.report import Kept

EVERY = 4  # every fourth image is held out
MOST = 512  # so many are kept in memory
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"
COPIES = "the held-out calibration images are copies of others: give different ones"
TELLING = 4096  # numbers of each tensor of a sample, by which copies are found


class HeldOutSplit:
    """Calls without every fourth image, which goes to `held`: for fitting, as often as they are read.

    Where a call cannot be parted, every fourth call goes there. Calls are as large as suits the device of the network
    (`checked_batches.parts`). A copy of an image that is fitted to tells nothing of other images: once all are read,
    `held` is without copies, and `copies` is their number. `first` is the first call that is fitted to.
    """

    def __init__(self, batches: Iterable[Example], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.held: list[Example] = []
        self.first: Example | None = None
        self.copies = 0

    def __iter__(self) -> Iterator[Example]:
        self.held, self.first = [], None
        room, known = MOST, set[bytes]()
        for i, batch in enumerate(self.batches):
            if not batch.tensors():
                yield batch  # whoever reads it says what is wrong
                continue
            out = torch.arange(batch.count) % EVERY == EVERY - 1
            held, rest = batch.take(out), batch.take(~out)
            if batch.count < EVERY or held is None:
                held, rest = (batch, None) if i % EVERY == EVERY - 1 else (None, batch)
            if held is not None and room > 0:
                kept = held.first(room)
                self.held += parts(kept, self.device)
                room -= kept.count
            if rest is not None:
                known.update(_marks(rest))
                calls = parts(rest, self.device)
                self.first = self.first or calls[0]
                yield from calls
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


def measured(source: nn.Module, result: nn.Module, held: Iterable[Example], *, scores: bool = True) -> Kept | None:
    """How far both networks agree on these batches of images; None without any.

    Args:
        scores: whether scores of classes come out. The largest of an encoder's features is no answer.

    Raises:
        VerificationError: one of them does not run.
    """
    errors, counts = [], []
    for example in held:
        pair = running.both(source, result, example.like(source))
        assert pair is not None  # there is no other size
        (before, _), (after, _) = pair
        errors.append(comparison.worst("", example.images, before, after, exact=False))
        counts.append(example.count)
    total = sum(counts)
    if not total:
        return None
    relative_l2 = (sum(n * error.relative_l2**2 for n, error in zip(counts, errors, strict=True)) / total) ** 0.5
    shares = [error.agreement for error in errors if scores and error.agreement is not None]
    if len(shares) < len(errors):
        return Kept(None, relative_l2, total)
    return Kept(sum(n * share for n, share in zip(counts, shares, strict=True)) / total, relative_l2, total)
