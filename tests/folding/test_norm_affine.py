"""`--to folded` on LayerNorm networks: gamma and beta go into linear layers, or stay."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.lived_in_networks import distance, run, step
from support.small_transformers import inhabit, small
from timm.layers import (
    LayerNorm,
    LayerNorm2d,
    LayerNormAct2d,
    LayerNormFp32,
    LayerScale,
    RmsNorm,
    RmsNorm2d,
)
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.graph.inspection import inspect
from normswap.layers.placeholders import Vacant
from normswap.plan import AbsorbMode, Absorption, Step
from normswap.sites import position_norms
from normswap.surgery import applying
from normswap.surgery.conversion import plan_step

TOLERANCE = 1e-12
# A norm, the dimension along which it normalizes, and the function that it computes.
NORMS: dict[str, tuple[Callable[[], nn.Module], int, Callable[..., Tensor]]] = {
    "torch's": (lambda: nn.LayerNorm(6), -1, F.layer_norm),
    "timm's": (lambda: LayerNorm(6), -1, F.layer_norm),
    "timm's of maps": (lambda: LayerNorm2d(6), 1, F.layer_norm),
    "torch's RMSNorm": (lambda: nn.RMSNorm(6, eps=1e-5), -1, F.rms_norm),
    "timm's RMSNorm": (lambda: RmsNorm(6, eps=1e-5), -1, F.rms_norm),
    "timm's RMSNorm of maps": (lambda: RmsNorm2d(6, eps=1e-5), 1, F.rms_norm),
}
# Norms that keep gamma and beta, from timm's source: the last norm of a vision transformer, whose
# output is what `forward_features` returns (CLIP's and distilled ones too); Swin's and CLIP's norm
# before the first block, which the residual stream reads; ConvNeXt's stem norm likewise, and the
# norm of its head. Without a final norm (`global_pool` "avg") it is `fc_norm`. Swin v2 ends its
# branches in norms, which the stream reads: all but the patch mergings', whose output is the next
# stage's stream too. Queries and keys are read by the attention.
STAY = {
    "vit": ["norm"],
    "vit without qkv bias": ["norm"],
    "vit with registers, averaged": ["fc_norm"],
    "vit, parallel": ["norm"],
    "deit": ["norm"],
    "deit, distilled": ["norm"],
    "deit3, LayerScale": ["norm"],
    "vit, norm of queries and keys": [
        "blocks.0.attn.q_norm",
        "blocks.0.attn.k_norm",
        "blocks.1.attn.q_norm",
        "blocks.1.attn.k_norm",
        "norm",
    ],
    "swin": ["patch_embed.norm", "norm"],
    "clip": ["norm_pre", "norm"],
    "convnext": ["stem.1", "head.norm"],
    "convnext, convolutions": ["stem.1", "head.norm"],
}


def with_affine(model: nn.Module) -> list[str]:
    """The paths of the LayerNorms that have a gamma or beta."""
    return [
        path
        for path, module in model.named_modules()
        if isinstance(module, nn.LayerNorm) and next(module.parameters(), None) is not None
    ]


def folded(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    planned, builder = step(model, "folded")
    assert builder.refusals == {}
    return applying.apply_step(model, planned), builder.outcomes


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", STAY)
def test_exact(name: str) -> None:
    model, x = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result: Any = folded(model)[0]

    assert with_affine(result) == STAY[name]

    # Nothing else changed its class; LayerScales are gone (test_layer_scale.py).
    for old, new in zip(model.modules(), result.modules(), strict=True):
        assert type(new) is (Vacant if isinstance(old, LayerScale) else type(old))
    assert distance(run(model, x), run(model, x.flip(0))) > 0.01
    assert distance(run(model, x), run(result, x)) <= TOLERANCE

    with torch.no_grad():
        net: Any = model
        assert distance(net.forward_features(x), result.forward_features(x)) <= TOLERANCE
        _, expected = net.forward_intermediates(x)
        _, found = result.forward_intermediates(x)
        for reference, value in zip(expected, found, strict=True):
            assert distance(reference, value) <= TOLERANCE

    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(RefusedError, match="nothing to convert"):
        plan_step(inspect(result), "folded")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("harm", ["gamma", "beta"])
@pytest.mark.parametrize("name", ["vit", "swin", "convnext"])
def test_every_gamma_and_beta_counts(name: str, harm: str) -> None:
    """The checker of this file notices one channel of one norm that is off by a percent."""
    model, x = small(name)
    planned, _ = step(model, "folded")
    norms = [edit.path for edit in planned.edits if edit.layer == "BareNorm"]
    assert norms
    for path in norms:
        twin = applying.apply_step(model, Step("", {}, ()))
        norm: Any = twin.get_submodule(path)
        with torch.no_grad():
            (norm.weight if harm == "gamma" else norm.bias)[1] *= 1.01
        assert distance(run(model, x), run(applying.apply_step(twin, planned), x)) > 1e-9


def test_convert_and_restore() -> None:
    model, _ = small("convnext")
    done = normswap.convert(model.float(), "folded", input_size=(3, 64, 64))
    assert done.report.passed
    outcome = str(done.outcomes["stages.0.blocks.0.norm"])
    assert outcome == "its scale and shift move to stages.0.blocks.0.mlp.fc1"
    back = normswap.convert(done.model, "unfold", input_size=(3, 64, 64))
    assert with_affine(back.model) == with_affine(model)


class Net(nn.Module):
    """Patches, then whatever `body` does."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.patch = nn.Conv2d(3, 6, 4, 4)
        self.one = nn.LayerNorm(6)
        self.two = nn.LayerNorm(6)
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6, bias=False)
        self.head = nn.Linear(6, 3)
        self.map = LayerNorm2d(6)
        self.valid = nn.Conv2d(6, 6, 2)
        self.same = nn.Conv2d(6, 6, 3, padding=1)
        self.depthwise = nn.Conv2d(6, 6, 2, groups=6)
        self.tokens = nn.Linear(4, 4)
        self.act = LayerNormAct2d(6)
        self.single = LayerNormFp32(6)
        self.plane = nn.LayerNorm([4, 6])
        self.few = nn.Conv2d(2, 3, 1)
        self.row = nn.Conv1d(6, 3, 1)
        self.pretrained_cfg = {"input_size": (3, 8, 8)}

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, self.patch(x))


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).transpose(1, 2)


