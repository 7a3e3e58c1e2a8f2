"""SEE where the channels are: which axis of a value in the graph holds the outputs of the linear layer that made it.

Windows, heads, tokens and patches are cut by reshapes and permutations, whose arguments depend on the input's size. So
the graph is run: at two sizes, where the network takes them, else at its own. Beside each value that a linear
layer wrote, the number of its channel travels through the steps that act on every channel alike and by itself.
"""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import Tensor, fx, nn

from normswap import provenance
from normswap.graph.inspection import LINEAR
from normswap.graph.tracing import Traced, inputs, is_add, is_constant_mul
from normswap.layers import affine
from normswap.layers.channel_norm import channel_dim

_STEPS = (
    operator.getitem, torch.cat, torch.stack, torch.roll, torch.flatten, torch.reshape, torch.permute, torch.transpose,
    torch.unbind, torch.chunk, torch.split, torch.narrow, torch.mean, F.pad, F.avg_pool2d, F.adaptive_avg_pool2d,
    F.interpolate, "view", "reshape", "flatten", "unflatten", "permute", "transpose", "contiguous", "clone", "expand",
    "unsqueeze", "squeeze", "unbind", "chunk", "split", "narrow", "select", "roll", "mean", "repeat", "reshape_as",
    "view_as", "expand_as", "swapaxes", "movedim",
)  # fmt: skip
_STEP_MODULES = (nn.Flatten, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.ZeroPad2d, timm_layers.BlurPool2d)
_SIZES = ((128, 160), (160, 224))  # where the network takes them; less work than its own
_Silent = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Axis:
    """Where the channels of a value are.

    Args:
        size: how many there are.
        dim: the dimension that they are, all of it and nothing else; None where it is part of one.
        last: whether that is the last dimension.
        pure: whether every element belongs to a channel (no zeros of a padding among them).
    """

    size: int
    dim: int | None
    last: bool
    pure: bool


class Axes:
    """The channel axes of a traced network, by node; those are left out that have none, or not at every size."""

    def __init__(self, of: dict[fx.Node, Axis], why: str | None = None) -> None:
        self._of, self.why = of, why

    def get(self, node: fx.Node) -> Axis | None:
        return self._of.get(node)


def is_step(traced: Traced, node: fx.Node) -> bool:
    """Whether `node` is linear and does the same to every channel (if its channel axis is known at all)."""
    module = traced.module(node)
    return isinstance(module, _STEP_MODULES) if module is not None else node.target in _STEPS


@torch.no_grad()
def read(traced: Traced, silent: _Silent) -> Axes:
    """Run the graph and follow the channels.

    Args:
        silent: whether a node passes its input on unchanged.

    Returns:
        Nothing but the reason (`why`) if the network does not run at its own size.
    """
    channels, height, width = provenance.input_size(traced.modules[""])
    twin = _twin(traced)
    like = next((p for p in twin.parameters() if p.is_floating_point()), torch.empty(0))

    def run(*size: int, flexible: bool) -> dict[fx.Node, Axis]:
        one = _Run(twin, traced, silent, flexible)
        one.run(*_arguments(traced.graph, like.new_zeros(1, channels, *size)))
        return one.axes()

    own = (height, width)
    sizes = (own, (height + 32, width + 64)) if height * width < math.prod(_SIZES[0]) else _SIZES
    found: dict[tuple[int, int], dict[fx.Node, Axis]] = {}
    for size in sizes:
        with suppress(_DoesNotRunError):
            found[size] = run(*size, flexible=True)
    if len(found) < len(sizes):
        try:
            found[own] = run(*own, flexible=any(size != own for size in found))
        except _DoesNotRunError as error:
            return Axes({}, f"it does not run on {height} x {width} pixels: {error}".split("\n")[0])
    first, *others = found.values()
    return Axes({node: axis for node, axis in first.items() if all(axis == other.get(node) for other in others)})


def _twin(traced: Traced) -> nn.Module:
    """The network in eval mode, on the same tensors."""
    model = traced.modules[""]
    shared = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in shared})
    twin.eval()
    twin.__dict__.update(traced.constants)
    return twin


def _arguments(graph: fx.Graph, x: Tensor) -> list[Any]:
    """`x`, and the defaults that tracing pinned the other arguments to."""
    pinned = [node for node in graph.nodes if node.op == "placeholder"][1:]
    return [x, *(node.args[0] if node.args else None for node in pinned)]


