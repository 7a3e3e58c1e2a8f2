"""What is said of a plan from a file that was edited, or made for another network."""

import inspect
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args, get_origin

import pytest
from support.six_networks import images, trained
from torch import Tensor, nn
from typing_extensions import TypedDict, Unpack, get_type_hints

from normswap.errors import PlanError
from normswap.layers import planned_layer
from normswap.layers.planned_layer import PlannedLayer
from normswap.plan import Edit, Step
from normswap.surgery import conversion, edited_plans
from normswap.surgery.network import Network


def network() -> Network:
    return Network(trained("post"), images(2))


def planned(scheme: str) -> Step:
    step, _ = conversion.plan_step(network().anatomy, scheme)
    return step


def with_edit(step: Step, changed: Edit) -> Step:
    edits = [changed if edit.path == changed.path else edit for edit in step.edits]
    return replace(step, edits=tuple(edits))


def test_each_number_that_is_another_here_is_named_with_both_values() -> None:
    step = planned("groupnorm")
    edit = next(edit for edit in step.edits if "eps" in edit.args)
    eps = edit.args["eps"]
    edited = with_edit(step, replace(edit, args={**edit.args, "eps": 0.25}))

    (note,) = edited_plans.notes(network(), edited)

    assert f"eps of {edit.path} (0.25, here {eps:.4g})" in note
    assert edited_plans.notes(network(), step) == []


@pytest.mark.parametrize("scheme", ["folded", "skipinit", "fixup", "tune", "groupnorm"])
def test_the_edits_alone_tell_what_becomes_of_each_norm(scheme: str) -> None:
    """A file may lack the outcomes. Then reports count the norms as they count those of a plan."""
    step = planned(scheme)

    found = edited_plans.outcomes(network(), replace(step, outcomes={}))

    assert found.keys() == step.outcomes.keys()
    for path, outcome in found.items():
        if step.outcomes[path].counted.startswith(("folded", "scale a weight")):
            assert outcome == step.outcomes[path]
        else:
            assert outcome.counted.startswith("became ")


def arguments(layer: type[PlannedLayer]) -> Iterator[str]:
    """Yield the names of what an edit of a layer may have, as its `replacing` spells them."""
    known = {"Unpack": Unpack}
    hints = get_type_hints(layer.replacing.__func__, localns=known)  # type: ignore[attr-defined]
    for parameter in inspect.signature(layer.replacing).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            yield parameter.name
        elif parameter.kind is parameter.VAR_KEYWORD and get_origin(hints[parameter.name]):
            (options,) = get_args(hints[parameter.name])
            yield from get_type_hints(options, localns=known)


@pytest.mark.parametrize("name", sorted(planned_layer.planned_layers()))
def test_no_argument_of_a_layer_is_taken_unchecked(name: str) -> None:
    """`takes` is a field of an edit, and `like` is no part of it."""
    for argument in set(arguments(planned_layer.planned_layers()[name])) - {"like", "takes"}:
        nonsense = Edit("bn", name, {argument: object()})

        with pytest.raises(PlanError, match=argument):
            edited_plans.check(Step("folded", {}, (nonsense,)))


class Settings(TypedDict, total=False):
    """What a layer of another package takes as one argument."""

    eps: float


def test_an_argument_that_is_a_table_is_checked_by_its_keys() -> None:
    class Tabled(PlannedLayer):
        @classmethod
        def replacing(cls, old: nn.Module, *, like: Tensor, settings: Settings) -> nn.Module:
            return old

    try:
        right = Edit("bn", Tabled.__name__, {"settings": {"eps": 0.25}})
        wrong = Edit("bn", Tabled.__name__, {"settings": {"eps": "small"}})

        edited_plans.check(Step("folded", {}, (right,)))
        with pytest.raises(PlanError, match="settings"):
            edited_plans.check(Step("folded", {}, (wrong,)))
    finally:
        del planned_layer._BY_NAME[Tabled.__name__]
