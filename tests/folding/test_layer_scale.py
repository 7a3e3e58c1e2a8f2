"""LayerScale folds into the linear layer before it, or stays, with the reason."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run, step
from support.small_transformers import inhabit
from timm.layers import LayerScale, LayerScale2d
from torch import Tensor, nn

import normswap
from normswap.graph.recorder import Widening
from normswap.sites import position_norms
from normswap.surgery import applying

TOLERANCE = 1e-12
# timm's name, its arguments, the side of the images, and how many LayerScales stay.
SMALL: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "vit": ("vit_tiny_patch16_224", {"init_values": 0.1, "img_size": 32, "depth": 2}, 32, 0),
    "dinov2": ("vit_small_patch14_dinov2", {"img_size": 28, "depth": 2}, 28, 0),
    "efficientformer v2": (
        "efficientformerv2_s0",
        {"embed_dims": (8, 12, 24, 44), "depths": (1, 1, 3, 3), "img_size": 64},
        64,
        0,
    ),
    # All blocks but the last mix their tokens by pooling: no linear layer comes before their first
    # LayerScale.
    "efficientformer": (
        "efficientformer_l1",
        {"embed_dims": (12, 24, 56, 112)},
        224,
        3 + 2 + 6 + 3,
    ),
}


def scaled(model: nn.Module) -> list[str]:
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, LayerScale | LayerScale2d)
    ]


def randomize(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, LayerScale | LayerScale2d):
            with torch.no_grad():
                module.gamma.copy_(torch.rand(module.gamma.shape, generator=generator) - 0.3)
                module.gamma[0] = 0
    return model


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", SMALL)
def test_exact(name: str) -> None:
    arch, args, side, stay = SMALL[name]
    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    model = lived_in(randomize(timm.create_model(arch, **args)), x)
    planned, builder = step(model, "folded")
    assert builder.refusals == {}
    result = applying.apply_step(model, planned)
    assert len(scaled(model)) > len(scaled(result)) == stay
    assert distance(run(model, x), run(result, x)) <= TOLERANCE


def test_one_beside_the_chosen_layers_stays() -> None:
    """The linear layer before it is chosen, and the LayerScale is not."""
    arch, args, side, _ = SMALL["vit"]
    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    model = lived_in(randomize(timm.create_model(arch, **args)), x)

    chosen = ["blocks.0.norm1", "blocks.0.attn"]
    result = normswap.convert(model, "folded", only=chosen, inputs=x).model

    assert len(scaled(model)) == 4
    assert scaled(result) == scaled(model)
    assert distance(run(model, x), run(result, x)) <= TOLERANCE


def test_unfold_gives_the_architecture_back() -> None:
    arch, args, side, _ = SMALL["vit"]
    torch.manual_seed(0)
    x = torch.randn(2, 3, side, side, dtype=torch.float64)
    model = randomize(timm.create_model(arch, **args)).double().eval()
    size = x.shape[1:]
    result = normswap.convert(model, "folded", input_size=size).model
    back = normswap.convert(result, "unfold", input_size=size).model

    assert scaled(back) == scaled(model)
    assert back.state_dict().keys() == model.state_dict().keys()
    assert distance(run(model, x), run(back, x)) <= TOLERANCE


class Branch(nn.Module):
    """x + gamma f(x), with something in the way."""

    def __init__(self, obstacle: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.scale = LayerScale(4, 0.5, obstacle == "in place")
        self.obstacle = obstacle

    def forward(self, x: Tensor) -> Tensor:
        f = self.linear(self.norm(x))
        if self.obstacle == "twice":
            return x + self.scale(self.scale(f))
        if self.obstacle == "read elsewhere":
            return x + self.scale(f) + f
        if self.obstacle == "activation":
            return x + self.scale(f.relu())
        if self.obstacle == "gamma read":
            return x + self.scale(f) * self.scale.gamma
        if self.obstacle == "linear twice":
            return x + self.scale(self.linear(f))

        return x + self.scale(f)


@pytest.mark.parametrize(
    ("obstacle", "why"),
    [
        ("", None),
        ("in place", None),
        ("twice", "is read elsewhere too"),
        ("read elsewhere", "is read elsewhere too"),
        ("activation", "not a linear layer"),
        ("gamma read", "is read elsewhere in forward"),
        ("linear twice", "is read elsewhere too"),
    ],
)
def test_what_is_in_the_way(obstacle: str, why: str | None) -> None:
    torch.manual_seed(0)
    model = randomize(Branch(obstacle)).double().eval()
    planned, builder = step(model, "folded")
    result = applying.apply_step(model, planned)
    x = torch.randn(3, 5, 4, dtype=torch.float64)
    assert distance(run(model, x), run(result, x)) <= TOLERANCE
    assert bool(scaled(result)) == (why is not None)
    if why is not None:
        (note,) = (note for note in builder.notes if note.startswith("scale stays"))
        assert why in note


@pytest.mark.parametrize("change", ["hooked", "patched"])
def test_one_that_may_compute_something_else_stays(change: str) -> None:
    model = Branch("").double().eval()
    if change == "hooked":
        model.scale.register_forward_hook(lambda *given: None)
    else:
        model.scale.__dict__["forward"] = lambda x: 2 * x
    planned, _ = step(model, "folded")
    assert not any(edit.path == "scale" for edit in planned.edits)


class Own(nn.Module):
    """One number per channel, and some way to use it."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor], channels: int = 6) -> None:
        super().__init__()
        # Equal numbers, as they are at first.
        self.lambda1 = nn.Parameter(0.1 * torch.ones(channels))
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(x, self.lambda1)


