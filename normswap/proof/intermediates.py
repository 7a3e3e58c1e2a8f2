"""PROVE, beside forward: what timm's `forward_intermediates` hands out of source and result."""

import torch
from torch import Tensor, nn

from normswap.errors import first_line
from normswap.models.calling import named_tensors
from normswap.models.modes import callers_dtype, undisturbed
from normswap.proof.distance import distance
from normswap.proof.running import Source

# Features that differ by more than this share of their size (relative L2) are reported.
_OTHERWISE = 1e-3


def note(source: Source, result: nn.Module) -> str:
    """Return a warning if `forward_intermediates` of an exact result gives other features.

    The warning is empty if the features are the source's, or if the source has no such method. Only
    `forward` is recorded and proved, and values inside may differ. For instance, a convolution into
    which a norm was folded returns the norm's output, where the source's returns its own.

    Args:
        source: The source.
        result: The network that was proved to compute the same.
    """
    example = source.short_example
    if not hasattr(source.module, "forward_intermediates") or not example.only_images:
        return ""

    # The method is timm's or the user's: it may refuse these images, or any.
    try:
        expected = _features(source.module, example.images)
    except Exception:
        return ""
    if not expected:
        return ""

    # The method may read a layer that the result does not have any more.
    try:
        features = _features(result, example.images)
    except Exception as error:
        return f"forward_intermediates does not run on the result any more: {first_line(error)}"

    # How far each feature is off, as a share of its size. `not <=` is also true of NaN.
    pairs = zip(expected, features, strict=False)
    shares = [distance(*pair).relative_l2 for pair in pairs]
    off = [i for i, share in enumerate(shares) if not share <= _OTHERWISE]
    if not off and len(features) == len(expected):
        return ""

    listed = ", ".join(f"{i} by {shares[i]:.0%}" for i in off[:4])
    more = f" and {len(off) - 4} more" if len(off) > 4 else ""
    return (
        "forward_intermediates (features_only) gives other features than the source's, though"
        f" forward gives the same: of {len(expected)}, number {listed}{more} (relative L2)"
    )


@torch.no_grad()
def _features(model: nn.Module, images: Tensor) -> list[Tensor]:
    """Return what the method `forward_intermediates` of a network returns for images.

    Args:
        model: The network, which has this method of timm's.
        images: The images, (N, C, H, W).
    """
    with undisturbed(model), callers_dtype():
        features = model.forward_intermediates(images.clone(), intermediates_only=True)  # type: ignore[operator]
    return [tensor for _, tensor in named_tensors(features)]
