"""SAY: what will be done to a network, as data.

A plan can be printed, saved, edited by hand and fed back.

An `Edit` names a dotted module path and the layer that will stand there; a `Step` is one scheme's
edits; a `Plan` is the steps that lead from the bare architecture to the network at hand, in order.
No torch in this file.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from normswap import reading
from normswap.errors import PlanError

if TYPE_CHECKING:
    from pydantic import ConfigDict, TypeAdapter

# An object as JSON has it.
Body: TypeAlias = dict[str, Any]
VERSION = 2
# Bounds of a plan that is read. Conversions in a row make one step each.
MOST_STEPS = 100
MOST_IN_CHAIN = 100


class _Record:
    """The base of a plan's dataclasses, which pydantic reads from JSON.

    Values are not cast to another type, and unknown keys are refused.
    """

    __pydantic_config__: ClassVar[ConfigDict] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True)
class Arch(_Record):
    """How to build a network as it was before any conversion, without its weights.

    Args:
        name: The name under which the builder knows the architecture.
        kwargs: The builder's keyword arguments, of types that JSON can hold.
        builder: The library that builds the network, such as timm, which is called as
            `timm.create_model(name, **kwargs)`, or torchvision. `models.kinds` lists all of them.
    """

    name: str
    kwargs: Body = field(default_factory=dict)
    builder: str = "timm"

    def __str__(self) -> str:
        """Return the architecture as text, such as `resnet18(num_classes = 10)`.

        An argument that is longer than a line is cut off.
        """
        shown: list[str] = []
        for key, value in self.kwargs.items():
            pair = f"{key} = {value}"
            if len(pair) >= 80:
                pair = f"{pair[:70]} ..."
            shown.append(pair)
        return f"{self.name}({', '.join(shown)})"


class AbsorbMode(str, Enum):
    """How a linear layer y = W x + b takes a neighbour s x + t (s, t per channel) into W and b.

    AFTER: the neighbour follows the layer: W' = s W, b' = s b + t.
    AFTER_UNIT: as AFTER, but the neighbour is a norm that is read with gamma = 1 and beta = 0.
    BEFORE: the neighbour precedes the layer, with no padding in between: W' = W s per input
        channel, b' = b + W t.
    BEFORE_MAGNITUDE: as BEFORE, but only |s| is taken: W' = W |s|, b' = b.
    BEFORE_SHIFT: as BEFORE, but only t is taken: W' = W, b' = b + W t.
    NORM: the neighbour becomes a norm inside the layer, whose gamma and beta go on learning (tune
        mode).
    SUM: layer and neighbour are terms of one sum: W' = W + W2, b' = b + b2.
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
        """Whether this formula is for a neighbour, such as a norm, that stands before the layer.

        The layer takes the scale and shift of the neighbour into its own weights.
        """
        return self in (AbsorbMode.BEFORE, AbsorbMode.BEFORE_MAGNITUDE, AbsorbMode.BEFORE_SHIFT)


@dataclass(frozen=True)
class Absorption(_Record):
    """How a layer takes the scale and shift of a neighbour, such as a norm, into its own weights.

    Args:
        way: The formula for the new weights.
        part: The channels of the neighbour that are used: the index of the first one, and the index
            behind the last one. None means all channels.
    """

    way: AbsorbMode
    part: tuple[int, int] | None = None

    @property
    def channels(self) -> slice:
        """The slice of a neighbour's channels that a layer takes into its own weights.

        The neighbour is a module such as a norm.
        """
        if self.part is None:
            return slice(None)
        return slice(*self.part)


@dataclass(frozen=True)
class Then(_Record):
    """One more layer that an `Edit` puts behind the layer that replaces a module.

    Both stand at the path of the module.

    Args:
        layer: The name of the class in `normswap.layers` that builds the layer.
        args: The keyword arguments for that class, as JSON has them.
    """

    layer: str
    args: Body = field(default_factory=dict)


