"""SEE where the channels are: which axis of a value holds the output channels of a linear layer.

Reshapes and permutations cut windows, heads, tokens and patches; their arguments depend on the
input's size, so records of two sizes are read where the network takes two. Every element of a
linear layer's output gets the number of its channel, and these numbers are followed through every
step that acts on all channels alike.
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
        size: The number of channels.
        dim: The dimension that holds the channels and nothing else. None where the channels share a
            dimension with something else.
        last: Whether `dim` is the last dimension.
        pure: Whether every element belongs to a channel. False where a padding added zeros.
    """

    size: int
    dim: int | None
    last: bool
    pure: bool


# The channel axes of a traced network, by node; nodes without one at every size are left out.
Axes: TypeAlias = dict[fx.Node, Axis]


def is_step(traced: Traced, node: fx.Node) -> bool:
    """Whether `node` is linear and does the same to every channel.

    This holds where the node's channel axis is known; without one, the answer says nothing.
    """
    module = traced.module(node)
    if module is None:
        return node.target in _STEPS
    return keeps_forward(module, _STEP_MODULES)


def scaled(traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """If `node` is value * parameter: the value's node and the parameter's node, else None.

    The parameter may be rearranged by steps before it is multiplied.
    """
    if not is_mul(node):
        return None

    first, second = inputs(node)
    for value, factor in ((first, second), (second, first)):
        while is_step(traced, factor) and len(inputs(factor)) == 1:
            (factor,) = inputs(factor)
        if factor.op == "get_attr":
            return value, factor
    return None


@torch.no_grad()
def find_axes(traced: Traced, is_identity: _IsIdentity) -> Axes:
    """The channel axis of every value, where the records of all sizes agree on one.

    Args:
        traced: The recorded network.
        is_identity: Tells of a node whether it passes its input on unchanged.
    """
    axes = _Reading(traced, traced, traced.nodes, is_identity).axes()
    for record in traced.others:
        resized = _Reading(traced, record, traced.nodes, is_identity).axes()
        axes = {node: axis for node, axis in axes.items() if axis == resized.get(node)}

    for record in traced.alternatives:
        axes |= _Reading(traced, record, record.nodes, is_identity).axes()
    return axes


@dataclass(frozen=True)
class _Label:
    """The channel of every element of a value: (i // stride) % size for element i, flattened.

    Args:
        size: The number of channels.
        stride: How many neighbouring elements share a channel.
        pure: Whether every element belongs to a channel, as in `Axis`.
    """

    size: int
    stride: int
    pure: bool = True

    def numbers(self, shape: torch.Size) -> Tensor:
        """A tensor of this shape that has every element's channel number, from 1, in float64."""
        once = torch.arange(1.0, self.size + 1, dtype=torch.float64).repeat_interleave(self.stride)
        return once.repeat(math.prod(shape) // len(once)).view(shape)


# A label for each tensor of a tuple, where a tensor may have none.
_Labels: TypeAlias = _Label | tuple[_Label | None, ...]


class _Reading:
    """The labels of one record.

    Args:
        traced: The whole recorded network.
        record: The record to read: `traced` itself, or one of its other records.
        nodes: For each node of `record`, in order, the node that the result names in its place.
        is_identity: Tells of a node whether it passes its input on unchanged.
    """

    def __init__(
        self, traced: Traced, record: Traced, nodes: list[fx.Node], is_identity: _IsIdentity
    ) -> None:
        self.traced = traced
        self.record = record
        self.is_identity = is_identity
        self.node_of = dict(zip(record.nodes, nodes, strict=True))
        self.labels: dict[fx.Node, _Labels] = {}

    def axes(self) -> Axes:
        for node in self.record.nodes:
            labels = self._label(node, node.meta["shape"])
            if labels is not None:
                self.labels[node] = labels

        return {
            self.node_of[node]: _axis(label, node.meta["shape"])
            for node, label in self.labels.items()
            if isinstance(label, _Label)
        }

    def _label(self, node: fx.Node, shape: object) -> _Labels | None:
        """The labels of the node's value; None where its channels are not known."""
        if isinstance(shape, torch.Size):
            label = self._written(node, shape)
            if label is not None:
                return label

        sources = inputs(node)
        if not any(source in self.labels for source in sources):
            return None

        module = self.traced.module(node)
        is_map = module is not None and affine.is_affine(module)
        if self.is_identity(self.node_of[node]) or is_constant_mul(node) or is_map:
            return self.labels[sources[0]]
        if is_add(node) or scaled(self.traced, node):
            return self._common(node, sources)
        if is_step(self.traced, node) and all(source in self.labels for source in sources):
            return self._moved(node, set(sources))
        return None

    def _written(self, node: fx.Node, shape: torch.Size) -> _Label | None:
        """The label of a value that begins channels; None for a value that only carries them.

        Linear layers, LayerScales and norms begin channels, and so do parameters (channels last).
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

    def _common(self, node: fx.Node, arms: list[fx.Node]) -> _Labels | None:
        """The label of a sum, or of a product with a parameter, where both inputs agree on it."""
        first, second = arms
        self._label_parameter(first, self.labels.get(second))
        self._label_parameter(second, self.labels.get(first))

        label = self.labels.get(first)
        same_shape = all(arm.meta["shape"] == node.meta["shape"] for arm in arms)
        if label == self.labels.get(second) and same_shape:
            return label

        labels = [self._moved(node, {arm}) for arm in arms if arm in self.labels]
        return labels[0] if len(labels) == 2 and labels[0] == labels[1] else None

    def _label_parameter(self, node: fx.Node, label: Any) -> None:
        """Give a parameter the channels of the value beside it, which has this label."""
        if node.op != "get_attr" or not label:
            return
        count = math.prod(node.meta["shape"])
        if count == label.size:
            self.labels[node] = _Label(count, 1)
        elif not count % (label.size * label.stride):
            # An embedding of maps has its channels where the maps have them.
            self.labels[node] = label

    def _moved(self, node: fx.Node, carriers: set[fx.Node]) -> _Labels | None:
        """The labels after a step, found by running it on channel numbers.

        Args:
            node: The step.
            carriers: The inputs that get their channel numbers. All other inputs get the neutral
                element: 0, or 1 where the step multiplies.
        """
        neutral = float(is_mul(node))

        def numbers(source: fx.Node) -> Any:
            shape = source.meta["shape"]
            if source not in carriers:
                if not isinstance(shape, torch.Size):
                    return None
                return torch.full(shape, neutral, dtype=torch.float64)

            labels = self.labels[source]
            if isinstance(labels, _Label):
                return labels.numbers(shape)
            pairs = zip(labels, shape, strict=True)
            return tuple(label and label.numbers(size) for label, size in pairs)

        args = fx.node.map_arg(node.args, numbers)
        kwargs = fx.node.map_arg(node.kwargs, numbers)
        try:
            moved = apply(self.traced, node, args, kwargs)
        except (RuntimeError, TypeError, AttributeError, IndexError):
            return None

        carried = self._labels_of(carriers)
        sizes = {label.size for label in carried}
        if len(sizes) != 1:
            return None

        # The width of a padding may depend on the size.
        varies = node.target is F.pad and self.traced.flexible
        pure = all(label.pure for label in carried) and not varies
        if isinstance(moved, tuple | list):
            return tuple(_recognized(tensor, *sizes, pure=pure) for tensor in moved)
        return _recognized(moved, *sizes, pure=pure)

    def _labels_of(self, nodes: set[fx.Node]) -> list[_Label]:
        """The labels of all tensors of these nodes' values, without those that have none."""
        found: list[_Label] = []
        for node in nodes:
            labels = self.labels[node]
            if isinstance(labels, _Label):
                found.append(labels)
            else:
                found += [label for label in labels if label is not None]
        return found


def _recognized(numbers: object, size: int, *, pure: bool) -> _Label | None:
    """The label whose channel numbers these are, except for zeros."""
    if not isinstance(numbers, Tensor) or not numbers.numel():
        return None

    flat = numbers.flatten()
    nonzero = flat != 0
    # The length of the first run of equal numbers: 0 where all are equal.
    first_run = int((flat != flat[0]).to(torch.uint8).argmax())
    strides = [math.prod(numbers.shape[i + 1 :]) for i in range(numbers.ndim)]
    for stride in dict.fromkeys([*strides, first_run]):
        if not stride or len(flat) % (size * stride):
            continue
        label = _Label(size, stride, pure and bool(nonzero.all()))
        error = (flat - label.numbers(numbers.shape).flatten()).abs_() * nonzero
        if bool(nonzero.any()) and float(error.max()) < 1e-6:
            return label
    return None


def _axis(label: _Label, shape: torch.Size) -> Axis:
    """The axis of a value with this label and shape: the last dimension that fits both."""
    fitting = [
        i
        for i in range(len(shape))
        if shape[i] == label.size and math.prod(shape[i + 1 :]) == label.stride
    ]
    dim = next(reversed(fitting), None)
    return Axis(size=label.size, dim=dim, last=dim == len(shape) - 1, pure=label.pure)
