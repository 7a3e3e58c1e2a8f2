"""Calibration batches as calls of a network, on its device; what cannot be one is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from normswap.errors import NormswapError, SourceError, first_line
from normswap.models.calling import Example, form


def checked(model: nn.Module, batches: Iterable[object]) -> Iterator[Example]:
    """The calls of `model` that the batches are; labels beside them are dropped.

    Args:
        batches: calls, or anything that `Example.read` knows.

    Raises:
        SourceError: no images, images of another size, or NaN or infinite values.
    """
    called, size = form(model), None
    for i, batch in enumerate(batches):
        example, _ = called.read(batch)
        _demand_images(example, batch, i)
        own = None if example.listed else tuple(tuple(t.shape[1:]) for t in example.tensors())
        if size is not None and own != size:
            said = [one[0] if one and len(one) == 1 else one for one in (own, size)]
            raise SourceError(f"calibration batch {i} has images of size {said[0]}", f"not {said[1]}")
        size = own
        yield example.like(model)


def _demand_images(example: Example, batch: object, index: int) -> None:
    tensors = example.tensors()
    floats = [t for t in tensors if t.is_floating_point()]
    if not tensors or not (floats or example.kwargs) or (not example.listed and example.images.ndim < 2):
        what = batch[0] if isinstance(batch, tuple | list) and batch else batch
        kind = f"{type(what).__name__} of {what.dtype}" if isinstance(what, Tensor) else type(what).__name__
        raise SourceError(f"calibration batch {index} is no batch of images", f"it is a {kind}")
    if not all(bool(torch.isfinite(t).all()) for t in floats):
        raise SourceError(f"calibration batch {index} has values that are not finite", "NaN or infinite pixels")


def misfit(error: Exception, what: str = "the calibration images do not fit the network") -> NormswapError:
    """What to say of whatever a network raises on a batch: errors of ours as they are."""
    return error if isinstance(error, NormswapError) else SourceError(what, first_line(error))
