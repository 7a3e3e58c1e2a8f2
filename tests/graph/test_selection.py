"""Conversions of a part: every scheme x patterns is exact in float64, and what is outside stays as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from crossed import crossed
from lived import batchnorms, distance, run
from narrow_networks import norm_free
from narrow_networks import source as lived
from scheme_rows import ROWS, Row
from timm.layers import ScaledStdConv2d
from torch import nn

import normswap
from normswap.errors import NormswapError, OptionError, RefusedError
from normswap.graph import selection
from normswap.layers.scalars import Scale

SIZE = (3, 33, 33)
# a part of each network: what is chosen, and how it looks from the paths of its norms
PATTERNS: tuple[dict[str, Any], ...] = (
    {"only": ["{3}"]},
    {"skip": ["{2}", "{4}.0"]},
    {"only": ["{1}", "{3}.1"], "skip": ["*2"]},
)
STAGES = {"resnet18": "layer{}", "seresnet18": "layer{}", "resnetv2_18": "stages.{}.blocks"}
NORMLESS = ("batchnorm", "frozen-bn", "tune")  # those that put norms back


def patterns(arch: str, given: dict[str, list[str]]) -> dict[str, list[str]]:
    """`{3}` is the third stage."""
    stages = ["", *(STAGES[arch].format(i - ("v2" in arch)) for i in range(1, 5))]
    return {option: [one.format(*stages) for one in listed] for option, listed in given.items()}


def chosen(path: str, only: list[str] = [], skip: list[str] = []) -> bool:  # noqa: B006
    """An oracle of its own: by parts of paths, for patterns that are plain or end a path."""

    def named(pattern: str) -> bool:
        if pattern.startswith("*"):
            return any(part.endswith(pattern[1:]) for part in path.split("."))
        return path.split(".")[: pattern.count(".") + 1] == pattern.split(".")

    return (not only or any(named(one) for one in only)) and not any(named(one) for one in skip)


PARTS = [*((arch, given) for arch in ("resnet18", "resnetv2_18") for given in PATTERNS), ("seresnet18", PATTERNS[2])]


@crossed("part, row", PARTS, ROWS, every=3)
def test_exact_and_the_rest_stays(part: tuple[str, dict[str, Any]], row: Row) -> None:
    arch, given = part
    model, x, reference = lived(arch)
    part = patterns(arch, given)
    try:
        done = normswap.convert(model, row.scheme, inputs=x, **row.options, **part)
    except RefusedError as why:
        if row.scheme != "residual-scale" or "a scale cannot pass" not in str(why):  # the norms that stay
            raise
        return
    error = distance(reference, run(done.model, x))
    spared = any("is not reset" in note for note in done.notes)  # by a norm that stays
    assert error <= 1e-12 if row.exact else (error > 1e-5 or spared) and error < float("inf")
    before, after = model.state_dict(), done.model.state_dict()
    outside = [path for path in batchnorms(model) if not chosen(path, **part)]
    inside = [path for path in batchnorms(model) if chosen(path, **part)]
    assert inside
    assert outside
    names = dict(done.renames)
    for path in outside:
        for name in ("weight", "bias", "running_mean", "running_var"):
            assert torch.equal(before[f"{path}.{name}"], after[names.get(f"{path}.{name}", f"{path}.{name}")])
    left = batchnorms(done.model)
    assert set(outside) <= {path.replace(".inner", "") for path in left}
    if not row.norms:
        assert not set(inside) & set(left)
    scalars = [path for path, module in done.model.named_modules() if isinstance(module, Scale)]
    assert all(chosen(path.removesuffix(".then"), only=part.get("only", [])) for path in scalars)
    assert done.plan.steps[-1].options == {**done.plan.steps[-1].options, **part}


@pytest.mark.parametrize(
    ("arch", "to"), [("resnet18", "folded"), ("resnetv2_18", "skipinit"), ("seresnet18", "skipinit")]
)
def test_part_by_part_is_the_whole(arch: str, to: str) -> None:
    """Stage after stage, then the rest: the network that one conversion gives; and back."""
    model, x, reference = lived(arch)
    now = model
    for stage in range(1, 5):
        now = normswap.convert(now, to, inputs=x, **patterns(arch, {"only": [f"{{{stage}}}"]})).model
        assert distance(reference, run(now, x)) <= 1e-12
    now = normswap.convert(now, to, inputs=x).model
    whole = normswap.convert(model, to, inputs=x).model
    assert {name: t.shape for name, t in now.state_dict().items()} == {
        name: t.shape for name, t in whole.state_dict().items()}  # fmt: skip
    assert distance(reference, run(now, x)) <= 1e-12
    back = normswap.convert(now, "batchnorm", inputs=x).model
    assert distance(reference, run(back, x)) <= 1e-12


def test_load_and_unfold(tmp_path: Path) -> None:
    model, x, reference = lived("resnetv2_18")
    done = normswap.convert(model, "skipinit", inputs=x, **patterns("resnetv2_18", {"only": ["{3}"]}))
    loaded = normswap.load(normswap.save(done, tmp_path / "out"))
    assert torch.equal(run(loaded, x), run(done.model, x))
    back = normswap.convert(loaded, "unfold", inputs=x).model
    assert distance(reference, run(back, x)) <= 1e-12
    assert batchnorms(back) == batchnorms(model)


def test_half_a_normalizer_free_network() -> None:
    model, x = norm_free("nf_resnet26")
    done = normswap.convert(model, "folded", inputs=x, skip="stages.2")
    assert distance(run(model, x), run(done.model, x)) <= 1e-12
    left = [path for path, module in done.model.named_modules() if isinstance(module, ScaledStdConv2d)]
    assert left
    assert all(path.startswith("stages.2.") for path in left)


def test_fitting_leaves_the_norms_outside() -> None:
    model, _, _ = lived("resnet18")
    batches = list(torch.randn(32, 3, 32, 32).split(8))
    done = normswap.convert(model, "groupnorm", input_size=SIZE, calibrate=batches, only="layer4")
    kept = [path for path in batchnorms(model) if not path.startswith("layer4")]
    assert batchnorms(done.model) == kept


def test_what_cannot_be_read_can_be_left() -> None:
    """A norm that would be refused is no obstacle where it is outside."""
    torch.manual_seed(0)
    net = timm.create_model("resnet18", channels=(8, 8, 8, 8), num_classes=5).eval()
    net.get_submodule("layer2.0").bn1 = nn.BatchNorm2d(8, track_running_stats=False)
    with pytest.raises(RefusedError, match=r"layer2\.0\.bn1.*no running statistics"):
        normswap.convert(net, "folded", input_size=SIZE)
    done = normswap.convert(net, "folded", input_size=SIZE, skip="layer2.0.bn1")
    assert batchnorms(done.model) == ["layer2.0.bn1"]


@pytest.mark.parametrize(
    ("to", "options", "kind", "message"),
    [
        ("folded", {"only": ["layer9"]}, OptionError, 'only="layer9" names no norm.*layer'),
        ("folded", {"only": ["layer1", "nothing"]}, OptionError, '"nothing".*`normswap inspect` lists their paths'),
        ("folded", {"only": "fc"}, RefusedError, "nothing to convert to folded: the norms of what is chosen are none"),
        ("skipinit", {"only": ["*.bn2"]}, RefusedError, "no residual block is chosen.*layer1.0"),
        ("residual-scale", {"rule": "rescale", "only": "layer3.1"}, RefusedError, "layer3.1: a scale cannot pass"),
        ("unfold", {"only": "layer1"}, OptionError, "no option only"),
        ("folded", {"skip": ["layer1", "layr3.1"]}, OptionError, '"layr3.1" names no.*Did you mean layer3.1 or layer'),
    ],
)
def test_patterns_that_cannot_be(to: str, options: dict[str, Any], kind: type[NormswapError], message: str) -> None:
    with pytest.raises(kind, match=message):
        normswap.convert(lived("resnet18")[0], to, input_size=SIZE, **options)


def test_patterns() -> None:
    yes = [("layer3", "layer3"), ("layer3", "layer3.0.bn1"), ("layer3.*", "layer3.0"), ("*.bn2", "layer3.0.bn2"),
           ("*.down*", "layer2.0.downsample.1"), ("layer[12]", "layer2.0"), ("*", "x")]  # fmt: skip
    no = [("layer3", "layer30"), ("layer3", "a.layer3"), ("bn1", "layer1.0.bn1"), ("layer3.*", "layer3")]
    assert all(selection.matches(*pair) for pair in yes)
    assert not any(selection.matches(*pair) for pair in no)
