"""Take out the shifts that folding leaves in pre-activation networks: the residual stream itself carries them.

Folding leaves y = act(x + b) where a norm stood before an activation, on a stream x that others read too. If whatever
makes x makes x + b instead, the addition is gone, and the other readers, sums and convolutions without padding, take b
off again: a convolution's bias absorbs W b, and in a sum x + f(x) the branch's last convolution absorbs -b. Along a
stage, with b_k before block k, the last convolution of branch k thus adds b_{k+1} - b_k. The features between blocks
change, so this is done for exports only.
"""

from __future__ import annotations

import copy

from torch import Tensor, fx, nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear
from normswap.graph.inspection import Anatomy
from normswap.graph.node_reader import LINEAR
from normswap.graph.tracing import inputs, is_add
from normswap.layers import affine, own_forwards
from normswap.layers.channelwise import ChannelBias
from normswap.layers.placeholders import Vacant

_POOLS = (nn.MaxPool2d, nn.AdaptiveAvgPool2d)


def has_shifts(model: nn.Module) -> bool:
    """Whether there is anything to move."""
    return any(isinstance(module, ChannelBias) and module.sign is None for module in model.modules())


def absorb(model: nn.Module, anatomy: Anatomy) -> list[str]:
    """Change a folded network, in place, so that it computes the same without the shifts that can be moved.

    Args:
        anatomy: of the network, or of one that it is a copy of.

    Returns:
        The paths where a shift stood.
    """
    work = _Absorber(model, anatomy)
    for path, module in anatomy.traced.modules.items():
        if isinstance(module, ChannelBias) and module.sign is None:
            work.take_out(path, module)
    work.carry_out()
    return list(work.vacant)


class _Absorber:
    """Collects what is added to each convolution's bias, in float64."""

    def __init__(self, model: nn.Module, anatomy: Anatomy) -> None:
        self.builder = PlanBuilder(anatomy)
        self.traced = anatomy.traced
        self.model = model
        self.added: dict[str, Tensor] = {}
        self.vacant: list[str] = []

    def take_out(self, path: str, module: ChannelBias) -> None:
        calls = self.traced.calls.get(id(module), [])
        if len(calls) != 1 or affine.refusal(module):
            return
        (call,), (value,) = calls, inputs(calls[0])
        shift = module.bias.detach().double()
        try:
            changes = [(self._maker(value), shift)]
            for reader in self.traced.users[value]:
                if reader is not call:
                    changes += self._undo(reader, value, shift)
        except NotFoldable:
            return
        for conv, more in changes:
            self.added[conv] = self.added[conv] + more if conv in self.added else more
        self.vacant.append(path)

    def carry_out(self) -> None:
        for path, more in self.added.items():
            conv, weight = self.model.get_submodule(path), self.model.get_parameter(f"{path}.weight")
            before = getattr(conv, "bias", None)
            bias = more if before is None else before.detach().double() + more
            conv.register_parameter("bias", nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad))
        for path in self.vacant:
            act = copy.deepcopy(affine.activation(self.model.get_submodule(path)))
            for part in act.modules() if act is not None else ():
                if hasattr(part, "inplace"):
                    vars(part).update(inplace=False)  # it would overwrite the stream
            self.model.set_submodule(path, Vacant(act))

    def _maker(self, value: fx.Node) -> str:
        """The convolution whose bias can make `value` larger."""
        for arm in inputs(value) if is_add(value) else [value]:
            try:
                return self._conv_above(arm, alone=arm is not value)
            except NotFoldable:
                continue
        raise NotFoldable("no convolution ends there")

    def _undo(self, reader: fx.Node, value: fx.Node, shift: Tensor) -> list[tuple[str, Tensor]]:
        """The changes that take `shift` off again for a reader of `value`."""
        if is_add(reader):
            (other,) = [arm for arm in inputs(reader) if arm is not value]
            return [(self._conv_above(other, alone=True), -shift)]
        if self.builder.is_identity(reader):
            return [undo for user in self.traced.users[reader] for undo in self._undo(user, reader, shift)]
        conv = self.traced.module(reader)
        if isinstance(conv, nn.Conv2d) and not own_forwards.pads(conv):
            path = self._usable(reader)
            weight = conv.weight.detach().double().sum((2, 3))  # (O, I / groups)
            groups = shift.reshape(conv.groups, 1, -1)
            change = (weight.reshape(conv.groups, -1, weight.shape[1]) * groups).sum(2).flatten()
            return [(path, -change)]
        raise NotFoldable("a reader cannot take it off")

    def _conv_above(self, node: fx.Node, *, alone: bool) -> str:
        """The convolution that makes `node`, directly or through what passes a shift on, and that nothing else reads.

        Args:
            alone: `node` itself must have one reader, too.
        """
        while True:
            if alone and len(self.traced.users[node]) > 1:
                raise NotFoldable("it has another reader")
            if isinstance(self.traced.module(node), LINEAR):
                return self._usable(node)
            if not self._passes(node):
                raise NotFoldable("no convolution makes it")
            (node,), alone = inputs(node), True

    def _passes(self, node: fx.Node) -> bool:
        """Whether a constant per channel that is added before is the same constant after."""
        module = self.traced.module(node)
        pools = isinstance(module, _POOLS) or (isinstance(module, nn.AvgPool2d) and not module.padding)
        return len(inputs(node)) == 1 and (pools or self.builder.is_identity(node))

    def _usable(self, node: fx.Node) -> str:
        path = str(node.target)
        module = self.traced.modules[path]
        check_linear(self.builder, path, module)
        if len(self.traced.calls[id(module)]) != 1:
            raise NotFoldable(f"{path} is called more than once")
        return path
