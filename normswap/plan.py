"""SAY: what will be done to a network, as data. A plan can be printed, saved, edited by hand and
fed back.

An `Edit` names a dotted module path and the layer that will stand there; a `Step` is one scheme's
edits; a `Plan` is the steps that lead from the bare architecture to the network at hand, in order.
No torch in this file.
"""

from __future__ import annotations

import functools
import hashlib
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from normswap.errors import PlanError

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

# An object as JSON has it.
Body: TypeAlias = dict[str, Any]
VERSION = 2


class _Record:
    """What pydantic reads from JSON without an unknown key, or a value of another type that could
    be cast.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class Arch:
    """How to build the bare skeleton of a network.

    Args:
        name: what its builder calls it.
        kwargs: the builder's arguments, as JSON has them.
        builder: who builds it, one of `models.kinds`: timm (`timm.create_model(name, **kwargs)`),
            torchvision, ...
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

    AFTER: it is followed by it: W' = s W, b' = s b + t. AFTER_UNIT: the same with gamma = 1, beta =
    0.
    BEFORE: it precedes the layer, with no padding in between: W' = W s per input channel, b' = b +
    W t.
    BEFORE_MAGNITUDE: of that |s| alone. BEFORE_SHIFT: t alone. NORM: as a norm that stays in the
    layer (tune mode).
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
class Absorption(_Record):
    """How a layer absorbs a neighbour, and by which of the neighbour's channels: from, up to; None:
    by all.
    """

    way: AbsorbMode
    part: tuple[int, int] | None = None

    @property
    def channels(self) -> slice:
        if self.part is None:
            return slice(None)
        return slice(*self.part)


@dataclass(frozen=True)
class Then(_Record):
    """One more layer at the same path, after the replacement."""

    layer: str
    args: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Edit(_Record):
    """Place `layer` at `path`.

    Args:
        path: dotted path of a module.
        layer: name of the class in `normswap.layers` whose `replacing(old, *reads, **args)` builds
            the replacement.
        args: JSON-able keyword arguments; every number that the surgery needs.
        reads: paths of the modules whose values the replacement is built from.
        takes: how each of `reads` is absorbed, for a layer that absorbs its neighbours.
        keep: the module at the path stays, and the replacement comes after it; its tensors are then
            called `inner.*`.
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
            raise PlanError(
                f"the edit of {self.path} has {len(self.reads)} reads and {len(self.takes)} takes"
            )

    @property
    def absorbed(self) -> tuple[tuple[str, Absorption], ...]:
        """(path, how) of every neighbour that is absorbed."""
        return tuple(zip(self.reads, self.takes, strict=bool(self.takes)))

    @property
    def arguments(self) -> Body:
        """The keyword arguments of the layer's `replacing`."""
        if not self.takes:
            return self.args
        return {**self.args, "takes": self.takes}

    @property
    def depth(self) -> int:
        """How many times `inner` stands between the path and what was there, or was placed there,
        first.
        """
        return self.keep + len(self.then)


@dataclass(frozen=True)
class Outcome(_Record):
    """The outcome of a norm, as the rule that did it says.

    Args:
        counted: in a few words, as norms are counted: `folded into the layer before`.
        sentence: `folds into layer1.0.conv1`.
        reason: why it stays, or what is special about it.
    """

    counted: str
    sentence: str
    reason: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.sentence, self.reason)))


@dataclass(frozen=True)
class Step(_Record):
    """One conversion: scheme, options, at most one edit per path; the outcomes are for the reader
    alone.
    """

    scheme: str
    options: Body
    edits: tuple[Edit, ...]
    outcomes: dict[str, Outcome] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        paths: set[str] = set()
        for edit in self.edits:
            if edit.path in paths:
                raise PlanError(
                    f"step '{self.scheme}' edits {edit.path} twice",
                    remedy="Keep one edit per path.",
                )
            paths.add(edit.path)


@dataclass(frozen=True)
class Plan:
    """The steps from a bare architecture to a converted network."""

    steps: tuple[Step, ...] = ()

    def then(self, step: Step) -> Plan:
        return Plan((*self.steps, step))

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON but for the outcomes: two plans with the same digest do the
        same thing.
        """
        body = self._body()
        for step in body["steps"]:
            del step["outcomes"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def _body(self) -> Body:
        return {"version": VERSION, "steps": [asdict(step) for step in self.steps]}

    def to_json(self, indent: int | None = None) -> str:
        return json.dumps({**self._body(), "digest": self.digest}, indent=indent)

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Read what `to_json` wrote, possibly edited by hand: no digest is compared; raises
        PlanError: ill-formed.
        """
        try:
            body = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{origin} is not JSON", str(error)) from None
        if not isinstance(body, dict):
            raise PlanError(
                f"{origin} is no plan",
                f"it holds a {type(body).__name__} where a plan is an object",
            )
        if body.get("version") != VERSION:
            raise PlanError(
                f"{origin} has plan version {body.get('version')!r}, this normswap reads {VERSION}"
            )
        from pydantic import ValidationError

        try:
            return Plan(_reader().validate_json(text).steps)
        except ValidationError as error:
            first = error.errors()[0]
            place = "".join(
                f"[{key}]" if isinstance(key, int) else f".{key}" for key in first["loc"]
            )
            raise PlanError(f"{origin}{place}: {first['msg'].lower()}") from None


@dataclass(frozen=True)
class _PlanFile(_Record):
    version: int
    steps: tuple[Step, ...]
    digest: str = ""


@functools.cache
def _reader() -> TypeAdapter[_PlanFile]:
    from pydantic import TypeAdapter

    return TypeAdapter(_PlanFile)