@pytest.mark.parametrize(
    ("module", "dim"),
    [
        (LayerScale(6), -1),
        (LayerScale2d(6), 1),
        (Own(lambda x, g: x * g), -1),
        (Own(lambda x, g: x * g.view(1, -1, 1, 1)), 1),
        (Own(lambda x, g: x.mul_(g)), -1),
        (Own(lambda x, g: x * g.mean()), None),
        (Own(lambda x, g: x * g + g), None),
        (Own(lambda x, g: x * g.abs()), None),
        (Own(lambda x, g: x * g, channels=1), None),
        (nn.PReLU(6), None),
        (nn.RMSNorm(6), None),
        (nn.LayerNorm(6, bias=False), None),
    ],
)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_is_one(module: nn.Module, dim: int | None, gradients: bool) -> None:
    with torch.set_grad_enabled(gradients):
        assert position_norms.scaled_dim(copy.deepcopy(module)) == dim


def test_dinov2_of_transformers_at_its_own_size_and_at_another() -> None:
    """It has LayerScales of its own, and stretches its position embeddings to the images' size."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, image_size=28, patch_size=7
    )

    model = inhabit(transformers.Dinov2ForImageClassification(config).double().eval())
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("lambda1"):
                value.uniform_(-0.3, 0.7)

    images = [torch.randn(2, 3, *size, dtype=torch.float64) for size in ((28, 28), (42, 56))]
    results = {
        to: normswap.convert(model, to, inputs={"pixel_values": images[0]}).model
        for to in ("folded", "rmsnorm")
    }

    with Widening(), torch.no_grad():
        # At the other size the embeddings are stretched in float32.
        for x, allowed in zip(images, (TOLERANCE, 1e-9), strict=True):
            expected = model(pixel_values=x).logits
            for result in results.values():
                assert distance(expected, result(pixel_values=x).logits) <= allowed
                names = [name for name, _ in result.named_parameters()]
                assert not [name for name in names if name.endswith("lambda1")]

    # The output of the last norm are the network's features.
    norms = [norm for norm in results["folded"].modules() if isinstance(norm, nn.LayerNorm)]
    assert len([norm for norm in norms if norm.elementwise_affine]) == 1
    assert not any(isinstance(module, nn.LayerNorm) for module in results["rmsnorm"].modules())
