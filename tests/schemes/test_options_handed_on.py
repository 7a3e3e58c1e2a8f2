"""Law: every option of a scheme reaches the plan, alone and beside each other option.

The rows are the records of the options, so that a new option that does nothing fails by itself.
"""

from typing import Any

import pytest
from support.lived_in_networks import seen
from support.six_networks import trained

from normswap import schemes
from normswap.errors import NormswapError
from normswap.schemes.catalogue import TARGETS
from normswap.schemes.scheme import Option

# Values of options that are any text, or of which some numbers mean the same.
VALUES: dict[tuple[str, str], tuple[object, ...]] = {
    # A group has two channels at least.
    ("groupnorm", "group_size"): (2, 4),
}
# Options that no plan of these networks has, with the tests that hold them.
ELSEWHERE = {
    ("batchnorm", "where"): "tests/schemes/test_batchnorm_back.py, of networks without norms",
    ("batchnorm", "like"): "tests/schemes/test_batchnorm_back.py, of networks without norms",
    ("batchnorm", "ghost_batch"): "tests/schemes/test_batchnorm_back.py",
    ("folded", "branches"): "tests/folding/test_branches.py, of networks with such branches",
}
# One of these must feel the option.
NETWORKS = ("resnet18", "inverted")
# Options that say nothing beside a value of another option, with the reason.
SILENT = {
    ("groupnorm", "groups", "group_size"): "only one of the two is given",
    ("groupnorm", "group_size", "groups"): "only one of the two is given",
    ("nf", "stem", "mean"): "mean=keep fits nothing",
    ("nf", "depthwise", "mean"): "mean=keep fits nothing",
    ("nf", "stem", "init"): "init=reset drops all means, as the paper does",
    ("nf", "depthwise", "init"): "init=reset drops all means, as the paper does",
    ("centered-weightnorm", "stem", "mean"): "mean=keep fits nothing",
    ("centered-weightnorm", "depthwise", "mean"): "mean=keep fits nothing",
}
CASES = [
    (name, option)
    for name, scheme in TARGETS.items()
    for option in scheme.options
    if (name, option.name) not in ELSEWHERE
]


def values_of(scheme: str, option: Option) -> tuple[object, ...]:
    """Return values of an option that must all differ in the plan; none of them is the default."""
    named = VALUES.get((scheme, option.name))
    if named is not None:
        return named
    if option.choices:
        return option.choices

    assert option.kind in (int, float), f"{option.name} needs a row in VALUES"
    low = option.range.low if option.range else 0
    high = min(option.range.high, low + 4) if option.range else 4
    numbers = (low + (high - low) / 4, low + (high - low) / 2)
    return tuple(option.kind(number) for number in numbers)


def planned(network: str, scheme: str, options: dict[str, Any]) -> object:
    """Return what the plan says of a network, or why there is none."""
    try:
        chosen = schemes.chosen(scheme, options).options
        builder = schemes.get(scheme).plan(seen(trained(network)), **chosen)
    except NormswapError as error:
        return str(error)
    return builder.edits(), builder.refusals


def alike(scheme: str, option: Option, beside: dict[str, Any]) -> list[tuple[object, object]]:
    """Return the pairs of values of an option that no network tells apart."""
    values = values_of(scheme, option)
    plans = {}
    for value in values:
        options = {**beside, option.name: value}
        plans[value] = [planned(network, scheme, options) for network in NETWORKS]

    found = []
    for number, one in enumerate(values):
        found += [(one, other) for other in values[:number] if plans[one] == plans[other]]
    return found


@pytest.mark.parametrize(("scheme", "option"), CASES, ids=lambda case: getattr(case, "name", case))
def test_an_option_reaches_the_plan(scheme: str, option: Option) -> None:
    assert alike(scheme, option, {}) == []

    for other in TARGETS[scheme].options:
        if other.name == option.name or (scheme, option.name, other.name) in SILENT:
            continue
        for value in values_of(scheme, other):
            beside = {other.name: value}
            assert alike(scheme, option, beside) == [], beside


def test_an_option_that_is_not_handed_on_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = schemes.get("dyt").plan
    deaf = schemes.Scheme(lambda anatomy, *, bend: plan(anatomy, bend=0.25), options=BEND)
    monkeypatch.setattr(schemes, "_registered", {"deaf": deaf})

    assert alike("deaf", BEND[0], {}) != []
    assert alike("dyt", BEND[0], {}) == []


BEND = TARGETS["dyt"].options
