"""Plans that somebody has edited, or made for another network: what an edit may say."""

from __future__ import annotations

import functools
import inspect
import math
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, get_args, get_origin, get_type_hints

import typing_extensions
from pydantic import ConfigDict, TypeAdapter, ValidationError

from normswap import reading
from normswap.errors import NormswapError, PlanError, first_few
from normswap.folding.plan_builder import KEEPS_STATISTICS, NEVER_CALLED, folded_back, stays
from normswap.layers.planned_layer import PlannedLayer, planned_layers
from normswap.plan import Edit, Outcome, Step
from normswap.surgery import applying, conversion
from normswap.surgery.network import Network

# Python has had its own since 3.11.
_UNPACKS = (typing_extensions.Unpack, getattr(typing, "Unpack", None))
# The words (`Outcome.counted`) under which reports count norms that a step does not change.
_UNTOUCHED = (stays("").counted, KEEPS_STATISTICS.counted, NEVER_CALLED.counted)
# A number that was planned anew is the same if it differs by less than this share.
_SAME = 1e-3


def check(step: Step) -> None:
    """Raise PlanError for an argument that no layer takes, and for edits that do not go together.

    Args:
        step: A step, which may have been edited by hand.
    """
    by_path = {edit.path: edit for edit in step.edits}
    # The edit that reads a path, by this path.
    by_reads: dict[str, Edit] = {}
    for edit in step.edits:
        by_reads.update(dict.fromkeys(edit.reads, edit))

    for edit in step.edits:
        layer = applying.layer_of(edit)
        _check_arguments(edit, layer, edit.layer, edit.args)
        for follower in edit.then:
            follower_layer = applying.layer_of(edit, follower.layer)
            _check_arguments(edit, follower_layer, follower.layer, follower.args)
        _check_partner(edit, layer, by_reads.get(edit.path), by_path)


def _check_arguments(
    edit: Edit, layer: type[PlannedLayer], name: str, args: Mapping[str, object]
) -> None:
    """Raise PlanError for an argument of another type or range than the layer takes.

    Args:
        edit: The edit, which the error names.
        layer: The class of the edit's layer, or of a layer that follows it.
        name: The name of that layer.
        args: The arguments of that layer, by name.
    """
    adapters = _adapters(layer.replacing.__func__)  # type: ignore[attr-defined]
    for argument, value in args.items():
        if argument not in adapters:
            continue
        try:
            adapters[argument].validate_python(value)
        except ValidationError as error:
            why = f"{name} takes no {argument} = {value!r:.60}: {reading.first_problem(error)}"
            raise PlanError(f"edit of {edit.path} does not fit", why) from None


@functools.cache
def _adapters(replacing: Callable[..., object]) -> dict[str, TypeAdapter[Any]]:
    """Return how each argument of an edit is checked, by the argument's name.

    Args:
        replacing: The function `replacing` of the edit's layer. Its annotations say what each
            argument may be; one that cannot be read checks nothing.
    """
    known = {"Unpack": typing_extensions.Unpack}
    try:
        hints = get_type_hints(replacing, localns=known, include_extras=True)
    # The layer may be another package's, whose annotations name anything.
    except Exception:
        return {}

    # An edit gives the keyword arguments. A record of keywords (`Unpack`) gives one each field.
    for parameter in inspect.signature(replacing).parameters.values():
        hint = hints.pop(parameter.name, None)
        is_argument = parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "like"
        if is_argument and hint is not None:
            hints[parameter.name] = hint
        elif parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) in _UNPACKS:
            (options,) = get_args(hint)
            hints |= get_type_hints(options, localns=known, include_extras=True)

    adapters: dict[str, TypeAdapter[Any]] = {}
    config = ConfigDict(strict=True, arbitrary_types_allowed=True)
    for name, hint in hints.items():
        if name not in ("return", "takes"):
            # pydantic may have no check for a type of another package.
            with suppress(Exception):
                adapters[name] = _adapter(hint, config)
    return adapters


def _adapter(hint: Any, config: ConfigDict) -> TypeAdapter[Any]:
    """Return pydantic's check that a value has a given type.

    Args:
        hint: The type, as an annotation states it.
        config: Whether the check is strict, for a type that does not state this itself.
    """
    # A record states its own configuration, and is strict by that alone.
    if typing_extensions.is_typeddict(hint):
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=config)


