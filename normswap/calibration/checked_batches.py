"""Calibration batches as calls of a network, on its device.

A batch that the network cannot be called with raises an error that says why.
"""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from normswap.errors import NormswapError, SourceError, first_line
from normswap.models.calling import Example, form

# A batch is split into parts whose images have at most so many numbers. The network's values then
# fit into memory that the process already has. A CPU spends more time on getting new memory than on
# products.
NUMBERS = 2**20


def parts(batch: Example, device: torch.device) -> list[Example]:
    """Split a batch, in order, into parts that suit the device.

    On a CPU the images of a part have at most `NUMBERS` numbers. On other devices, and if it cannot
    be split, the batch is one part.
    """
    # The number of images in a part.
    most = max(NUMBERS * batch.count // max(batch.images.numel(), 1), 1)
    if device.type != "cpu" or batch.listed or batch.count <= most:
        return [batch]
    return batch.parted(most)


def hashes(call: Example) -> list[bytes]:
    """Return a hash of each sample of a call, or an empty list if the call cannot be split.

    Samples with the same numbers have the same hash.
    """
    tensors = call.tensors()
    if call.listed or any(tensor.ndim == 0 or len(tensor) != call.count for tensor in tensors):
        return []

    found: list[bytes] = []
    # A sample is its entry in each tensor of the call.
    for sample in zip(*(tensor.cpu().double().numpy() for tensor in tensors), strict=True):
        content = b"".join(value.tobytes() for value in sample)
        found.append(hashlib.sha256(content).digest())
    return found


def without_copies(call: Example, seen: set[bytes], *, whole: bool = False) -> Example | None:
    """Return the samples of a call that are no copies, or None if all are.

    A copy equals a sample that was seen, or an earlier sample of the call.

    Args:
        call: The call. If it cannot be split into samples, it is returned as it is.
        seen: The hashes of the samples that were seen. Those of this call are added, in place.
        whole: Whether the call stays whole, with its copies, if it has any other sample.
    """
    of_samples = hashes(call)
    if not of_samples:
        return call

    is_new: list[bool] = []
    for i, sample_hash in enumerate(of_samples):
        is_new.append(sample_hash not in seen and sample_hash not in of_samples[:i])
    seen.update(of_samples)
    if whole and any(is_new):
        return call
    return call.take(torch.tensor(is_new))


def count_without_copies(call: Example, seen: set[bytes]) -> int:
    """Return how many samples of a call are no copies: of one that was seen, or of one another.

    Args:
        call: The call. If it cannot be split into samples, all of them are counted.
        seen: The hashes of the samples that were seen. Those of this call are added, in place.
    """
    of_samples = hashes(call)
    if not of_samples:
        return call.count
    before = len(seen)
    seen.update(of_samples)
    return len(seen) - before


def checked(model: nn.Module, batches: Iterable[object]) -> Iterator[Example]:
    """Yield the batches as calls of the network. Each batch is read once.

    Args:
        model: The network that will be called.
        batches: Images (N, C, H, W), pairs of images and labels, or whatever `Example.read` takes.

    Raises:
        SourceError: A batch has no images, images of another size, or NaN or infinite values.
    """
    called = form(model)
    # The sizes of the tensors in the batch before.
    size = None
    for i, batch in enumerate(batches):
        example, _ = called.read(batch)
        _check_images(example, i)
        # The images in a list may have different sizes, so the sizes of lists are not compared.
        sizes = None if example.listed else tuple(tuple(t.shape[1:]) for t in example.tensors())
        if size is not None and sizes != size:
            raise SourceError(
                f"calibration batch {i} has images of size {_shown(sizes)}", f"not {_shown(size)}"
            )
        size = sizes
        yield example.like(model)


def _shown(sizes: tuple[tuple[int, ...], ...] | None) -> object:
    """Return the sizes of a call's tensors as a message shows them.

    The size of a single tensor is shown without a tuple around it.

    Args:
        sizes: The size of each tensor. None if the call takes a list of images.
    """
    if sizes and len(sizes) == 1:
        return sizes[0]
    return sizes


def first_images(model: nn.Module, batches: Iterable[object], count: int) -> Iterator[Example]:
    """Yield calls of the network (see `checked`) until they hold `count` images."""
    total = 0
    for example in checked(model, batches):
        yield example
        total += example.count
        if total >= count:
            return


def _check_images(example: Example, index: int) -> None:
    """Raise SourceError if batch number `index` holds no images, or values that are not finite."""
    tensors = example.tensors()
    floats = [tensor for tensor in tensors if tensor.is_floating_point()]
    if not tensors or (not example.listed and example.images.ndim < 2):
        remedy = "Give them as the network takes them, for instance (N, C, H, W), normalized"
        types = ", ".join(sorted({str(tensor.dtype) for tensor in tensors})) or "none"
        raise SourceError(
            f"calibration batch {index} is no batch of images", f"its types are: {types}", remedy
        )

    if not all(bool(torch.isfinite(tensor).all()) for tensor in floats):
        raise SourceError(
            f"calibration batch {index} has values that are not finite", "NaN or infinite pixels"
        )


def run(
    model: nn.Module, example: Example, what: str = "the calibration images do not fit the network"
) -> object:
    """Return the network's output for a call.

    Args:
        model: The network.
        example: The call.
        what: The first words of the error.

    Raises:
        SourceError: The network does not run on these images.
    """
    try:
        return example.call_on_copies(model)
    # The forward is the user's, and may raise anything.
    except Exception as error:
        raise misfit(error, what, example) from None


def misfit(error: Exception, what: str, example: Example) -> NormswapError:
    """Return the error that tells the user what a network raised on a batch.

    Args:
        error: The exception that the network raised. A `NormswapError` is returned as it is.
        what: The first words of the new error.
        example: The call that raised it.
    """
    if isinstance(error, NormswapError):
        return error
    return SourceError(what, first_line(error), remedy_for(example))


def remedy_for(example: Example) -> str:
    """Return the advice to give floating-point images, if the call has integers only.

    The text is empty if some tensor of the call is floating-point.
    """
    tensors = example.tensors()
    if any(tensor.is_floating_point() for tensor in tensors):
        return ""
    types = ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors}))
    return f"They are {types}. Give them as the network takes them: floating-point, normalized"
