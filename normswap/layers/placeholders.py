"""Layers that do nothing, layers that hold two in a row, and small changes of a layer."""

from __future__ import annotations

import inspect

import torch
from torch import Tensor, nn

from normswap import copying
from normswap.layers.planned_layer import Linearity, OwnLayer, PlannedLayer, Share
from normswap.sites.affine import copied_activation


class Vacant(PlannedLayer, OwnLayer):
    """What is left of a norm that is gone: y = act(x), or x if the norm had no activation."""

    OUTCOME = "gone"

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.activated(x)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, in_place: bool = True) -> Vacant:
        """Return what is left of a norm that is taken out: its activation, or the identity.

        Args:
            old: The norm.
            like: Not used, since the result gets no new tensor.
            in_place: Whether the activation may write into its input, as the norm's own may.
        """
        act = copied_activation(old)
        if act is not None and not in_place:
            act = out_of_place(act)
        return cls(act)


class Holder(OwnLayer):
    """Base of layers that hold the layer that stood at their path before, and add something to it.

    The held layer is called `inner`, so the names of its tensors begin with `inner.` now.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class Chain(Holder):
    """Runs the layer that stood at the path, then a second one: y = then(inner(x))."""

    def __init__(self, inner: nn.Module, then: nn.Module) -> None:
        super().__init__(inner)
        self.then = then

    def forward(self, x: Tensor) -> Tensor | float:
        """Run the first layer on x (N, C, ...), and `then` on the result.

        The output is that of `then`: a tensor, or the number 0 if `then` is a `merged.Zero`.
        """
        output: Tensor | float = self.then(self.inner(x))
        return output


class OpenChain(Chain):
    """A `Chain` whose first layer takes more than one argument, such as a conditional norm."""

    def forward(self, *args: Tensor, **named: Tensor) -> Tensor | float:
        """Run the first layer on all arguments, and the second layer, `then`, on the result."""
        output: Tensor | float = self.then(self.inner(*args, **named))
        return output


def chained(inner: nn.Module, then: nn.Module) -> Chain:
    """Return a layer that takes the inputs of `inner`, runs `inner`, then `then` on the result."""
    parameters = inspect.signature(inner.forward).parameters.values()
    has_one_argument = len(parameters) == 1 and all(
        parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters
    )
    # TorchScript does not compile a forward with *args, so `OpenChain` is used only if it must be.
    return Chain(inner, then) if has_one_argument else OpenChain(inner, then)


class Copy(PlannedLayer, OwnLayer):
    """Returns a copy of its input, which the next layer may overwrite.

    The copy is needed behind a module with backward hooks, because autograd forbids to overwrite
    the output of a hooked module.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x.clone()

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> Copy:
        return cls()


class OutOfPlace(PlannedLayer):
    """An activation or dropout that no longer writes into its input."""

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> nn.Module:
        """Return a copy of `old` that does not write into its input.

        Args:
            old: The activation or dropout.
            like: Not used, since the copy needs no new tensor.
        """
        return out_of_place(copying.duplicate(old, {}))


def out_of_place(module: nn.Module) -> nn.Module:
    """Return the module itself, changed so that no layer in it writes into its input."""
    for layer in nn.Module.modules(module):
        if getattr(layer, "inplace", False) is True:
            layer.__dict__["inplace"] = False
    return module


class WithBias(PlannedLayer):
    """A linear layer or convolution that gets a bias of zeros if it has none."""

    @classmethod
    def replacing(cls, old: Linearity, *, like: Tensor) -> nn.Module:
        """Return a copy of the layer, with a bias of zeros if it has none."""
        new = copying.duplicate(old, {})
        if new.bias is None:
            channels = new.out_features if isinstance(new, nn.Linear) else new.out_channels
            new.bias = nn.Parameter(torch.zeros(channels).to(new.weight))
        return new


class Dropout(PlannedLayer):
    """Dropout before the classifier, as a Dropout module or as timm's number `drop_rate`."""

    @classmethod
    def replacing(cls, old: nn.Module | float, *, like: Tensor, p: Share) -> nn.Module | float:
        """Return a dropout module with probability p, or p itself if `old` is a number."""
        return nn.Dropout(p) if isinstance(old, nn.Module) else p


class Dropped(PlannedLayer, Holder):
    """Dropout, then the classifier that stood at the path.

    It takes the place of a classifier that had no dropout in front.
    """

    NAMES = {"weight": "inner.weight", "bias": "inner.bias"}

    def __init__(self, inner: nn.Module, p: float) -> None:
        super().__init__(inner)
        self.dropout = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, ..., I) to (N, ..., O)."""
        output: Tensor = self.inner(self.dropout(x))
        return output

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor, p: Share) -> Dropped:
        """Return a copy of the classifier `old` behind a dropout with probability p."""
        return cls(copying.duplicate(old, {}), p)


class Number(PlannedLayer):
    """A number in place of an attribute that a module reads in its forward, such as a factor.

    The attribute may have been a number or a scalar parameter. It becomes None instead, if the
    module's forward leaves out the factor then.
    """

    @classmethod
    def replacing(cls, old: object, *, like: Tensor, value: float | None) -> float | None:
        """Return `value`, which the attribute `old` of a module becomes.

        None is for an attribute whose module leaves out a step of its forward then.
        """
        return value
