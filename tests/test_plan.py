"""Plans are data: they survive JSON, know themselves by their digest, and refuse what they do not
understand.
"""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

from normswap.errors import PlanError
from normswap.plan import VERSION, AbsorbMode, Absorption, Edit, Outcome, Plan, Step, Then
from normswap.surgery import applying

paths = st.lists(st.text("abc019_", min_size=1, max_size=4), min_size=1, max_size=4).map(".".join)
words = st.text(max_size=6)
numbers = st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=6,
)
records = st.dictionaries(words, values, max_size=3)
parts = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 9))
taken = st.lists(
    st.tuples(paths, st.builds(Absorption, st.sampled_from(AbsorbMode), parts)), max_size=3
)
thens = st.lists(st.builds(Then, words, records), max_size=2).map(tuple)
edits = st.builds(
    Edit,
    paths,
    words,
    records,
    st.lists(paths, max_size=3).map(tuple),
    keep=st.booleans(),
    then=thens,
    out_of_place=st.booleans(),
) | st.builds(
    lambda path, layer, args, reads: Edit(
        path, layer, args, *(tuple(part) for part in zip(*reads, strict=True))
    ),
    paths,
    words,
    records,
    taken,
)
steps = st.builds(
    Step, words, records, st.lists(edits, max_size=5, unique_by=lambda e: e.path).map(tuple)
)
plans = st.builds(Plan, st.lists(steps, max_size=3).map(tuple))


@settings(max_examples=50)
@given(plan=plans, name=words, indent=st.sampled_from([None, 2]))
def test_round_trip(plan: Plan, name: str, indent: int | None) -> None:
    outcomes = {"a.b": Outcome(name, f"{name} folds"), "c": Outcome("stays", name, "why")}
    told = tuple(replace(step, outcomes=outcomes) for step in plan.steps)
    plan = Plan(told, made_for=name)

    read = Plan.from_json(plan.to_json(indent))
    assert read == plan
    assert read.digest == plan.digest
    assert json.loads(plan.to_json())["digest"] == plan.digest
    # Two plans may be equal, and be meant for other networks or say something else to people.
    assert asdict(read) == asdict(plan)


@pytest.mark.slow
@settings(max_examples=50)
@given(one=plans, two=plans)
def test_digests_tell_plans_apart(one: Plan, two: Plan) -> None:
    as_text = [json.dumps(json.loads(plan.to_json()), sort_keys=True) for plan in (one, two)]
    assert (one.digest == two.digest) == (as_text[0] == as_text[1])


def test_the_digest_ignores_the_order_of_keys_only() -> None:
    def plan(args: dict[str, Any]) -> Plan:
        return Plan((Step("skipinit", {}, (Edit("a", "Scale", args),)),))

    assert plan({"alpha": 1.0, "bias": True}).digest == plan({"bias": True, "alpha": 1.0}).digest
    assert plan({"alpha": 1.0}).digest != plan({"alpha": 1.0000001}).digest
    assert re.fullmatch("[0-9a-f]{64}", Plan().digest)


def test_outcomes_are_saved_and_decide_nothing() -> None:
    told = {
        "bn1": Outcome("folded back", "folds into conv1"),
        "bn2": Outcome("stay", "stays", "it has hooks"),
    }
    edits = (Edit("bn1", "Vacant"),)
    with_them = Plan((Step("folded", {}, edits, told),))
    without = Plan((Step("folded", {}, edits),))
    read = Plan.from_json(with_them.to_json())

    assert read.steps[0].outcomes == told
    assert [str(outcome) for outcome in told.values()] == [
        "folds into conv1",
        "stays: it has hooks",
    ]
    assert read.digest == without.digest == json.loads(with_them.to_json())["digest"]

    body = json.loads(without.to_json())
    del body["steps"][0]["outcomes"]  # a plan of before
    assert Plan.from_json(json.dumps(body)) == without

    body["steps"][0]["outcomes"] = {"bn1": "folded"}
    with pytest.raises(PlanError, match=r"steps\[0\].outcomes.bn1: must be an object"):
        Plan.from_json(json.dumps(body))


def test_steps_append() -> None:
    one = Step("folded", {}, ())
    two = Step("skipinit", {"alpha": "match"}, ())
    assert Plan().then(one).then(two) == Plan((one, two))


BODY: dict[str, Any] = {
    "version": VERSION,
    "steps": [
        {"scheme": "folded", "options": {}, "edits": []},
        {
            "scheme": "skipinit",
            "options": {"alpha": "match"},
            "edits": [
                {"path": "a.b", "layer": "Scale", "args": {"alpha": 1.0}, "reads": []},
                {"path": "a.c", "layer": "Vacant"},
            ],
        },
    ],
}
EDIT = r"steps\[1\]\.edits\[1\]"


