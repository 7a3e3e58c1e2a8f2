"""SAY: what will be done to a network, as data. A plan can be printed, saved, edited by hand and fed back.

An `Edit` names a dotted module path and the layer that will stand there; a `Step` is one scheme's edits; a
`Plan` is the steps that lead from the bare architecture to the network at hand, in order. No torch in this file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any, TypeAlias, TypeVar

from normswap.errors import PlanError

Body: TypeAlias = dict[str, Any]  # an object as JSON has it
VERSION = 2
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Arch:
    """How to build the bare skeleton of a network.

    Args:
        name: what its builder calls it.
        kwargs: the builder's arguments, as JSON has them.
        builder: who builds it, one of `models.kinds`: timm (`timm.create_model(name, **kwargs)`), torchvision, ...
    """

    name: str
    kwargs: Body = field(default_factory=dict)
    builder: str = "timm"

    def __str__(self) -> str:
        """As a reader wants it: without what is too long to read."""
        pairs = (f"{key} = {value}" for key, value in self.kwargs.items())
        return f"{self.name}({', '.join(pair if len(pair) < 80 else f'{pair[:70]} ...' for pair in pairs)})"


class AbsorbMode(str, Enum):
    """How a linear layer y = W x + b absorbs a neighbour s x + t (s, t per channel).

    AFTER: it is followed by it: W' = s W, b' = s b + t. AFTER_UNIT: the same with gamma = 1, beta = 0.
    BEFORE: it precedes the layer, with no padding in between: W' = W s per input channel, b' = b + W t.
    BEFORE_MAGNITUDE: of that |s| alone. BEFORE_SHIFT: t alone. NORM: as a norm that lives on in the layer (tune mode).
    SUM: it is another term of the sum of which the layer is one: W' = W + W2, b' = b + b2.
    """

    AFTER = "after"
    AFTER_UNIT = "after-unit"
    BEFORE = "before"
    BEFORE_MAGNITUDE = "before-magnitude"
    BEFORE_SHIFT = "before-shift"
    NORM = "norm"
    SUM = "sum"

    @property
    def precedes(self) -> bool:
        """Whether the neighbour stands before the layer."""
        return self in (AbsorbMode.BEFORE, AbsorbMode.BEFORE_MAGNITUDE, AbsorbMode.BEFORE_SHIFT)


@dataclass(frozen=True)
class Absorption:
    """How a layer absorbs a neighbour, and by which of the neighbour's channels: from, up to; None: by all."""

    way: AbsorbMode
    part: tuple[int, int] | None = None

    @property
    def channels(self) -> slice:
        return slice(None) if self.part is None else slice(*self.part)


@dataclass(frozen=True)
class Then:
    """One more layer at the same path, after the replacement."""

    layer: str
    args: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Edit:
    """Place `layer` at `path`.

    Args:
        path: dotted path of a module.
        layer: name of the class in `normswap.layers` whose `replacing(old, *reads, **args)` builds the replacement.
        args: JSON-able keyword arguments; every number that the surgery needs.
        reads: paths of the modules whose values the replacement is built from.
        takes: how each of `reads` is absorbed, for a layer that absorbs its neighbours.
        keep: the module at the path stays, and the replacement comes after it; its tensors are then called `inner.*`.
        then: further layers after the replacement, which is then called `inner`.
        out_of_place: nothing in the replacement writes into its input.
    """

    path: str
    layer: str
    args: Body = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    takes: tuple[Absorption, ...] = ()
    keep: bool = False
    then: tuple[Then, ...] = ()
    out_of_place: bool = False

    def __post_init__(self) -> None:
        if self.takes and len(self.takes) != len(self.reads):
            raise PlanError(f"the edit of {self.path} has {len(self.reads)} reads and {len(self.takes)} takes")

    @property
    def absorbed(self) -> tuple[tuple[str, Absorption], ...]:
        """(path, how) of every neighbour that is absorbed."""
        return tuple(zip(self.reads, self.takes, strict=bool(self.takes)))

    @property
    def depth(self) -> int:
        """How many times `inner` stands between the path and what was there, or was placed there, first."""
        return self.keep + len(self.then)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a norm, as the rule that did it says.

    Args:
        counted: in a few words, as norms are counted: `folded back`.
        sentence: `folds into layer1.0.conv1`.
        reason: why it stays, or what is special about it.
    """

    counted: str
    sentence: str
    reason: str = ""

    def __str__(self) -> str:
        return self.sentence + (f": {self.reason}" if self.reason else "")


@dataclass(frozen=True)
class Step:
    """One conversion: the scheme, the options it was given, and its edits, at most one per path.

    Args:
        outcomes: what became of each norm, by path: told, not obeyed. Plans of earlier versions have none.
    """

    scheme: str
    options: Body
    edits: tuple[Edit, ...]
    outcomes: dict[str, Outcome] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        paths: set[str] = set()
        for edit in self.edits:
            if edit.path in paths:
                raise PlanError(f"step '{self.scheme}' edits {edit.path} twice", remedy="Keep one edit per path.")
            paths.add(edit.path)


@dataclass(frozen=True)
class Plan:
    """The steps from a bare architecture to a converted network."""

    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Plan:
        return Plan((*self.steps, step))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON: two plans with the same digest do the same thing."""
        return digest_of(self._body())

    def _body(self) -> Body:
        return {"version": VERSION, "steps": [asdict(step) for step in self.steps]}

    def to_json(self, indent: int | None = None, about: str = "") -> str:
        """Write the plan; `about` is a sentence ahead of it, for people who open the file."""
        head = {"about": about} if about else {}
        return json.dumps({**head, **self._body(), "digest": self.digest}, indent=indent)

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
        if not isinstance(body, dict):
            raise PlanError(f"{origin} is no plan", f"it holds a {type(body).__name__} where a plan is an object")
        version = body.get("version")
        if version not in (1, VERSION):
            raise PlanError(f"{origin} has plan version {version!r}, this normswap reads 1 and {VERSION}")
        _only(body, {"about", "version", "steps", "digest"}, origin)
        steps = _list(body, "steps", origin)
        return Plan(tuple(_step(item, f"{origin}: steps[{i}]", old=version == 1) for i, item in enumerate(steps)))


