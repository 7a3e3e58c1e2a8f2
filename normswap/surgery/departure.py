"""PROVE, where: the first layer of a network that a file, or a copy of the network, computes otherwise."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from normswap.graph import recording, tracing
from normswap.models.calling import Example

# Rounding costs layers of one kind about the same: one that is off by so many times their median stands out.
_JUMP = 5


@dataclass(frozen=True)
class Departure:
    """A layer that is off, though its input is not.

    Args:
        site: its path, or that of the module whose forward does it; kind: what stands there, a class or a function.
        relative_l2: |result - network| / |network|, over its output.
        network, result: the numbers of both where they differ most.
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
def first_apart(
    network: nn.Module, example: Example, values: Iterable[object], allowed: float, similar: float = 0.0
) -> Departure | None:
    """The first layer whose output is not among `values`, all that a file or a result computes of the same input.

    The network, a copy that may be written to, goes on with the result's value of an operation where that is near, so
    each is measured alone. One of which the result has no value, as runtimes fuse some, is right where its reader is.

    Args:
        allowed: the relative L2 that an operation may be off by; similar: beyond which a value is another's.
    """
    traced, similar = recording.record_once(network, example), max(allowed, similar)
    departures = _departures(traced, example, values, similar)
    right: set[fx.Node] = set()
    for node in reversed(traced.nodes[:-1]):
        off = departures[node].relative_l2 if node in departures else math.inf
        if off <= allowed or (off > similar and any(reader in right for reader in traced.users[node])):
            right.add(node)
    near: list[Departure] = []

    def stands_out(departure: Departure) -> bool:
        others = [other.relative_l2 for other in near if other.kind == departure.kind and other is not departure]
        return departure.relative_l2 > max(allowed, _JUMP * statistics.median(others or [0.0]))

    for node, departure in departures.items():
        if departure.relative_l2 <= similar:
            near.append(departure)
        elif node not in right and traced.depends(traced.nodes[-1], node):
            return next(filter(stands_out, near), departure)
    return next(filter(stands_out, near), None)


def _departures(
    traced: tracing.Traced, example: Example, values: Iterable[object], similar: float
) -> dict[fx.Node, Departure]:
    """How far every operation on the input is from the closest of `values`, which goes on in its place if `similar`."""
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    tensors = (tensor.clone() for tensor in example.tensors())
    outputs: dict[fx.Node, Any] = dict(zip(placeholders, tensors, strict=True))
    outputs |= {node: traced.fetch(str(node.target)) for node in traced.nodes if node.op == "get_attr"}
    departures: dict[fx.Node, Departure] = {}
    for node in (node for node in traced.nodes[:-1] if node not in outputs):
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outputs.__getitem__)
        output = outputs[node] = tracing.apply(traced, node, args, kwargs)
        depends = any(traced.depends(node, placeholder) for placeholder in placeholders)
        if depends and isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1:
            same_size = [value.reshape(output.shape) for value in floats if value.numel() == output.numel()]
            distances = [float((value - output).norm().nan_to_num(math.inf)) for value in same_size]
            value = same_size[distances.index(min(distances))] if same_size else output.mul(math.nan)
            departures[node] = departure = _departure(traced, node, output, value)
            if departure.relative_l2 <= similar and output.is_contiguous():
                output.copy_(value)
    return departures


def _departure(traced: tracing.Traced, node: fx.Node, output: Tensor, value: Tensor) -> Departure:
    a, b = output.double().flatten(), value.double().flatten()
    place = int((a - b).abs().nan_to_num(math.inf).argmax())
    size = float(((a - b).norm() / a.norm().clamp_min(1e-300)).nan_to_num(math.inf))
    site, kind = str(node.target), type(traced.module(node)).__name__
    if node.op != "call_module":
        site, kind = "".join(node.meta["inside"][-1:]), getattr(node.target, "__name__", site)
    return Departure(site, kind, size, float(a[place]), float(b[place]))
