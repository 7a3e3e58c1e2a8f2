"""SAY: what will be done to a network, as data. A plan can be printed, saved, edited by hand and fed back.

An `Edit` names a seat (a dotted module path) and the layer that will sit there; a `Step` is one scheme's edits; a
`Plan` is the steps that lead from the bare architecture to the network at hand, in order. No torch in this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from normswap.errors import PlanError

VERSION = 1


@dataclass(frozen=True)
class Arch:
    """How to build the bare skeleton of a timm network: `timm.create_model(name, **kwargs)`."""

    name: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """Seat `layer` at `path`.

    Args:
        path: dotted path of the seat.
        layer: name of the class in `normswap.layers` whose `replacing(old, *reads, **args)` builds the newcomer.
        args: JSON-able keyword arguments; every number that the surgery needs.
        reads: paths of the modules whose values the newcomer is built from.
    """

    path: str
    layer: str
    args: dict[str, Any] = field(default_factory=dict)
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Step:
    """One conversion: the scheme, the options it was given, and its edits, at most one per seat."""

    scheme: str
    options: dict[str, Any]
    edits: tuple[Edit, ...]

    def __post_init__(self) -> None:
        seats: set[str] = set()
        for edit in self.edits:
            if edit.path in seats:
                raise PlanError(f"step '{self.scheme}' edits {edit.path} twice", remedy="Keep one edit per seat.")
            seats.add(edit.path)


@dataclass(frozen=True)
class Plan:
    """The steps from a bare architecture to a converted network."""

    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Plan:
        return Plan((*self.steps, step))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: two plans with the same digest do the same thing."""
        return hashlib.sha256(json.dumps(self._body(), sort_keys=True).encode()).hexdigest()

    def _body(self) -> dict[str, Any]:
        return {"version": VERSION, "steps": [asdict(step) for step in self.steps]}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({**self._body(), "digest": self.digest}, indent=indent)

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Read what `to_json` wrote, possibly edited by hand (so the digest is not compared here).

        Raises:
            PlanError: not JSON, another version, or a record with missing, unknown or ill-typed fields.
        """
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{origin} is not JSON", str(error)) from None
        if not isinstance(body, dict) or body.get("version") != VERSION:
            found = body.get("version") if isinstance(body, dict) else type(body).__name__
            raise PlanError(f"{origin} has plan version {found!r}, this normswap reads {VERSION}")
        _only(body, {"version", "steps", "digest"}, origin)
        return Plan(tuple(_step(item, f"{origin}: steps[{i}]") for i, item in enumerate(_list(body, "steps", origin))))


def _step(item: Any, where: str) -> Step:
    _only(item, {"scheme", "options", "edits"}, where)
    edits = [_edit(edit, f"{where}.edits[{i}]") for i, edit in enumerate(_list(item, "edits", where))]
    return Step(_get(item, "scheme", str, where), _get(item, "options", dict, where), tuple(edits))


def _edit(item: Any, where: str) -> Edit:
    _only(item, {"path", "layer", "args", "reads"}, where)
    reads = item.get("reads", [])
    if not isinstance(reads, list) or not all(isinstance(read, str) for read in reads):
        raise PlanError(f"{where}.reads must be a list of module paths")
    args = _get(item, "args", dict, where) if "args" in item else {}
    return Edit(_get(item, "path", str, where), _get(item, "layer", str, where), args, tuple(reads))


def _only(item: Any, known: Iterable[str], where: str) -> None:
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be an object, not {type(item).__name__}")
    unknown = sorted(set(item) - set(known))
    if unknown:
        raise PlanError(f"{where} has unknown keys {unknown}", remedy=f"Known: {sorted(known)}.")


def _get(item: dict[str, Any], key: str, kind: type, where: str) -> Any:
    if not isinstance(item.get(key), kind):
        raise PlanError(f"{where}.{key} must be of type {kind.__name__}")
    return item[key]


def _list(item: dict[str, Any], key: str, where: str) -> list[Any]:
    return _get(item, key, list, where)
