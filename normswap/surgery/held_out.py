"""Held-out images: every fourth of the user's, on which source and result are compared."""

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from normswap.calibration.checked_batches import parts
from normswap.graph.anatomy import Anatomy
from normswap.models.calling import Example
from normswap.surgery import comparison, running
from normswap.surgery.report import Kept

# Every fourth image is held out, and at most so many stay in memory.
EVERY = 4
MOST = 512
TOO_FEW = "too few calibration images to hold out every fourth and measure on it: give 25 or more"


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
    off = size = 0.0
    count = 0
    axis = None
    same = defaultdict[str, float](float)

    compared = defaultdict[str, int](int)
    for example in held:
        pair = running.both(source, result, example.like(source))
        assert pair is not None, "there is no second size"

        (before, _), (after, _) = pair
        error = comparison.worst("", example.images, before, after, exact=False)
        floats = [
            value.double().nan_to_num(0.0, 0.0, 0.0)
            for value in before.values()
            if value.is_floating_point()
        ]
        squares = sum(float(value.square().sum()) for value in floats) or example.count
        off = off + squares * error.relative_l2**2
        size = size + squares
        count = count + example.count
        axis = comparison.class_axes(before, anatomy).get("")

        for answer, share in comparison.agreements(before, after, anatomy).items():
            same[answer] += share * example.count
            compared[answer] += example.count

    if not count:
        return None

    shares = {answer: same[answer] / count for answer in same if compared[answer] == count}
    agreement, answers = comparison.least_agreement(shares)
    return Kept(agreement, (off / size) ** 0.5, count, answers, axis)
