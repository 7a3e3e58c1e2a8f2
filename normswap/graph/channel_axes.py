"""SEE where the channels are: which axis of a value in the graph holds the output channels of a
linear layer.

Reshapes and permutations cut windows, heads, tokens and patches; their arguments depend on the
input's size, so records of two sizes are read where the network takes two. The channel numbers of a
linear layer's output are followed through every step that acts on all channels alike.
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from torch import Tensor, fx, nn

from normswap.graph.tracing import LINEAR, Traced, apply, inputs, is_add, is_constant_mul, is_mul
from normswap.layers import affine
from normswap.layers.activations import keeps_forward
from normswap.layers.channel_norm import channel_dim, scaled_dim

# Steps that move or average elements, so that channel numbers pass through them.
_JOINS = (
    torch.cat,
    torch.stack,
    torch.unbind,
    torch.chunk,
    torch.split,
    torch.narrow,
    operator.getitem,
)
_LAYOUTS = (torch.roll, torch.flatten, torch.reshape, torch.permute, torch.transpose)
_AVERAGES = (torch.mean, F.pad, F.avg_pool2d, F.adaptive_avg_pool2d, F.interpolate)
_SHAPE_METHODS = (
    "view",
    "reshape",
    "flatten",
    "unflatten",
    "reshape_as",
    "view_as",
    "unsqueeze",
    "squeeze",
    "expand",
)
_ORDER_METHODS = (
    "permute",
    "transpose",
    "swapaxes",
    "movedim",
    "roll",
    "repeat",
    "expand_as",
    "contiguous",
    "clone",
)
_OTHER_METHODS = ("unbind", "chunk", "split", "narrow", "select", "mean", "to", "float")
_STEPS = (*_JOINS, *_LAYOUTS, *_AVERAGES, *_SHAPE_METHODS, *_ORDER_METHODS, *_OTHER_METHODS)
_STEP_MODULES = (
    nn.Flatten,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool2d,
    nn.ZeroPad2d,
    timm_layers.BlurPool2d,
)
_IsIdentity = Callable[[fx.Node], bool]


@dataclass(frozen=True)
class Axis:
    """Where the channels of a value are.

    Args:
        size: the number of channels.
        dim: the dimension that holds the channels and nothing else; None where they share one.
        last: whether that is the last dimension.
        pure: whether every element belongs to a channel (no zeros of a padding among them).
    """

    size: int
    dim: int | None
    last: bool
    pure: bool


# The channel axes of a traced network, by node; nodes without one at every size are left out.
Axes: TypeAlias = dict[fx.Node, Axis]


def is_step(traced: Traced, node: fx.Node) -> bool:
    """Whether `node` is linear and does the same to every channel (if its channel axis is known at
    all).
    """
    module = traced.module(node)
    if module is None:
        return node.target in _STEPS
    return keeps_forward(module, _STEP_MODULES)


def scaled(traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The value that `node` multiplies by a parameter, perhaps rearranged, and the parameter's
    node; None: neither.
    """
    sources = inputs(node)
    for value, factor in (sources, sources[::-1]) if is_mul(node) else ():
        while is_step(traced, factor) and len(inputs(factor)) == 1:
            (factor,) = inputs(factor)
        if factor.op == "get_attr":
            return value, factor
    return None


@torch.no_grad()
def read(traced: Traced, is_identity: _IsIdentity) -> Axes:
    """Follow the channels through every record; `is_identity(node)`: the node passes its input on
    unchanged.
    """
    records = (traced, *traced.others)
    first, *resized = (
        _Reading(traced, record, traced.nodes, is_identity).axes() for record in records
    )
    axes = {
        node: axis
        for node, axis in first.items()
        if all(axis == other.get(node) for other in resized)
    }
    for record in traced.alternatives:
        axes |= _Reading(traced, record, record.nodes, is_identity).axes()
    return axes


