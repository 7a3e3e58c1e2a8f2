"""PROVE, where: the first layer of a network that a file, or a copy of the network, computes otherwise."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from normswap.graph import recording, tracing
from normswap.models.calling import Example

# Rounding costs layers of one kind about the same: one that is off by so many times their median stands out.
_JUMP = 5
# A value is looked for by this many of its numbers.
_SAMPLED = 4096


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
        numbers = f"{self.network:.4g} in the network is {self.result:.4g}"
        return f"{self.site or 'forward'} ({self.kind}): relative L2 {self.relative_l2:.1e}, where {numbers}"


@torch.no_grad()
def first_apart(
    network: nn.Module, example: Example, values: Iterable[object], allowed: float, similar: float = 0.0
) -> Departure | None:
    """The first layer whose output is not among `values`, all that a file or a result computes of the same input.

    The network, a copy that may be written to, goes on with the result's value of an operation where that is near, so
    each is measured alone. One of which the result has no value, as runtimes fuse some, is right where its reader is.

    Args:
        allowed: the relative L2 that an operation may be off by; what rounds may be off by five times the
            median of its kind.
        similar: the relative L2 beyond which a value is another operation's; by default `allowed`.
    """
    traced, similar = recording.record_once(network, example), max(allowed, similar)
    departures = _departures(traced, example, values, similar)
    right: set[fx.Node] = set()
    for node in reversed(traced.nodes[:-1]):
        off = departures[node].relative_l2 if node in departures else math.inf
        if off <= allowed or (off > similar and any(reader in right for reader in traced.users[node])):
            right.add(node)
    near: list[Departure] = []
    for node, departure in departures.items():
        if departure.relative_l2 <= similar:
            near.append(departure)
        elif node not in right and traced.depends(traced.nodes[-1], node):
            return _standing_out(near, allowed) or departure
    return _standing_out(near, allowed)


def _standing_out(departures: Sequence[Departure], allowed: float) -> Departure | None:
    for departure in departures:
        others = [other.relative_l2 for other in departures if other.kind == departure.kind and other is not departure]
        if departure.relative_l2 > max(allowed, _JUMP * statistics.median(others or [0.0])):
            return departure
    return None


def _departures(
    traced: tracing.Traced, example: Example, values: Iterable[object], similar: float
) -> dict[fx.Node, Departure]:
    """How far every operation on the input is from the closest of `values`, which goes on in its place if `similar`."""
    floats = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    inputs = iter(example.tensors())
    placeholders = [node for node in traced.nodes if node.op == "placeholder"]
    outputs: dict[fx.Node, object] = {node: next(inputs).clone() for node in placeholders}
    departures: dict[fx.Node, Departure] = {}
    for node in traced.nodes[len(placeholders) : -1]:
        if node.op == "get_attr":
            outputs[node] = traced.fetch(str(node.target))
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), outputs.__getitem__)
        output = outputs[node] = tracing.apply(traced, node, args, kwargs)
        depends = any(traced.depends(node, placeholder) for placeholder in placeholders)
        if depends and isinstance(output, Tensor) and output.is_floating_point() and output.numel() > 1:
            value = _closest(output, floats)
            departures[node] = departure = _departure(traced, node, output, value)
            if departure.relative_l2 <= similar and output.is_contiguous():
                output.copy_(value)
    return departures


def _closest(output: Tensor, values: Sequence[Tensor]) -> Tensor:
    step = max(1, output.numel() // _SAMPLED)
    sample = output.flatten()[::step]

    def distance(value: Tensor) -> float:
        return float((value.flatten()[::step] - sample).norm().nan_to_num(math.inf))

    values = [value for value in values if value.numel() == output.numel()]
    return min(values, key=distance, default=torch.full_like(output, math.nan)).reshape(output.shape)


def _departure(traced: tracing.Traced, node: fx.Node, output: Tensor, value: Tensor) -> Departure:
    a, b = output.double().flatten(), value.double().flatten()
    place = int((a - b).abs().nan_to_num(math.inf).argmax())
    size = float(((a - b).norm() / a.norm().clamp_min(1e-300)).nan_to_num(math.inf))
    site, kind = str(node.target), type(traced.module(node)).__name__
    if node.op != "call_module":
        site, kind = "".join(node.meta["inside"][-1:]), getattr(node.target, "__name__", site)
    return Departure(site, kind, size, float(a[place]), float(b[place]))