MOVES: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "a linear layer": (lambda m, x: m.head(m.inner(m.one(tokens_of(x))).relu().mean(1)), ["inner"]),
    "without a bias": (lambda m, x: m.head(m.outer(m.one(tokens_of(x))).relu().mean(1)), ["outer"]),
    "two of them": (
        lambda m, x: m.head((m.inner(y := m.one(tokens_of(x))) * m.outer(y)).mean(1)),
        ["inner", "outer"],
    ),
    "rolled, cut, reshaped, averaged": (
        lambda m, x: m.head(
            m.inner(m.one(tokens_of(x)).roll(1, 1)[:, 1:].view(-1, 3, 1, 6).mean(1)).relu()[:, 0]
        ),
        ["inner"],
    ),
    "one norm twice": (
        lambda m, x: m.head(
            (m.inner(m.one(tokens_of(x))) + m.outer(m.one(2 * tokens_of(x)))).mean(1)
        ),
        ["inner", "outer"],
    ),
    "a convolution": (lambda m, x: m.head(m.valid(m.map(x)).relu().mean((2, 3))), ["valid"]),
    "a depthwise convolution": (
        lambda m, x: m.head(m.depthwise(m.map(x)).relu().mean((2, 3))),
        ["depthwise"],
    ),
    "a linear layer on a map": (
        lambda m, x: m.head(m.inner(m.map(x).permute(0, 2, 3, 1)).relu().mean((1, 2))),
        ["inner"],
    ),
}
STAYS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "an activation": (
        lambda m, x: m.head(m.inner(m.one(tokens_of(x)).relu()).mean(1)),
        "relu reads it",
    ),
    "a sum": (
        lambda m, x: m.head((m.inner(y := m.one(tokens_of(x))).relu() + y).mean(1)),
        "reads it, not a linear layer",
    ),
    "padding": (lambda m, x: m.head(m.same(m.map(x)).relu().mean((2, 3))), "same pads its input"),
    "padding before a linear layer": (
        lambda m, x: m.head(m.inner(F.pad(m.one(tokens_of(x)), (0, 0, 1, 0))).relu().mean(1)),
        "padded before inner",
    ),
    "padding at some sizes": (
        lambda m, x: m.head(
            m.inner(F.pad(y := m.one(tokens_of(x)), (0, 0, 0, y.shape[1] % 4))).relu().mean(1)
        ),
        "padded",
    ),
    "something else is joined on": (
        lambda m, x: m.head(m.inner(torch.cat([m.one(y := tokens_of(x)), y], 1)).relu().mean(1)),
        "cat reads it",
    ),
    "called elsewhere": (
        lambda m, x: m.head((m.inner(m.one(y := tokens_of(x))) * m.inner(y)).mean(1)),
        "inner is called elsewhere too",
    ),
    "two norms, one layer": (
        lambda m, x: m.head((m.inner(m.one(y := tokens_of(x))) * m.inner(m.two(y))).mean(1)),
        "inner is called elsewhere",
    ),
    "over the tokens": (
        lambda m, x: m.head(m.tokens(m.one(tokens_of(x)).transpose(1, 2)).relu().mean(2)),
        "the inputs of tokens are not",
    ),
    "tokens as channels": (
        lambda m, x: m.head(m.row(m.one(tokens_of(x))[:, :1].expand(-1, 6, -1)).mean(1)),
        "the inputs of row are not its",
    ),
    "samples as channels": (
        lambda m, x: m.head(
            m.few(m.one(tokens_of(x)).transpose(1, 2)[:1].expand(2, -1, -1)).mean(2)
        ),
        "of few are not its",
    ),
    "the classifier": (
        lambda m, x: m.head(m.one(tokens_of(x)).mean(1)),
        "the features that head reads would change",
    ),
    "it is returned": (
        lambda m, x: (m.head(m.inner(y := m.one(tokens_of(x))).relu().mean(1)), y),
        "the model returns it",
    ),
    "its weight is read": (
        lambda m, x: m.head(m.inner(m.one(tokens_of(x))).relu().mean(1)) * m.one.weight.sum(),
        r"one.weight is read",
    ),
    "an activation of its own": (
        lambda m, x: m.head(m.valid(m.act(x)).mean((2, 3))),
        "forward of its own",
    ),
    "float32": (
        lambda m, x: m.head(m.inner(m.single(tokens_of(x))).relu().mean(1)),
        "computes in float32",
    ),
    "tokens and channels": (
        lambda m, x: m.head(m.inner(m.plane(tokens_of(x))).relu().mean(1)),
        "normalizes more than the channels",
    ),
}