@dataclass(frozen=True)
class Edit(_Record):
    """One change of a network: the module at `path` is replaced by a new layer.

    Args:
        path: The dotted path of the module.
        layer: The name of the class in `normswap.layers` whose `replacing(old, *reads, **args)`
            builds the replacement.
        args: The keyword arguments, as JSON has them, with every number that the surgery needs.
        reads: The paths of the modules from whose parameters and statistics the replacement is
            built.
        takes: How each module of `reads` enters the weights of the replacement. Empty for a layer
            that uses them in a way of its own.
        keep: Whether the module at the path stays and the replacement comes after it. The module
            then becomes the attribute `inner` of the replacement.
        then: Further layers after the replacement, in order. Each has all that comes before it as
            its attribute `inner`.
        out_of_place: Whether every layer in the replacement that works in place is changed to
            return a new tensor instead.
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
        # `takes` says of each module in `reads` how it enters the weights of the new layer.
        if self.takes and len(self.takes) != len(self.reads):
            raise PlanError(
                f"the edit of {self.path} has {len(self.reads)} reads and {len(self.takes)} takes"
            )

    @property
    def absorbed(self) -> tuple[tuple[str, Absorption], ...]:
        """The modules, such as norms, that the new layer takes into its own weights.

        Each is a pair: the dotted path of the module, and the formula by which it is taken in. The
        tuple is empty if the edit states no formulas (`takes`). Then the new layer uses the modules
        that it reads in a way of its own.
        """
        # If there are formulas, there is one for each module that is read (`strict`). Without
        # formulas there are no pairs.
        return tuple(zip(self.reads, self.takes, strict=bool(self.takes)))

    @property
    def arguments(self) -> Body:
        """The keyword arguments with which the new layer is built.

        They are passed to the classmethod `replacing` of the layer's class.
        """
        # Only layers that take other modules into their weights have an argument `takes`.
        if not self.takes:
            return self.args
        return {**self.args, "takes": self.takes}

    @property
    def depth(self) -> int:
        """The number of `.inner` behind `path` that lead to the module that runs first there.

        It is the old module if the old one stays (`keep`), or else the replacement. Each layer that
        runs later holds all earlier ones as its attribute `inner`. So with `keep` and one layer in
        `then`, the old module lies at `path.inner.inner`, and the depth is 2.
        """
        # With `keep`, the replacement holds the old module as `inner`. That is one level.
        return self.keep + len(self.then)


@dataclass(frozen=True)
class Outcome(_Record):
    """What a conversion does with one norm, in words for the user.

    Args:
        counted: The group in which a summary counts the norm, such as `folded into the layer
            before`.
        sentence: What happens to this norm, such as `folds into layer1.0.conv1`.
        reason: Why the norm stays, or what is special about it. Empty if there is nothing to say.
    """

    counted: str
    sentence: str
    reason: str = ""

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.sentence, self.reason)))


@dataclass(frozen=True)
class Step(_Record):
    """One conversion of a network, as edits of its modules.

    Args:
        scheme: The name of the scheme that planned the conversion.
        options: The scheme's options.
        edits: The edits, at most one for each path.
        outcomes: What happens to each norm, by the norm's path. It is only shown to people.
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
    """The steps from a bare architecture to a converted network.

    Args:
        steps: The steps, in order.
        made_for: The network that a plan in a file was made for, as its user named it. A user who
            applies the plan to another network gets a remark. Comparisons of plans ignore it.
    """

    steps: tuple[Step, ...] = ()
    made_for: str = field(default="", compare=False)

    def __deepcopy__(self, memo: object) -> Plan:
        """Return the plan itself, so that copies of a network share it. A plan never changes."""
        return self

    def then(self, step: Step) -> Plan:
        """Return a new plan, which has one more step (one conversion) at its end."""
        return Plan((*self.steps, step))

    @property
    def edits(self) -> tuple[Edit, ...]:
        """The edits (replacements of modules) of all steps of the plan, in order."""
        return tuple(itertools.chain.from_iterable(step.edits for step in self.steps))

    @functools.cached_property
    def digest(self) -> str:
        """The SHA-256 of the plan's JSON with sorted keys.

        The outcomes, which are only shown to people, are left out. So two plans with the same
        digest do the same thing.
        """
        body = self._body()
        for step in body["steps"]:
            del step["outcomes"]
        return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()

    def _body(self) -> Body:
        return {"version": VERSION, "steps": [asdict(step) for step in self.steps]}

    def to_json(self, indent: int | None = None) -> str:
        """Return the plan as JSON, with its digest.

        Args:
            indent: The number of spaces of a level. None writes everything in one line.
        """
        body = self._body()
        if self.made_for:
            body["made_for"] = self.made_for
        return json.dumps({**body, "digest": self.digest}, indent=indent)

    @staticmethod
    def from_file(file: Path) -> Plan:
        """Return the plan that a JSON file holds.

        Args:
            file: The path of the file.

        Raises:
            PlanError: The file cannot be read, or is no plan.
        """
        try:
            text = reading.file_text(file)
        except reading.UnreadableError as error:
            raise PlanError(f"cannot read the plan {file}", str(error)) from None
        return Plan.from_json(text, str(file))

    @staticmethod
    def from_json(text: str, origin: str = "plan") -> Plan:
        """Return the plan that `to_json` wrote, and that somebody may have edited by hand.

        The digest in the text is not compared with the plan's.

        Args:
            text: The JSON.
            origin: The name of the plan in errors, such as its file's.

        Raises:
            PlanError: The text is no plan, has an unknown key, or is larger than any plan of a
                conversion.
        """
        try:
            body = reading.parse_json(text)
            if not isinstance(body, dict):
                kind = type(body).__name__
                raise PlanError(
                    f"{origin} is no plan", f"it holds a {kind} where a plan is an object"
                )
            version = body.get("version")
            if version != VERSION:
                raise PlanError(
                    f"{origin} has plan version {version!r:.40}, this normswap reads {VERSION}"
                )
            # The text is parsed again, because the strict records would refuse the lists in `body`
            # where they have tuples. From a text, they accept them.
            stored = reading.validated(_plan_reader(), text)
        except reading.UnreadableError as error:
            raise PlanError(_located(origin, str(error))) from None

        _check_counts(stored.steps, origin)
        return Plan(stored.steps, stored.made_for)