def _edit(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["steps"][1]["edits"][1].update(changes)


def _step(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda body: body["steps"][1].update(changes)


MALFORMED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "unknown key": (lambda body: body.update(extra=1), r"plan\.json\.extra: unexpected"),
    "no version": (lambda body: body.pop("version"), "version None"),
    "the version before": (
        lambda body: body.update(version=1),
        f"version 1, this normswap reads {VERSION}",
    ),
    "version as text": (lambda body: body.update(version=str(VERSION)), "version"),
    "no steps": (lambda body: body.pop("steps"), r"steps: is missing"),
    "steps as record": (lambda body: body.update(steps={}), "steps: must be a list"),
    "step as text": (
        lambda body: body["steps"].append("folded"),
        r"steps\[2\]: must be an object",
    ),
    "unknown key in a step": (_step(alpha=0), r"steps\[1\]\.alpha: unexpected"),
    "no scheme": (
        lambda body: body["steps"][1].pop("scheme"),
        r"steps\[1\]\.scheme: is missing",
    ),
    "options as list": (_step(options=[]), r"steps\[1\]\.options: must be an object"),
    "edit as list": (
        lambda body: body["steps"][1]["edits"].append([]),
        r"edits\[2\]: must be an object",
    ),
    "unknown key in an edit": (_edit(kept=True), EDIT + r"\.kept: unexpected"),
    "keep as number": (_edit(keep=1), EDIT + r"\.keep: must be true or false"),
    "then without a layer": (_edit(then=[{}]), EDIT + r"\.then\[0\]\.layer: is missing"),
    "unknown way": (
        _edit(takes=[{"way": "sideways"}], reads=["a"]),
        r"takes\[0\]\.way: .*before-shift",
    ),
    "a part of one end": (
        _edit(takes=[{"way": "after", "part": [1]}], reads=["a"]),
        r"takes\[0\]\.part",
    ),
    "more takes than reads": (_edit(takes=[{"way": "after"}]), r"a\.c has 0 reads and 1 takes"),
    "path as number": (_edit(path=3), EDIT + r"\.path: must be a text"),
    "args as null": (_edit(args=None), EDIT + r"\.args: must be an object"),
    "reads of numbers": (_edit(reads=[1]), EDIT + r"\.reads\[0\]: must be a text"),
    "two edits for one path": (_edit(path="a.b"), r"skipinit.*a\.b twice"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_plans_say_where(name: str) -> None:
    body = json.loads(json.dumps(BODY))

    assert Plan.from_json(json.dumps(body), "plan.json")

    harm, message = MALFORMED[name]
    harm(body)
    with pytest.raises(PlanError, match=message) as caught:
        Plan.from_json(json.dumps(body), "plan.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3", '"plan"', "\x00"])
def test_not_a_plan_at_all(text: str) -> None:
    with pytest.raises(PlanError, match=r"^plan\.json"):
        Plan.from_json(text, "plan.json")


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(nn.Conv2d(4, 5, 1))
    )


AFTER = Absorption(AbsorbMode.AFTER)
UNFIT: dict[str, tuple[Edit, str]] = {
    "unknown layer": (
        Edit("1", "Scales", {"alpha": 1.0}),
        "edit of 1 names an unknown layer 'Scales'.*Vacant",
    ),
    "private layer": (Edit("1", "Chain"), "unknown layer 'Chain'"),
    "unknown path": (
        Edit("3.7", "Vacant"),
        r"step 'mine' names '3\.7', which is not in Sequential",
    ),
    "path of a tensor": (Edit("1.weight", "Vacant"), "no module but a Parameter"),
    "path of a method": (Edit("1.forward", "Vacant"), "no module but a method"),
    "empty path": (Edit("", "Vacant"), "names ''"),
    "unknown read": (Edit("0", "Folded", {}, ("9",), (AFTER,)), "edit of 0 names '9'"),
    "missing argument": (Edit("1", "Scale"), "edit of 1 does not fit.*Scale.replacing.*alpha"),
    "unknown argument": (Edit("1", "Vacant", {"alpha": 1.0}), "edit of 1 does not fit.*alpha"),
    "argument of another type": (Edit("1", "Scale", {"alpha": "much"}), "edit of 1 does not fit"),
    "a read that is not taken": (Edit("0", "Folded", {}, ("1",)), "edit of 0 does not fit"),
    "takes of a layer that takes nothing": (
        Edit("1", "Vacant", {}, ("0",), (AFTER,)),
        "edit of 1 does not fit",
    ),
    "read of no norm": (Edit("0", "Folded", {}, ("2",), (AFTER,)), "edit of 0 does not fit"),
    "read of other channels": (
        Edit("3.0", "Folded", {}, ("1",), (AFTER,)),
        r"edit of 3\.0 does not fit",
    ),
    "then an unknown layer": (
        Edit("1", "Vacant", then=(Then("Scales"),)),
        "unknown layer 'Scales'",
    ),
    "fold of no convolution": (Edit("2", "Folded", {"gain": 2.0}), "edit of 2 does not fit"),
    "affine of no norm": (Edit("2", "ChannelAffine"), "edit of 2 does not fit"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_plans_that_do_not_fit_say_where(name: str) -> None:
    edit, message = UNFIT[name]
    with pytest.raises(PlanError, match=message) as caught:
        applying.apply(model(), [Step("mine", {}, (edit,))])
    assert "\n" not in str(caught.value)


def test_a_fitting_plan_is_carried_out() -> None:
    good = Edit("0", "Folded", {}, ("1",), (AFTER,)), Edit("1", "Vacant")
    source = model().eval()
    result = applying.apply(source, [Step("mine", {}, good)])
    x = torch.randn(2, 3, 6, 6)

    torch.testing.assert_close(result(x), source(x))
