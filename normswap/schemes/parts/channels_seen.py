"""Means and mean squares of the channels that reach each norm, of images; also of images made of dead leaves."""

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
from normswap.graph.tracing import Traced
from normswap.layers import affine
from normswap.models import network_input
from normswap.models.calling import Example, anchor
from normswap.models.modes import evaluating, hooked

COUNT, BATCH = 128, 64  # images of leaves
MOST = 512  # images of the user's
LARGEST = {1: 4096, 2: 128, 3: 32}  # their largest side, by its dimensions

Seen = tuple[Tensor, Tensor]
Part = TypeVar("Part")


class Watch(Protocol[Part]):
    """Notes by path, a part for each call, what reaches each norm meanwhile."""

    def __call__(self, norms: Mapping[str, nn.Module], /) -> AbstractContextManager[dict[str, list[Part]]]: ...


@contextmanager
def watching(norms: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Seen]]]:
    """By path, what reaches each norm meanwhile about its running mean: each image's means and mean squares, (N, C)."""
    seen: dict[str, list[Seen]] = {}

    def spy(path: str, norm: nn.Module) -> RemovableHandle:
        centre = affine.statistics(norm)[0]

        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            x = args[0].detach().flatten(2) if args[0].ndim > 2 else args[0].detach().unsqueeze(2)
            mean, square = x.mean(2).double(), torch.linalg.vector_norm(x, dim=2).double().square() / x.shape[2]
            seen.setdefault(path, []).append(
                (mean - centre, (square - 2 * centre * mean + centre.square()).clamp_min(0))
            )

        return norm.register_forward_pre_hook(hook)

    with hooked(spy(path, norm) for path, norm in norms.items()):
        yield seen


def joined(seen: Mapping[str, list[Seen]]) -> dict[str, Seen]:
    """Means and mean squares of all images, on the CPU, of the norms where they are finite."""
    whole = {path: torch.stack([torch.cat(parts) for parts in zip(*p, strict=True)]).cpu() for path, p in seen.items()}
    return {path: (pair[0], pair[1]) for path, pair in whole.items() if bool(torch.isfinite(pair).all())}


def seen_on_leaves(traced: Traced, norms: Mapping[str, nn.Module]) -> dict[str, Seen]:
    """By path, the means and mean squares of what images of leaves make reach each norm; or nothing."""
    return joined(watched_on_leaves(traced, norms, watching))


@torch.no_grad()
def watched_on_leaves(
    traced: Traced, norms: Mapping[str, nn.Module], watch: Watch[Part], count: int = COUNT
) -> dict[str, list[Part]]:
    """Let `watch` note at least `count` images of leaves, by batches; or nothing.

    They are as loud as the first norm expects.
    """
    shape = next(node.meta["shape"] for node in traced.nodes if node.op == "placeholder")
    size = tuple(shape if traced.form.listed else shape[1:])
    return _watched(traced.modules[""], traced.form, size, norms, watch, count)


@torch.no_grad()
def watched_on_leaves_of(
    model: nn.Module, norms: Mapping[str, nn.Module], batches: Iterable[object], watch: Watch[Part], count: int
) -> dict[str, list[Part]]:
    """Let `watch` note `count` images of leaves of the size of the first of `batches` (`Example.read`); or nothing."""
    first = next(checked(model, batches), None)
    return {} if first is None else _watched(model, first.hollow, first.size, norms, watch, count)


def _watched(
    model: nn.Module,
    form: Example,
    recorded: tuple[int, ...],
    norms: Mapping[str, nn.Module],
    watch: Watch[Part],
    count: int,
) -> dict[str, list[Part]]:
    model, norms = _single(model, norms)
    like = anchor(model)
    with evaluating(model):
        for size in _sizes(model, recorded):
            try:
                with watching(norms) as few:
                    form.of(leaves(4, size, 0).to(like)).call(model)
                path, parts = next(iter(few.items()))
                ratio = float(affine.statistics(norms[path])[1].sum() / parts[0][1].mean(0).sum())
                loud = min(max(ratio**0.5, 0.125), 8.0) if 0 < ratio < float("inf") else 1.0
                with watch(norms) as seen:
                    for i in range(-(-count // BATCH)):
                        form.of((loud * leaves(BATCH, size, i)).to(like)).call(model)
            except Exception:  # whatever the network raises: not of that size, or it takes no images at all
                continue
            return seen
    return {}


def _single(model: nn.Module, norms: Mapping[str, nn.Module]) -> tuple[nn.Module, Mapping[str, nn.Module]]:
    """On a CPU, where half precision takes many times as long, a copy of the network in float32, and its norms."""
    like = anchor(model)
    if like.device.type != "cpu" or like.dtype not in (torch.float16, torch.bfloat16):
        return model, norms
    names = {module: name for name, module in model.named_modules()}
    single = copying.duplicate(model, {}).float()
    return single, {path: single.get_submodule(names[norm]) for path, norm in norms.items()}


@torch.no_grad()
def watched_on_images(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[object], watch: Watch[Part]
) -> dict[str, list[Part]]:
    """Let `watch` note batches (`Example.read`), of about the first `MOST` images.

    Raises:
        SourceError: the network does not take them.
    """
    count = 0
    try:
        with evaluating(model), watch(layers) as seen:
            for example in checked(model, batches):
                example.call(model)
                count += example.count
                if count >= MOST:
                    break
    except Exception as error:  # whatever the network raises
        raise misfit(error) from None
    return seen


def _sizes(model: nn.Module, recorded: tuple[int, ...]) -> list[list[int]]:
    """Sizes to try, none of what are no images, signals or clips: small ones cost less."""
    made_for = network_input.candidates(model)[0]
    # a record is made at a size where a network for photographs has few places to a channel left at its end
    channels, *sides = made_for if recorded in network_input.small(made_for) else recorded
    largest = LARGEST.get(len(sides))
    return [[channels, *(min(side, largest) for side in sides)], [channels, *sides]] if largest else []
