"""Of which kind a network is, as far as that decides what approximate conversions keep."""

from __future__ import annotations

from enum import Enum

import torch

from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.layers.reparametrized import CONVOLUTIONS

_MANY = 2  # concatenations: one joins features at a head as well


class Kind(Enum):
    """The first of these that a network is."""

    OTHER = "no BatchNorm"
    DEPTHWISE = "depthwise convolutions"
    CONCATENATING = "concatenations"
    GROUPED = "grouped convolutions"
    RESIDUAL = "residual blocks"
    PLAIN = "no skips"


def kind_of(seen: Anatomy) -> Kind:
    """The kind of a network that `inspect` saw."""
    layers = [module for module in seen.traced.modules.values() if isinstance(module, CONVOLUTIONS)]
    split = [layer for layer in layers if layer.groups > 1]
    joins = sum(node.target in (torch.cat, torch.concat) for node in seen.traced.nodes)
    if not any(affine.is_batchnorm(module) for module in seen.traced.modules.values()):
        return Kind.OTHER
    if any(layer.groups == layer.in_channels for layer in split):
        return Kind.DEPTHWISE
    if joins >= _MANY:
        return Kind.CONCATENATING
    if split:
        return Kind.GROUPED
    return Kind.RESIDUAL if seen.blocks else Kind.PLAIN
