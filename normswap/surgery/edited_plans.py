"""Checks of plans that somebody has edited by hand, or made for another network.

An edit of a plan names the path of a module, the class of the layer that is placed there, its
arguments, and the modules (`reads`) whose tensors the layer absorbs.
"""

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
from normswap.folding.plan_builder import (
    KEEPS_STATISTICS,
    NEVER_CALLED,
    folded_back,
    folded_forward,
    scales_weight,
    stays,
)
from normswap.layers.planned_layer import PlannedLayer, planned_layers
from normswap.plan import AbsorbMode, Edit, Outcome, Step
from normswap.surgery import applying, conversion
from normswap.surgery.network import Network

# `Unpack` as annotations may have it: Python has its own since 3.11.
_UNPACKS = (typing_extensions.Unpack, getattr(typing, "Unpack", None))
# The words (`Outcome.counted`) under which reports count norms that a step does not change.
_UNTOUCHED = (stays("").counted, KEEPS_STATISTICS.counted, NEVER_CALLED.counted)
# What becomes of a norm whose whole map goes into other layers, given their paths. Another layer
# may stand in the norm's place, such as the scalar of a residual branch.
_OUTCOMES: dict[AbsorbMode, Callable[..., Outcome]] = {
    AbsorbMode.AFTER: folded_back,
    AbsorbMode.AFTER_UNIT: folded_back,
    AbsorbMode.BEFORE: folded_forward,
    AbsorbMode.NORM: scales_weight,
}
# Two numbers count as the same if they differ by less than this share.
_SAME = 1e-3


def check(step: Step) -> None:
    """Check the arguments of a step's edits, and that edits which need one another are there.

    Args:
        step: A step, which may have been edited by hand.

    Raises:
        PlanError: An argument has a wrong type or is out of range, or an edit lacks its partner.
    """
    # The edit of each path, and for each path in the `reads` of an edit, that edit.
    by_path = {edit.path: edit for edit in step.edits}
    by_reads: dict[str, Edit] = {}
    for edit in step.edits:
        by_reads.update(dict.fromkeys(edit.reads, edit))

    for edit in step.edits:
        layer = applying.layer_of(edit)
        _check_arguments(edit, layer, edit.layer, edit.args)
        for follower in edit.then:
            follower_layer = applying.layer_of(edit, follower.layer)
            _check_arguments(edit, follower_layer, follower.layer, follower.args)
        _check_norm(edit, layer, by_reads.get(edit.path))
        _check_scaled_convolution(edit, by_path)


