"""Law of steps: what holds of one step of a conversion holds of two and of three.

The steps of one call (what a target needs comes first, its purpose last) and of several calls; all
of them exact, all fitted, or mixed in either order.
"""

import copy
import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lived_in_networks import distance, run
from support.sampled_tables import dice, sampled
from support.scheme_rows import ROWS, Row
from support.six_networks import images, trained
from torch import nn

import normswap
from normswap import schemes
from normswap.errors import NormswapError, RefusedError
from normswap.plan import Outcome, Step
from normswap.schemes.catalogue import PURPOSES, TARGETS
from normswap.storage import checkpoint
from normswap.surgery import applying, carrying_out, conversion, reverification
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

BATCHES = [images(24, 1), images(24, 2)]
# Every fourth of the images is held out.
HELD_OUT = 12
FITTED = (Row("groupnorm", exact=False), Row("dyt", exact=False), Row("nf", exact=False))


@functools.cache
def source(name: str) -> nn.Module:
    """A small residual network with BatchNorms, with GroupNorms, or without norms; in float64."""
    if name == "batchnorm":
        return trained("post")
    if name == "folded":
        return normswap.convert(trained("post"), "folded", inputs=images(2)).model

    model: Any = copy.deepcopy(trained("post"))
    for block in model.blocks:
        block.bn1 = _group_norm(block.bn1)
        block.bn2 = _group_norm(block.bn2)
    return model


def _group_norm(norm: nn.BatchNorm2d) -> nn.Module:
    """A GroupNorm with the gammas and betas of a BatchNorm."""
    group_norm = nn.GroupNorm(2, norm.num_features).double().eval()
    group_norm.load_state_dict({"weight": norm.weight, "bias": norm.bias})
    return group_norm


@pytest.mark.parametrize(
    ("target", "steps"),
    [
        ("groupnorm", ["batchnorm", "groupnorm"]),
        ("affine", ["affine"]),
        ("batchnorm", ["batchnorm"]),
        ("fixup", ["fixup"]),
    ],
)
def test_norms_that_were_lost_come_back_for_a_target_that_replaces_norms(
    target: str, steps: list[str]
) -> None:
    folded = source("folded")

    path = conversion.scheme_path(Network(folded, images(2)).anatomy, target, {}, measured=False)

    assert [chosen.scheme.name for chosen in path] == steps


def is_exact(done: Conversion | nn.Module) -> bool:
    """Whether every step since the bare architecture claims to keep the function."""
    plan = Network(done.model if isinstance(done, Conversion) else done).provenance.plan
    return all(schemes.of(step).exact for step in plan.steps)


def renamed(singles: list[Conversion], before: nn.Module, after: nn.Module) -> dict[str, str]:
    """Follow every tensor of the source through the steps; return those with another name."""
    names: dict[str, str] = {}
    held = after.state_dict()
    for old in before.state_dict():
        name = old
        for single in singles:
            name = dict(single.renames).get(name, name)
        if name != old and name in held:
            names[old] = name
    return names


def changed(model: nn.Module, seed: object) -> nn.Module:
    """A copy, one tensor of which is other than it was, so that its outputs differ."""
    other = copy.deepcopy(model)
    parameters = [each for each in nn.Module.parameters(other) if each.is_floating_point()]
    before = run(model, images(4))
    for parameter in dice(seed).sample(parameters, len(parameters)):
        with torch.no_grad():
            parameter.add_(0.1)
        if distance(before, run(other, images(4))) > 1e-3:
            return other
    raise AssertionError("no tensor changes the outputs")


def hold_against_source(before: nn.Module, after: nn.Module, seed: object) -> None:
    """Every step counts where a result is compared with its source once more."""
    network = Network(before, images(3, 5))
    expected = "PROVED" if is_exact(after) else "MEASURED"

    assert reverification.again(network, after).verdict == expected
    if expected == "PROVED":
        assert distance(run(before, images(3, 7)), run(after, images(3, 7))) <= 1e-10
        assert reverification.again(network, changed(after, seed)).verdict == "WRONG"


