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
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normswap.calibration.least_squares import Kernel, Moments, by_group, naming
from normswap.calibration.row_block import RowBlock
from normswap.calibration.sampling import fits, patches
from normswap.exporting.weight_grid import WeightGrid
from normswap.graph.node_reader import LINEAR
from normswap.layers.planned_layer import Linearity
from normswap.models.modes import hooked

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


@torch.no_grad()
def weights(
    network: nn.Module, batches: Sequence[Tensor], layers: Collection[str], grid: WeightGrid
) -> dict[str, Rounded]:
    """The weights of these layers by path; what cannot be seen by patches is rounded each for itself.

    Args:
        network: in float32; it is not changed.
        batches: images (N, C, H, W) that show what inputs go along with what.

    Raises:
        SourceError: what reaches a layer overflows when it is squared.
    """
    seen = _moments(network, batches, layers)
    rounded = {}
    for path, module in network.named_modules():
        if path not in layers or not isinstance(module, LINEAR):
            continue
        if path in seen:
            with naming(path, "rounded"):
                blocks = _blocks(seen.pop(path))
                rounded[path] = _diffused(module, blocks, grid)
        else:
            rounded[path] = Rounded(module.weight.detach().clone(), grid.rounded(module))
    return rounded


def _moments(network: nn.Module, batches: Sequence[Tensor], layers: Collection[str]) -> dict[str, list[Moments]]:
    """Those of the patches that layers read, part by part of wide ones."""
    count = sum(map(len, batches))
    draw = torch.Generator().manual_seed(0)
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
            moments.flush()
            moments.waiting = RowBlock()  # of all layers at once, the room for what waits would be more than the sums

    handles = (
        module.register_forward_hook(functools.partial(look, path))
        for path, module in network.named_modules()
        if path in layers and isinstance(module, LINEAR) and fits(module)
    )
    with hooked(handles):
        for x in batches:
            network(x)
    return seen


def _blocks(seen: Sequence[Moments]) -> Iterator[_Block]:
    first = 0
    for moments in seen:
        covariance = moments.covariances()[0]
        yield _Block.of(covariance.double(), first)
        first += covariance.shape[1]


def _diffused(module: Linearity, blocks: Iterable[_Block], grid: WeightGrid) -> Rounded:
    groups, weight = getattr(module, "groups", 1), module.weight.detach()
    shape = (groups, len(weight) // groups, -1)
    step = grid.steps(module).double().expand_as(weight).reshape(shape)
    nearest = grid.rounded(module).double().reshape(shape)
    weights = weight.double().reshape(shape)
    largest = weights.abs().amax(2, keepdim=True) if grid.per_channel else weights.abs().amax()
    settled, most = weights.abs() >= largest, math.floor(grid.levels(module))  # the largest make the step, and stay
    rounded = nearest.clone()
    for block in blocks:
        at = block.order[:, None].expand(-1, shape[1], -1)
        wish, held, size, fixed = (each.gather(2, at) for each in (weights, rounded, step, settled))
        lost = torch.zeros_like(wish)
        for start in range(0, wish.shape[2], _BLOCK):
            end = min(start + _BLOCK, wish.shape[2])
            gained = lost[:, :, :start] @ block.shares[:, :start, start:end]
            for i in range(start, end):
                more = gained[:, :, i - start] + (lost[:, :, start:i] @ block.shares[:, start:i, i, None])[:, :, 0]
                number = ((wish[:, :, i] + more) / size[:, :, i] + 0.5).floor().clamp(-most, most)
                held[:, :, i] = torch.where(fixed[:, :, i], held[:, :, i], number * size[:, :, i])
                lost[:, :, i] = wish[:, :, i] - held[:, :, i]
        rounded.scatter_(2, at, held)
    both = (torch.where(settled, weights, rounded), rounded)
    return Rounded(*(each.to(weight).reshape(weight.shape) for each in both))
