"""Law of edits that belong together: a plan that has lost one of them is refused, by its path."""

from dataclasses import replace

import pytest
from support.lived_in_networks import step
from support.six_networks import images, trained

from normswap.errors import PlanError
from normswap.graph.inspection import inspect
from normswap.layers.planned_layer import planned_layers
from normswap.plan import Edit, Step
from normswap.surgery import edited_plans

OPTIONS: dict[str, tuple[str, dict[str, float]]] = {
    "groupnorm": ("groupnorm", {}),
    "groupnorm of two": ("groupnorm", {"groups": 2}),
    "groupnorm, unscaled": ("groupnorm", {"relative_eps": 0}),
    "layernorm": ("layernorm", {}),
    "instancenorm": ("instancenorm", {}),
    "dyt": ("dyt", {}),
}


def planned(name: str) -> Step:
    scheme, options = OPTIONS[name]
    step_, _ = step(inspect(trained("post"), images(2)), scheme, **options)
    return step_


def pairs(whole: Step) -> list[tuple[Edit, Edit]]:
    """The edits of a convolution that is scaled, each with that of the norm which undoes it."""
    layers = {layer.PARTNER for layer in planned_layers().values() if layer.PARTNER}
    by_path = {edit.path: edit for edit in whole.edits}
    return [(edit, by_path[edit.reads[0]]) for edit in whole.edits if edit.layer in layers]


def without(whole: Step, *lost: Edit) -> Step:
    return replace(whole, edits=tuple(edit for edit in whole.edits if edit not in lost))


@pytest.mark.parametrize("name", OPTIONS)
def test_of_two_edits_that_belong_together_neither_stands_alone(name: str) -> None:
    whole = planned(name)
    edited_plans.check(whole)

    for convolution, norm in pairs(whole):
        for lost, left in ((convolution, norm), (norm, convolution)):
            with pytest.raises(PlanError, match=f"edit of {left.path}.*cannot stand alone"):
                edited_plans.check(without(whole, lost))
        # Neither is missed if both are gone.
        edited_plans.check(without(whole, convolution, norm))


def test_which_norms_have_a_partner() -> None:
    """Two norms in each of three blocks, behind a convolution; no eps, no rescaling."""
    assert {name: len(pairs(planned(name))) for name in OPTIONS} == {
        "groupnorm": 6,
        "groupnorm of two": 6,
        "groupnorm, unscaled": 0,
        "layernorm": 6,
        "instancenorm": 0,
        "dyt": 6,
    }


@pytest.mark.parametrize("name", [name for name in OPTIONS if name.startswith("group")])
def test_a_norm_that_reads_its_input_as_it_is_stands_alone(name: str) -> None:
    """Without an eps nothing is rescaled; with `lead` the norm's own layer does it."""
    whole = planned(name)
    norms = [edit for edit in whole.edits if edit.layer == "GroupNorm"]
    assert norms

    for edit in norms:
        own = {key: value for key, value in edit.args.items() if key != "eps"}
        lead = {**edit.args, "lead": True}
        for args in (own, lead):
            edited_plans.check(replace(whole, edits=(replace(edit, args=args),)))
