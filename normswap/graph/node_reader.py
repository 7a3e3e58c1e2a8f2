"""The kind of a node of a recorded forward: a norm, a linear layer, an activation."""

from __future__ import annotations

from torch import fx, nn

from normswap.graph.tracing import Traced
from normswap.layers import affine
from normswap.layers.activations import is_activation, is_activation_call

LINEAR = (nn.Linear, nn.modules.conv._ConvNd)


class NodeReader:
    """Reads the nodes of a record."""

    def __init__(self, traced: Traced) -> None:
        self.traced, self.nodes = traced, traced.nodes

    def on(self, mask: int) -> list[fx.Node]:
        """The nodes of a mask, in order of the forward pass."""
        nodes = []
        while mask:
            low = mask & -mask
            nodes.append(self.nodes[low.bit_length() - 1])
            mask ^= low
        return nodes

    def is_norm(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        return module is not None and affine.is_norm(module)

    def is_linear(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        if module is None:
            return False
        return isinstance(module, LINEAR) or str(node.target) in self.traced.opaque

    def is_activation(self, node: fx.Node) -> bool:
        module = self.traced.module(node)
        if module is None:
            return is_activation_call(node.target)
        return is_activation(module)