def _check_partner(
    edit: Edit, layer: type[PlannedLayer], partner: Edit | None, by_path: Mapping[str, Edit]
) -> None:
    """Raise PlanError where a norm, or the convolution before it, lost the edit of the other.

    Args:
        edit: The edit of the norm, or of the convolution.
        layer: The class of the edit's layer. `layer.PARTNER` names the layer that must come before
            it.
        partner: The edit that reads this edit's path, if there is one.
        by_path: All edits of the step, by path.
    """
    # A norm with `groups` and no `eps` reads the convolution's output as it is, so the convolution
    # needs no edit. With `lead`, a layer in front of the norm scales its input instead.
    scales_input = "eps" in edit.args or "groups" not in edit.args
    if layer.PARTNER and scales_input and not edit.args.get("lead"):
        if partner is None or partner.layer != layer.PARTNER:
            why = f"no edit places the {layer.PARTNER} convolution before it"
            remedy = "Keep both edits, or give it `lead`: true, which scales its input"
            raise PlanError(f"edit of {edit.path}: {edit.layer} cannot stand alone", why, remedy)
        if partner.args.get("groups") != edit.args.get("groups"):
            why = f"{partner.path} has groups {partner.args.get('groups')}"
            problem = f"edit of {edit.path} has groups {edit.args.get('groups')}"
            raise PlanError(problem, why, "Give both edits the same groups")

    # The other way round: a convolution that is scaled needs the norm that undoes the scale.
    undoing = [name for name, other in planned_layers().items() if edit.layer == other.PARTNER]
    if undoing:
        norm = by_path.get(edit.reads[0]) if edit.reads else None
        if norm is None or norm.layer not in undoing or norm.args.get("lead"):
            why = f"no edit places the {undoing[0]} behind it that undoes its scaling"
            raise PlanError(f"edit of {edit.path}: {edit.layer} cannot stand alone", why)


def notes(network: Network, step: Step) -> list[str]:
    """Return a sentence about a step's numbers that differ from those planned for this network.

    The list is empty if no number differs.

    Args:
        network: The network that the step is for.
        step: A step from a file.
    """
    # A plan may name a scheme or layers that this network would not get.
    try:
        own_step, _ = conversion.plan_step(network.anatomy, step.scheme, **step.options)
    except (NormswapError, TypeError):
        return []

    planned = {(edit.path, edit.layer): edit.args for edit in own_step.edits}
    differ: list[str] = []
    for edit in step.edits:
        own_args = planned.get((edit.path, edit.layer), {})
        for name, value in edit.args.items():
            if _differs(value, own_args.get(name)):
                differ.append(f"{name} of {edit.path} ({value:.4g}, here {own_args[name]:.4g})")
    if not differ:
        return []
    return [
        f"the plan has other numbers than would be planned here: {first_few(differ, 2)}. It was"
        " made for another network, or edited"
    ]


def outcomes(network: Network, step: Step) -> dict[str, Outcome]:
    """Return the outcome of each norm of a network under a step from a file, by path.

    The file's own record is older than an edit by hand. It counts only for a norm that the edits
    still name.

    Args:
        network: The network that the step is for.
        step: A step from a file.
    """
    layers = {edit.path: edit.layer for edit in step.edits}
    read_by: dict[str, str] = {}
    for edit in step.edits:
        for path in edit.reads:
            read_by.setdefault(path, edit.path)

    found: dict[str, Outcome] = {}
    for norm in network.anatomy.norms:
        path = norm.path
        is_named = path in layers or path in read_by
        recorded = step.outcomes.get(path)
        # The plan was made for a part of the network, and this norm is in another part.
        if recorded is None and step.outcomes and not is_named:
            continue
        # The record holds if an edit names the norm and the record says that the norm is changed,
        # or if no edit does and the record says that the norm stays.
        if recorded is not None and is_named != (recorded.counted in _UNTOUCHED):
            found[path] = recorded
        elif not is_named:
            found[path] = stays("no edit of the plan names it") if norm.called else NEVER_CALLED
        # If the norm itself gets no layer but the placeholder `Vacant`, it is folded into the layer
        # that reads it.
        elif path in read_by and layers.get(path, "Vacant") == "Vacant":
            found[path] = folded_back(read_by[path])
        else:
            found[path] = Outcome(f"became {layers[path]}", f"becomes {layers[path]}")
    return found


def _differs(value: object, planned: object) -> bool:
    """Return whether two numbers differ. Other values are not compared.

    Args:
        value: The value of the edited plan.
        planned: The value of the plan that normswap makes.
    """
    for number in (value, planned):
        if isinstance(number, bool) or not isinstance(number, int | float):
            return False
    return not math.isclose(float(value), float(planned), rel_tol=_SAME)  # type: ignore[arg-type]
