"""The equalization that int8 wants where all weights of a layer share a step: factors per channel that level them.

A quantizer has one step for all channels of an activation, and here one for all weights of a tensor. A channel that is
small beside the others there loses its digits. Cross-layer equalization (Nagel et al. 2019, arXiv:1906.04721, section
4.1) levels the rows of what writes a channel against the columns of what reads it. Each group's logarithm moves to the
mean of what its rows and columns ask for, again and again: for a pair of layers that is equation 11,
s = sqrt(r1 r2) / r2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normswap.errors import TraceError
from normswap.exporting.exported_module import as_convolutions
from normswap.folding import channel_factors
from normswap.folding.channel_factors import Channels
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import inspection
from normswap.layers.activations import BoundedReLU
from normswap.layers.own import per_channel
from normswap.models import calling
from normswap.models.modes import hooked

_ROUNDS = 40
# Of a factor's logarithm.
_FARTHEST = 7.0
# Of the largest: a channel that is smaller asks for nothing.
_SILENT = 1e-6


class Equalizer:
    """A folded network, and which of its channels can be scaled.

    Args:
        network: a folded network in float32; it is not changed.
        batches: images (N, C, H, W) that say which bounds (of ReLU6) are reached.
    """

    def __init__(self, network: nn.Module, batches: Sequence[Tensor]) -> None:
        self.batches, self.network = batches, _scalable(network, batches[0][:1])
        try:
            example = calling.batches(self.batches[0][:1])
            self.channels: Channels | None = Channels(PlanBuilder(inspection.inspect(self.network, example)))
        except TraceError:
            self.channels = None

    def equalized(self) -> nn.Module:
        """A copy with levelled weights, which computes the same on the images."""
        twin = copy.deepcopy(self.network)
        if self.channels is not None:
            channel_factors.scale(twin, self.channels, self._factors(self.channels))
        self._release_bounds(twin)
        return twin

    @torch.no_grad()
    def _release_bounds(self, network: nn.Module) -> None:
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

    def _factors(self, channels: Channels) -> Tensor:
        logs = torch.zeros(channels.count, dtype=torch.float64)
        magnitudes = {layer.path: _magnitudes(self.network.get_submodule(layer.path)) for layer in channels.layers}
        for _ in range(_ROUNDS):
            wish, votes = torch.zeros_like(logs), torch.zeros_like(logs)

            def ask(groups: Tensor, size: Tensor, sign: int, wish: Tensor = wish, votes: Tensor = votes) -> None:
                heard = size > _SILENT * size.max()
                if heard.any():
                    level = size[heard].log()
                    wish.index_add_(0, groups[heard], sign * (level - level.mean()))
                    votes.index_add_(0, groups[heard], torch.ones_like(level))

            for layer in channels.layers:
                table, groups = magnitudes[layer.path]
                table = table * logs[layer.writes].exp().view(-1, 1)
                reads = logs[layer.reads].exp().view(groups, 1, -1)
                table = table / reads.expand(-1, len(table) // groups, -1).flatten(0, 1)
                ask(layer.writes, table.amax(1), -1)
                ask(layer.reads, channel_factors.columns(table, groups).amax(1), 1)
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
