"""Norms behind reshapes, average pools and concatenations.

They fold where their channels are surely the layer's outputs.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import batchnorms, distance, lived_in, run, step
from support.tiny_modules import C, conv, net
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import normswap
from normswap.plan import AbsorbMode, Absorption, Step
from normswap.surgery import applying, unfolding
from normswap.surgery.network import Network

Body = Callable[[Any, Tensor], Any]


def tokens(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


def bn1(channels: int = C) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm1d(channels)


def bn2(channels: int = C) -> Callable[[], nn.Module]:
    return lambda: nn.BatchNorm2d(channels)


def linear() -> nn.Module:
    return nn.Linear(C, C, bias=False)


class Half(nn.Module):
    """A parametrization of a weight that no library has."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def halved() -> nn.Module:
    layer = conv()
    parametrize.register_parametrization(layer, "weight", Half())
    return layer


FOLDS: dict[str, tuple[Body, dict[str, Any], str]] = {
    "LeViT's": (
        lambda m, x: m.bn(m.fc(tokens(x)).flatten(0, 1)).reshape(x.shape[0], -1, C) * 1.0,
        {"fc": linear, "bn": bn1()},
        "fc",
    ),
    "LeViT's, its shape asked for": (
        lambda m, x: m.bn((y := m.fc(tokens(x))).flatten(0, 1)).reshape_as(y),
        {"fc": linear, "bn": bn1()},
        "fc",
    ),
    "channels first": (
        lambda m, x: m.bn(m.fc(tokens(x)).transpose(1, 2)),
        {"fc": linear, "bn": bn1()},
        "fc",
    ),
    "a linear layer on maps": (
        lambda m, x: m.bn(m.fc(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
        {"fc": linear, "bn": bn2()},
        "fc",
    ),
    "weight norm": (
        lambda m, x: m.bn(m.conv(x)),
        {"conv": lambda: parametrizations.weight_norm(conv()), "bn": bn2()},
        "conv",
    ),
    "an average pool": (
        lambda m, x: m.bn(m.pool(m.conv(x))),
        {"conv": conv, "pool": lambda: nn.AvgPool2d(2), "bn": bn2()},
        "conv",
    ),
    "the average": (lambda m, x: m.bn(m.conv(x).mean((2, 3))), {"conv": conv, "bn": bn1()}, "conv"),
    "flattened maps": (
        lambda m, x: m.bn(m.conv(x).flatten(2)),
        {"conv": conv, "bn": bn1()},
        "conv",
    ),
    "two convolutions joined": (
        lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 1)),
        {"a": conv, "b": lambda: conv(1, 3), "bn": bn2(C + 3)},
        "a, b",
    ),
    "joined in a dimension that is named": (
        lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], dim=1)),
        {"a": conv, "b": lambda: conv(1, 3), "bn": bn2(C + 3)},
        "a, b",
    ),
    "three, by keyword": (
        lambda m, x: m.bn(torch.cat(tensors=(m.a(x), m.b(x[:, :2]), m.c(x)), dim=1)),
        {
            "a": conv,
            "b": lambda: nn.Conv2d(2, 2, 1, groups=2),
            "c": lambda: conv(5, 3),
            "bn": bn2(C + 5),
        },
        "a, b, c",
    ),
}
STAYS: dict[str, tuple[Body, dict[str, Any], str]] = {
    "a weight that a function of the user computes": (
        lambda m, x: m.bn(m.conv(x)),
        {"conv": halved, "bn": bn2()},
        "parametrized weight",
    ),
    "tokens are its channels": (
        lambda m, x: m.bn(m.fc(tokens(x[:, :, :2, :2]))),
        {"fc": linear, "bn": bn1()},
        "may not be its channels",
    ),
    "rows are its channels": (
        lambda m, x: m.bn(m.fc(x.permute(0, 2, 3, 1)[:, :4])),
        {"fc": linear, "bn": bn2(4)},
        "may not be its channels",
    ),
    "a pool that pads": (
        lambda m, x: m.bn(m.pool(m.conv(x))),
        {"conv": conv, "pool": lambda: nn.AvgPool2d(3, 2, 1), "bn": bn2()},
        "may not be its channels",
    ),
    "zeros are padded": (
        lambda m, x: m.bn(F.pad(m.conv(x), (1, 1))),
        {"conv": conv, "bn": bn2()},
        "zeros are padded",
    ),
    "a maximum": (
        lambda m, x: m.bn(m.pool(m.conv(x))),
        {"conv": conv, "pool": lambda: nn.MaxPool2d(2), "bn": bn2()},
        "pool",
    ),
    "channels are shuffled": (
        lambda m, x: m.bn(m.conv(x).unflatten(1, (2, 2)).transpose(1, 2).flatten(1, 2)),
        {"conv": conv, "bn": bn2()},
        "may not be its channels",
    ),
    "joined with the input": (
        lambda m, x: m.bn(torch.cat([m.a(x), x], 1)),
        {"a": conv, "bn": bn2(2 * C)},
        "not of convolutions",
    ),
    "joined with itself": (
        lambda m, x: m.bn(torch.cat([y := m.a(x), y], 1)),
        {"a": conv, "bn": bn2(2 * C)},
        "follows cat",
    ),
    "called for both parts": (
        lambda m, x: m.bn(torch.cat([m.a(x), m.a(2 * x)], 1)),
        {"a": conv, "bn": bn2(2 * C)},
        "several parts",
    ),
    "joined below each other": (
        lambda m, x: m.bn(torch.cat([m.a(x), m.b(x)], 2)),
        {"a": conv, "b": conv, "bn": bn2()},
        "follows cat",
    ),
    "a part is read elsewhere": (
        lambda m, x: m.bn(torch.cat([y := m.a(x), m.b(x)], 1))[:, :C] + y,
        {"a": conv, "b": conv, "bn": bn2(2 * C)},
        "another consumer",
    ),
    "the whole is read elsewhere": (
        lambda m, x: m.bn(y := torch.cat([m.a(x), m.b(x)], 1)) + y,
        {"a": conv, "b": conv, "bn": bn2(2 * C)},
        "another consumer",
    ),
}


