"""What reaches each norm, image by image: of the user's images, and of images made of dead leaves.

Where there are no images, or few, dead leaves (`natural_noise.leaves`) show how the channels of a network go together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normswap import copying
from normswap.calibration.checked_batches import checked, misfit
from normswap.calibration.natural_noise import leaves
from normswap.layers import affine
from normswap.models import network_input
from normswap.models.calling import Example, anchor
from normswap.models.modes import evaluating, hooked

COUNT, BATCH = 128, 64  # images of dead leaves
MOST = 512  # images of the user's
LARGEST = {1: 4096, 2: 128, 3: 32}  # side of an image of dead leaves, by its number of dimensions

Moments = tuple[Tensor, Tensor]
Part = TypeVar("Part")


class Watch(Protocol[Part]):
    """Records by path, a part for each call, what reaches each layer meanwhile."""

    def __call__(self, layers: Mapping[str, nn.Module], /) -> AbstractContextManager[dict[str, list[Part]]]: ...


@contextmanager
def watching_moments(norms: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Moments]]]:
    """By path, each image's means and mean squares (N, C) about the layer's expected mean (`_expected`)."""
    moments: dict[str, list[Moments]] = {}

    def spy(path: str, norm: nn.Module) -> RemovableHandle:
        centre = _expected(norm)[0]

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(2) if args[0].ndim > 2 else args[0].detach().unsqueeze(2)
            mean, square = x.mean(2).double(), torch.linalg.vector_norm(x, dim=2).double().square() / x.shape[2]
            square = (square - 2 * centre * mean + centre.square()).clamp_min(0)
            moments.setdefault(path, []).append((mean - centre, square))

        return norm.register_forward_pre_hook(hook)

    with hooked(spy(path, norm) for path, norm in norms.items()):
        yield moments


def _expected(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Mean and variance of what reaches a norm; of a layer without statistics, behind a whitened layer, 0 and 1."""
    if affine.holds_statistics(layer):
        return affine.statistics(layer)
    weight = anchor(layer).detach().double()
    return torch.zeros_like(weight[:1]), torch.ones_like(weight[:1])


def joined(moments: Mapping[str, list[Moments]]) -> dict[str, Moments]:
    """Means and mean squares of all images, on the CPU, of the norms where they are finite."""
    whole = {
        path: torch.stack([torch.cat(batches) for batches in zip(*parts, strict=True)]).cpu()
        for path, parts in moments.items()
    }
    return {path: (pair[0], pair[1]) for path, pair in whole.items() if bool(torch.isfinite(pair).all())}


@torch.no_grad()
def watched_on_images(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[object], watch: Watch[Part]
) -> dict[str, list[Part]]:
    """What `watch` records of about the first `MOST` images.

    Raises:
        SourceError: the network does not take them.
    """
    count = 0
    try:
        with evaluating(model), watch(layers) as parts:
            for example in checked(model, batches):
                example.call(model)
                count += example.count
                if count >= MOST:
                    break
    except Exception as error:  # whatever the network raises
        raise misfit(error) from None
    return parts


@torch.no_grad()
def watched_on_leaves(
    model: nn.Module, example: Example, norms: Mapping[str, nn.Module], watch: Watch[Part], count: int = COUNT
) -> dict[str, list[Part]]:
    """What `watch` records of `count` images of dead leaves (whole batches of `BATCH`); nothing where none run.

    The images get the standard deviation with which the first norm sees its running variance.

    Args:
        example: one call: how the network is called, and the size of its images.
    """
    model, norms = _in_float32(model, norms)
    like = anchor(model)
    with evaluating(model):
        for size in _sizes(model, example.size):
            try:
                with watching_moments(norms) as first:
                    example.of(leaves(4, size, 0).to(like)).call(model)
                path, parts = next(iter(first.items()))
                ratio = float(_expected(norms[path])[1].mean() / parts[0][1].mean())
                deviation = min(max(ratio**0.5, 0.125), 8.0) if 0 < ratio < float("inf") else 1.0
                with watch(norms) as recorded:
                    for i in range(-(-count // BATCH)):
                        example.of((deviation * leaves(BATCH, size, i)).to(like)).call(model)
            except Exception:  # whatever the network raises: not of that size, or it takes no images at all
                continue
            return recorded
    return {}


def _in_float32(model: nn.Module, norms: Mapping[str, nn.Module]) -> tuple[nn.Module, Mapping[str, nn.Module]]:
    """On a CPU, where half precision takes many times as long, a copy of the network in float32, and its norms."""
    like = anchor(model)
    if like.device.type != "cpu" or like.dtype not in (torch.float16, torch.bfloat16):
        return model, norms
    names = {module: name for name, module in model.named_modules()}
    single = copying.duplicate(model, {}).float()
    return single, {path: single.get_submodule(names[norm]) for path, norm in norms.items()}


def _sizes(model: nn.Module, recorded: tuple[int, ...]) -> list[list[int]]:
    """Sizes to try, none of what are no images, signals or clips: small ones cost less."""
    made_for = network_input.candidates(model)[0]
    # a record is made at a size where a network for photographs has few places to a channel left at its end
    channels, *sides = made_for if recorded in network_input.small(made_for) else recorded
    largest = LARGEST.get(len(sides))
    return [[channels, *(min(side, largest) for side in sides)], [channels, *sides]] if largest else []
