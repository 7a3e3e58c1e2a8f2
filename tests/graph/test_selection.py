"""Conversions of a part: loading, patterns that cannot be, where norms stood; the law of it is in test_scope.py."""

from typing import Any

import pytest
import timm
import torch
from lived import batchnorms, distance, run
from narrow_networks import norm_free, source as lived
from timm.layers import ScaledStdConv2d
from torch import nn

import normswap
from normswap.errors import NormswapError, OptionError, RefusedError
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.anatomy import matches
from normswap.graph.inspection import inspect
from normswap.surgery.network import Network

SIZE = (3, 33, 33)


def test_half_a_normalizer_free_network() -> None:
    model, x = norm_free("nf_resnet26")
    done = normswap.convert(model, "folded", inputs=x, skip="stages.2")
    assert distance(run(model, x), run(done.model, x)) <= 1e-12
    left = [path for path, module in done.model.named_modules() if isinstance(module, ScaledStdConv2d)]
    assert left
    assert all(path.startswith("stages.2.") for path in left)


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
        ("folded", {"only": "fc"}, RefusedError, "nothing to convert to folded: its norms are none"),
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
    assert all(matches(*pair) for pair in yes)
    assert not any(matches(*pair) for pair in no)


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


def test_what_was_never_known_is_none() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)).eval()
    assert Network(net).anatomy.kept_moments("1") is None
