"""SEE: a network's residual blocks, their branch and skip, and every norm with its role.

Roles follow Kim et al. 2022 (which gammas to decay): `stem` before the first block; `last`, the
norm whose output (or whose following convolution) ends a residual branch; `down`, on a projection
skip, or, in pre-activation networks, the first norm of a downsampling block, which feeds the skip;
`head` after the last block; `other`.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import fx, nn

from normswap import provenance
from normswap.copying import dotted
from normswap.graph.anatomy import AffineMap, Anatomy, Block, Norm
from normswap.graph.recording import record
from normswap.graph.tracing import LINEAR, NodeReader, Traced, inputs, is_add, is_mul, single
from normswap.layers import affine, known_norms
from normswap.models import network_input
from normswap.models.calling import Inputs

__all__ = ["AffineMap", "Anatomy", "Block", "Norm", "inspect"]

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


def inspect(model: nn.Module, inputs: Inputs = None) -> Anatomy:
    """Read the anatomy of `model`, which is not changed.

    Args:
        inputs: what it takes (`calling.batches`); by default what it says of itself.

    Returns:
        The residual blocks, the norms with their roles, and the classifier.

    Raises SourceError: it is no network; TraceError: it does not run, or something in its forward
    cannot be seen.
    """
    traced = record(network_input.require_module(model), inputs)
    reader = _GraphReader(traced)
    blocks = reader.blocks()
    norms = tuple(reader.norms(blocks))
    untraced = (*traced.opaque.items(), *_hidden_norms(traced))
    classifier = reader.classifier()
    end: str | None = None
    dropout: str | None = None
    if classifier is not None:
        end = str(classifier.target)
        dropout = reader.dropout(classifier)
    features, widths = reader.ends()
    maps = tuple(_maps(traced))
    origin = provenance.of(model)
    return Anatomy(
        tuple(blocks),
        norms,
        untraced,
        end,
        dropout,
        traced,
        maps,
        features,
        widths,
        provenance=origin,
    )


def _maps(traced: Traced) -> Iterator[AffineMap]:
    for call, *_ in traced.calls.values():
        module = traced.module(call)
        if module is not None and affine.is_affine(module):
            read = traced.read_directly(module)
            why = affine.refusal(module) or (
                read and f"{read} is read in forward, not only by the norm itself"
            )
            yield AffineMap(str(call.target), module, affine.holds_statistics(module), why)


def _hidden_norms(traced: Traced) -> list[tuple[str, str]]:
    """Calls of batch_norm, by a forward, on tensors of its own."""
    calls = [n for n in traced.nodes if n.target in (F.batch_norm, torch.batch_norm)]
    stays = [
        n
        for n in calls
        if any(isinstance(arg, fx.Node) for arg in (*n.args[1:3], n.kwargs.get("running_mean")))
    ]
    return [
        ("".join(n.meta["inside"][-1:]), "forward calls batch_norm itself, not a module")
        for n in stays
    ]


class _GraphReader(NodeReader):
    """Reads blocks, their arms, norms' roles and the network's outputs from the graph."""

    def blocks(self) -> list[Block]:
        sums: Counter[str] = Counter()
        blocks = [self._block(node, sums) for node in self.nodes if is_add(node)]
        return [block for block in blocks if block is not None]

    def _block(self, total: fx.Node, sums: Counter[str]) -> Block | None:
        """The residual block that ends in a sum, if one does; `sums` counts the blocks of each
        module.
        """
        first, second = inputs(total)
        common = self.traced.above(first) & self.traced.above(second)
        if not common:
            return None
        fork = self.nodes[common.bit_length() - 1]
        if fork.target in _SPLITS:
            # Each arm has channels of its own (Res2Net).
            return None
        arms = {arm: self.on(self.traced.above(arm) & ~common) for arm in (first, second)}
        weights = {arm: sum(self.is_linear(node) for node in arms[arm]) for arm in arms}
        skip, branch = sorted((first, second), key=lambda arm: weights[arm])
        if weights[skip] == weights[branch] or weights[skip] > 1:
            # Of parallel branches (RepVGG) and of fusions (HRNet) no arm is the skip.
            return None
        if weights[skip] and self._enlarged(branch, arms[branch]):
            # The sum merges levels of a pyramid (Lin et al. 2017, figure 3).
            return None
        container = next(reversed(total.meta["inside"]), "")
        sums[container] += 1
        path = container if sums[container] == 1 else f"{container}+{sums[container]}"
        on_branch = arms[branch]
        on_skip = arms[skip]
        last = self._last_norm(branch, on_branch)
        skip_kind = "other"
        entry = None
        if weights[skip]:
            skip_kind = "projection"
            entry = self._entry(fork, container)
        elif all(self._kind(n) in ("Identity", "Vacant", "DropPath") for n in on_skip):
            skip_kind = "identity"
        norms = [str(n.target) for n in (entry, *on_branch, *on_skip) if n and self.is_norm(n)]
        return Block(
            path=path,
            stage=_stage(path),
            skip=skip_kind,
            order=self._order(total, on_branch, fork, container),
            tail=self._tail(branch, total),
            norms=tuple(dict.fromkeys(norms)),
            last=str(last.target) if last else None,
            gate=self._gate(branch, on_branch),
            drop_path=next(
                (str(n.target) for n in on_branch if self._kind(n).startswith("DropPath")), None
            ),
            total=total,
            branch=branch,
        )

    def _enlarged(self, branch: fx.Node, on_branch: list[fx.Node]) -> bool:
        """Whether maps are enlarged between the last convolution or sum on an arm and its end."""
        last = branch
        for last in self._upwards(branch, on_branch):
            if isinstance(self.traced.module(last), LINEAR):
                break
        small, large = (node.meta["shape"] for node in (last, branch))
        same_rank = isinstance(small, torch.Size) and len(small) == len(large)
        return same_rank and math.prod(small[2:]) < math.prod(large[2:])

    def _upwards(self, branch: fx.Node, on_branch: list[fx.Node]) -> Iterator[fx.Node]:
        """The nodes of the branch that carry its signal, the last first."""
        return itertools.takewhile(set(on_branch).__contains__, self.traced.upwards(branch))

    def norms(self, blocks: list[Block]) -> list[Norm]:
        modules = self.traced.modules
        role = self._roles(blocks)
        home = {path: block.path for block in blocks for path in block.norms}
        called = [str(n.target) for n in self.nodes if n.op == "call_module"]
        paths: dict[int, str] = {}
        for path in (*called, *modules):
            paths.setdefault(id(modules[path]), path)
        norms = []
        for path in paths.values():
            module = modules[path]
            kind = known_norms.kind_of(modules[path])
            if kind is None:
                continue
            calls = self.traced.called(module)
            averages = calls == 1 and affine.has_average(module)
            name = type(module).__name__
            channels = affine.channels(module)
            where = role.get(path, "other")
            norms.append(
                Norm(path, name, channels, where, home.get(path), kind.statistics, calls, averages)
            )
        return norms

    def _roles(self, blocks: list[Block]) -> dict[str, str]:
        role: dict[str, str] = {}
        if not blocks:
            return role
        first = blocks[0].total
        final = blocks[-1].total
        inside = {path for block in blocks for path in block.norms}
        for node in self.nodes:
            if self.is_norm(node) and str(node.target) not in inside:
                role[str(node.target)] = "other"
                if self.traced.depends(first, on=node):
                    role[str(node.target)] = "stem"
                elif self.traced.depends(node, on=final):
                    role[str(node.target)] = "head"
        for block in blocks:
            fork_norms = [path for path in block.norms if not self._on_branch(path, block)]
            role.update(dict.fromkeys(fork_norms, {"projection": "down"}.get(block.skip, "other")))
            if block.last:
                role[block.last] = "last"
        return role

    def _on_branch(self, path: str, block: Block) -> bool:
        skip = next(arm for arm in inputs(block.total) if arm is not block.branch)
        nodes = self.traced.calls[id(self.traced.modules[path])]
        return not any(self.traced.depends(skip, on=node) for node in nodes)

    def _entry(self, fork: fx.Node, container: str) -> fx.Node | None:
        node: fx.Node | None = fork
        while node is not None and container and container in node.meta["inside"]:
            if self.is_norm(node):
                return node
            node = single(inputs(node))
        return None

    def _last_norm(self, branch: fx.Node, on_branch: list[fx.Node]) -> fx.Node | None:
        """The last norm of the branch, if at most one linear layer follows it (unlike in ViT's
        MLP).
        """
        linears = 0
        for node in self._upwards(branch, on_branch):
            if self.is_norm(node):
                return node
            linears += self.is_linear(node)
            if linears == 2:
                break
        return None

    def _gate(self, branch: fx.Node, on_branch: list[fx.Node]) -> str | None:
        for node in self._upwards(branch, on_branch):
            if self.is_linear(node):
                break
            # The product of a LayerScale has no second input that depends on the first.
            if is_mul(node) and self.traced.main_input(node) is not None:
                return next(iter(self.traced.outputs.get(node, ())), node.name)
        return None

    def _tail(self, branch: fx.Node, total: fx.Node) -> str | None:
        if self.traced.users[branch] != [total]:
            return None
        depth = len(total.meta["inside"])
        for path in self.traced.outputs.get(branch, []):
            calls = [n for n, owners in self.traced.outputs.items() if path in owners]
            around = (*branch.meta["inside"], path)
            if len(calls) == 1 and around[:depth] == total.meta["inside"]:
                return path
        return None

    def _order(
        self, total: fx.Node, on_branch: list[fx.Node], fork: fx.Node, container: str
    ) -> str:
        users = self.traced.users[total]
        if len(users) == 1 and self.is_activation(users[0]):
            return "post"
        # Otherwise the fork is the end of the block before.
        inside_block = container in ("", *fork.meta["inside"])
        if inside_block and (self.is_norm(fork) or (self.is_activation(fork) and container)):
            return "pre"
        if on_branch and (self.is_norm(on_branch[0]) or self.is_activation(on_branch[0])):
            return "pre"
        return "linear"

    def _kind(self, node: fx.Node) -> str:
        module = self.traced.module(node)
        return type(module).__name__ if module is not None else str(node.target)

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

    def ends(self) -> tuple[bool, frozenset[int]]:
        """Whether the outputs are features (last made by norms or activations); widths of linear
        layers that end it.
        """
        left = [self.nodes[-1]]
        visited = set[fx.Node]()
        widths = set[int]()
        features = False
        others = False
        while left:
            for node in inputs(left.pop()):
                module = self.traced.module(node)
                acts = self.is_activation(node) and not any(
                    self.is_linear(source) for source in inputs(node)
                )
                if self.is_norm(node) or acts:
                    features = True
                elif self.is_linear(node):
                    widths.add(
                        int(getattr(module, "out_features", getattr(module, "out_channels", 0)))
                    )
                elif not inputs(node):
                    others = True
                elif node not in visited:
                    visited.add(node)
                    left.append(node)
        return features and not widths and not others, frozenset(widths)

    def dropout(self, classifier: fx.Node) -> str | None:
        """The place of the dropout before the classifier: a module's path, or that of a `drop_rate`
        attribute.
        """
        sources = inputs(classifier)
        while len(sources) == 1 and not self.is_linear(sources[0]) and not self.is_norm(sources[0]):
            node = sources[0]
            if isinstance(self.traced.module(node), nn.Dropout):
                return str(node.target)
            if node.target is F.dropout:
                owner = next(reversed(node.meta["inside"]), "")
                if not hasattr(self.traced.modules[owner], "drop_rate"):
                    return None
                return dotted(owner, "drop_rate")
            sources = inputs(node)
        return None


def _stage(path: str) -> str:
    """`layer1.0` -> `layer1`; `s1.b1` -> `s1`; `stages.0.blocks.1` -> `stages.0`."""
    parts = path.split("+")[0].split(".")
    if len(parts) > 1 and parts[-1].removeprefix("b").isdigit():
        parts.pop()
        if len(parts) > 1 and parts[-1] == "blocks":
            parts.pop()
    return ".".join(parts)
