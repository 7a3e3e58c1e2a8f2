"""What only an export does to a network: shifts into the stream, mean and std before the stem, weights to bfloat16.

All in float64, against the unfused forward.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from lived import distance, lived_in, run
from tiny import Net
from torch import Tensor, nn

from normswap.exporting import export_folding, rounding, shift_absorption
from normswap.exporting.exported_module import Shipped
from normswap.graph import inspection
from normswap.layers.channelwise import ChannelAffine, ChannelBias
from normswap.layers.placeholders import Vacant
from normswap.models.calling import Example

V2: dict[str, Any] = {"channels": [8, 16, 32, 64], "stem_chs": 8, "num_classes": 10}
SIZE = (3, 64, 64)


def v2(*, positive: bool, name: str = "resnetv2_18", **args: Any) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = timm.create_model(name, **(args or V2)), torch.randn(2, *SIZE)
    lived_in(model, x)
    if positive:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.data.abs_().add_(0.2)
    return model, x.double()


def left(model: nn.Module) -> list[str]:
    kinds = (ChannelBias, ChannelAffine)
    return [path for path, module in model.named_modules() if isinstance(module, kinds)]


# --- shifts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnetv2_18", "resnetv2_50"])
def test_a_preactivation_network_keeps_nothing(name: str) -> None:
    args = {"channels": [16, 16, 32, 32], "stem_chs": 8, "num_classes": 10}
    model, x = v2(positive=True, name=name, **args)
    folded = export_folding.fold_for_export(model, SIZE)
    assert (
        len(left(folded)) == len(inspection.inspect(model).blocks) + 1
    )  # before each block, and before the classifier
    absorbed = copy.deepcopy(folded)
    assert shift_absorption.absorb(absorbed, inspection.inspect(folded)) == left(folded)
    assert left(absorbed) == []
    assert distance(run(model, x), run(absorbed, x)) <= 1e-12
    assert distance(run(folded.get_submodule("stem"), x), run(absorbed.get_submodule("stem"), x)) > 1e-3


def test_a_shift_with_a_sign_stays() -> None:
    model, x = v2(positive=False)
    folded = export_folding.fold_for_export(model, SIZE)
    before = left(folded)
    gone = shift_absorption.absorb(folded, inspection.inspect(folded))
    signed = [path for path in before if folded.get_submodule(path).__class__ is ChannelBias]
    assert left(folded) == signed
    assert [path for path in before if path not in gone] == signed
    assert signed
    assert distance(run(model, x), run(folded, x)) <= 1e-12


def _stream(m: Any, x: Tensor) -> Tensor:
    """A pre-activation block whose stream is read by `m.other` as well."""
    h = m.stem(x)
    total: Tensor = h + m.conv(m.bias(h))
    return total.mean((2, 3)) + m.other(h).mean((2, 3))


@pytest.mark.parametrize(
    ("other", "absorbed"),
    [
        (nn.Conv2d(4, 4, 1), True),
        (nn.Conv2d(4, 4, 3, groups=2), True),
        (nn.Conv2d(4, 4, 1, bias=False), True),
        (nn.Conv2d(4, 4, 3, padding=1), False),  # the shift is not there in its zeros
        (nn.Conv2d(4, 4, 3, padding="same"), False),
        (nn.ReLU(), False),
        (nn.Sequential(nn.Dropout(), nn.Conv2d(4, 4, 1)), True),
    ],
    ids=lambda value: str(value),
)
def test_other_readers_of_the_stream_take_the_shift_off(other: nn.Module, absorbed: bool) -> None:
    torch.manual_seed(0)
    parts = {"stem": nn.Conv2d(3, 4, 3), "conv": nn.Conv2d(4, 4, 3, padding=1), "other": other}
    parts["bias"] = ChannelBias(torch.randn(4), None, nn.ReLU(inplace=True))
    model: nn.Module = Net(_stream, **parts).double().eval()
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    expected = run(model, x)
    assert shift_absorption.absorb(model, inspection.inspect(model)) == (["bias"] if absorbed else [])
    assert distance(expected, run(model, x)) <= 1e-13


def test_an_inplace_activation_does_not_overwrite_the_stream() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), ChannelBias(torch.ones(4), None, nn.ReLU(inplace=True)))
    shift_absorption.absorb(model, inspection.inspect(model))
    vacant: Any = model[1]
    assert isinstance(vacant, Vacant)
    assert vacant.act.inplace is False


def streamlined(folded: nn.Module, model: nn.Module, x: Tensor) -> nn.Module:
    anatomy = functools.partial(inspection.inspect, folded)
    return export_folding.streamlined(folded, anatomy, model, Example((x,)), torch.float32)


def test_a_huge_shift_stays_where_precision_would_be_lost() -> None:
    model, x = v2(positive=True)
    model.stages[1].blocks[1].norm1.weight.data[0] = 1e-6  # type: ignore[union-attr, index]
    model.float()
    x = x.float()
    folded = export_folding.fold_for_export(model, SIZE)
    assert streamlined(folded, model, x) is folded
    model.stages[1].blocks[1].norm1.weight.data[0] = 1.0  # type: ignore[union-attr, index]
    folded = export_folding.fold_for_export(model, SIZE)
    assert streamlined(folded, model, x) is not folded


# --- mean and std -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("softmax", [False, True])
def test_pixels_are_normalized_in_the_file(softmax: bool) -> None:
    """Before a convolution that pads, whose zeros are those of normalized images."""
    mean, std = (torch.tensor(values).double().view(3, 1, 1) for values in ((0.5, 0.4, 0.3), (0.2, 0.25, 0.3)))
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Flatten()).double().eval()
    pixels = torch.rand(2, 3, 12, 12, dtype=torch.float64)
    shipped = Shipped(network, normalization=(mean, std), softmax=softmax)
    expected = run(network, (pixels - mean) / std)
    for one in (shipped, shipped.around(network)):
        assert distance(expected.softmax(-1) if softmax else expected, run(one, pixels)) <= 1e-13


# --- bfloat16 ---------------------------------------------------------------------------------------------------------


def test_diffused_weights_are_bfloat16_and_keep_each_filters_sum() -> None:
    weight = torch.randn(16, 8, 3, 3, generator=torch.Generator().manual_seed(0))
    found = rounding.diffused(weight, torch.bfloat16)
    assert torch.equal(found.to(torch.bfloat16).double(), found)
    lost = (found - weight).flatten(1)
    plain = (weight.to(torch.bfloat16).double() - weight).flatten(1)
    assert lost.abs().max() <= 2**-7 * weight.abs().max()
    assert lost.sum(1).abs().max() <= 2**-8 * weight.abs().max()  # what the last weight lost
    assert plain.sum(1).abs().max() > 4 * lost.sum(1).abs().max()


V1: dict[str, Any] = {"channels": [8, 16, 32, 64], "stem_type": "deep", "stem_width": 4, "num_classes": 10}
MAIN_PATH: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "v1": (
        lambda: timm.create_model("resnet18", **V1),
        {"conv1.0", "conv1.3", "conv1.6", "fc", *(f"layer{i}.0.downsample.0" for i in (2, 3, 4))},
    ),
    "v2": (
        lambda: timm.create_model("resnetv2_18", **V2),
        {"stem.conv", "head.fc", *(f"stages.{i}.blocks.0.downsample.conv" for i in (1, 2, 3))},
    ),
    "no blocks": (lambda: nn.Sequential(*(nn.Conv2d(3, 3, 1) for _ in range(4))), {"0", "3"}),
}


@pytest.mark.parametrize("name", MAIN_PATH)
def test_the_main_path_keeps_its_weights(name: str) -> None:
    make, expected = MAIN_PATH[name]
    model = make()
    anatomy = functools.partial(inspection.inspect, model)
    assert rounding.main_path(model, anatomy) == expected
    before = {path: value.clone() for path, value in model.state_dict().items()}
    rounding.to_bfloat16_(model, anatomy)
    after = model.state_dict()
    changed = {path for path, value in before.items() if not torch.equal(value, after[path])}
    linear = [path for path, module in model.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert changed == {f"{path}.weight" for path in linear if path not in expected}
    assert all(rounding.is_bfloat16(after[path]) for path in changed)


def test_the_main_path_of_what_cannot_be_traced() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.three(m.two(m.one(x))) if x.sum() > 0 else m.three(m.one(x))

    parts = {name: nn.Conv2d(3, 3, 1) for name in ("one", "two", "three")}
    model = Net(forward, **parts)
    assert rounding.main_path(model, functools.partial(inspection.inspect, model)) == {"one", "three"}


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("softmax", [False, True])
def test_another_network_gets_what_goes_before_and_after(*, normalized: bool, softmax: bool) -> None:
    """As every network in half precision, and every int8 one, is put in the place of the folded one."""
    network, x = nn.Sequential(nn.Conv2d(3, 4, 2), nn.Flatten()), torch.rand(2, 3, 2, 2)
    mean, std = torch.full((3, 1, 1), 0.4), torch.full((3, 1, 1), 0.3)
    shipped = Shipped(nn.Identity(), normalization=(mean, std) if normalized else None, softmax=softmax)
    with torch.no_grad():
        wanted = network((x - mean) / std if normalized else x)
        assert torch.equal(shipped.around(network)(x), wanted.softmax(-1) if softmax else wanted)
