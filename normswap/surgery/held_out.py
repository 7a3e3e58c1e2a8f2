"""Images that nothing is fitted to: every fourth of the user's, on which source and result are compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from normswap.calibration.checked_batches import parts
from normswap.models.calling import Example
from normswap.surgery import comparison, running
from normswap.surgery.report import Kept

# Every fourth image is held out, and at most so many are kept in memory.
EVERY, MOST = 4, 512
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"


class HeldOutSplit:
    """The calls to fit to, which can be iterated repeatedly. Every fourth image is held out of them, in `held`.

    Of calls that cannot be split, every fourth one is held out. Calls are cut to a size that suits the device
    (`checked_batches.parts`). After an iteration `held` no longer has copies of images that were fitted to, and
    `copies` is their number.
    """

    def __init__(self, batches: Iterable[Example], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self.held: list[Example] = []
        self.copies = 0

    def __iter__(self) -> Iterator[Example]:
        self.held, room = [], MOST
        fitted_to: set[bytes] = set()
        position = 0
        for i, batch in enumerate(self.batches):
            if not batch.tensors():
                yield batch
                continue
            out = torch.arange(position, position + batch.count) % EVERY == EVERY - 1
            position += batch.count
            held_out, fitted = batch.take(out), batch.take(~out)
            if held_out is None and fitted is None:
                held_out, fitted = (batch, None) if i % EVERY == EVERY - 1 else (None, batch)
            if held_out is not None and room > 0:
                first = held_out.first(room)
                self.held += parts(first, self.device)
                room -= first.count
            if fitted is not None:
                fitted_to.update(_hashes(fitted))
                yield from parts(fitted, self.device)
        count = sum(call.count for call in self.held)
        self.held = [different for call in self.held if (different := _without(call, fitted_to)) is not None]
        self.copies = count - sum(call.count for call in self.held)


def _hashes(call: Example) -> list[bytes]:
    """What tells each sample from others; nothing of a call that cannot be parted."""
    if call.listed or any(tensor.ndim == 0 or len(tensor) != call.count for tensor in call.tensors()):
        return []
    rows = zip(*(tensor.cpu().double().numpy() for tensor in call.tensors()), strict=True)
    return [hashlib.sha256(b"".join(value.tobytes() for value in row)).digest() for row in rows]


def _without(call: Example, seen: set[bytes]) -> Example | None:
    """The samples that do not stand in `seen`, which they join; None where there are none."""
    hashes = _hashes(call)
    if not hashes:
        return call
    new = torch.tensor([mark not in seen and mark not in hashes[:i] for i, mark in enumerate(hashes)])
    seen.update(hashes)
    return call.take(new)


def measured(source: nn.Module, result: nn.Module, held: Iterable[Example], *, scores: bool = True) -> Kept | None:
    """How far both networks agree on these batches of images; None without any.

    Args:
        scores: whether scores of classes come out. The largest of an encoder's features is no answer.

    Raises VerificationError: one of them does not run.
    """
    errors, counts, sizes = [], [], []
    for example in held:
        pair = running.both(source, result, example.like(source))
        assert pair is not None, "there is no second size"
        (before, _), (after, _) = pair
        errors.append(comparison.worst("", example.images, before, after, exact=False))
        counts.append(example.count)
        floats = [value.double().nan_to_num(0.0, 0.0, 0.0) for value in before.values() if value.is_floating_point()]
        sizes.append(sum(float(value.square().sum()) for value in floats) or example.count)
    total = sum(counts)
    if not total:
        return None
    off = sum(size * error.relative_l2**2 for size, error in zip(sizes, errors, strict=True))
    relative_l2 = (off / sum(sizes)) ** 0.5
    shares = [error.agreement for error in errors if scores and error.agreement is not None]
    if len(shares) < len(errors):
        return Kept(None, relative_l2, total)
    return Kept(sum(n * share for n, share in zip(counts, shares, strict=True)) / total, relative_l2, total)