def _check_arguments(
    edit: Edit, layer: type[PlannedLayer], name: str, args: Mapping[str, object]
) -> None:
    """Raise PlanError if an argument has a type or range that the layer does not take.

    Arguments whose type is not known are not checked.

    Args:
        edit: The edit, which the error names.
        layer: The class of the edit's layer, or of a layer that follows it.
        name: The name of that layer.
        args: The arguments of that layer, by name.
    """
    # `replacing` is a class method. The function inside it has the annotations of the arguments.
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
    """Return pydantic's check of each argument of an edit, by the argument's name.

    Args:
        replacing: The function `replacing` of the edit's layer. Its annotations say what each
            argument may be. An argument whose annotation cannot be read gets no check.
    """
    # Annotations may be text, and name `Unpack` by this name.
    known = {"Unpack": typing_extensions.Unpack}
    try:
        hints = get_type_hints(replacing, localns=known, include_extras=True)
    # The layer may be another package's, whose annotations name anything.
    except Exception:
        return {}

    # The arguments of an edit are keyword arguments: those behind `*`, except `like`, which is no
    # argument of an edit. For `**options: Unpack[Options]` they are the fields of `Options`.
    for parameter in inspect.signature(replacing).parameters.values():
        hint = hints.pop(parameter.name, None)
        is_argument = parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "like"
        if is_argument and hint is not None:
            hints[parameter.name] = hint
        elif parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) in _UNPACKS:
            (options,) = get_args(hint)
            hints |= get_type_hints(options, localns=known, include_extras=True)

    # `takes` is not in an edit's arguments: it has a field of its own.
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
        config: The configuration of the check. It is not used for a TypedDict.
    """
    # pydantic raises an error if it is given a configuration for a TypedDict.
    if typing_extensions.is_typeddict(hint):
        return TypeAdapter(hint)
    return TypeAdapter(hint, config=config)


def _check_norm(edit: Edit, layer: type[PlannedLayer], partner: Edit | None) -> None:
    """Raise PlanError if a norm needs a convolution before it that is scaled, and there is none.

    Some conversions scale a convolution and undo the scale in the norm behind it. Only the edits of
    both together compute what stood there. Edits of other layers are not checked.

    Args:
        edit: The edit of the norm.
        layer: The class of the edit's layer. `layer.PARTNER` names the layer that an edit of the
            convolution must place. It is empty if none is needed.
        partner: The edit that has the norm's path among its `reads`, if there is one.
    """
    # With `groups` and without `eps` the norm reads the convolution's output as it is, so the
    # convolution needs no edit. With `lead`, a layer in front of the norm scales its input in place
    # of the convolution.
    reads_scaled_input = "eps" in edit.args or "groups" not in edit.args
    if not layer.PARTNER or not reads_scaled_input or edit.args.get("lead"):
        return

    if partner is None or partner.layer != layer.PARTNER:
        why = f"no edit places the {layer.PARTNER} convolution before it"
        remedy = "Keep both edits, or give it `lead`: true, which scales its input"
        raise PlanError(f"edit of {edit.path}: {edit.layer} cannot stand alone", why, remedy)
    if partner.args.get("groups") != edit.args.get("groups"):
        why = f"{partner.path} has groups {partner.args.get('groups')}"
        problem = f"edit of {edit.path} has groups {edit.args.get('groups')}"
        raise PlanError(problem, why, "Give both edits the same groups")


def _check_scaled_convolution(edit: Edit, by_path: Mapping[str, Edit]) -> None:
    """Raise PlanError if a convolution is scaled, and no norm behind it undoes the scale.

    Edits of other layers are not checked.

    Args:
        edit: The edit of the convolution. The first of its `reads` is the norm's path.
        by_path: All edits of the step, by path.
    """
    # The layers that undo the scale of the edit's layer. There are none for most layers.
    undoing = [name for name, other in planned_layers().items() if edit.layer == other.PARTNER]
    if not undoing:
        return

    # A norm with `lead` undoes the scale of a layer in front of it, not that of the convolution.
    norm = by_path.get(edit.reads[0]) if edit.reads else None
    if norm is None or norm.layer not in undoing or norm.args.get("lead"):
        why = f"no edit places the {undoing[0]} behind it that undoes its scaling"
        raise PlanError(f"edit of {edit.path}: {edit.layer} cannot stand alone", why)


def notes(network: Network, step: Step) -> list[str]:
    """Compare a step's numbers with those that would be planned for this network.

    Args:
        network: The network that the step is for.
        step: A step from a file.

    Returns:
        A list with a sentence about the numbers that differ. It is empty if none do, or if the
        scheme cannot be planned for this network.
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
    """Return what a step from a file makes of each norm of a network: its outcome, by the path.

    The file records outcomes (`step.outcomes`), but its edits may have been changed by hand
    afterwards. So a recorded outcome is taken only if it agrees with the edits.

    Args:
        network: The network that the step is for.
        step: A step from a file.
    """
    by_edits = _by_edits(step)
    found: dict[str, Outcome] = {}
    for norm in network.anatomy.norms:
        path = norm.path
        is_named = path in by_edits
        recorded = step.outcomes.get(path)
        # If the file records outcomes but none for this norm, the plan was made for a part of the
        # network, and the norm is in another part.
        if recorded is None and step.outcomes and not is_named:
            continue
        # The record holds if an edit names the norm and the record says that the norm is changed,
        # or if no edit does and the record says that the norm stays.
        if recorded is not None and is_named != (recorded.counted in _UNTOUCHED):
            found[path] = recorded
        elif is_named:
            found[path] = by_edits[path]
        else:
            found[path] = stays("no edit of the plan names it") if norm.called else NEVER_CALLED
    return found


def _by_edits(step: Step) -> dict[str, Outcome]:
    """Return what the edits of a step alone say of each module that they name, by its path."""
    # The layer that is placed at a path, the paths of the edits that read (absorb) it, and what
    # becomes of a norm that is absorbed whole.
    layers = {edit.path: edit.layer for edit in step.edits}
    read_by: dict[str, list[str]] = {}
    whole: dict[str, Callable[..., Outcome]] = {}
    for edit in step.edits:
        for path in edit.reads:
            read_by.setdefault(path, []).append(edit.path)
        for path, absorption in edit.absorbed:
            if absorption.way in _OUTCOMES:
                whole[path] = _OUTCOMES[absorption.way]

    # A module whose place gets no layer, or only the placeholder `Vacant`, which computes nothing,
    # is folded into the layers that read it.
    found = {path: Outcome(f"became {layer}", f"becomes {layer}") for path, layer in layers.items()}
    for path, readers in read_by.items():
        if path in whole:
            found[path] = whole[path](*readers)
        elif layers.get(path, "Vacant") == "Vacant":
            found[path] = folded_back(*readers)
    return found


def _differs(value: object, planned: object) -> bool:
    """Return whether two numbers differ. It is false if one of the values is no number.

    Args:
        value: The value of the edited plan.
        planned: The value of the plan that normswap makes.
    """
    for number in (value, planned):
        if isinstance(number, bool) or not isinstance(number, int | float):
            return False
    return not math.isclose(float(value), float(planned), rel_tol=_SAME)  # type: ignore[arg-type]
