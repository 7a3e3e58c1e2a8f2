"""What is said of a plan from a file that was edited, or made for another network."""

from dataclasses import replace

import pytest
from support.six_networks import images, trained
from torch import Tensor, nn
from typing_extensions import TypedDict

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


@pytest.mark.parametrize("scheme", ["folded", "groupnorm"])
def test_the_edits_alone_tell_what_becomes_of_each_norm(scheme: str) -> None:
    """A file may lack the outcomes. Then reports count the norms as they count those of a plan."""
    step = planned(scheme)

    found = edited_plans.outcomes(network(), replace(step, outcomes={}))

    assert found.keys() == step.outcomes.keys()
    for path, outcome in found.items():
        if step.outcomes[path].counted.startswith("folded"):
            assert outcome == step.outcomes[path]
        else:
            assert outcome.counted.startswith("became ")


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