@dataclass(frozen=True)
class _Label:
    """In the flattened value, element i belongs to channel (i // stride) % size."""

    size: int
    stride: int
    pure: bool = True

    def numbers(self, shape: torch.Size) -> Tensor:
        """The channel's number, from 1, of every element."""
        once = torch.arange(1.0, self.size + 1, dtype=torch.float64).repeat_interleave(self.stride)
        return once.repeat(math.prod(shape) // len(once)).view(shape)


class _DoesNotRunError(Exception):
    """The network does not take an input of this size."""


class _Run(fx.Interpreter):
    """One run.

    Args:
        flexible: whether the network takes other sizes too: paddings that depend on the size may then be any.
    """

    def __init__(self, twin: nn.Module, traced: Traced, silent: _Silent, flexible: bool) -> None:
        super().__init__(twin, graph=traced.graph)
        self.traced, self.silent, self.flexible = traced, silent, flexible
        self.labels: dict[fx.Node, Any] = {}  # a label, or a tuple of them where the value is a tuple
        self.shapes: dict[fx.Node, torch.Size] = {}

    def axes(self) -> dict[fx.Node, Axis]:
        return {n: _axis(label, self.shapes[n]) for n, label in self.labels.items() if isinstance(label, _Label)}

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception as error:  # whatever the model raises
            raise _DoesNotRunError(str(error).split("\n")[0]) from None
        if isinstance(value, Tensor):
            self.shapes[n] = value.shape
        label = self._label(n, value)
        if label is not None:
            self.labels[n] = label
        return value

    def _label(self, node: fx.Node, value: Any) -> Any:
        if isinstance(value, Tensor) and (own := self._written(node, value)):
            return own
        sources = inputs(node)
        if not any(source in self.labels for source in sources):
            return None
        if self.silent(node) or is_constant_mul(node):
            return self.labels[sources[0]]
        if is_add(node):
            return self._common(node, sources)
        if is_step(self.traced, node) and all(source in self.labels for source in sources):
            return self._moved(node, set(sources))
        return None

    def _written(self, node: fx.Node, value: Tensor) -> _Label | None:
        """The label of what linear layers, LayerScales and norms write, and of parameters, whose channels come last."""
        if node.op == "get_attr":
            return _Label(value.shape[-1], 1) if value.ndim > 1 and value.is_floating_point() else None
        module = self.traced.module(node)
        if module is None:
            return None
        dim = channel_dim(module)
        if isinstance(module, (*LINEAR, *affine.LAYER_SCALES)):
            dim = -1 if isinstance(module, nn.Linear | timm_layers.LayerScale) else 1
        if dim is None or value.ndim < 2:
            return None
        return _Label(value.shape[dim], 1 if dim == -1 else math.prod(value.shape[2:]))

    def _common(self, node: fx.Node, arms: list[fx.Node]) -> _Label | None:
        """The label of a sum, if both arms, broadcast to its shape, agree on it."""
        for arm, other in (arms, arms[::-1]):
            theirs = self.labels.get(other)
            if arm.op == "get_attr" and theirs and not math.prod(self.shapes[arm]) % (theirs.size * theirs.stride):
                self.labels[arm] = theirs  # embeddings of maps have their channels where the maps have them
        found = [self._moved(node, {arm}) for arm in arms if arm in self.labels]
        return found[0] if len(found) == 2 and found[0] == found[1] else None

    def _moved(self, node: fx.Node, carriers: set[fx.Node]) -> Any:
        """What the step makes of the channels' numbers in the values of `carriers`; other values count as 0."""

        def number(source: fx.Node) -> Any:
            value = self.env[source]
            if source in carriers:
                label = self.labels[source]
                if isinstance(label, tuple):
                    return tuple(part and part.numbers(own.shape) for part, own in zip(label, value, strict=True))
                return label.numbers(value.shape)
            return torch.zeros(value.shape, dtype=torch.float64) if isinstance(value, Tensor) else value

        args, kwargs = (fx.node.map_arg(part, number) for part in (node.args, node.kwargs))
        try:
            moved = getattr(self, node.op)(node.target, args, kwargs)
        except (RuntimeError, TypeError, AttributeError):
            return None
        labels = [self.labels[carrier] for carrier in carriers]
        whole = [part for label in labels for part in (label if isinstance(label, tuple) else (label,)) if part]
        sizes = {label.size for label in whole}
        if len(sizes) != 1:
            return None
        varies = node.target is F.pad and self.flexible and len(node.all_input_nodes) > len(inputs(node))
        pure = all(label.pure for label in whole) and not varies
        if isinstance(moved, tuple | list):
            return tuple(_recognized(part, *sizes, pure=pure) for part in moved)
        return _recognized(moved, *sizes, pure=pure)


def _recognized(numbers: Any, size: int, *, pure: bool) -> _Label | None:
    """The label that gives these numbers, where they are not 0."""
    if not isinstance(numbers, Tensor) or not numbers.numel():
        return None
    flat = numbers.flatten()
    there = flat != 0
    changes = torch.diff(flat).nonzero()
    first_run = int(changes[0]) + 1 if len(changes) else len(flat)
    for stride in dict.fromkeys([*_strides(numbers.shape), first_run]):
        if not stride or len(flat) % (size * stride):
            continue
        label = _Label(size, stride, pure and bool(there.all()))
        expected = label.numbers(numbers.shape).flatten()
        if bool(there.any()) and bool(((flat - expected).abs()[there] < 1e-6).all()):
            return label
    return None


def _strides(shape: torch.Size) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def _axis(label: _Label, shape: torch.Size) -> Axis:
    fits = [i for i in range(len(shape)) if shape[i] == label.size and math.prod(shape[i + 1 :]) == label.stride]
    dim = fits[-1] if fits else None
    return Axis(label.size, dim, dim == len(shape) - 1, label.pure)
