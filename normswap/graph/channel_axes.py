"""SEE where the channels are: which axis of a value holds the output channels of a linear layer.

Every element of a linear layer's output gets the number of its channel. The numbers are followed
through every step that acts on all channels alike, such as reshapes and permutations into windows,
heads, tokens and patches. The arguments of these steps depend on the input's size, so an axis
counts only if the records of two sizes agree on it, where the network takes two.
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
from normswap.sites.activations import keeps_forward

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
        dim: The dimension that holds the channels alone. None if the channels share a dimension
            with other positions.
        last: Whether `dim` is the last dimension.
        pure: Whether every element belongs to a channel. False where a padding added zeros.
    """

    size: int
    dim: int | None
    last: bool
    pure: bool


# The channel axes of a traced network, by node. A node is left out unless all sizes agree on one.
Axes: TypeAlias = dict[fx.Node, Axis]


def is_step(traced: Traced, node: fx.Node) -> bool:
    """Whether `node` is linear and does the same to every channel.

    The answer is right only if the node's channel axis is known: a reshape may mix channels.
    """
    module = traced.module(node)
    if module is None:
        return node.target in _STEPS
    return keeps_forward(module, _STEP_MODULES)


def scaled(traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the nodes of the value and the parameter if `node` is their product, else None.

    The parameter may be rearranged by steps, such as a reshape, before the product.
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
    """Return the channel axis of every value on which the records of all sizes agree.

    Records of other paths through the network have values of their own, and add the axes of these.

    Args:
        traced: The recorded network.
        is_identity: Returns whether a node passes its input on unchanged.
    """
    axes = _LabelReader(traced, traced, traced.nodes, is_identity).axes()
    for record in traced.others:
        resized = _LabelReader(traced, record, traced.nodes, is_identity).axes()
        axes = {node: axis for node, axis in axes.items() if axis == resized.get(node)}

    for record in traced.alternatives:
        axes |= _LabelReader(traced, record, record.nodes, is_identity).axes()
    return axes


@dataclass(frozen=True)
class _Label:
    """The channel of every element of a value.

    Element i of the flattened value belongs to channel (i // stride) % size.

    Args:
        size: The number of channels.
        stride: How many neighbouring elements share a channel.
        pure: Whether every element belongs to a channel. False where a padding added zeros.
    """

    size: int
    stride: int
    pure: bool = True

    def numbers(self, shape: torch.Size) -> Tensor:
        """Return the channel number, from 1, of every element of a value of this shape, in float64.

        Channel numbers begin at 1 because 0 marks an element that belongs to no channel.
        """
        once = torch.arange(1.0, self.size + 1, dtype=torch.float64).repeat_interleave(self.stride)
        return once.repeat(math.prod(shape) // len(once)).view(shape)


# The label of a tensor, or the labels of a tuple of tensors, some of which may have none.
_Labels: TypeAlias = _Label | tuple[_Label | None, ...]


class _LabelReader:
    """Finds the labels of all values of one record.

    Args:
        traced: The whole recorded network.
        record: The record to read: `traced` itself, or one of its other records.
        nodes: The node under which `axes` returns the axis of each node of `record`, in order.
        is_identity: Returns whether a node passes its input on unchanged.
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
        """Return the channel axis of every value of the record that has one.

        The axis of a tuple of tensors is left out, as each of its tensors has an axis of its own.
        """
        for node in self.record.nodes:
            labels = self._label(node, node.meta["shape"])
            if labels is not None:
                self.labels[node] = labels

        axes: Axes = {}
        for node, label in self.labels.items():
            if isinstance(label, _Label):
                axes[self.node_of[node]] = _axis(label, node.meta["shape"])
        return axes

    def _label(self, node: fx.Node, shape: object) -> _Labels | None:
        """Return the labels of the node's value, or None if its channels are not known.

        Args:
            node: The node.
            shape: The shape of its value, or a tuple of the shapes of its tensors.
        """
        if isinstance(shape, torch.Size):
            label = self._beginning_label(node, shape)
            if label is not None:
                return label

        sources = inputs(node)
        if not any(source in self.labels for source in sources):
            return None

        # Identities, products with a number and affine maps keep the labels. Sums, and steps that
        # move elements, may change them.
        site = self.traced.site_at(node)
        is_map = site is not None and site.is_affine
        if self.is_identity(self.node_of[node]) or is_constant_mul(node) or is_map:
            return self.labels[sources[0]]
        if is_add(node) or scaled(self.traced, node):
            return self._common_label(node, sources)
        if is_step(self.traced, node) and all(source in self.labels for source in sources):
            return self._labels_after(node, set(sources))
        return None

    def _beginning_label(self, node: fx.Node, shape: torch.Size) -> _Label | None:
        """Return the label of a value whose channels begin here, or None for any other value.

        Channels begin at linear layers, LayerScales, norms and parameters. A parameter has its
        channels last.

        Args:
            node: The node of the value.
            shape: The shape of the value.
        """
        # An integer tensor, such as an index, has no channels.
        if node.op == "get_attr":
            if not shape or not self.record.fetch(str(node.target)).is_floating_point():
                return None
            return _Label(shape[-1], 1)

        site = self.traced.site_at(node)
        if site is None:
            return None
        dim = site.channel_dim or site.scaled_dim
        if isinstance(site.module, nn.Linear):
            dim = -1
        elif isinstance(site.module, LINEAR):
            dim = 1
        if dim is None or len(shape) < 2:
            return None
        return _Label(shape[dim], math.prod(shape[dim % len(shape) + 1 :]))

    def _common_label(self, node: fx.Node, arms: list[fx.Node]) -> _Labels | None:
        """Return the label that both inputs of a sum, or of a product with a parameter, agree on.

        Args:
            node: The node of the sum or product.
            arms: The nodes of its two inputs.

        Returns:
            The label, or None if the inputs have different ones.
        """
        first, second = arms
        self._label_parameter(first, self.labels.get(second))
        self._label_parameter(second, self.labels.get(first))

        label = self.labels.get(first)
        # If no input is broadcast, a common label is the label of the result as well.
        same_shape = all(arm.meta["shape"] == node.meta["shape"] for arm in arms)
        if label == self.labels.get(second) and same_shape:
            return label

        # Inputs of other shapes are broadcast, so each is labelled as it stands in the result.
        labels = [self._labels_after(node, {arm}) for arm in arms if arm in self.labels]
        both_agree = len(labels) == 2 and labels[0] == labels[1]
        return labels[0] if both_agree else None

    def _label_parameter(self, node: fx.Node, label: Any) -> None:
        """Give a parameter the channels of the value that it is added to or multiplied with.

        Args:
            node: The node of the parameter. Any other node is left as it is.
            label: The label of the value, or None.
        """
        if node.op != "get_attr" or not label:
            return
        # A parameter of one number per channel has the channels side by side.
        count = math.prod(node.meta["shape"])
        if count == label.size:
            self.labels[node] = _Label(count, 1)
        elif not count % (label.size * label.stride):
            # An embedding that is added to maps has its channels in the maps' dimension.
            self.labels[node] = label

    def _labels_after(self, node: fx.Node, carriers: set[fx.Node]) -> _Labels | None:
        """Return the labels after a step, found by running it on channel numbers.

        Args:
            node: The step.
            carriers: The inputs that get their channel numbers. All other inputs get the neutral
                element: 0, or 1 where the step multiplies.
        """
        neutral = float(is_mul(node))

        def numbers(source: fx.Node) -> Any:
            """Return what takes the place of an input of the step."""
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

        # Values with different numbers of channels cannot share a label.
        carried = self._labels_of(carriers)
        sizes = {label.size for label in carried}
        if len(sizes) != 1:
            return None

        # A padding may be 0 at the recorded size and not at others.
        varies = node.target is F.pad and self.traced.flexible
        pure = all(label.pure for label in carried) and not varies
        if isinstance(moved, tuple | list):
            return tuple(_label_of_numbers(tensor, *sizes, pure=pure) for tensor in moved)
        return _label_of_numbers(moved, *sizes, pure=pure)

    def _labels_of(self, nodes: set[fx.Node]) -> list[_Label]:
        """Return the labels of all labelled tensors among these nodes' values."""
        found: list[_Label] = []
        for node in nodes:
            labels = self.labels[node]
            if isinstance(labels, _Label):
                found.append(labels)
            else:
                found += [label for label in labels if label is not None]
        return found


def _label_of_numbers(numbers: object, size: int, *, pure: bool) -> _Label | None:
    """Return the label that gives these channel numbers, or None if no label does.

    Args:
        numbers: The value that a step returned for channel numbers. Zeros are elements without a
            channel.
        size: The number of channels.
        pure: Whether every element of the step's inputs belongs to a channel.
    """
    if not isinstance(numbers, Tensor) or not numbers.numel():
        return None

    flat = numbers.flatten()
    nonzero = flat != 0
    # The channels may fill a dimension of the value, or lie in runs inside one. The stride of every
    # dimension is tried, and then the length of the first run, which is 0 if all numbers are equal.
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
    """Return the axis of a value with this label and shape.

    The dimension of the axis is the last one that has the label's size and stride.
    """
    dim: int | None = None
    for candidate, size in enumerate(shape):
        # In a dense tensor, a dimension's stride is the product of the sizes behind it.
        stride = math.prod(shape[candidate + 1 :])
        if size == label.size and stride == label.stride:
            dim = candidate
    return Axis(size=label.size, dim=dim, last=dim == len(shape) - 1, pure=label.pure)
