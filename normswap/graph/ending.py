"""The end of a network: a classifier and the dropout before it, or features."""

from __future__ import annotations

import torch.nn.functional as F
from torch import fx, nn

from normswap.graph.node_reader import NodeReader
from normswap.graph.tracing import inputs


class Ending(NodeReader):
    """The walks back from the output."""

    def classifier(self) -> fx.Node | None:
        """The last linear layer, if only parameter-free steps lie between it and the output."""
        output = self.nodes[-1]
        below = [node for node in self.on(self.traced.above(output)) if self.is_linear(node)]
        if not below:
            return None
        last = below[-1]
        sources = inputs(output)
        while sources and sources[0] is not last:
            if len(sources) != 1 or self.is_norm(sources[0]) or self.is_linear(sources[0]):
                return None
            sources = inputs(sources[0])
        return last if sources else None

    def gives_features(self) -> bool:
        """Whether all that comes out was last a norm's, or an activation's of anything but a linear layer."""
        left, seen, features = [self.nodes[-1]], set(), False
        while left:
            for node in inputs(left.pop()):
                if self.is_norm(node):
                    features = True
                elif self.is_activation(node):
                    if any(self.is_linear(source) for source in inputs(node)):
                        return False
                    features = True
                elif self.is_linear(node) or not inputs(node):
                    return False
                elif node not in seen:
                    seen.add(node)
                    left.append(node)
        return features

    def dropout(self, classifier: fx.Node) -> str | None:
        sources = inputs(classifier)
        while len(sources) == 1 and not self.is_linear(sources[0]) and not self.is_norm(sources[0]):
            node = sources[0]
            if isinstance(self.traced.module(node), nn.Dropout):
                return str(node.target)
            if node.target is F.dropout:
                owner = node.meta["inside"][-1] if node.meta["inside"] else ""
                attribute = f"{owner}.drop_rate" if owner else "drop_rate"
                return attribute if hasattr(self.traced.modules[owner], "drop_rate") else None
            sources = inputs(node)
        return None
