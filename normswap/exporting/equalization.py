"""The equalization that int8 wants: factors per channel that level what shares one step size.

A quantizer has one step for all channels of an activation, and one for all weights of a tensor, or of a row of it. A
channel that is small beside the others there loses its digits. Cross-layer equalization (Nagel et al. 2019,
arXiv:1906.04721, section 4.1) levels the rows of what writes a channel against the columns of what reads it; here the
range of the channel itself, seen in data, may count, too. Each group's logarithm moves to the mean of what its rows,
ranges and columns ask for, again and again: for a pair of layers that is equation 11, s = sqrt(r1 r2) / r2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import TraceError
from normswap.exporting.exported_module import as_convolutions
from normswap.folding import channel_factors
from normswap.folding.channel_factors import Channels, Reach
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.layers.activations import BoundedReLU
from normswap.layers.own import per_channel
from normswap.models import calling
from normswap.models.modes import hooked

_ROUNDS = 40
_FARTHEST = 7.0  # of a factor's logarithm
_SILENT = 1e-6  # of the largest: a channel that is smaller asks for nothing


@dataclass(frozen=True)
class Equalization:
    """A choice of what equalization levels.

    Args:
        rows: weights by output channel; ranges: activations; columns: weights by input channel.
    """

    name: str
    rows: bool = False
    ranges: bool = False
    columns: bool = False


AS_FOLDED = Equalization("as folded")


def equalizations(*, per_channel: bool) -> tuple[Equalization, ...]:
    """Those to try. Rows with a step each need no levelling."""
    columns, ranges = Equalization("weights", columns=True), Equalization("ranges", ranges=True, columns=True)
    if per_channel:
        return AS_FOLDED, columns, ranges
    both = Equalization("weights and ranges", rows=True, ranges=True, columns=True)
    return AS_FOLDED, replace(columns, rows=True), ranges, both


class Equalizer:
    """A folded network, and what is known of its channels.

    Args:
        network: a folded network in float32; it is not changed.
        batches: images (N, C, H, W) that say how large its activations are.
        per_channel: each row of the weights will have a step of its own.
    """

    def __init__(self, network: nn.Module, batches: Sequence[Tensor], *, per_channel: bool) -> None:
        self.batches, self.per_channel = batches, per_channel
        # no runtime fuses bounds that differ, which make a file half as fast; steps by row can do without
        self.network = as_convolutions(network) if per_channel else _scalable(network, self.batches[0][:1])
        try:
            example = calling.batches(self.batches[0][:1])
            self.channels: Channels | None = Channels(PlanBuilder(inspection.inspect(self.network, example)))
        except TraceError:
            self.channels = None
        self.peaks = _peaks(self.network, self.channels.layers if self.channels else [], self.batches)

    def equalized(self, equalization: Equalization) -> nn.Module:
        """A copy equalized that way, which computes the same."""
        twin = copy.deepcopy(self.network)
        if self.channels is not None:
            channel_factors.scale(twin, self.channels, self._factors(equalization))
        return twin

    @torch.no_grad()
    def settle_(self, network: nn.Module) -> None:
        """Let go, in place, of bounds (of ReLU6) that none of the images reaches, and of those that are one number."""
        reached: dict[str, bool] = {}

        def watch(path: str) -> Callable[..., None]:
            def look(module: BoundedReLU, _args: object, output: Tensor) -> None:
                reached[path] = reached.get(path, False) or bool((output >= per_channel(module.bound, output)).any())

            return look

        bounded = {path: module for path, module in network.named_modules() if isinstance(module, BoundedReLU)}
        with hooked(module.register_forward_hook(watch(path)) for path, module in bounded.items()):
            for x in self.batches if bounded else ():
                network(x)
        for path, module in bounded.items():
            bound = module.bound
            if not reached.get(path, True):
                network.set_submodule(path, nn.ReLU())
            elif bool((bound == bound[0]).all()):
                network.set_submodule(path, nn.Hardtanh(0.0, float(bound[0])))

    def _factors(self, equalization: Equalization) -> Tensor:
        assert self.channels is not None
        logs = torch.zeros(self.channels.count, dtype=torch.float64)
        sizes = {one.path: _magnitudes(self.network.get_submodule(one.path)) for one in self.channels.layers}
        for _ in range(_ROUNDS):
            wish, votes = torch.zeros_like(logs), torch.zeros_like(logs)

            def ask(groups: Tensor, size: Tensor, sign: int, wish: Tensor = wish, votes: Tensor = votes) -> None:
                heard = size > _SILENT * size.max()
                if heard.any():
                    level = size[heard].log()
                    wish.index_add_(0, groups[heard], sign * (level - level.mean()))
                    votes.index_add_(0, groups[heard], torch.ones_like(level))

            for one in self.channels.layers:
                table, groups = sizes[one.path]
                table = table * logs[one.writes].exp().view(-1, 1)
                table = table / logs[one.reads].exp().view(groups, 1, -1).expand(-1, len(table) // groups, -1).flatten(
                    0, 1
                )
                if equalization.rows:
                    ask(one.writes, table.amax(1), -1)
                if equalization.ranges:
                    ask(one.reads, self.peaks[one.path] * logs[one.reads].exp(), -1)
                if self.per_channel:
                    table = table / table.amax(1, keepdim=True).clamp_min(1e-300)
                if equalization.columns and not (self.per_channel and table.shape[1] == 1):
                    ask(one.reads, channel_factors.columns(table, groups).amax(1), 1)
            logs += wish / votes.clamp_min(1)
            logs[channel_factors.HELD] = 0
            logs.clamp_(-_FARTHEST, _FARTHEST)
        return logs.exp()


def _magnitudes(module: Any) -> tuple[Tensor, int]:
    """(O, I / groups), the largest weight between two channels; and the number of groups."""
    weight = module.weight.detach().double().abs()
    return weight.flatten(2).amax(2) if weight.ndim > 2 else weight, getattr(module, "groups", 1)


@torch.no_grad()
def _scalable(network: nn.Module, x: Tensor) -> nn.Module:
    """A copy whose scales and shifts are convolutions, and in which every ReLU6 has a bound per channel."""
    twin = as_convolutions(network)
    sixes = {path: module for path, module in twin.named_modules() if type(module) is nn.ReLU6}
    widths: dict[str, list[int]] = {path: [] for path in sixes}

    def watch(path: str) -> Callable[..., None]:
        return lambda _module, args: widths[path].append(args[0].shape[1])

    with hooked(module.register_forward_pre_hook(watch(path)) for path, module in sixes.items()):
        twin(x)
    for path, calls in widths.items():
        if len(calls) == 1:
            twin.set_submodule(path, BoundedReLU(x.new_full((calls[0],), 6.0)))
    return twin


@torch.no_grad()
def _peaks(network: nn.Module, layers: list[Reach], batches: Sequence[Tensor]) -> dict[str, Tensor]:
    """(I,) by path: how large each input channel of a layer gets, the mean over the images."""
    peaks: dict[str, Tensor] = {}

    def watch(path: str) -> Callable[..., None]:
        def look(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
            size = args[0].double().abs().flatten(2).amax(2) if args[0].ndim > 2 else args[0].double().abs()
            peaks[path] = peaks.get(path, 0) + size.sum(0)

        return look

    with hooked(network.get_submodule(one.path).register_forward_pre_hook(watch(one.path)) for one in layers):
        for x in batches:
            network(x)
    return {path: total / sum(map(len, batches)) for path, total in peaks.items()}