def digest_of(body: Body) -> str:
    """The digest of a plan as it stands in JSON, of whatever version; a digest that stands with it does not count."""
    kept = {key: value for key, value in body.items() if key not in ("about", "digest")}
    if isinstance(steps := kept.get("steps"), list):
        kept["steps"] = [_only_what_is_done(step) for step in steps]
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _only_what_is_done(step: object) -> object:
    return {key: value for key, value in step.items() if key != "outcomes"} if isinstance(step, dict) else step


def _step(item: object, where: str, *, old: bool) -> Step:
    item = _only(item, {"scheme", "options", "edits", "outcomes"}, where)
    read = _edit_of_version_1 if old else _edit
    edits = [read(edit, f"{where}.edits[{i}]") for i, edit in enumerate(_list(item, "edits", where))]
    outcomes = {path: _outcome(one, f"{where}.outcomes[{path!r}]")
                for path, one in _maybe(item, "outcomes", dict, where, {}).items()}  # fmt: skip
    return Step(_get(item, "scheme", str, where), _get(item, "options", dict, where), tuple(edits), outcomes)


def _outcome(item: object, where: str) -> Outcome:
    item = _only(item, {"counted", "sentence", "reason"}, where)
    return Outcome(*(_get(item, key, str, where) for key in ("counted", "sentence", "reason")))


def _edit(item: object, where: str) -> Edit:
    item = _only(item, {"path", "layer", "args", "reads", "takes", "keep", "then", "out_of_place"}, where)
    takes = tuple(
        _absorption(one, f"{where}.takes[{i}]") for i, one in enumerate(_maybe(item, "takes", list, where, []))
    )
    then = tuple(_then(one, f"{where}.then[{i}]") for i, one in enumerate(_maybe(item, "then", list, where, [])))
    return Edit(
        *_layer_at(item, where),
        reads=_paths(item, where),
        takes=takes,
        keep=_maybe(item, "keep", bool, where, False),
        then=then,
        out_of_place=_maybe(item, "out_of_place", bool, where, False),
    )


def _edit_of_version_1(item: object, where: str) -> Edit:
    """An edit of version 1: in `args` are takes as words (`after 16:32`), and what became of the module."""
    item = _only(item, {"path", "layer", "args", "reads"}, where)
    path, layer, args = _layer_at(item, where)
    args = dict(args)
    words = [str(word).partition(" ") for word in args.pop("takes", [])]
    takes = [{"way": way, "part": [int(end) for end in part.split(":")] if part else None} for way, _, part in words]
    scalar, copied = args.pop("then", None), args.pop("copied", False)
    then = (() if scalar is None else (Then("Scale", scalar),)) + ((Then("Copy"),) if copied else ())
    return Edit(
        path,
        "Copy" if layer == "Copied" else layer,
        args,
        reads=_paths(item, where),
        takes=tuple(_absorption(absorption, f"{where}.takes[{i}]") for i, absorption in enumerate(takes)),
        keep=bool(args.pop("keep", False)),
        then=then,
        out_of_place=bool(args.pop("out_of_place", False)),
    )


def _layer_at(item: Body, where: str) -> tuple[str, str, Body]:
    return _get(item, "path", str, where), _get(item, "layer", str, where), _maybe(item, "args", dict, where, {})


def _paths(item: Body, where: str) -> tuple[str, ...]:
    reads = item.get("reads", [])
    if not isinstance(reads, list) or not all(isinstance(read, str) for read in reads):
        raise PlanError(f"{where}.reads must be a list of module paths")
    return tuple(reads)


def _absorption(item: object, where: str) -> Absorption:
    item = _only(item, {"way", "part"}, where)
    way, part = _get(item, "way", str, where), item.get("part")
    known = [one.value for one in AbsorbMode]
    if way not in known:
        raise PlanError(f"{where}.way is {way!r}", f"it is one of {', '.join(known)}")
    if part is not None and not (isinstance(part, list) and [type(end) for end in part] == [int, int]):
        raise PlanError(f"{where}.part must be null or two whole numbers")
    return Absorption(AbsorbMode(way), None if part is None else (part[0], part[1]))


def _then(item: object, where: str) -> Then:
    item = _only(item, {"layer", "args"}, where)
    return Then(_get(item, "layer", str, where), _maybe(item, "args", dict, where, {}))


def _only(item: object, known: Iterable[str], where: str) -> Body:
    if not isinstance(item, dict):
        raise PlanError(f"{where} must be an object, not {type(item).__name__}")
    unknown = sorted(set(item) - set(known))
    if unknown:
        raise PlanError(f"{where} has unknown keys {unknown}", remedy=f"Known: {sorted(known)}.")
    return item


def _get(item: Body, key: str, kind: type[_Kind], where: str) -> _Kind:
    value = item.get(key)
    if not isinstance(value, kind):
        raise PlanError(f"{where}.{key} must be of type {kind.__name__}")
    return value


def _maybe(item: Body, key: str, kind: type[_Kind], where: str, default: _Kind) -> _Kind:
    return _get(item, key, kind, where) if key in item else default


def _list(item: Body, key: str, where: str) -> list[object]:
    return _get(item, key, list, where)
