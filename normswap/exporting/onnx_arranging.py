"""An ONNX graph in fp32, arranged so that ONNX Runtime computes all of it on bytes: other nodes, the same values.

A node that has no form in int8 costs a pass over floats on both sides of it.

- A ReLU after max-pooling comes before it, where a convolution absorbs it: a maximum lets pass what rises.
- A ReLU of a sum that is also read without it (the stream of a pre-activation network) gets a sum of its own, whose
  rounding to unsigned bytes is the ReLU.
- The average over windows side by side is a depthwise convolution with 1/n, faster in int8 than the pooling.
- The mean over a whole map is GlobalAveragePool, and a Reshape where its sides are gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto


def arrange(model: ModelProto) -> None:
    """Rewrite the graph of an ONNX ModelProto in place."""
    graph = _Graph(model.graph)
    for node in list(graph.nodes):
        if node.op_type == "Relu":
            graph.relu_before_pooling(node)
            graph.sum_of_its_own(node)
        elif node.op_type == "AveragePool":
            graph.average_as_convolution(node)
        elif node.op_type == "ReduceMean":
            graph.mean_as_pooling(node)
    graph.write()


class _Graph:
    """The nodes of a graph in order, who makes and who reads what, and what is known of shapes and values."""

    def __init__(self, graph: GraphProto) -> None:
        self.proto, self.nodes = graph, list(graph.node)
        known = (*graph.value_info, *graph.input, *graph.output)
        self.shapes = {one.name: [dim.dim_value for dim in one.type.tensor_type.shape.dim] for one in known}
        self.makers = {name: node for node in self.nodes for name in node.output}
        self.readers = Counter([*_read(graph), *(one.name for one in graph.output)])

    def relu_before_pooling(self, relu: NodeProto) -> None:
        pool = self.makers.get(relu.input[0])
        if pool is None or pool.op_type != "MaxPool" or self.readers[pool.output[0]] > 1 or len(pool.output) > 1:
            return
        start, between, end = pool.input[0], pool.output[0], relu.output[0]
        relu.input[0], relu.output[0] = start, between
        pool.input[0], pool.output[0] = between, end
        self.makers.update({between: relu, end: pool})
        at, then = self._at(pool), self._at(relu)
        self.nodes[at], self.nodes[then] = relu, pool
        self.shapes[between] = self.shapes.get(start, [])
        for value in [one for one in self.proto.value_info if one.name == between]:  # it has another shape now
            self.proto.value_info.remove(value)

    def sum_of_its_own(self, relu: NodeProto) -> None:
        total = self.makers.get(relu.input[0])
        if total is None or total.op_type != "Add" or self.readers[total.output[0]] < 2:
            return
        name = f"{total.output[0]}_alone"
        self.nodes.insert(self._at(relu), _node("Add", [*total.input], name, f"{total.name}_alone"))
        self.readers[total.output[0]] -= 1
        relu.input[0] = name

    def average_as_convolution(self, pool: NodeProto) -> None:
        from onnx import numpy_helper

        shape, kernel, steps = (
            self.shapes.get(pool.input[0], []),
            _numbers(pool, "kernel_shape"),
            _numbers(pool, "strides"),
        )
        automatic = any(one.name == "auto_pad" and one.s != b"NOTSET" for one in pool.attribute)
        padded = any(_numbers(pool, "pads")) or automatic
        if padded or kernel != steps or len(shape) != len(kernel) + 2 or not all(shape[1:]):
            return
        if any(size % step for size, step in zip(shape[2:], steps, strict=True)):
            return
        weight = np.full((shape[1], 1, *kernel), 1 / np.prod(kernel), np.float32)
        name = f"{pool.output[0]}_weight"
        self.proto.initializer.append(numpy_helper.from_array(weight, name))
        node_inputs = [pool.input[0], name]
        self.nodes[self._at(pool)] = _node(
            "Conv", node_inputs, pool.output[0], pool.name, strides=steps, group=shape[1]
        )

    def mean_as_pooling(self, mean: NodeProto) -> None:
        from onnx import numpy_helper

        rank = len(self.shapes.get(mean.input[0], ()))
        axes = self._values(mean.input[1]) if len(mean.input) > 1 else _numbers(mean, "axes")
        if rank < 3 or sorted(axis % rank for axis in axes) != [*range(2, rank)]:
            return
        self.readers.subtract(mean.input)
        at, made = self._at(mean), mean.output[0]
        if _numbers(mean, "keepdims") != [0]:
            self.nodes[at] = _node("GlobalAveragePool", [mean.input[0]], made, mean.name)
            return
        pooled, shape = f"{made}_pooled", f"{made}_shape"
        rows = np.array([0, -1], np.int64)  # 0: as many as there are
        self.proto.initializer.append(numpy_helper.from_array(rows, shape))
        pool = _node("GlobalAveragePool", [mean.input[0]], pooled, mean.name)
        self.nodes[at : at + 1] = [pool, _node("Reshape", [pooled, shape], made, f"{mean.name}_rows")]

    def write(self) -> None:
        unread = [one for one in self.proto.initializer if one.name in self.readers and not self.readers[one.name]]
        for one in unread:
            self.proto.initializer.remove(one)
        del self.proto.node[:]
        self.proto.node.extend(self.nodes)

    def _at(self, node: NodeProto) -> int:
        return next(i for i, one in enumerate(self.nodes) if one is node)

    def _values(self, name: str) -> list[int]:
        from onnx import numpy_helper

        return [int(v) for one in self.proto.initializer if one.name == name for v in numpy_helper.to_array(one)]


def _read(graph: GraphProto) -> Iterator[str]:
    """The values that the nodes read, those of inner graphs, too."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _read(inner)


def _numbers(node: NodeProto, name: str) -> list[int]:
    """The whole numbers that an attribute holds; none where it is not there."""
    attribute = next((one for one in node.attribute if one.name == name), None)
    if attribute is None:
        return []
    return [*attribute.ints] or [attribute.i]


def _node(kind: str, inputs: list[str], made: str, name: str, **attributes: int | list[int]) -> NodeProto:
    from onnx import helper

    node = helper.make_node(kind, inputs, [made], name)
    node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
    return node
