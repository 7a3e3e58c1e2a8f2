"""Round the weights of a filter one after another, so that later ones make up for what earlier ones lost.

A weight that is off by e adds e x to what the filter gives. As far as another input of the filter goes along with x,
its weight can take that off again: it gains what was lost, and is rounded then. With R the upper triangular root of
the inputs' covariance, C + damp = R R', what is lost is |(W - Q) R|^2, and the weight j is rounded where the losses
e_i of those before it leave it:

    Q_j = round(W_j + sum_i<j e_i R_ij / R_jj),    e_i = W_i - Q_i

which is GPTQ (Frantar et al. 2022, arXiv:2210.17323, section 3), without its inverse of C. Inputs that vary most come
first. The values that are found lie on the grid of the file's own tool, so that it finds them again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.calibration.least_squares import Kernel, Moments, by_group, naming
from normswap.calibration.sampling import fits, patches
from normswap.exporting.weight_grid import rounded, steps
from normswap.graph.inspection import LINEAR
from normswap.layers.seat import Linearity

_DAMP = 0.01  # of the mean variance, as GPTQ's own
_WIDEST = 1024  # numbers in a patch whose losses are shared; blocks of 288 of 1152 lose as little as all at once
_ROWS, _FAN = 8192, 4  # rows seen of a layer, at least, and for each number in a patch
_BLOCK = 64  # columns at a time


@dataclass(frozen=True)
class _Block:
    """Numbers of a patch whose weights share their losses.

    Args:
        order: (G, b), the numbers in the order in which their weights are rounded.
        shares: (G, b, b), R_ij / R_jj for i < j, else 0.
    """

    order: Tensor
    shares: Tensor

    @classmethod
    def of(cls, covariance: Tensor, first: int) -> _Block:
        """Of the covariance (G, b, b) of the numbers from `first` on."""
        rising = covariance.diagonal(dim1=1, dim2=2).argsort(1)
        sorted_ = covariance.gather(1, rising[:, :, None].expand_as(covariance))
        sorted_ = sorted_.gather(2, rising[:, None].expand_as(covariance))
        root = Kernel.of(sorted_, _DAMP).factor.flip(1, 2)
        shares = (root / root.diagonal(dim1=1, dim2=2)[:, None]).triu(1)
        return cls(rising.flip(1) + first, shares)


@dataclass(frozen=True)
class Rounded:
    """Weights of one layer.

    Args:
        given: to the file's tool, which rounds each to the nearest; the largest, which make the step, as they were.
        held: by the file then.
    """

    given: Tensor
    held: Tensor


class Rounder:
    """What of a network's inputs goes along with what, layer by layer.

    Args:
        network: in float32; it is not changed.
        batches: images (N, C, H, W).
    """

    @torch.no_grad()
    def __init__(self, network: nn.Module, batches: Iterable[Tensor], *, seed: int = 0) -> None:
        images = list(batches)
        count = sum(map(len, images))
        draw = torch.Generator().manual_seed(seed)
        seen: dict[str, list[Moments]] = {}

        def look(path: str, layer: Linearity, args: tuple[Tensor, ...], out: Tensor) -> None:
            fan = layer.weight[0].numel()
            places = -(-max(_ROWS, _FAN * min(fan, _WIDEST)) // count)
            rows = by_group(patches(layer, args[0], out, places, draw)[0]).float()
            parts = rows.tensor_split(-(-fan // _WIDEST), 2)
            none = rows[:, :, :0]  # there is nothing to aim at
            if path not in seen:
                seen[path] = [Moments.like(part, none) for part in parts]
            for moments, part in zip(seen[path], parts, strict=True):
                moments.add(part, none)
                moments.flush()  # of all layers at once, what waits would be more than the sums

        handles = [
            module.register_forward_hook(functools.partial(look, path))
            for path, module in network.named_modules() if isinstance(module, LINEAR) and fits(module)
        ]  # fmt: skip
        try:
            for x in images:
                network(x)
        finally:
            for handle in handles:
                handle.remove()
        self.covariances = {path: [moments.covariances()[0].float() for moments in seen.pop(path)] for path in [*seen]}

    @torch.no_grad()
    def weights(
        self,
        network: nn.Module,
        units: Mapping[str, Tensor],
        *,
        levels: Callable[[nn.Module], float],
        per_channel: bool,
        keep: Collection[str] = (),
    ) -> dict[str, Rounded]:
        """By path, the weights of each layer; what cannot be seen by patches is rounded each for itself.

        Args:
            network: what was looked at, but for factors of its channels; it is not changed.
            units: of input channels by path, the factors (I,) by which they are larger here than they were.
            levels: of each layer (`weight_grid.rounded`).
            keep: the paths of layers that are not rounded.

        Raises:
            SourceError: what reaches a layer overflows when it is squared.
        """
        found = {}
        for path, module in network.named_modules():
            if not isinstance(module, LINEAR) or path in keep:
                continue
            if path in self.covariances:
                blocks = self._blocks(module, path, units.get(path))
                with naming(path, "rounded"):
                    found[path] = _diffused(module, blocks, levels=levels(module), per_channel=per_channel)
            else:
                held = rounded(module, levels=levels(module), per_channel=per_channel)
                found[path] = Rounded(module.weight.detach().clone(), held)
        return found

    def _blocks(self, module: Linearity, path: str, units: Tensor | None) -> Iterator[_Block]:
        groups, first = getattr(module, "groups", 1), 0
        for covariance in self.covariances[path]:
            last = first + covariance.shape[1]
            if units is not None:
                of_patch = units.view(groups, -1).repeat_interleave(module.weight[0, 0].numel(), 1)[:, first:last]
                covariance = of_patch[:, :, None] * covariance * of_patch[:, None, :]
            yield _Block.of(covariance.double(), first)
            first = last


def _diffused(module: Linearity, blocks: Iterable[_Block], *, levels: float, per_channel: bool) -> Rounded:
    groups, weight = getattr(module, "groups", 1), module.weight.detach()
    shape = (groups, len(weight) // groups, -1)
    step = steps(module, levels=levels, per_channel=per_channel).double().expand_as(weight).reshape(shape)
    nearest = rounded(module, levels=levels, per_channel=per_channel).double().reshape(shape)
    given = weight.double().reshape(shape)
    largest = given.abs().amax(2, keepdim=True) if per_channel else given.abs().amax()
    settled, most = given.abs() >= largest, math.floor(levels)  # the largest make the step, and stay
    found = nearest.clone()
    for block in blocks:
        at = block.order[:, None].expand(-1, shape[1], -1)
        wish, held, size, fixed = (each.gather(2, at) for each in (given, found, step, settled))
        lost = torch.zeros_like(wish)
        for start in range(0, wish.shape[2], _BLOCK):
            end = min(start + _BLOCK, wish.shape[2])
            gained = lost[:, :, :start] @ block.shares[:, :start, start:end]
            for i in range(start, end):
                more = gained[:, :, i - start] + (lost[:, :, start:i] @ block.shares[:, start:i, i, None])[:, :, 0]
                number = ((wish[:, :, i] + more) / size[:, :, i] + 0.5).floor().clamp(-most, most)
                held[:, :, i] = torch.where(fixed[:, :, i], held[:, :, i], number * size[:, :, i])
                lost[:, :, i] = wish[:, :, i] - held[:, :, i]
        found.scatter_(2, at, held)
    both = (torch.where(settled, given, found), found)
    return Rounded(*(each.to(weight).reshape(weight.shape) for each in both))