def made(body: Body, parts: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(3, C, 6, 6, dtype=torch.float64)
    model: Any = net(body, **parts)().double().eval()
    model.pretrained_cfg = {"input_size": (C, 6, 6)}
    return lived_in(model, x), x


@pytest.mark.parametrize("name", FOLDS)
def test_folds(name: str) -> None:
    body, parts, into = FOLDS[name]
    model, x = made(body, parts)
    planned, builder = step(model, "folded")
    assert list(builder.outcomes) == ["bn"]
    assert str(builder.outcomes["bn"]) == f"folds into {into}"
    result = applying.apply_step(model, planned)
    assert batchnorms(result) == []
    assert distance(run(model, x), run(result, x)) < 1e-13


@pytest.mark.parametrize("name", STAYS)
def test_stays(name: str) -> None:
    body, parts, why = STAYS[name]
    model, x = made(body, parts)
    planned, builder = step(model, "folded")
    outcome = str(builder.outcomes["bn"])
    assert re.search(f"^keeps scale and shift: .*{why}", outcome), outcome
    assert distance(run(model, x), run(applying.apply_step(model, planned), x)) < 1e-13


def test_one_part_taken_for_the_other_is_noticed() -> None:
    model, x = made(*FOLDS["two convolutions joined"][:2])
    planned, _ = step(model, "folded")
    edits = {edit.path: edit for edit in planned.edits}
    shifted_range = Absorption(AbsorbMode.AFTER, (C - 1, C + 2))
    edits["b"] = replace(edits["b"], takes=(shifted_range,))

    wrong = applying.apply_step(model, Step("", {}, tuple(edits.values())))

    assert distance(run(model, x), run(wrong, x)) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "args", "size"),
    [
        pytest.param("mixnet_s", {}, 64, marks=pytest.mark.slow),
        ("levit_128s", {"img_size": 128, "embed_dim": (32, 64, 96), "depth": (1, 2, 1)}, 128),
    ],
    ids=["mixnet_s", "levit_128s"],
)
def test_there_and_back(arch: str, args: dict[str, Any], size: int, tmp_path: Path) -> None:
    """Saved, loaded, trained a little, unfolded: the same function again, with BatchNorms."""
    torch.manual_seed(0)
    seen = torch.randn(8, 3, size, size, dtype=torch.float64)
    model = lived_in(timm.create_model(arch, num_classes=4, **args), seen)
    x = seen[:2]
    done = normswap.convert(model, "folded", inputs=x)
    normswap.save(done, tmp_path / "folded")
    again = normswap.load(tmp_path / "folded")

    assert torch.equal(run(again, x), run(done.model, x))

    with torch.no_grad():
        for module in again.modules():
            if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
                module.bias += 0.01

    back = unfolding.unfold(Network(again, x)).module
    assert batchnorms(back) == batchnorms(model)
    assert distance(run(done.model, x), run(back, x)) > 1e-3
    assert distance(run(again, x), run(back, x)) < 1e-10