@dataclass(frozen=True)
class _Label:
    """Element i of the flattened value belongs to channel (i // stride) % size."""

    size: int
    stride: int
    pure: bool = True

    def numbers(self, shape: torch.Size) -> Tensor:
        """Every element's channel number, from 1."""
        once = torch.arange(1.0, self.size + 1, dtype=torch.float64).repeat_interleave(self.stride)
        return once.repeat(math.prod(shape) // len(once)).view(shape)


class _Reading:
    """A reader of one record; `nodes`: the nodes of the first record that correspond to its own, in
    order.
    """

    def __init__(
        self, traced: Traced, record: Traced, nodes: list[fx.Node], is_identity: _IsIdentity
    ) -> None:
        self.traced = traced
        self.record = record
        self.is_identity = is_identity
        self.node_of = dict(zip(record.nodes, nodes, strict=True))
        self.labels: dict[fx.Node, Any] = {}

    def axes(self) -> Axes:
        for node in self.record.nodes:
            label = self._label(node, node.meta["shape"])
            if label is not None:
                self.labels[node] = label
        labels = {node: label for node, label in self.labels.items() if isinstance(label, _Label)}
        return {
            self.node_of[node]: _axis(label, node.meta["shape"]) for node, label in labels.items()
        }

    def _label(self, node: fx.Node, shape: object) -> object:
        if isinstance(shape, torch.Size) and (label := self._written(node, shape)):
            return label
        sources = inputs(node)
        if not any(source in self.labels for source in sources):
            return None
        module = self.traced.module(node)
        if (
            self.is_identity(self.node_of[node])
            or is_constant_mul(node)
            or (module and affine.is_affine(module))
        ):
            return self.labels[sources[0]]
        if is_add(node) or scaled(self.traced, node):
            return self._common(node, sources)
        if is_step(self.traced, node) and all(source in self.labels for source in sources):
            return self._moved(node, set(sources))
        return None

    def _written(self, node: fx.Node, shape: torch.Size) -> _Label | None:
        """The label of the output of linear layers, LayerScales and norms, and of parameters
        (channels last).
        """
        if node.op == "get_attr":
            if not shape or not self.record.fetch(str(node.target)).is_floating_point():
                return None
            return _Label(shape[-1], 1)
        module = self.traced.module(node)
        if module is None:
            return None
        dim = channel_dim(module) or scaled_dim(module)
        if isinstance(module, nn.Linear):
            dim = -1
        elif isinstance(module, LINEAR):
            dim = 1
        if dim is None or len(shape) < 2:
            return None
        return _Label(shape[dim], math.prod(shape[dim % len(shape) + 1 :]))

    def _common(self, node: fx.Node, arms: list[fx.Node]) -> _Label | None:
        for arm, other in (arms, arms[::-1]):
            label = self.labels.get(other)
            if arm.op == "get_attr" and label:
                count = math.prod(arm.meta["shape"])
                if count == label.size:
                    self.labels[arm] = _Label(count, 1)
                elif not count % (label.size * label.stride):
                    # An embedding of maps has its channels where the maps have them.
                    self.labels[arm] = label
        first, second = (self.labels.get(arm) for arm in arms)
        if first == second and all(arm.meta["shape"] == node.meta["shape"] for arm in arms):
            return first
        labels = [self._moved(node, {arm}) for arm in arms if arm in self.labels]
        return labels[0] if len(labels) == 2 and labels[0] == labels[1] else None

    def _moved(self, node: fx.Node, carriers: set[fx.Node]) -> Any:
        """The label after a step, run on the channel numbers of `carriers`, and on 0 (a factor: 1)
        for other inputs.
        """

        def number(source: fx.Node) -> Any:
            shape = source.meta["shape"]
            if source not in carriers:
                neutral = float(is_mul(node))
                return (
                    torch.full(shape, neutral, dtype=torch.float64)
                    if isinstance(shape, torch.Size)
                    else None
                )
            label = self.labels[source]
            if isinstance(label, tuple):
                return tuple(
                    each and each.numbers(size) for each, size in zip(label, shape, strict=True)
                )
            return label.numbers(shape)

        args = fx.node.map_arg(node.args, number)
        kwargs = fx.node.map_arg(node.kwargs, number)
        try:
            moved = apply(self.traced, node, args, kwargs)
        except (RuntimeError, TypeError, AttributeError, IndexError):
            return None
        labels = [self.labels[carrier] for carrier in carriers]
        whole = [
            tensor
            for label in labels
            for tensor in (label if isinstance(label, tuple) else (label,))
            if tensor
        ]
        sizes = {label.size for label in whole}
        if len(sizes) != 1:
            return None
        # The width of a padding may depend on the size.
        varies = node.target is F.pad and self.traced.flexible
        pure = all(label.pure for label in whole) and not varies
        if isinstance(moved, tuple | list):
            return tuple(_recognized(tensor, *sizes, pure=pure) for tensor in moved)
        return _recognized(moved, *sizes, pure=pure)


def _recognized(numbers: object, size: int, *, pure: bool) -> _Label | None:
    """The label whose numbers these are, except for zeros."""
    if not isinstance(numbers, Tensor) or not numbers.numel():
        return None
    flat = numbers.flatten()
    there = flat != 0
    # The length of the first run of equal numbers: 0 where all are equal.
    first_run = int((flat != flat[0]).to(torch.uint8).argmax())
    strides = [math.prod(numbers.shape[i + 1 :]) for i in range(numbers.ndim)]
    for stride in dict.fromkeys([*strides, first_run]):
        if not stride or len(flat) % (size * stride):
            continue
        label = _Label(size, stride, pure and bool(there.all()))
        expected = label.numbers(numbers.shape).flatten()
        if bool(there.any()) and float(((flat - expected).abs_() * there).max()) < 1e-6:
            return label
    return None


def _axis(label: _Label, shape: torch.Size) -> Axis:
    fits = [
        i
        for i in range(len(shape))
        if shape[i] == label.size and math.prod(shape[i + 1 :]) == label.stride
    ]
    dim = next(reversed(fits), None)
    return Axis(label.size, dim, dim == len(shape) - 1, label.pure)
