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
    """Where the channels of a value (a tensor of the forward) are.

    Args:
        size: The number of channels.
        dim: The dimension along which the channels lie. None if no dimension has the channels and
            nothing else, as after flattening (N, C, H, W) to (N, C H W).
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
    """Whether a node moves or averages elements, such as a permutation or a pooling.

    Such an operation treats all channels alike. Only its kind is looked at: a reshape is one, but
    may merge channels with other positions. `find_axes` tells whether the channels are still apart.

    Args:
        traced: The recorded network.
        node: A node of its graph.
    """
    module = traced.module(node)
    if module is None:
        return node.target in _STEPS
    return keeps_forward(module, _STEP_MODULES)


def scaled(traced: Traced, node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the factors of a product of a value and a parameter, such as LayerScale's gamma x.

    The parameter may be reshaped or permuted before the product.

    Returns:
        The node of the value and the node of the parameter. None if `node` is no such product.
    """
    if not is_mul(node):
        return None

    first, second = inputs(node)
    # Either factor may be the parameter. The loop goes up from it, past reshapes and the like.
    for value, factor in ((first, second), (second, first)):
        while is_step(traced, factor) and len(inputs(factor)) == 1:
            (factor,) = inputs(factor)
        if factor.op == "get_attr":
            return value, factor
    return None


@torch.no_grad()
def find_axes(traced: Traced, is_identity: _IsIdentity) -> Axes:
    """Return the channel axis of each node's value, if it is known.

    If the network was recorded on inputs of several sizes, an axis is known only if it is the same
    at all of them. If forward was also recorded on another path through its code, that record has
    nodes of its own, and their axes are returned, too.

    Args:
        traced: The recorded network.
        is_identity: Returns whether a node passes its input on unchanged.
    """
    axes = _LayoutReader(traced, traced, traced.nodes, is_identity).axes()
    # `others` have the same nodes at other sizes. `alternatives` have nodes of their own.
    for record in traced.others:
        resized = _LayoutReader(traced, record, traced.nodes, is_identity).axes()
        axes = {node: axis for node, axis in axes.items() if axis == resized.get(node)}

    for record in traced.alternatives:
        axes |= _LayoutReader(traced, record, record.nodes, is_identity).axes()
    return axes


