"""Law of what eval mode hides: norms that come back are the old ones in training; what does not
learn stays so.
"""

import copy
import re
from typing import Any

import pytest
import torch
from support import narrow_networks
from support.lived_in_networks import batchnorms, distance, run
from support.sampled_tables import dice
from support.scheme_rows import EXACT, ROWS, Row
from support.six_networks import SIX, fits, images, measured, trained
from torch import Tensor, nn

import normswap
from normswap.plan import AbsorbMode
from normswap.surgery.network import Network

DROPOUTS = (nn.Dropout, nn.Dropout2d)


def in_training(model: nn.Module, x: Tensor) -> Tensor:
    """What a copy of the network answers in training mode, without dropout."""
    model = copy.deepcopy(model).train()
    for module in model.modules():
        if isinstance(module, DROPOUTS):
            module.eval()
        elif hasattr(module, "drop_rate"):
            module.drop_rate = 0.0
    with torch.no_grad():
        y: Tensor = model(x)
    return y


def inputs_of_norms(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """(C, N) of each BatchNorm, in eval mode."""
    seen: dict[str, Tensor] = {}
    handles = []
    for path in batchnorms(model):

        def look(_: nn.Module, args: tuple[Tensor, ...], path: str = path) -> None:
            seen[path] = args[0].transpose(0, 1).flatten(1)

        handles.append(model.get_submodule(path).register_forward_pre_hook(look))
    with torch.no_grad():
        model.eval()(x)
    for handle in handles:
        handle.remove()
    return seen


CASES = [(name, row) for name in SIX for row in EXACT if fits(name, row.scheme)]


@pytest.mark.parametrize(("name", "row"), CASES, ids=str)
@pytest.mark.one_in(8)
def test_norms_that_come_back_are_the_old_ones(name: str, row: Row) -> None:
    """They have the statistics of their input, and train as the source does, and as fast."""
    generator = dice(name, row)
    seed = generator.randrange(4)
    epsilon = generator.choice([None, 3e-4])
    gammas = generator.choice(["any", "not negative", "ones"])
    momentum = generator.choice(["its own", None, 0.0])
    x = images(12, seed)

    source = copy.deepcopy(trained(name, seed))
    for path in batchnorms(source):
        norm: Any = source.get_submodule(path)
        norm.eps = epsilon or norm.eps
        norm.momentum = norm.momentum if momentum == "its own" else momentum
        with torch.no_grad():
            norm.weight.copy_({"any": norm.weight, "ones": 1}.get(gammas, norm.weight.abs()))

    measured(source, x)
    there = normswap.convert(source, row.scheme, inputs=x[:2], **row.options)
    settings = {(norm.momentum, norm.eps) for norm in map(source.get_submodule, batchnorms(source))}
    learning: Any = [module for module in there.model.modules() if hasattr(module, "momentum")]

    assert {(norm.momentum, norm.eps) for norm in learning} <= settings

    anatomy = Network(there.model, x[:2]).anatomy
    for path in anatomy.provenance.original_paths:
        mean, deviation = anatomy.kept_moments(path)
        assert mean is not None
        assert mean.equal(source.get_parameter(f"{path}.bias"))
        assert deviation is not None
        assert deviation.equal(source.get_parameter(f"{path}.weight").abs())

    back = normswap.convert(there, "batchnorm", inputs=x[:2]).model
    assert [path.removesuffix(".inner") for path in batchnorms(back)] == batchnorms(source)

    values = inputs_of_norms(back, x)
    for path, old_path in zip(batchnorms(back), batchnorms(source), strict=True):
        norm = back.get_submodule(path)
        old = source.get_submodule(old_path)
        assert (norm.momentum, norm.eps, norm.num_batches_tracked) == (
            old.momentum,
            old.eps,
            old.num_batches_tracked,
        )
        assert norm.running_mean.dtype == old.running_mean.dtype

        mean = values[path].mean(1)
        variance = values[path].var(1)
        tolerance = 1e-3 * (variance + 1e-4).sqrt()

        assert bool(((norm.running_mean - mean).abs() <= tolerance).all()), path
        assert bool(((norm.running_var - variance).abs() <= 1e-3 * (variance + 1e-4)).all()), path

    assert distance(in_training(source, x), in_training(back, x)) < 1e-3
    assert distance(run(source, x), run(back, x)) < 1e-10


# Some norms of the last one stay as a scale and shift.
UNFOLDED = [
    *(case for case in CASES if "resnet" in case[0]),
    *(("resnetv2_18", row) for row in EXACT[:3]),
]


@pytest.mark.parametrize(("name", "row"), UNFOLDED, ids=str)
@pytest.mark.one_in(8)
def test_unfolded_buffers_are_the_old_ones(name: str, row: Row) -> None:
    source, x = (trained(name), images(2)) if name in SIX else narrow_networks.source(name)[:2]
    there = normswap.convert(source, row.scheme, inputs=x, **row.options)
    back = normswap.convert(there, "unfold", inputs=x).model
    buffers = dict(back.named_buffers())

    assert all(buffers[key].equal(value) for key, value in source.named_buffers())

    if row.scheme in ("affine", "tune", "frozen-bn"):
        norms = (path for path in batchnorms(source))
        assert all(
            back.get_parameter(f"{path}.bias").equal(source.get_parameter(f"{path}.bias"))
            for path in norms
        )

    # What every parameter has learned since comes back, too.
    torch.manual_seed(dice(name, row).randrange(9))
    with torch.no_grad():
        for parameter in there.model.parameters():
            parameter.mul_(1 + 0.05 * torch.randn_like(parameter))

    back = normswap.convert(there, "unfold", inputs=x).model
    assert distance(run(there.model, x), run(back, x)) < 1e-10


# What has to be said of every network of a kind.
SAID = (
    "no norm says how much its output varies|times the mean variance|part of frozen weights"
    "|it is a transposed convolution|does not keep the function of a trained network"
)
ALL = [(name, row) for name in SIX for row in ROWS if fits(name, row.scheme)]


# How a neighbour's shift gets into a bias.
SHIFTS = (AbsorbMode.AFTER, AbsorbMode.BEFORE, AbsorbMode.BEFORE_SHIFT)


def _took_a_learning_beta(name: str, source: nn.Module, done: normswap.Conversion) -> bool:
    """Whether the parameter is a bias into which a norm was folded whose beta learned."""
    path, _, leaf = name.rpartition(".")
    if leaf != "bias":
        return False
    for step in done.plan.steps:
        for edit in step.edits:
            for norm_path, absorption in edit.absorbed if edit.path == path else ():
                beta = getattr(source.get_submodule(norm_path), "bias", None)
                carries_beta = absorption.way in SHIFTS
                if carries_beta and beta is not None and beta.requires_grad:
                    return True
    return False


@pytest.mark.parametrize(("name", "row"), ALL, ids=str)
@pytest.mark.one_in(8)
def test_what_does_not_learn_or_drops_stays_so(name: str, row: Row) -> None:
    """Every parameter that lives on under its name; and a dropout drops what it dropped.

    A bias into which the shift of a norm went learns where that norm's beta learned.
    """
    source = copy.deepcopy(trained(name))
    layers = [path for path, module in source.named_modules() if module._parameters]
    generator = dice(name, row)
    for path in generator.sample(layers, generator.randint(1, len(layers))):
        source.get_submodule(path).requires_grad_(False)
    done = normswap.convert(source, row.scheme, inputs=images(2), **row.options)

    # A network in which nothing is wrong is warned of nothing.
    assert not [note for note in done.notes if not re.search(SAID, note)]
    assert done.report.remarks == ()

    names = dict(done.renames)
    now = dict(done.model.named_parameters())
    for old, parameter in source.named_parameters():
        new = names.get(old, old)
        if new in now:
            learned = parameter.requires_grad or _took_a_learning_beta(old, source, done)
            assert now[new].requires_grad == learned, new

    drops = {
        path: module.p for path, module in source.named_modules() if isinstance(module, DROPOUTS)
    }
    for path, p in drops.items():
        assert done.model.get_submodule(path).p == p  # type: ignore[union-attr]