def hold_saved(done: Conversion, before: nn.Module, folder: Path, case: str) -> None:
    """A directory, its card and its record say of all steps what is so of all steps.

    Args:
        done: The conversion.
        before: The network before the first step of the plan.
        folder: The directory to write.
        case: The name of the row, by which a tensor is chosen that is then changed.
    """
    skeleton = copy.deepcopy(before)
    place = normswap.save(done, folder)
    loaded = normswap.load(place, skeleton=skeleton)

    assert Network(loaded).provenance.plan.digest == done.plan.digest
    assert distance(run(done.model, images(3, 7)), run(loaded, images(3, 7))) == 0
    hold_against_source(before, loaded, case)
    header = checkpoint.read_header(place)
    assert header.report == done.report
    card = (place / "README.md").read_text(encoding="utf-8")
    for step in done.plan.steps:
        assert step.scheme in card
    assert ("keeps the function of its source" in card) == is_exact(done)
    if "--to unfold" in card:
        skeleton = copy.deepcopy(before)
        back = normswap.convert(loaded, "unfold", inputs=images(2), like=skeleton)
        assert distance(run(before, images(3, 7)), run(back.model, images(3, 7))) <= 1e-10


def in_one_call() -> Iterator[str]:
    """Yield source, target and purpose of every conversion of two steps or three."""
    for name in ("batchnorm", "groupnorm", "folded"):
        for target, scheme in TARGETS.items():
            # GroupNorms become BatchNorms first, which are what this target asks for.
            is_estimated = name == "groupnorm" and target != "batchnorm"
            is_restored = name == "folded" and scheme.starts_from == "batchnorm"
            if is_estimated or is_restored:
                yield f"{name} {target}"
            for purpose in PURPOSES:
                yield f"{name} {target} {purpose}"


@dataclass(frozen=True)
class Single:
    """A step that was planned, carried out and measured by itself."""

    exact: bool
    notes: tuple[str, ...]
    done: Conversion


@functools.cache
def steps_alone(name: str, target: str, purpose: str) -> tuple[Single, ...] | None:
    """The steps of a conversion, each by itself; None where one of them cannot be."""
    network = Network(source(name), images(2)).fitted_to(BATCHES, None)
    options: dict[str, Any] = {"purpose": purpose} if purpose else {}
    singles: list[Single] = []
    for chosen in conversion.scheme_path(network.anatomy, target, options, measured=True):
        try:
            builder = chosen.scheme.plan(network.anatomy, **chosen.own)
        except NormswapError:
            return None
        is_nothing = not (builder.replacements or builder.linears)
        if builder.refusals or (is_nothing and not chosen.scheme.may_do_nothing):
            return None

        step = Step(chosen.scheme.name, chosen.own, builder.edits(), builder.outcomes)
        done = carrying_out.carry_out(network, step)
        singles.append(Single(chosen.exact, (*builder.notes, *done.notes), done))
        network = done.network.fitted_to(BATCHES, None)
    return tuple(singles)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", sampled(in_one_call(), 30))
def test_the_steps_of_one_call(case: str, tmp_path: Path) -> None:
    name, target, purpose = [*case.split(" "), ""][:3]
    options: dict[str, Any] = {"purpose": purpose} if purpose else {}
    before = source(name)
    singles = steps_alone(name, target, purpose)
    if singles is None:
        with pytest.raises(RefusedError):
            normswap.convert(before, target, inputs=images(2), calibrate=BATCHES, **options)
        return

    done = normswap.convert(before, target, inputs=images(2), calibrate=BATCHES, **options)

    assert done.steps == len(singles) > 1
    assert done.report.verdict == (
        "PROVED" if all(single.exact for single in singles) else "MEASURED"
    )
    expected = set().union(*(single.notes for single in singles))
    assert expected <= set(done.notes)
    assert len(done.notes) == len(set(done.notes))
    alone = [single.done for single in singles]
    assert dict(done.renames) == renamed(alone, before, done.model)
    assert all(distance(run(alone[-1].model, x), run(done.model, x)) == 0 for x in BATCHES)
    hold_kept(done, before)
    # What was folded is saved with its plan, which begins at the network with norms.
    bare = trained("post") if name == "folded" else before
    hold_saved(done, bare, tmp_path / "net", case)


