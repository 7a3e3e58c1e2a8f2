"""Batches that differ in some samples only, for runs in training mode.

Sample i of a call is entry i along the first dimension of each tensor that has as many entries as
the call has samples, and entry i of each list of that length.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normswap.models.calling import Example, changed, named_tensors

# The number of samples is even, and large enough that a sample has a neighbour on either side.
SAMPLES = 4
# Maps of given inputs are tried at this size first, in pixels, which costs less. An operation that
# mixes samples does so there, too.
_SIDE = 64
# The size of a sample's other values, relative to its own values. Some are larger and some smaller,
# as a maximum over the batch may be what mixes samples.
_SCALES = (0.5, 1.5, 2.0, 0.7)


def trial_batches(example: Example) -> Iterator[Example]:
    """Yield the batches on which a trial is made, one after the other until the network runs.

    They are four samples with small maps, the same samples with their maps as they are, and the
    given batch itself. The first batch is left out if no map had to be shrunk. The last one is left
    out if it has four samples, which were tried before it, or a single one.
    """
    grown = _grown(example)
    small = grown.map(_shrunk)
    pairs = zip(small.tensors(), grown.tensors(), strict=True)
    if any(shrunk.shape != full.shape for shrunk, full in pairs):
        yield small
    yield grown
    if example.count not in (1, SAMPLES):
        yield example


def _shrunk(tensor: Tensor) -> Tensor:
    """Return maps (N, C, H, W) resized to sides of 64 at most, and any other tensor as it is."""
    if tensor.ndim != 4 or not tensor.is_floating_point() or max(tensor.shape[2:]) <= _SIDE:
        return tensor
    return F.interpolate(tensor, [min(side, _SIDE) for side in tensor.shape[2:]])


def _grown(example: Example) -> Example:
    """Return a batch of four samples: the example's first four.

    If it has fewer samples, they are repeated, and the repeated ones get other values.
    """
    rows = torch.arange(SAMPLES)
    grown = with_rows(example, rows % example.count)
    return with_other_values(grown, rows >= example.count)


def with_rows(call: Example, rows: Tensor) -> Example:
    """Return the call with a selection of its samples, in any order, some perhaps several times.

    Args:
        call: The call.
        rows: For each position of the new batch, the index of the sample in the old batch, (N,).
    """
    count = call.count

    # The value is a tensor or a list. If it has no entry for each sample, it is no batch: a tensor
    # is kept as it is, and the entries of a list are looked at one by one.
    def pick(value: Any) -> Any:
        if isinstance(value, list) and len(value) == count:
            return [value[row] for row in rows.tolist()]
        if isinstance(value, list):
            return [changed(entry, pick, list) for entry in value]
        if not value.ndim or len(value) != count:
            return value
        return value[rows.to(value.device)]

    return _changed_call(call, pick)


def _changed_call(call: Example, change: Callable[[Any], Any]) -> Example:
    """Return the call with `change` applied to each of its tensors and lists.

    Args:
        call: The call, which is not changed.
        change: A function that takes a tensor or a whole list, and returns what replaces it.
    """
    return Example(changed(call.args, change, list), changed(call.kwargs, change, list))


def with_other_values(call: Example, rows: Tensor) -> Example:
    """Return the call with other values in some samples.

    The other values of a sample depend on the sample and its index alone, so they are the same
    whichever other samples are changed. If the call has floating-point tensors, such as images, its
    whole numbers (labels, masks) stay as they are.

    Args:
        call: The call, which is not changed.
        rows: Which samples are changed: a bool for each, (N,).
    """
    count = call.count
    of_images = any(tensor.is_floating_point() for tensor in call.tensors())

    # All samples of a batch, each with its other values.
    def all_changed(samples: list[Any] | Tensor) -> list[Any]:
        others = []
        for i, sample in enumerate(samples):
            # Some of the other values are larger than the sample's own and some smaller, as a
            # maximum over the batch may be what mixes samples.
            scale = _SCALES[i % len(_SCALES)]
            others.append(changed(sample, partial(_other_values, scale=scale, of_images=of_images)))
        return others

    def change(value: Any) -> Any:
        """Return a tensor or list of the call, with other values in the samples marked by `rows`.

        A value without an entry for each sample is no batch: a tensor is returned as it is, and the
        entries of a list are changed one by one.
        """
        if isinstance(value, list) and len(value) != count:
            return [changed(entry, change, list) for entry in value]
        if isinstance(value, list):
            samples: list[Any] = []
            for is_changed, sample, other in zip(
                rows.tolist(), value, all_changed(value), strict=True
            ):
                samples.append(other if is_changed else sample)
            return samples

        if not value.ndim or len(value) != count:
            return value
        # The marks get the shape (N, 1, 1, ...), so that each holds for a whole sample.
        marks = rows.to(value.device).reshape(-1, *[1] * (value.ndim - 1))
        return torch.where(marks, torch.stack(all_changed(value)), value)

    return _changed_call(call, change)


def _other_values(sample: Tensor, *, scale: float, of_images: bool) -> Tensor:
    """Return other values for a sample, in the same shape.

    Floating-point numbers are shuffled and multiplied by `scale`. Whole numbers are drawn anew
    between the sample's least and largest. In a call that has images they stay as they are.

    Args:
        sample: The tensor of one sample.
        scale: The factor of its numbers.
        of_images: Whether the call has floating-point tensors, such as images.
    """
    # The seed depends on the sample's size alone, so a sample always gets the same other values.
    generator = torch.Generator().manual_seed(sample.numel())
    if sample.is_floating_point() or sample.is_complex():
        order = torch.randperm(sample.numel(), generator=generator).to(sample.device)
        other = scale * sample.flatten()[order].reshape(sample.shape)
        # If the values are the same again, as zeros are, noise takes their place.
        if torch.equal(other, sample):
            return scale * torch.randn(sample.shape, generator=generator).to(sample)
        return other

    if of_images or sample.dtype == torch.bool or not sample.numel():
        return sample

    low, high = int(sample.min()), int(sample.max())
    return torch.randint(low, high + 1, sample.shape, generator=generator).to(sample)


def values_of_sample(call: Example, sample: int) -> list[Tensor]:
    """Return the tensors that belong to one sample of a call.

    Args:
        call: The call.
        sample: The index of the sample in the batch.
    """
    count = call.count
    tensors: list[Tensor] = []

    def collect(value: Any) -> None:
        if isinstance(value, list) and len(value) == count:
            tensors.extend(tensor for _, tensor in named_tensors(value[sample]))
        elif isinstance(value, list):
            for entry in value:
                changed(entry, collect, list)
        elif value.ndim and len(value) == count:
            tensors.append(value[sample])

    # Only the visits to tensors and lists are wanted here, not the changed call.
    _changed_call(call, collect)
    return tensors
