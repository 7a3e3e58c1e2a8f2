"""Statistics go with the model: whatever a network was converted to, `inspect` knows the mean and std of every norm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lived import batchnorms
from narrow_networks import source as lived
from torch import nn

import normswap
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import inspect
from normswap.layers import affine
from normswap.surgery.network import Network

SIZE = (3, 33, 33)


def expected(model: nn.Module) -> dict[str, tuple[list[float], list[float]]]:
    """By path, the smallest and largest mean and deviation of a norm's output: beta and |gamma|."""
    found = {}
    for path in batchnorms(model):
        norm: Any = model.get_submodule(path)
        spans = [[float(v.min()), float(v.max())] for v in (norm.bias.detach(), norm.weight.detach().abs())]
        found[path] = (spans[0], spans[1])
    return found


def seen(model: nn.Module) -> dict[str, tuple[list[float], list[float]]]:
    """The same of what the norms say that are there, and of what the network carries of those that are gone."""
    anatomy = Network(model).anatomy
    moments = {path: anatomy.kept_moments(path) for path in anatomy.provenance.original_paths}
    for norm in anatomy.norms:
        module = anatomy.traced.modules[norm.path]
        if affine.has_moments(module):
            moments[anatomy.original_path(norm.path)] = affine.moments(module)
    found = {}
    for path, (mean, std) in moments.items():
        assert mean is not None
        assert std is not None
        found[path] = ([mean.min().item(), mean.max().item()], [std.min().item(), std.max().item()])
    return found


def test_parts_of_a_chain_are_at_the_site_of_the_norm() -> None:
    model, x, _ = lived("resnet18")
    anatomy = inspect(normswap.convert(model, "folded", inputs=x).model, x)
    for path in ("bn1", "layer1.0.bn2"):
        assert {anatomy.original_path(f"{path}{end}") for end in ("", ".inner", ".then", ".inner.then")} == {path}
    assert anatomy.original_path("inner") == ""


def test_a_path_is_removed_when_the_plan_says_so() -> None:
    model, x, _ = lived("resnet18")
    builder = PlanBuilder(inspect(model, x))
    builder.replace("bn1", "WeightNorm")
    builder.remove("layer1.0.bn1")
    assert [builder.removes(path) for path in ("bn1", "layer1.0.bn1", "layer1.0.bn2")] == [False, True, False]


def test_a_long_way_and_the_disk(tmp_path: Path) -> None:
    model, x, _ = lived("resnet18")
    wanted, now = expected(model), model
    for i, (to, purpose) in enumerate(
        [("skipinit", "opacus"), ("folded", None), ("weightnorm", None), ("fixup", None)]
    ):
        done = normswap.convert(now, to, inputs=x, purpose=purpose)
        now = normswap.load(normswap.save(done, tmp_path / str(i)))
        assert seen(now) == wanted


def test_what_was_never_known_is_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).eval()
    assert Network(net).anatomy.kept_moments("1") == (None, None)