@dataclass(frozen=True)
class _Layout:
    """Says which element of a tensor belongs to which channel.

    Element i of the flattened tensor belongs to channel (i // stride) % size.

    Args:
        size: The number of channels.
        stride: How many neighbouring elements share a channel.
        pure: Whether every element belongs to a channel. False where a padding added zeros.
    """

    size: int
    stride: int
    pure: bool = True

    def numbers(self, shape: torch.Size) -> Tensor:
        """Return a tensor in float64 in which each element is the number of its channel.

        Channel numbers begin at 1 because 0 marks an element that belongs to no channel.

        Args:
            shape: The shape of the tensor.
        """
        # One run through all channels: 1, 1, ..., 2, 2, ... Then it begins again.
        period = torch.arange(1.0, self.size + 1, dtype=torch.float64)
        period = period.repeat_interleave(self.stride)
        return period.repeat(math.prod(shape) // len(period)).view(shape)


# The channel layout of a tensor, or those of a tuple of tensors, some of which may have none.
_Layouts: TypeAlias = _Layout | tuple[_Layout | None, ...]


class _LayoutReader:
    """Finds where the channels lie in the value of every node of a recorded network.

    `axes` returns the result. A layout says which element of a tensor belongs to which channel.

    Args:
        traced: The whole recorded network.
        record: The record to read: `traced` itself, or a record of the same network on an input of
            another size, or on another path through its code.
        nodes: The keys under which `axes` returns the axes, one for each node of `record`, in the
            same order. If `record` was made on an input of another size, the key is the node of
            `traced` for the same operation.
        is_identity: Returns whether a node passes its input on unchanged.
    """

    def __init__(
        self, traced: Traced, record: Traced, nodes: list[fx.Node], is_identity: _IsIdentity
    ) -> None:
        self.traced = traced
        self.record = record
        self.is_identity = is_identity
        self.node_of = dict(zip(record.nodes, nodes, strict=True))
        self.layouts: dict[fx.Node, _Layouts] = {}

    def axes(self) -> Axes:
        """Return the channel axis of the value of each node, where it is known.

        The axis of a tuple of tensors is left out, as each of its tensors has an axis of its own.
        """
        for node in self.record.nodes:
            layouts = self._layout(node, node.meta["shape"])
            if layouts is not None:
                self.layouts[node] = layouts

        axes: Axes = {}
        for node, layout in self.layouts.items():
            if isinstance(layout, _Layout):
                axes[self.node_of[node]] = _axis(layout, node.meta["shape"])
        return axes

    def _layout(self, node: fx.Node, shape: object) -> _Layouts | None:
        """Return where the channels lie in a node's value (its layout), or None if it is not known.

        Args:
            node: The node. The layouts of its inputs' values are in `self.layouts`.
            shape: The shape of its value, or a tuple of the shapes of its tensors.
        """
        if isinstance(shape, torch.Size):
            layout = self._first_layout(node, shape)
            if layout is not None:
                return layout

        sources = inputs(node)
        if not any(source in self.layouts for source in sources):
            return None

        # Identities, products with a number and layers that are y = act(s x + t) keep the layout.
        # Sums, and steps that move elements, may change it.
        site = self.traced.site_at(node)
        is_map = site is not None and site.is_affine
        if self.is_identity(self.node_of[node]) or is_constant_mul(node) or is_map:
            return self.layouts[sources[0]]
        if is_add(node) or scaled(self.traced, node):
            return self._common_layout(node, sources)
        if is_step(self.traced, node) and all(source in self.layouts for source in sources):
            return self._layouts_after(node, set(sources))
        return None

    def _first_layout(self, node: fx.Node, shape: torch.Size) -> _Layout | None:
        """Return where the channels lie in a layer's output or a parameter (its layout), or None.

        A linear layer, LayerScale, LayerNorm or RMSNorm says in which dimension its output has the
        channels. A parameter is taken to have them in its last dimension. For any other value, the
        result is None.

        Args:
            node: The node of the value.
            shape: The shape of the value.
        """
        # A `get_attr` node reads a parameter, buffer or constant. An integer tensor, such as an
        # index, has no channels.
        if node.op == "get_attr":
            if not shape or not self.record.fetch(str(node.target)).is_floating_point():
                return None
            return _Layout(shape[-1], 1)

        site = self.traced.site_at(node)
        if site is None:
            return None

        # These are 1, -1 or None: the dimension of a norm, or else of a LayerScale.
        dim = site.channel_dim or site.scaled_dim
        if isinstance(site.module, nn.Linear):
            dim = -1
        elif isinstance(site.module, LINEAR):
            dim = 1
        if dim is None or len(shape) < 2:
            return None
        # The stride of a dimension is the product of the sizes behind it.
        return _Layout(shape[dim], math.prod(shape[dim % len(shape) + 1 :]))

    def _common_layout(self, node: fx.Node, operands: list[fx.Node]) -> _Layouts | None:
        """Return where the channels lie in a sum, or in a product with a parameter (its layout).

        Args:
            node: The node of the sum or product.
            operands: The nodes of its two inputs.

        Returns:
            The layout that both inputs have, or None if they differ, or if that of one is unknown.
        """
        first, second = operands
        # A parameter gets the layout of the other input.
        self._set_parameter_layout(first, self.layouts.get(second))
        self._set_parameter_layout(second, self.layouts.get(first))

        layout = self.layouts.get(first)
        # If no input is broadcast, a common layout is the layout of the result as well.
        same_shape = all(operand.meta["shape"] == node.meta["shape"] for operand in operands)
        if layout == self.layouts.get(second) and same_shape:
            return layout

        # An input of another shape is broadcast. So the layouts of both are found as they are in
        # the result, each by itself.
        layouts = [
            self._layouts_after(node, {operand}) for operand in operands if operand in self.layouts
        ]
        both_agree = len(layouts) == 2 and layouts[0] == layouts[1]
        return layouts[0] if both_agree else None

    def _set_parameter_layout(self, node: fx.Node, layout: Any) -> None:
        """Set the channel layout of a parameter that is added to a value or multiplies it.

        Args:
            node: The node of the parameter. Any other node is left as it is.
            layout: The channel layout of the value. With None, or a layout that the parameter's
                number of elements does not fit, nothing is set.
        """
        # A parameter is read by a `get_attr` node.
        if node.op != "get_attr" or not layout:
            return
        # A parameter of one number per channel has the channels side by side.
        count = math.prod(node.meta["shape"])
        if count == layout.size:
            self.layouts[node] = _Layout(count, 1)
        elif not count % (layout.size * layout.stride):
            # An embedding that is added to maps has its channels in the maps' dimension.
            self.layouts[node] = layout

    def _layouts_after(self, node: fx.Node, carriers: set[fx.Node]) -> _Layouts | None:
        """Return where the channels lie in the result of an operation.

        The operation is run on channel numbers: each element of an input is the number of its
        channel. The result then shows which of its elements belongs to which channel.

        Args:
            node: The node of the operation.
            carriers: The inputs that get channel numbers. All other inputs get a number that
                changes nothing: 0, or 1 if the operation is a product.

        Returns:
            The layout, or None if the operation does not run on channel numbers, or if its result
            has no layout. If the operation returns several tensors, the result is a tuple with the
            layout of each, or None.
        """
        # 1.0 for a product, 0.0 for a sum.
        neutral = float(is_mul(node))

        def numbers(source: fx.Node) -> Any:
            """Return the value on which the operation is run in place of one of its inputs.

            It is a tensor of channel numbers if the input is one of `carriers`. Otherwise each
            element is `neutral`. If the input is a tuple of tensors, so is the result.

            Args:
                source: The node of the input.
            """
            shape = source.meta["shape"]
            if source not in carriers:
                if not isinstance(shape, torch.Size):
                    return None
                return torch.full(shape, neutral, dtype=torch.float64)

            layouts = self.layouts[source]
            if isinstance(layouts, _Layout):
                return layouts.numbers(shape)
            # The value is a tuple of tensors. A tensor without a layout becomes None.
            pairs = zip(layouts, shape, strict=True)
            return tuple(layout and layout.numbers(size) for layout, size in pairs)

        args = fx.node.map_arg(node.args, numbers)
        kwargs = fx.node.map_arg(node.kwargs, numbers)
        try:
            moved = apply(self.traced, node, args, kwargs)
        except (RuntimeError, TypeError, AttributeError, IndexError):
            return None

        # Values with different numbers of channels cannot share a layout.
        carried = self._layouts_of(carriers)
        sizes = {layout.size for layout in carried}
        if len(sizes) != 1:
            return None
        (size,) = sizes

        # A padding may be 0 at the recorded size and not at others. So its result may have elements
        # without a channel.
        may_pad = node.target is F.pad and self.traced.flexible
        pure = all(layout.pure for layout in carried) and not may_pad
        if isinstance(moved, tuple | list):
            return tuple(_layout_of_numbers(tensor, size, pure=pure) for tensor in moved)
        return _layout_of_numbers(moved, size, pure=pure)

    def _layouts_of(self, nodes: set[fx.Node]) -> list[_Layout]:
        """Return the channel layouts of the values of some nodes, in one list.

        The value of a node may be a tuple of tensors, each with a layout of its own. A tensor
        without a layout is left out.

        Args:
            nodes: The nodes.
        """
        single_layouts: list[_Layout] = []
        for node in nodes:
            layouts = self.layouts[node]
            if isinstance(layouts, _Layout):
                single_layouts.append(layouts)
            else:
                single_layouts += [layout for layout in layouts if layout is not None]
        return single_layouts


def _layout_of_numbers(numbers: object, size: int, *, pure: bool) -> _Layout | None:
    """Return the channel layout of a tensor whose elements are the numbers of their channels.

    The result is None if it is no tensor, or if no layout puts the channels where it has them.

    Args:
        numbers: What an operation returned for tensors of channel numbers. A 0 is an element
            without a channel.
        size: The number of channels.
        pure: Whether every element of the operation's inputs belongs to a channel.
    """
    if not isinstance(numbers, Tensor) or not numbers.numel():
        return None

    flat = numbers.flatten()
    nonzero = flat != 0
    # The channels may fill a dimension of the tensor, or lie in runs inside one. So the stride of
    # every dimension is tried, and then the length of the first run of equal numbers. The latter is
    # computed as 0 if all numbers are equal.
    first_run = int((flat != flat[0]).to(torch.uint8).argmax())
    strides = [math.prod(numbers.shape[i + 1 :]) for i in range(numbers.ndim)]
    for stride in dict.fromkeys([*strides, first_run]):
        if not stride or len(flat) % (size * stride):
            continue
        # A layout fits if it has the same number at each element that belongs to a channel.
        layout = _Layout(size, stride, pure and bool(nonzero.all()))
        error = (flat - layout.numbers(numbers.shape).flatten()).abs_() * nonzero
        if bool(nonzero.any()) and float(error.max()) < 1e-6:
            return layout
    return None


def _axis(layout: _Layout, shape: torch.Size) -> Axis:
    """Return the channel axis of a tensor: the dimension along which its channels lie.

    It is the last dimension that has the layout's size and stride. If there is none, `Axis.dim` is
    None.

    Args:
        layout: The channel layout of the tensor.
        shape: The shape of the tensor.
    """
    dim: int | None = None
    for candidate, size in enumerate(shape):
        # In a dense tensor, a dimension's stride is the product of the sizes behind it.
        stride = math.prod(shape[candidate + 1 :])
        if size == layout.size and stride == layout.stride:
            dim = candidate
    return Axis(size=layout.size, dim=dim, last=dim == len(shape) - 1, pure=layout.pure)
