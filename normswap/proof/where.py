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

# A value that is off by half of its size is another layer's; rounding to int8 costs most layers up
# to 0.05.
_SIMILAR = 0.5


@dataclass(frozen=True)
class Departure:
    """A layer that is off, though its input is not.

    Args:
        site: The layer's path, or that of the module whose forward does it.
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
    """Return the first layer whose output is not among the values of a result, or None.

    The network goes on with the result's value of an operation if that is near, so each operation
    is measured alone. A runtime may fuse a layer away. Such a layer counts as right if the layer
    that reads it is right.

    Args:
        network: The network, a copy that may be written to.
        example: The input.
        values: All values that a file or a result computes from the same input.
        allowed: The relative L2 distance that an operation may be off by.
        jump: An operation may also be off by this factor times the median of others of its kind.
    """
    traced = recording.record_once(network, example)
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    departures = _measured(traced, example, floats)
    right: set[fx.Node] = set()
    for node in reversed(traced.nodes[:-1]):
        off = departures[node].relative_l2 if node in departures else math.inf
        if off <= allowed or (
            off > _SIMILAR and any(reader in right for reader in traced.users[node])
        ):
            right.add(node)
    near: list[Departure] = []

    def stands_out(departure: Departure) -> bool:
        others = [
            other.relative_l2
            for other in near
            if other.kind == departure.kind and other is not departure
        ]
        return departure.relative_l2 > max(allowed, jump * statistics.median(others or [0.0]))

    for node, departure in departures.items():
        if departure.relative_l2 <= _SIMILAR:
            near.append(departure)
        elif node not in right and traced.depends(traced.nodes[-1], node):
            return next(filter(stands_out, near), departure)
    return next(filter(stands_out, near), None)


def _measured(
    traced: tracing.Traced, example: Example, floats: list[Tensor]
) -> dict[fx.Node, Departure]:
    """How far every operation is off, alone.

    A value belongs to the operation that it is nearest to. One whose closest value belongs to
    another has none, and is as far off as the first that has one and reads it.
    """
    departures, closest = _departures(traced, example, floats)
    nearest: dict[int, float] = {}
    for node, place in closest.items():
        nearest[place] = min(departures[node].relative_l2, nearest.get(place, math.inf))
    without = [
        node for node, place in closest.items() if departures[node].relative_l2 > nearest[place]
    ]

    departures, _ = _departures(traced, example, floats, without, similar=_SIMILAR)
    for node in without:
        readers = (
            other for other in departures if other not in without and traced.depends(other, node)
        )
        reader = departures[next(readers, node)]
        departures[node] = replace(reader, site=departures[node].site, kind=departures[node].kind)

    return departures


def _departures(
    traced: tracing.Traced,
    example: Example,
    floats: list[Tensor],
    without: Container[fx.Node] = (),
    similar: float = -1.0,
) -> tuple[dict[fx.Node, Departure], dict[fx.Node, int]]:
    """How far every operation on the input is from the closest of `floats`, and which that is.

    That goes on in place of its output where it is off by `similar` at most, but of operations
    `without` a value.
    """
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    tensors = (tensor.clone() for tensor in example.tensors())
    outputs: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=True))
    outputs |= {
        node: traced.fetch(str(node.target)) for node in traced.nodes if node.op == "get_attr"
    }
    departures: dict[fx.Node, Departure] = {}

    closest: dict[fx.Node, int] = {}
    for node in (node for node in traced.nodes[:-1] if node not in outputs):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outputs.__getitem__)
        output = outputs[node] = tracing.apply(traced, node, args, kwargs)

        depends = any(traced.depends(node, placeholder) for placeholder in placeholders)
        if (
            depends
            and isinstance(output, Tensor)
            and output.is_floating_point()
            and output.numel() > 1
        ):
            same = {
                i: value.reshape(output.shape)
                for i, value in enumerate(floats)
                if value.numel() == output.numel()
            }
            distances = {
                i: float((value - output).norm().nan_to_num(math.inf)) for i, value in same.items()
            }
            closest[node] = min(distances, key=lambda i: distances[i], default=-1)
            value = same.get(closest[node], output.mul(math.nan))
            departures[node] = departure = _departure(traced, node, output, value)
            if departure.relative_l2 <= similar and node not in without and output.is_contiguous():
                output.copy_(value)

    return departures, closest


def _departure(traced: tracing.Traced, node: fx.Node, output: Tensor, value: Tensor) -> Departure:
    a = output.double().flatten()
    b = value.double().flatten()
    place = int((a - b).abs().nan_to_num(math.inf).argmax())
    size = float(((a - b).norm() / a.norm().clamp_min(1e-300)).nan_to_num(math.inf))
    site = str(node.target)
    kind = type(traced.module(node)).__name__
    if node.op != "call_module":
        site, kind = "".join(node.meta["inside"][-1:]), getattr(node.target, "__name__", site)
    return Departure(site, kind, size, float(a[place]), float(b[place]))