def _located(origin: str, reason: str) -> str:
    """Return the reason of an error with the plan's name in front.

    A dot joins them if the reason begins with a key of the plan: `plan.steps[0].edits: is missing`.

    Args:
        origin: The plan's name.
        reason: The reason, which may begin with a key of the plan.
    """
    # A key is a text without blanks in front of a colon, as in `steps[0].edits: is missing`.
    key, colon, _ = reason.partition(": ")
    names_key = bool(colon) and " " not in key
    if not names_key:
        return f"{origin}: {reason}"
    return f"{origin}.{reason}"


def _check_counts(steps: tuple[Step, ...], origin: str) -> None:
    """Raise PlanError for more steps, or more layers in a chain, than a conversion ever has.

    Args:
        steps: The steps of the plan.
        origin: The plan's name, for the message.
    """
    if len(steps) > MOST_STEPS:
        raise PlanError(f"{origin} has {len(steps)} steps", f"at most {MOST_STEPS} are carried out")

    for step in steps:
        for edit in step.edits:
            if len(edit.then) > MOST_IN_CHAIN:
                raise PlanError(
                    f"{origin}: the edit of {edit.path} has {len(edit.then)} layers in `then`",
                    f"at most {MOST_IN_CHAIN} are placed",
                )


@dataclass(frozen=True)
class _PlanFile(_Record):
    """The JSON of a plan, as `to_json` writes it."""

    version: int
    steps: tuple[Step, ...]
    made_for: str = ""
    digest: str = ""


@functools.cache
def _plan_reader() -> TypeAdapter[_PlanFile]:
    from pydantic import TypeAdapter

    return TypeAdapter(_PlanFile)
