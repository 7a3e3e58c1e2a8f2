"""PROVE, where: the first layer that a file, or a copy of the network, computes otherwise."""

import math
import statistics
from collections.abc import Container, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.graph import recording, tracing
from normswap.models.calling import Example

# A value belongs to an operation if its relative L2 distance from the operation's output is at most
# this. If it is larger, it is taken for another layer's output. For comparison, rounding to int8
# costs most layers up to 0.05.
_SIMILAR = 0.5


@dataclass(frozen=True)
class Departure:
    """A layer whose output is wrong in the result, although its input is right.

    Args:
        site: The layer's path. For a function it is the path of the module whose forward calls it.
        kind: The name of the layer's class, or of the function.
        relative_l2: The distance |result - network| / |network|, over its output.
        network: The network's number where both differ most.
        result: The result's number at the same place.
    """

    site: str
    kind: str
    relative_l2: float
    network: float
    result: float

    def __str__(self) -> str:
        where = f"{self.site or 'forward'} ({self.kind}): relative L2 {self.relative_l2:.1e}"
        return f"{where}, where {self.network:.4g} in the network is {self.result:.4g}"


@torch.no_grad()
def first_layer_apart(
    network: nn.Module,
    example: Example,
    values: Iterable[object],
    allowed: float,
    jump: float = 0.0,
) -> Departure | None:
    """Return the first layer whose output the result computes differently, or None.

    The network's operations run one by one. If one of the result's values is near an operation's
    output, the next operations read that value in place of the output. So each operation is
    measured without the errors of those before it. A runtime may fuse a layer away, so that the
    result has no value for it. Such a layer counts as right if the layer that reads it is right.

    Args:
        network: The source, in a copy that may be written to.
        example: The input.
        values: All values that the result, a file or a network, computes from the same input.
        allowed: The relative L2 distance that an operation's value may be off by.
        jump: An operation may also be off by this factor times the median distance of the other
            operations of its kind. With the default 0 only `allowed` counts.
    """
    traced = recording.record_once(network, example)
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    departures = _measured(traced, example, floats)

    right = _right_operations(traced, departures, allowed)

    # The operations so far for which the result has a value. The loop below fills it.
    with_value: list[Departure] = []

    # An operation stands out if it is off by more than is allowed, and by more than `jump` times
    # the median of the others of its kind.
    def stands_out(departure: Departure) -> bool:
        others = [
            other.relative_l2
            for other in with_value
            if other.kind == departure.kind and other is not departure
        ]
        return departure.relative_l2 > max(allowed, jump * statistics.median(others or [0.0]))

    # Go through the operations from the input on, as far as the first one that has no value, is not
    # right and reaches the outputs (the last node). If an operation before it stands out, that one
    # is the cause, or else this one.
    for node, departure in departures.items():
        if departure.relative_l2 <= _SIMILAR:
            with_value.append(departure)
        elif node not in right and traced.depends(traced.nodes[-1], node):
            return next(filter(stands_out, with_value), departure)
    return next(filter(stands_out, with_value), None)


def _right_operations(
    traced: tracing.Traced, departures: dict[fx.Node, Departure], allowed: float
) -> set[fx.Node]:
    """Return the operations that the result computes as the network does.

    An operation is right if its value is right, or if the result has no value for it and an
    operation that reads it is right.

    Args:
        traced: The network's recorded forward.
        departures: How far each measured operation is off.
        allowed: The relative L2 distance that an operation's value may be off by.
    """
    right: set[fx.Node] = set()
    # From the outputs backwards, so that the operations that read a value come before it. The last
    # node returns the outputs and computes nothing.
    for node in reversed(traced.nodes[:-1]):
        # Operations that were not measured, such as those that give no tensor, have no value.
        relative_l2 = departures[node].relative_l2 if node in departures else math.inf
        has_no_value = relative_l2 > _SIMILAR
        has_right_reader = any(reader in right for reader in traced.users[node])
        if relative_l2 <= allowed or (has_no_value and has_right_reader):
            right.add(node)
    return right


