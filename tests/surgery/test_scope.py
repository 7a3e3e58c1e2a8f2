"""Law of scope: what `only` and `skip` leave out stays to the last bit; what they take gets the whole plan's edits."""

import functools
from collections.abc import Iterator

import pytest
from crossed import crossed, dice
from lived import batchnorms, distance, run, step
from scheme_rows import ROWS, Row
from six_networks import BRANCHLESS, SIX, fits, images, trained
from torch import nn

import normswap
from normswap import schemes
from normswap.graph import inspection
from normswap.graph.anatomy import restrict
from normswap.graph.inspection import Anatomy
from normswap.plan import Step

FITTED = (Row("groupnorm"), Row("dyt"), Row("nf"), Row("nf", {"stem": "fit"}), Row("centered-weightnorm"))


# Two rules whose factors of the sums go into the branches behind, and so depend on which sums are scaled.
SUMS_TOO = ("balduzzi", "rescale")


def choices() -> Iterator[Row]:
    """A row for each word that an option of a scheme may be, but for what needs images to say where norms go."""
    for scheme in {row.scheme for row in ROWS} - {"batchnorm"}:
        for option in schemes.get(scheme).options:
            yield from (Row(scheme, {option.name: word}) for word in option.choices if word not in SUMS_TOO)


PLANNED = sorted({str(row): row for row in choices()}.items())
CASES = [(name, row) for name in SIX for row in (*ROWS, *FITTED) if fits(name, row.scheme)]
CASES += [(name, row) for name in SIX for _, row in PLANNED if fits(name, row.scheme)]


@functools.cache
def anatomy(name: str) -> Anatomy:
    return inspection.inspect(trained(name), images(2))


@functools.cache
def whole(name: str, row: str) -> Step:
    scheme = next(each for _, each in CASES if str(each) == row)
    planned, builder = step(anatomy(name), scheme.scheme, **scheme.options)
    assert not builder.refusals
    return planned


def units(name: str) -> list[tuple[str, ...]]:
    """What is taken together: a residual block, or a layer and the norm after it."""
    if name in BRANCHLESS:
        return [("stem", "bn1"), ("down", "bn2", "up", "bn3")]
    return [(block.path,) for block in anatomy(name).blocks]


def scope_of(name: str, row: Row) -> dict[str, list[str]]:
    """`only` with some of the units, or `skip` with some, but not all."""
    every, generator = units(name), dice(name, row)
    some = generator.sample(every, generator.randint(1, len(every) - 1))
    return {generator.choice(["only", "skip"]): [path for unit in some for path in unit]}


def takes_part(path: str, only: list[str] = [], skip: list[str] = []) -> bool:  # noqa: B006
    named = any(path == pattern or path.startswith(f"{pattern}.") for pattern in only + skip)
    return named is bool(only)


def assert_outside_stays(before: nn.Module, after: nn.Module, scope: dict[str, list[str]]) -> None:
    """Every layer that takes no part has its class, its settings, its tensors and their flags."""
    now = dict(after.named_modules())
    for path, layer in before.named_modules():
        if takes_part(path, **scope) or any(True for _ in layer.children()):
            continue
        same, state = now[path], layer.state_dict()
        assert (type(same), same.extra_repr(), same.training) == (type(layer), layer.extra_repr(), layer.training), path
        assert same.state_dict().keys() == state.keys(), path
        assert all(tensor.equal(state[key]) for key, tensor in same.state_dict().items()), path
        assert [p.requires_grad for p in same.parameters()] == [p.requires_grad for p in layer.parameters()], path


@pytest.mark.parametrize(("name", "row"), CASES, ids=str)
@pytest.mark.one_in(4)
def test_a_part_gets_the_edits_of_the_whole(name: str, row: Row) -> None:
    scope = scope_of(name, row)
    part, builder = step(restrict(anatomy(name), **scope), row.scheme, **row.options)
    assert not builder.refusals
    norms = {path for path in batchnorms(trained(name)) if takes_part(path, **scope)}
    assert norms == builder.outcomes.keys()
    of_the_whole = {edit.path: edit for edit in whole(name, str(row)).edits if takes_part(edit.path, **scope)}
    assert {edit.path: edit for edit in part.edits} == of_the_whole
    if row in ROWS:
        done = normswap.convert(trained(name), row.scheme, inputs=images(2), **scope, **row.options)
        assert done.plan.steps[-1].edits == part.edits
        assert_outside_stays(trained(name), done.model, scope)
        error = distance(run(trained(name), images(3, 7)), run(done.model, images(3, 7)))
        assert error <= 1e-11 if row.exact else 0 < error < float("inf")


@crossed("name, row", SIX, FITTED, every=3, mark=pytest.mark.slow)
@pytest.mark.one_in(2)
def test_a_fit_changes_nothing_outside(name: str, row: Row) -> None:
    scope = scope_of(name, row)
    batches = [images(24, 1), images(24, 2)]
    source = trained(name)
    done = normswap.convert(source, row.scheme, inputs=images(2), calibrate=batches, **scope, **row.options)
    assert_outside_stays(source, done.model, scope)