def net(body: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return inhabit(Net(body).double().eval()), torch.randn(2, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", MOVES)
def test_moves_to(name: str) -> None:
    body, readers = MOVES[name]
    model, x = net(body)
    result, outcomes = folded(model)
    assert list(map(str, outcomes.values())) == [
        f"its scale and shift move to {', '.join(readers)}"
    ]
    assert distance(run(model, x), run(result, x)) <= TOLERANCE


@pytest.mark.parametrize("name", STAYS)
def test_stays_because(name: str) -> None:
    body, why = STAYS[name]
    model, _ = net(body)
    planned, builder = step(model, "folded")
    assert planned.edits == ()
    assert builder.refusals == {}
    for outcome in map(str, builder.outcomes.values()):
        assert outcome.startswith("stays with its scale and shift: ")
        assert why in outcome
    assert builder.outcomes


def test_hooks_are_not_lost() -> None:
    model, _ = net(MOVES["a linear layer"][0])
    model.get_submodule("one").register_forward_hook(lambda *args: None)
    assert "forward hooks" in str(step(model, "folded")[1].outcomes["one"])


def test_a_wrong_take_is_noticed() -> None:
    """Shift without scale is not the same."""
    model, x = net(MOVES["a linear layer"][0])
    planned, _ = step(model, "folded")
    edits = list(planned.edits)
    for position, edit in enumerate(edits):
        if edit.reads:
            edits[position] = replace(edit, takes=(Absorption(AbsorbMode.BEFORE_SHIFT),))

    wrong = applying.apply_step(model, Step("", {}, tuple(edits)))

    assert distance(run(model, x), run(wrong, x)) > 1e-3


class Sideways(nn.LayerNorm):
    """Normalizes the second dimension by a forward of its own, as torchvision's ConvNeXt does."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Louder(nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("kind", "dim"), [(Sideways, 1), (Louder, None)])
def test_a_forward_that_nobody_has_read_is_measured(
    kind: type[nn.LayerNorm], dim: int | None
) -> None:
    assert position_norms.channel_dim(kind(6)) == dim
    # It is measured on few positions: a square of 4,096 would take 400 GB.
    assert position_norms.channel_dim(kind(4096)) == dim


def test_a_measured_norm_folds() -> None:
    torch.manual_seed(0)
    head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    model = (
        nn.Sequential(nn.Conv2d(3, 6, 3), Sideways(6), nn.Conv2d(6, 4, 2, 2), *head).double().eval()
    )
    for parameter in model[1].parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 10, 12, dtype=torch.float64)
    result, outcomes = folded(model)

    assert list(map(str, outcomes.values())) == ["its scale and shift move to 2"]
    assert list(result[1].parameters()) == []
    assert distance(run(model, x), run(result, x)) < 1e-13


@pytest.mark.parametrize("name", NORMS)
def test_the_dimension_is_that_along_which_it_normalizes(name: str) -> None:
    make, dim, function = NORMS[name]
    norm = make().double()
    x = torch.randn(2, 6, 6, 6, dtype=torch.float64)
    assert position_norms.channel_dim(norm) == dim
    expected = function(x.movedim(dim, -1), (6,), eps=norm.eps).movedim(-1, dim)
    assert distance(expected, norm(x).detach()) < 1e-12


@pytest.mark.parametrize("scheme", ["folded", "rmsnorm"])
def test_a_norm_that_is_left_out_keeps_its_scale_and_shift(scheme: str) -> None:
    model, x = small("vit")
    skipped = "blocks.0.norm1"
    before = model.get_submodule(skipped).state_dict()

    done = normswap.convert(model, scheme, inputs=x, skip=[skipped])

    after = done.model.get_submodule(skipped)
    assert type(after) is type(model.get_submodule(skipped))
    assert all(torch.equal(after.state_dict()[name], before[name]) for name in before)
    taken = "blocks.0.norm2"
    assert repr(done.model.get_submodule(taken)) != repr(model.get_submodule(taken))


class AfterAnother(nn.Module):
    """Two LayerNorms. An activation reads the first one, and a linear layer the second one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.LayerNorm(6)
        self.second = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.linear(self.second(self.first(x).sigmoid()))
        scores: Tensor = self.head(rows.relu())
        return scores


def test_a_norm_that_keeps_its_scale_and_shift_keeps_no_other_from_moving_its_own() -> None:
    model = inhabit(AfterAnother().double().eval())
    x = torch.randn(4, 6, dtype=torch.float64)

    done = normswap.convert(model, "folded", inputs=x)

    moved = {path: not list(done.model.get_submodule(path).parameters()) for path in done.outcomes}
    assert moved == {"first": False, "second": True}
    assert distance(run(model, x), run(done.model, x)) < TOLERANCE