def _measured(
    traced: tracing.Traced, example: Example, floats: list[Tensor]
) -> dict[fx.Node, Departure]:
    """Return how far every operation is off, without the errors of the operations before it.

    Several operations may have the same value of the result as their closest. It counts for the one
    whose output it is nearest to. The others get no value, and count as far off as the first
    operation behind them that has one.

    Args:
        traced: The network's recorded forward.
        example: The input.
        floats: The floating-point values of the result.
    """
    # Which operations share their closest value (its index in `floats`) with one that it is nearer
    # to, and so have no value of their own.
    departures, closest = _departures(traced, example, floats)
    least_distances: dict[int, float] = {}
    for node, index in closest.items():
        least = least_distances.get(index, math.inf)
        least_distances[index] = min(departures[node].relative_l2, least)
    without_value = [
        node
        for node, index in closest.items()
        if departures[node].relative_l2 > least_distances[index]
    ]

    # Measured again. Now the next operations read the result's value in place of each output that
    # has one near it.
    departures, _ = _departures(traced, example, floats, without_value, similar=_SIMILAR)

    # An operation without a value gets the figures of the first one behind it that has a value, if
    # there is one, and keeps its own path and kind.
    for node in without_value:
        readers = (
            other
            for other in departures
            if other not in without_value and traced.depends(other, node)
        )
        reader = departures[next(readers, node)]
        departures[node] = replace(reader, site=departures[node].site, kind=departures[node].kind)

    return departures


def _departures(
    traced: tracing.Traced,
    example: Example,
    floats: list[Tensor],
    without_value: Container[fx.Node] = (),
    similar: float = -1.0,
) -> tuple[dict[fx.Node, Departure], dict[fx.Node, int]]:
    """Run the network's operations, and return how far each is from the result's closest value.

    Only operations on the input that give a floating-point tensor of several numbers are measured.

    Args:
        traced: The network's recorded forward.
        example: The input.
        floats: The floating-point values of the result.
        without_value: The operations that have no value in the result.
        similar: If an operation is off by this at most, and is not in `without_value`, the next
            operations read its closest value in place of its output. With the default -1 they never
            do.

    Returns:
        The departure of each operation, and the index of its closest value in `floats`. The index
        is -1 if no value has the operation's number of entries.
    """
    # The values of the nodes that compute nothing: the inputs, and the constants and parameters.
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    tensors = (tensor.clone() for tensor in example.tensors())
    outputs: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=True))
    outputs |= {
        node: traced.fetch(str(node.target)) for node in traced.nodes if node.op == "get_attr"
    }

    departures: dict[fx.Node, Departure] = {}
    closest: dict[fx.Node, int] = {}
    # The last node returns the outputs and computes nothing.
    for node in traced.nodes[:-1]:
        if node in outputs:
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outputs.__getitem__)
        output = outputs[node] = tracing.apply(traced, node, args, kwargs)

        # Only numbers that come from the input are compared.
        if not traced.depends_on_inputs(node) or not isinstance(output, Tensor):
            continue
        if not output.is_floating_point() or output.numel() <= 1:
            continue

        closest[node], value = _closest(output, floats)
        departure = departures[node] = _departure(traced, node, output, value)

        # The value is written in place, so that views of the output have it, too.
        is_near = departure.relative_l2 <= similar
        if is_near and node not in without_value and output.is_contiguous():
            output.copy_(value)

    return departures, closest


def _closest(output: Tensor, floats: list[Tensor]) -> tuple[int, Tensor]:
    """Return which of the result's values is closest to an operation's output, and that value.

    A file may arrange the same numbers otherwise, so values of any shape with as many entries are
    compared.

    Args:
        output: The output.
        floats: The floating-point values of the result.

    Returns:
        The index of the closest value in `floats`, and the value in the output's shape. If no value
        has as many entries, they are -1 and a tensor of NaN, which is infinitely far off.
    """
    candidates = {
        i: value.reshape(output.shape)
        for i, value in enumerate(floats)
        if value.numel() == output.numel()
    }
    distances = {
        i: float((value - output).norm().nan_to_num(math.inf)) for i, value in candidates.items()
    }
    nearest = min(distances, key=lambda index: distances[index], default=-1)
    return nearest, candidates.get(nearest, output.mul(math.nan))


def _departure(traced: tracing.Traced, node: fx.Node, output: Tensor, value: Tensor) -> Departure:
    """Return how far a value of the result is from an operation's output.

    Args:
        traced: The network's recorded forward.
        node: The operation.
        output: The network's output of the operation.
        value: The result's value, of the same shape.
    """
    # Numbers that are not finite count as infinitely far off.
    expected = output.double().flatten()
    actual = value.double().flatten()
    difference = expected - actual
    index = int(difference.abs().nan_to_num(math.inf).argmax())
    relative_l2 = (difference.norm() / expected.norm().clamp_min(1e-300)).nan_to_num(math.inf)

    # A module is named by its path and class. A function is named by itself, and its site is the
    # module whose forward calls it: the innermost of the modules around it.
    target = str(node.target)
    site = target
    kind = type(traced.module(node)).__name__
    if node.op != "call_module":
        site = "".join(node.meta["inside"][-1:])
        kind = getattr(node.target, "__name__", target)
    return Departure(
        site=site,
        kind=kind,
        relative_l2=float(relative_l2),
        network=float(expected[index]),
        result=float(actual[index]),
    )
