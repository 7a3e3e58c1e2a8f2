"""Law of bounds: what a case may be off by comes from the case beside it, not from what passed
once.
"""

import copy
import functools
import statistics
from typing import Any

import pytest
from support.lived_in_networks import distance, run
from support.sampled_tables import crossed, dice
from support.scheme_rows import EXACT, Row
from support.six_networks import SIX, fits, images, measured, trained
from torch import Tensor, nn

import normswap
from normswap.calibration import per_sample_rescaling, tanh_factors
from normswap.graph import inspection
from normswap.models.calling import Example
from normswap.schemes import dyt, groupnorm
from normswap.surgery import applying, conversion

# Schemes of which every value may be fitted, and one that need not.
APPROXIMATE = (
    Row("groupnorm"),
    Row("layernorm"),
    Row("groupnorm", {"groups": 2, "relative_eps": 0.0}),
    Row("dyt"),
)
# What a fit on a hundred images may lose by chance on others, and what a norm may lose more behind
# other factors.
CHANCE = 1.1
ANOTHER_WAY = 3.0


@functools.cache
def source(name: str, seed: int) -> nn.Module:
    return measured(copy.deepcopy(trained(name, seed)), images(64, seed))


def lost(name: str, seed: int, scheme: str, **options: Any) -> float:
    """How far the result is from the source on images that nothing was fitted to."""
    model = source(name, seed)
    done = normswap.convert(model, scheme, inputs=images(2), **options).model
    return off(model, done, images(48, seed + 50))


def off(model: nn.Module, result: nn.Module, x: Tensor) -> float:
    return distance(run(model, x), run(result, x))


@pytest.mark.slow
@crossed("name, row", SIX, APPROXIMATE, mark=pytest.mark.slow, slow=("resnet18", "seresnet18"))
def test_fitted_is_no_worse_than_not_fitted(name: str, row: Row) -> None:
    """On average over three networks: of one of so few channels a third may be lost, or won, by
    chance.
    """
    ratios = []
    for seed in range(3):
        without = lost(name, seed, row.scheme, **row.options)
        ratios.append(
            lost(name, seed, row.scheme, **row.options, calibrate=[images(96, seed + 9)]) / without
        )
    assert statistics.geometric_mean(ratios) <= CHANCE, ratios


@crossed("name, row", SIX, APPROXIMATE, mark=pytest.mark.slow)
@pytest.mark.one_in(2)
def test_a_way_of_two_steps_is_no_worse_than_one(name: str, row: Row) -> None:
    """By an exact scheme, which has taken the norms away, to one that needs them."""
    generator = dice(name, row)
    seed = generator.randrange(4)
    before = generator.choice(["folded", "weightnorm", "tune", "affine"])
    model = source(name, seed)
    first = normswap.convert(model, before, inputs=images(2))
    second = normswap.convert(first, row.scheme, inputs=images(2), **row.options).model
    x = images(48, seed + 50)
    assert off(model, second, x) <= ANOTHER_WAY * lost(name, seed, row.scheme, **row.options) + 1e-9


# What a scheme of norms per sample, or of a tanh, is fitted to, and what chooses factors of
# channels before each norm.
TARGETS = {
    "groupnorm": (groupnorm.fitting_target, per_sample_rescaling.choose_rescaling),
    "layernorm": (groupnorm.fitting_target, per_sample_rescaling.choose_rescaling),
    "dyt": (dyt.fitting_target, tanh_factors.choose_factors),
}


@pytest.mark.parametrize(
    "row", [Row("groupnorm", {"group_size": 2}), Row("layernorm"), Row("dyt")], ids=str
)
@pytest.mark.parametrize("name", SIX)
@pytest.mark.one_in(3)
def test_what_a_fit_compares_with_is_the_source(name: str, row: Row) -> None:
    """Before and after the factors are chosen, on leaves and on images; they do something."""
    model = source(name, 0)
    x = images(32)
    (target_of, choose) = TARGETS[row.scheme]
    step, _ = conversion.plan_step(inspection.inspect(model, x[:2]), row.scheme, **row.options)
    target, result = (applying.apply_step(model, each) for each in (target_of(step), step))
    before = {key: tensor.clone() for key, tensor in result.state_dict().items()}
    assert off(model, target, x) < 1e-12
    choose(target, result, step, Example((x[:2],)), [Example((x,))])
    assert off(model, target, x) < 1e-12
    assert any(not tensor.equal(before[key]) for key, tensor in result.state_dict().items())


@pytest.mark.parametrize(
    ("name", "row"),
    [(name, row) for name in SIX for row in EXACT if fits(name, row.scheme)],
    ids=str,
)
@pytest.mark.one_in(4)
def test_in_float32_a_result_is_as_near_as_rounding_takes_the_source(name: str, row: Row) -> None:
    """Its error in float32 is at most some of what float32 costs the source itself."""
    wide = source(name, 0)
    x = images(8, 5)
    narrow = copy.deepcopy(wide).float()
    done = normswap.convert(narrow, row.scheme, inputs=x[:2].float(), **row.options).model
    reference = run(wide, x)
    own = distance(reference, run(narrow, x.float()).double())
    assert distance(reference, run(done, x.float()).double()) <= 8 * own + 1e-7
