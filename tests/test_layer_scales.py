"""LayerScale folds into the linear layer before it, or stays, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from lived import distance, lived_in, run, step
from timm.layers import LayerScale, LayerScale2d
from torch import Tensor, nn

import normswap
from normswap.surgery import applying

TOLERANCE = 1e-12
SMALL: dict[str, tuple[str, dict[str, Any], int, int]] = {  # name, arguments, size, LayerScales that stay
    "vit": ("vit_tiny_patch16_224", {"init_values": 0.1, "img_size": 32, "depth": 2}, 32, 0),
    "dinov2": ("vit_small_patch14_dinov2", {"img_size": 28, "depth": 2}, 28, 0),
    "efficientformer v2": ("efficientformerv2_s0", {}, 224, 0),
    # all blocks but the last mix their tokens by pooling: no linear layer is before the first LayerScale of those
    "efficientformer": ("efficientformer_l1", {}, 224, 3 + 2 + 6 + 3),
}


def scaled(model: nn.Module) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, LayerScale | LayerScale2d)]


def randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, LayerScale | LayerScale2d):
            with torch.no_grad():
                module.gamma.copy_(torch.rand(module.gamma.shape, generator=generator) - 0.3)
                module.gamma[0] = 0
    return model


@pytest.mark.parametrize("name", SMALL)
def test_exact(name: str) -> None:
    arch, args, side, stay = SMALL[name]
    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    model = lived_in(randomize(timm.create_model(arch, **args)), x)
    planned, sketch = step(model, "folded")
    assert sketch.refusals == {}
    result = applying.apply_step(model, planned)
    assert len(scaled(model)) > len(scaled(result)) == stay
    assert distance(run(model, x), run(result, x)) <= TOLERANCE


def test_unfold_gives_the_architecture_back() -> None:
    arch, args, side, _ = SMALL["vit"]
    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    model = randomize(timm.create_model(arch, **args)).double().eval()
    back = normswap.convert(normswap.convert(model, "folded", size=x.shape[1:]).model, "unfold", size=x.shape[1:]).model
    assert scaled(back) == scaled(model)
    assert back.state_dict().keys() == model.state_dict().keys()
    assert distance(run(model, x), run(back, x)) <= TOLERANCE


class Branch(nn.Module):
    """x + gamma f(x), with something in the way."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.norm, self.linear, self.scale = nn.LayerNorm(4), nn.Linear(4, 4), LayerScale(4, 0.5, what == "in place")
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        f = self.linear(self.norm(x))
        if self.what == "twice":
            return x + self.scale(self.scale(f))
        if self.what == "read elsewhere":
            return x + self.scale(f) + f
        if self.what == "activation":
            return x + self.scale(f.relu())
        if self.what == "gamma read":
            return x + self.scale(f) * self.scale.gamma
        if self.what == "linear twice":
            return x + self.scale(self.linear(f))
        return x + self.scale(f)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("", None), ("in place", None), ("twice", "called more than once"), ("read elsewhere", "is read elsewhere too"),
        ("activation", "not a linear layer"), ("gamma read", "is read elsewhere in forward"),
        ("linear twice", "is read elsewhere too"),
    ],
)  # fmt: skip
def test_what_is_in_the_way(what: str, why: str | None) -> None:
    torch.manual_seed(0)
    model = randomize(Branch(what)).double().eval()
    planned, sketch = step(model, "folded")
    result = applying.apply_step(model, planned)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert distance(run(model, x), run(result, x)) <= TOLERANCE
    assert bool(scaled(result)) == (why is not None)
    assert why is None or any(note.startswith("scale stays") and why in note for note in sketch.notes)


def hooked(module: Any) -> None:
    module.register_forward_hook(lambda *given: None)


def patched(module: Any) -> None:
    module.forward = lambda x: 2 * x


@pytest.mark.parametrize("spoil", [hooked, patched])
def test_one_that_may_compute_something_else_stays(spoil: Callable[[Any], None]) -> None:
    model = Branch("").double().eval()
    spoil(model.scale)
    planned, _ = step(model, "folded")
    assert not any(edit.path == "scale" for edit in planned.edits)


def test_a_part() -> None:
    arch, args, _, _ = SMALL["vit"]
    model = timm.create_model(arch, **args).double().eval()
    result = normswap.convert(model, "folded", size=(3, 32, 32), only=["blocks.0"]).model
    assert scaled(result) == ["blocks.1.ls1", "blocks.1.ls2"]