def hold_kept(done: Conversion, before: nn.Module) -> None:
    """The agreement of fitted steps is that of the whole, on images that none was fitted to."""
    if done.report.exact:
        assert done.report.kept is None
        return

    kept = done.report.kept
    x = torch.cat(BATCHES)[torch.arange(48) % 4 == 3]
    ours = run(done.model, x)
    theirs = run(before, x)
    assert kept is not None
    assert kept.count == HELD_OUT
    assert kept.agreement == pytest.approx(
        float((ours.argmax(1) == theirs.argmax(1)).double().mean())
    )
    assert kept.relative_l2 == pytest.approx(distance(theirs, ours), rel=1e-6)


SECOND = [row for row in (*ROWS, *FITTED) if row.scheme != "batchnorm"]


def in_several_calls() -> Iterator[tuple[Row, ...]]:
    """Yield chains of two rows and of three, in an order that is drawn."""
    for first in SECOND:
        for second in SECOND:
            third = dice(first, second).choice([None, *SECOND])
            yield (first, second) if third is None else (first, second, third)


CHAINS = {" ".join(map(str, chain)): chain for chain in in_several_calls()}


@pytest.mark.slow
@pytest.mark.parametrize("case", sampled(CHAINS, 120))
def test_the_steps_of_several_calls(case: str, tmp_path: Path) -> None:
    before = source("batchnorm")
    done: Conversion | None = None
    for row in CHAINS[case]:
        options = dict(row.options)
        # Nothing is fitted to images where a scheme has no use for them.
        if any(row.scheme == fitted.scheme for fitted in FITTED) and options.get("mean") != "keep":
            options["calibrate"] = BATCHES
        try:
            done = normswap.convert(done or before, row.scheme, inputs=images(2), **options)
        except NormswapError:
            # Not every scheme leaves what the next one needs.
            break

    if done is None or len(done.plan.steps) < 2:
        return
    assert done.report.verdict in ("PROVED", "MEASURED")
    assert done.report.steps_before == len(done.plan.steps) - done.steps
    hold_saved(done, before, tmp_path / "net", case)


@pytest.mark.parametrize("name", TARGETS)
def test_an_earlier_step_that_rescales_blocks_counts_in_what_is_claimed(name: str) -> None:
    """A later step may give a stream its own scale back."""
    folded = Step("folded", {}, ())
    earlier = Step(name, schemes.chosen(name, {}).options, ())

    claims = applying.claims([folded], earlier=[earlier])

    assert applying.claims([folded]).keeps_blocks
    assert claims.keeps_blocks is schemes.of(earlier).scheme.keeps_blocks


@pytest.mark.parametrize("then", ["folded", "skipinit", "weightnorm"])
def test_a_block_that_an_earlier_step_has_rescaled_may_change_again(then: str) -> None:
    """The function stays, and is proved at the outputs alone."""
    before = trained("resnet18")
    scaled = normswap.convert(before, "residual-scale", inputs=images(2), rule="balduzzi")

    after = normswap.convert(scaled, then, inputs=images(2))

    assert any(error.relative_l2 > 1e-3 for error in scaled.report.sites)
    assert after.report.verdict == "PROVED"
    assert distance(run(before, images(3, 7)), run(after.model, images(3, 7))) <= 1e-10


def test_what_each_step_says_is_said_of_all() -> None:
    """Notes and outcomes of an early step are no less the user's than those of the last one."""
    network = Network(source("batchnorm"), images(2))
    conversions: list[Conversion] = []
    for number, target in enumerate(("folded", "skipinit", "weightnorm")):
        before = conversions[-1] if conversions else network
        done = normswap.convert(before, target)
        outcomes = {f"norm{number}": Outcome("folded", f"outcome {number}")}
        conversions.append(replace(done, notes=(f"note {number}", "of all"), outcomes=outcomes))

    whole = conversion.joined(network, conversions)

    assert whole.notes == ("note 0", "of all", "note 1", "note 2")
    assert [*whole.outcomes] == ["norm0", "norm1", "norm2"]
    assert whole.steps == 3
