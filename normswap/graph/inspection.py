"""SEE: a network's residual blocks, their branch and skip, and every norm with its role.

Roles follow Kim et al. 2022 (which gammas to decay):

- `stem`: before the first block.
- `last`: a residual branch ends in this norm, or in the convolution after it.
- `down`: on a projection skip. In pre-activation networks it is the first norm of a downsampling
  block, whose output the skip reads.
- `head`: after the last block.
- `other`: all others.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from normswap import provenance
from normswap.copying import dotted
from normswap.graph.anatomy import Anatomy, Block, Norm
from normswap.graph.recording import record
from normswap.graph.tracing import LINEAR, NodeReader, Traced, inputs, is_add, is_mul, single
from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.sites.activations import is_identity, is_pool

__all__ = ["Anatomy", "Block", "Norm", "inspect"]

_SPLITS = (
    torch.split,
    torch.chunk,
    torch.unbind,
    torch.tensor_split,
    "split",
    "chunk",
    "unbind",
    "tensor_split",
)

_NORM_NAMES = ("batch_norm", "layer_norm", "group_norm", "instance_norm", "rms_norm")
# The functions of norms, as torch.nn.functional and as torch have them, with their names.
_NORM_FUNCTIONS: dict[object, str] = {
    **{getattr(F, name): name for name in _NORM_NAMES},
    **{getattr(torch, name): name for name in _NORM_NAMES},
}


def inspect(model: nn.Module, inputs: Inputs = None) -> Anatomy:
    """Find the residual blocks and norms of a network in a recorded forward.

    Args:
        model: The network, which is not changed.
        inputs: The inputs of the network (`calling.batches`). By default an example is made from
            the input that the network states.

    Returns:
        The residual blocks, the norms with their roles, the classifier, and the graph.

    Raises:
        SourceError: `model` is no network.
        TraceError: The network does not run, or something in its forward cannot be seen.
    """
    traced = record(network_input.require_module(model), inputs)
    reader = _GraphReader(traced)
    blocks = reader.blocks()
    features, widths = reader.features_and_widths()

    classifier_path: str | None = None
    dropout: str | None = None
    classifier = reader.classifier()
    if classifier is not None:
        classifier_path = str(classifier.target)
        dropout = reader.dropout(classifier)

    return Anatomy(
        blocks=tuple(blocks),
        norms=tuple(reader.norms(blocks)),
        classifier=classifier_path,
        dropout=dropout,
        traced=traced,
        maps=tuple(site for site in traced.sites if site.called and site.is_affine),
        features=features,
        widths=widths,
        provenance=provenance.of(model),
        functional_norms=_functional_norms(traced),
    )


def _functional_norms(traced: Traced) -> dict[str, str]:
    """Return a sentence for each module whose forward calls F.layer_norm or the like itself.

    A forward may also call such a function on a weight, to standardize it. Such a call is left out:
    only calls on values that are computed from the network's input are norms of the network.

    Returns:
        The sentences, by the path of the module.
    """
    sentences: dict[str, str] = {}
    for node in traced.nodes:
        name = _NORM_FUNCTIONS.get(node.target)
        if name is None or not traced.depends_on_inputs(node):
            continue
        # The innermost module whose forward runs here, or "" for the network itself.
        path = "".join(node.meta["inside"][-1:])
        # If the network itself is a norm, its forward rightly calls the function.
        if not traced.site(path).is_norm:
            sentences.setdefault(path, f"forward calls {name} itself, not a module")
    return sentences


@dataclass(frozen=True)
class _SumParts:
    """The nodes of the skip and of the branch of a residual sum, y = skip + branch.

    Args:
        fork: The last node that both skip and branch are computed from.
        branch: The node of the branch's value, an input of the sum.
        on_skip: The nodes between the fork and the sum on the skip, in order.
        on_branch: The nodes between the fork and the sum on the branch, in order.
        has_projection: Whether the skip has a linear layer.
    """

    fork: fx.Node
    branch: fx.Node
    on_skip: list[fx.Node]
    on_branch: list[fx.Node]
    has_projection: bool


class _GraphReader(NodeReader):
    """Finds residual blocks, norms, classifier and outputs of a network in its recorded graph."""

    def blocks(self) -> list[Block]:
        """Return the residual blocks of the network, in order of the forward pass."""
        # How many blocks each module has so far.
        counts: Counter[str] = Counter()
        blocks = [self._block(node, counts) for node in self.nodes if is_add(node)]
        return [block for block in blocks if block is not None]

    def _block(self, total: fx.Node, counts: Counter[str]) -> Block | None:
        """Return the residual block that ends in a sum, or None if the sum is not residual.

        Args:
            total: The node of the sum.
            counts: How many blocks each module has so far. The new block is counted.
        """
        parts = self._skip_and_branch(total)
        if parts is None:
            return None

        # A block has the path of the innermost module whose forward adds. If that module adds
        # several times, its later blocks are called `path+2`, `path+3` ...
        container = next(reversed(total.meta["inside"]), "")
        counts[container] += 1
        path = container
        if counts[container] > 1:
            path = f"{container}+{counts[container]}"

        # A skip that is none of the kinds below, such as a pooling, is "other". `Vacant` is the
        # identity that a conversion leaves at the path of a norm that it took away.
        skip_kind = "other"
        entry_norm: fx.Node | None = None
        if parts.has_projection:
            skip_kind = "projection"
            entry_norm = self._entry_norm(parts.fork, container)
        elif all(self._kind(node) in ("Identity", "Vacant", "DropPath") for node in parts.on_skip):
            skip_kind = "identity"

        branch = parts.branch
        on_branch = parts.on_branch
        return Block(
            path=path,
            stage=_stage(path),
            skip=skip_kind,
            order=self._order(total, on_branch, parts.fork, container),
            tail=self._tail(branch, total),
            norms=self._norm_paths([entry_norm, *on_branch, *parts.on_skip]),
            last=self._last_norm(branch, on_branch),
            gate=self._gate(branch, on_branch),
            drop_path=self._drop_path(on_branch),
            total=total,
            branch=branch,
        )

    def _skip_and_branch(self, total: fx.Node) -> _SumParts | None:
        """Return the skip and the branch of a sum, or None if the sum is not residual.

        The skip is the input of the sum with fewer linear layers since the fork, the last node that
        both inputs are computed from.

        Args:
            total: The node of the sum.
        """
        # The common ancestors of both inputs, as a bit mask. The last of them is the fork.
        first, second = inputs(total)
        common = self.traced.above(first) & self.traced.above(second)
        if not common:
            return None
        fork = self.nodes[common.bit_length() - 1]
        if fork.target in _SPLITS:
            # The two inputs of the sum come from different channels of a split, as in Res2Net, so
            # neither of them is a skip.
            return None

        # For each input of the sum, list the nodes between the fork and the input, which are its
        # ancestors without the common ones. Count the linear layers among them.
        on_path: dict[fx.Node, list[fx.Node]] = {}
        linears: dict[fx.Node, int] = {}
        for end in (first, second):
            on_path[end] = self.on(self.traced.above(end) & ~common)
            linears[end] = sum(map(self.is_linear, on_path[end]))
        skip, branch = sorted((first, second), key=lambda end: linears[end])

        # A skip has fewer linear layers than the branch, and at most one, its projection.
        if linears[skip] == linears[branch] or linears[skip] > 1:
            # Sums of parallel branches (RepVGG) and of fused maps (HRNet) have no skip.
            return None
        if linears[skip] and self._is_enlarged(branch, on_path[branch]):
            # The sum merges levels of a pyramid (Lin et al. 2017, figure 3).
            return None
        return _SumParts(
            fork=fork,
            branch=branch,
            on_skip=on_path[skip],
            on_branch=on_path[branch],
            has_projection=linears[skip] > 0,
        )

    def _norm_paths(self, nodes: list[fx.Node | None]) -> tuple[str, ...]:
        """Return the paths of the norms among the modules that some nodes call.

        Args:
            nodes: The nodes, in order. A None among them is passed over.

        Returns:
            The paths, each once, in the order of the nodes.
        """
        paths = [str(node.target) for node in nodes if node is not None and self.is_norm(node)]
        return tuple(dict.fromkeys(paths))

    def _is_enlarged(self, branch: fx.Node, on_branch: list[fx.Node]) -> bool:
        """Whether feature maps get more pixels behind the last linear layer of a branch.

        If a sum stands behind that layer, the maps are compared with the result of the sum.

        Args:
            branch: The node of the branch's value.
            on_branch: All nodes of the branch, in order.
        """
        # Go up from the end of the branch to a linear layer. Without one, the walk ends at a sum,
        # which has no main input, or at the first node of the branch.
        node = branch
        for node in self._upwards(branch, on_branch):
            if isinstance(self.traced.module(node), LINEAR):
                break

        before = node.meta["shape"]
        after = branch.meta["shape"]
        same_rank = isinstance(before, torch.Size) and len(before) == len(after)
        return same_rank and math.prod(before[2:]) < math.prod(after[2:])

    def _upwards(self, branch: fx.Node, on_branch: list[fx.Node]) -> Iterator[fx.Node]:
        """Yield the nodes through which a branch's signal goes, beginning at the end of the branch.

        Each is the main input of the one before: its only input, or x in a gate x g(x).

        Args:
            branch: The node of the branch's value, which is yielded first.
            on_branch: All nodes of the branch. The walk ends at the first node that is none.
        """
        return itertools.takewhile(set(on_branch).__contains__, self.traced.upwards(branch))

    def norms(self, blocks: list[Block]) -> list[Norm]:
        """Return every norm of the network with its role and its residual block.

        The norms that forward calls come first, in order of the forward pass. Then come those that
        it never calls.

        Args:
            blocks: The residual blocks of the network.
        """
        roles = self._roles(blocks)
        block_of: dict[str, str] = {}
        for block in blocks:
            block_of.update(dict.fromkeys(block.norms, block.path))

        norms = []
        for site in self.traced.sites:
            if site.is_norm:
                role = roles.get(site.path, "other")
                norms.append(Norm(site, role, block_of.get(site.path)))
        return norms

    def _roles(self, blocks: list[Block]) -> dict[str, str]:
        """Return the role of each norm, by its path: `stem`, `last`, `down`, `head` or `other`.

        A norm that has no entry has the role `other`, too.

        Args:
            blocks: The residual blocks, in order of the forward pass.
        """
        roles: dict[str, str] = {}
        if not blocks:
            return roles

        # Outside of blocks, a norm may stand before the first block or after the last one.
        first = blocks[0].total
        final = blocks[-1].total
        in_blocks: set[str] = set()
        for block in blocks:
            in_blocks.update(block.norms)

        for node in self.nodes:
            path = str(node.target)
            if not self.is_norm(node) or path in in_blocks:
                continue
            roles[path] = "other"
            if self.traced.depends(first, on=node):
                roles[path] = "stem"
            elif self.traced.depends(node, on=final):
                roles[path] = "head"

        # Norms that the skip depends on have the role "down" if the skip is a projection.
        for block in blocks:
            off_branch = [path for path in block.norms if not self._is_on_branch(path, block)]
            role = "down" if block.skip == "projection" else "other"
            roles.update(dict.fromkeys(off_branch, role))
            if block.last:
                roles[block.last] = "last"
        return roles

    def _is_on_branch(self, path: str, block: Block) -> bool:
        """Whether only the branch of a block depends on a norm, and the skip does not.

        Args:
            path: The path of the norm, which is one of the block's.
            block: The block.
        """
        # The sum has two inputs, the branch and the skip.
        skip = next(end for end in inputs(block.total) if end is not block.branch)
        nodes = self.traced.calls[id(self.traced.modules[path])]
        return not any(self.traced.depends(skip, on=node) for node in nodes)

    def _entry_norm(self, fork: fx.Node, container: str) -> fx.Node | None:
        """Return the node of the norm that comes before a block's skip and branch part, or None.

        Only a norm inside of the block is looked for.

        Args:
            fork: The node at which the block's skip and branch part.
            container: The path of the module whose forward adds them.
        """
        # Go up from the fork, as long as the node is inside of the block and has a single input. If
        # the network's own forward adds, `container` is "", and there is no inside.
        node: fx.Node | None = fork
        while node is not None and container and container in node.meta["inside"]:
            if self.is_norm(node):
                return node
            node = single(inputs(node))
        return None

    def _last_norm(self, branch: fx.Node, on_branch: list[fx.Node]) -> str | None:
        """Return the path of the branch's last norm, if at most one linear layer follows it.

        The norm of an MLP in a ViT has two linear layers behind it, so it is no last norm.

        Args:
            branch: The node of the branch's value.
            on_branch: The nodes of the branch.
        """
        linears = 0
        for node in self._upwards(branch, on_branch):
            if self.is_norm(node):
                return str(node.target)
            linears += self.is_linear(node)
            if linears == 2:
                break
        return None

    def _gate(self, branch: fx.Node, on_branch: list[fx.Node]) -> str | None:
        """Return the path of the module that ends a branch with a gate x g(x), or None.

        Squeeze-and-excitation is such a gate. It must stand behind the branch's last linear layer.

        Args:
            branch: The node of the branch's value.
            on_branch: The nodes of the branch.
        """
        for node in self._upwards(branch, on_branch):
            if self.is_linear(node):
                break
            # In a gate x g(x), `main_input` returns x. In LayerScale's product with a parameter it
            # returns None.
            if is_mul(node) and self.traced.main_input(node) is not None:
                # If no module returns the product, the node's name stands for a path.
                return next(iter(self.traced.outputs.get(node, ())), node.name)
        return None

    def _drop_path(self, on_branch: list[fx.Node]) -> str | None:
        """Return the path of the branch's first DropPath (stochastic depth), or None.

        Args:
            on_branch: The nodes of the branch, in order.
        """
        drops = (str(node.target) for node in on_branch if self._kind(node).startswith("DropPath"))
        return next(drops, None)

    def _tail(self, branch: fx.Node, total: fx.Node) -> str | None:
        """Return the path of the module after which a scalar can be placed on a branch, or None.

        It is the innermost module inside the block that returns the branch's value, if forward
        calls it only once. If it is a dropout or pool that forward calls more often, the search
        goes on in front of it, since a positive scalar may stand before it as well as behind it.

        Args:
            branch: The node of the branch's value.
            total: The node of the sum.
        """
        # Go up from the end of the branch, as long as a value is read by the node behind it alone.
        around_block = total.meta["inside"]
        reader = total
        node: fx.Node | None = branch
        while node is not None and self.traced.users[node] == [reader]:
            # `around` are the modules around the value, with the one that returns it.
            for path in self.traced.outputs.get(node, []):
                around = (*node.meta["inside"], path)
                is_inside = around[: len(around_block)] == around_block
                if is_inside and self._returns_once(path):
                    return path

            module = self.traced.module(node)
            if not is_identity(module) and not is_pool(module):
                return None
            reader = node
            node = single(inputs(node))
        return None

    def _returns_once(self, path: str) -> bool:
        """Whether a module returns a value at most once in a forward.

        This must hold in each record, if forward was recorded on several paths.

        Args:
            path: The path of the module.
        """
        # The graph of each record in which the module returns a value, once for each value.
        graphs: list[fx.Graph] = []
        for node, paths in self.traced.outputs.items():
            if path in paths:
                graphs.append(node.graph)
        return len(graphs) == len(set(graphs))

    def _order(
        self, total: fx.Node, on_branch: list[fx.Node], fork: fx.Node, container: str
    ) -> str:
        """Return where a residual block has its activation, as in `Block.order`.

        `post` is right after the sum, and `pre` at the beginning of the branch. `linear` says that
        there is neither.

        Args:
            total: The node of the sum.
            on_branch: The nodes of the branch.
            fork: The node at which skip and branch part.
            container: The path of the module whose forward adds them.
        """
        users = self.traced.users[total]
        if len(users) == 1 and self.is_activation(users[0]):
            return "post"

        # If the fork is inside of the block and is a norm or an activation, the block begins with
        # it. If it is outside, it is the end of the block before. If the network's own forward adds
        # (`container` is ""), all nodes are inside, so an activation at the fork may also end the
        # block before, and does not count.
        inside_block = container in ("", *fork.meta["inside"])
        if inside_block and (self.is_norm(fork) or (self.is_activation(fork) and container)):
            return "pre"
        if on_branch and (self.is_norm(on_branch[0]) or self.is_activation(on_branch[0])):
            return "pre"
        return "linear"

    def _kind(self, node: fx.Node) -> str:
        """Return the name of the class of the module that a node calls.

        For a node that calls no module, it is the text of the function, method or tensor's name.
        """
        module = self.traced.module(node)
        return type(module).__name__ if module is not None else str(node.target)

    def classifier(self) -> fx.Node | None:
        """Return the node of the last linear layer, or None if it is not the network's classifier.

        It is the classifier if only steps with one input, and no norm, stand between it and the
        output. If the layer itself is one of several outputs, or one of several inputs of a step,
        it has to be the first.
        """
        # All linear layers that the output depends on, in order.
        output = self.nodes[-1]
        linears = [node for node in self.on(self.traced.above(output)) if self.is_linear(node)]
        if not linears:
            return None

        # Go up from the output to the last linear layer, as long as each node has one input. The
        # layer itself is reached if it is the first input of a node.
        last = linears[-1]
        sources = inputs(output)
        while sources and sources[0] is not last:
            if len(sources) != 1 or self.is_norm(sources[0]) or self.is_linear(sources[0]):
                return None
            sources = inputs(sources[0])
        return last if sources else None

    def features_and_widths(self) -> tuple[bool, frozenset[int]]:
        """Return whether the network gives features or scores, and how wide its last layers are.

        An encoder gives features, which come from a norm or activation. A classifier gives scores,
        which come from a linear layer.

        The last layers are the first norms, activations and linear layers on the way up from the
        outputs. The outputs are features if all of these are norms or activations. An activation
        right after a linear layer counts as part of that layer.

        Returns:
            Whether the outputs are features, and the numbers of channels that the last linear
            layers give.
        """
        # Walk up from the output, and stop at the first norm, activation or linear layer.
        pending = [self.nodes[-1]]
        visited = set[fx.Node]()
        widths = set[int]()
        from_norms = False
        from_inputs = False
        while pending:
            for node in inputs(pending.pop()):
                sources = inputs(node)
                after_linear = any(self.is_linear(source) for source in sources)
                if self.is_norm(node) or (self.is_activation(node) and not after_linear):
                    from_norms = True
                elif self.is_linear(node):
                    # A module that cannot be looked into may have neither attribute, so it counts
                    # as 0.
                    module = self.traced.module(node)
                    out_channels = getattr(module, "out_channels", 0)
                    widths.add(int(getattr(module, "out_features", out_channels)))
                elif not sources:
                    # An input or a parameter is reached without any such layer.
                    from_inputs = True
                elif node not in visited:
                    visited.add(node)
                    pending.append(node)
        return from_norms and not widths and not from_inputs, frozenset(widths)

    def dropout(self, classifier: fx.Node) -> str | None:
        """Return the path of the dropout in front of the classifier, or None.

        The path names a module, or the attribute `drop_rate` of a module that calls F.dropout.

        Args:
            classifier: The node of the linear layer that gives the scores.
        """
        # Go up from the classifier, at most to the next linear layer or norm.
        sources = inputs(classifier)
        while len(sources) == 1 and not self.is_linear(sources[0]) and not self.is_norm(sources[0]):
            node = sources[0]
            if isinstance(self.traced.module(node), nn.Dropout):
                return str(node.target)
            # timm's networks call F.dropout, with the attribute `drop_rate` as probability.
            if node.target is F.dropout:
                owner = next(reversed(node.meta["inside"]), "")
                if not hasattr(self.traced.modules[owner], "drop_rate"):
                    return None
                return dotted(owner, "drop_rate")
            sources = inputs(node)
        return None


def _stage(path: str) -> str:
    """Return the path of the stage that a residual block belongs to.

    `layer1.0` is in `layer1`, `s1.b1` in `s1`, and `stages.0.blocks.1` in `stages.0`.
    """
    parts = path.split("+")[0].split(".")
    if len(parts) > 1 and parts[-1].removeprefix("b").isdigit():
        parts.pop()
        if len(parts) > 1 and parts[-1] == "blocks":
            parts.pop()
    return ".".join(parts)
