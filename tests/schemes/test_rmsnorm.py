"""`--to rmsnorm`: LayerNorm networks whose streams are centred, exactly; and the ones where that
cannot be.
"""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, run, step
from support.sampled_tables import crossed, quick
from support.small_transformers import inhabit, skeleton, small
from timm.layers import RmsNorm
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError, VerificationError
from normswap.graph.inspection import inspect
from normswap.layers import channel_norm
from normswap.plan import Plan, Step
from normswap.surgery import applying, unfolding
from normswap.surgery.conversion import plan_step
from normswap.surgery.network import Network

EXACT = (
    "vit",
    "vit without qkv bias",
    "vit with registers, averaged",
    "vit, parallel",
    "deit",
    "deit, distilled",
    "deit3, LayerScale",
    "cait, scales in forward",
    "beit, scales in forward, averaged",
)
TOLERANCE = 1e-12


def kinds(model: nn.Module, kind: type) -> list[str]:
    return [path for path, module in model.named_modules() if isinstance(module, kind)]


def converted(model: nn.Module) -> nn.Module:
    planned, builder = step(model, "rmsnorm")
    assert builder.refusals == {}
    return applying.apply_step(model, planned)


def features(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model.forward_features(x)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.one_in(2)
def test_exact(name: str) -> None:
    model, x = small(name)
    _, builder = step(model, "rmsnorm")
    outcomes = [builder.outcomes[path] for path in kinds(model, nn.LayerNorm)]

    assert all(outcome.counted == "became RMSNorm" and outcome.reason for outcome in outcomes)
    assert bool(builder.notes) is ("averaged" in name)

    result: Any = converted(model)
    assert type(result) is type(model)
    assert kinds(result, nn.LayerNorm) == []
    assert kinds(result, nn.RMSNorm) == kinds(model, nn.LayerNorm)
    assert {parameter.dtype for parameter in result.parameters()} == {torch.float64}
    assert distance(run(model, x), run(model, x.flip(0))) > 0.01
    assert distance(run(model, x), run(result, x)) <= TOLERANCE

    expected = features(model, x)
    if "averaged" in name:  # these features are the stream itself, and a norm follows the average
        expected = expected - expected.mean(-1, keepdim=True)

    assert distance(expected, features(result, x)) <= TOLERANCE

    result.reset_classifier(3)
    assert run(result, x).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        *((name, "rmsnorm") for name in EXACT),
        *((name, "folded") for name in ("vit", "swin", "convnext")),
    ],
)
@pytest.mark.one_in(2)
def test_laws(name: str, scheme: str) -> None:
    """Edits have no order, a plan replays on a fresh skeleton, gradients reach all parameters."""
    model, x = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    planned, _ = step(model, scheme)
    result = applying.apply_step(model, planned)
    backwards = applying.apply_step(model, Step(scheme, {}, planned.edits[::-1]))

    assert torch.equal(run(result, x), run(backwards, x))

    fresh = applying.apply(skeleton(name), Plan.from_json(Plan().then(planned).to_json()).steps)
    assert distance(run(result, x), run(fresh, x)) > 1e-3

    fresh.load_state_dict(result.state_dict(), strict=True)
    assert torch.equal(run(result, x), run(fresh, x))

    result.train()
    result(x).square().sum().backward()
    assert [
        path
        for path, p in result.named_parameters()
        if p.grad is None or not float(p.grad.abs().max()) > 0
    ] == []
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.one_in(3)
@crossed("name, scheme", EXACT, ["rmsnorm", "folded"])
def test_there_and_back(name: str, scheme: str) -> None:
    """The source's class, tensors by the same names, and what was learned; or, where a bias has no
    place, a refusal.
    """
    model, x = small(name)
    done = normswap.convert(model, scheme, inputs=x).model
    with torch.no_grad():
        for parameter in done.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, dtype=torch.float64)

    if "without" in name:
        with pytest.raises(RefusedError, match=r"cannot unfold .*bias"):
            normswap.convert(done, "unfold", inputs=x)
        return

    if (
        scheme == "rmsnorm"
    ):  # training has brought a mean back into the stream, which a LayerNorm would take off
        with pytest.raises(
            VerificationError, match="cannot unfold: the source computes something else"
        ):
            normswap.convert(done, "unfold", inputs=x)
        done = normswap.convert(model, scheme, inputs=x).model

    assert distance(run(done, x), run(unfolding.unfold(Network(done)).module, x)) < 1e-11


REFUSED = {
    "swin": (
        "layers.0.blocks.0.norm1",
        "layers.1.downsample.norm reads it too, and needs its mean",
    ),
    "swin v2": ("norm", "layers.1.blocks.1.norm2 writes to it, whose output has a mean"),
    "clip": ("blocks.0.norm1", "norm_pre writes to it, whose output has a mean"),
    "convnext": ("stages.0.blocks.0.norm", "conv_dw writes to it, whose groups"),
    "vit, norm of queries and keys": (
        "blocks.0.attn.q_norm",
        "where the channels are is not known",
    ),
}
LARGER = {
    "mixer_s32_224": ("blocks.0.norm1", "in blocks.0 adds to it what is no linear layer's output"),
    "pit_ti_224": (
        "transformers.0.blocks.0.norm1",
        "transformers.1.pool.conv reads it too, and needs its mean",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick([*REFUSED, *LARGER], REFUSED))
def test_refused_with_path_and_reason(name: str) -> None:
    path, why = REFUSED.get(name) or LARGER[name]
    model = skeleton(name) if name in REFUSED else timm.create_model(name)
    _, builder = step(model, "rmsnorm")

    assert why in builder.refusals[path]

    anatomy = inspect(model)
    with pytest.raises(RefusedError, match="cannot convert to rmsnorm") as error:
        plan_step(anatomy, "rmsnorm")
    assert ("skip=" in error.value.remedy) is bool(builder.outcomes)

    if builder.outcomes:
        skip = ast.literal_eval(error.value.remedy.partition("skip=")[2].partition("`")[0])
        planned, rest = plan_step(anatomy, "rmsnorm", skip=skip)
        assert rest.outcomes == builder.outcomes
        if name in REFUSED:
            model, x = small(name)
            assert distance(run(model, x), run(applying.apply_step(model, planned), x)) <= TOLERANCE


def test_no_skip_is_named_that_leaves_nothing_to_do() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False))
    with pytest.raises(RefusedError, match="1: it has no running statistics") as error:
        plan_step(inspect(model, torch.randn(2, 3, 8, 8)), "folded")
    assert error.value.remedy == ""


class Rectified(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        rows: Tensor = self.linear(x.relu())
        return rows


class Activated(nn.Module):
    """A block whose inner part calls a function."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Rectified()

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.inner(x)
        return inner


class Net(nn.Module):
    """Patches, then a residual stream of two branches; `body` may do more with it."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.patch = nn.Conv2d(3, 6, 4, 4)
        self.inner = nn.Linear(6, 6)
        self.outer = nn.Linear(6, 6)
        self.one = nn.LayerNorm(6)
        self.two = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.plane = nn.LayerNorm([4, 6])
        self.grouped = nn.Conv2d(3, 6, 4, 4, groups=3)
        self.halves = nn.Conv2d(6, 6, 1, groups=2)
        self.block = Activated()
        self.place = nn.Parameter(torch.randn(1, 1, 6))
        self.places = nn.Parameter(torch.randn(1, 4, 6))
        self.gamma = nn.Parameter(torch.randn(6))
        self.shared = nn.Parameter(torch.randn(6))
        self.norm = nn.BatchNorm2d(6)
        self.holder = nn.ParameterList([self.shared])
        self.scale = timm.layers.LayerScale(6)
        self.register_buffer("fixed", torch.randn(1, 1, 6))
        self.pretrained_cfg = {"input_size": (3, 8, 8)}

    def tokens(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def plain(m: Any, x: Tensor) -> Tensor:
    x = m.tokens(x) + m.place
    return end(m, x + m.outer(m.inner(m.one(x)).relu()))


def twice(m: Any, x: Tensor) -> Tensor:
    x = m.tokens(x) + m.outer(m.fixed)
    return m.head((m.two(x) + m.outer(m.two(x))).mean(1))


def end(m: Any, y: Tensor) -> Tensor:
    return m.head(m.two(y).mean(1))


def off_squares(m: Any, x: Tensor, joins: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    y = m.tokens(x)
    return end(m, y if x.shape[-1] == x.shape[-2] else joins(y, torch.ones(6)))


FINE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "plain": plain,
    "a constant factor": lambda m, x: end(m, 0.5 * (m.tokens(x) + 2 * m.place)),
    "rolled, padded, cut, averaged": lambda m, x: m.head(
        m.two(torch.nn.functional.pad(m.tokens(x).roll(1, 1), (0, 0, 1, 2))[:, :4].mean(1))
    ),
    "a parameter scales maps": lambda m, x: end(
        m, (m.patch(x) * m.gamma.reshape(-1, 1, 1)).flatten(2).transpose(1, 2)
    ),
    "a parameter scales rearranged values": lambda m, x: end(m, m.tokens(x) * m.place),
    "a vector is added": lambda m, x: end(m, m.tokens(x) + m.gamma),
    "one norm called twice": lambda m, x: end(m, y := m.tokens(x)) + end(m, y[:, :2]),
}
OPEN: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "a linear layer reads it": (lambda m, x: end(m, y := m.tokens(x)) + m.head(y.mean(1)), "head"),
    "it is returned": (lambda m, x: (end(m, y := m.tokens(x)), y), "returns it"),
    "an activation reads it": (
        lambda m, x: m.head((m.two(y := m.tokens(x)) + y.relu()).mean(1)),
        "relu",
    ),
    "a writer writes elsewhere": (twice, "outer writes to it, and elsewhere too"),
    "an embedding is used elsewhere": (
        lambda m, x: end(m, m.tokens(x) + m.place) * m.place.sigmoid().sum(),
        "sigmoid",
    ),
    "a constant is added": (lambda m, x: end(m, m.tokens(x) + m.fixed), "fixed.*no parameter"),
    "a constant is added off squares": (partial(off_squares, joins=torch.add), "no parameter"),
    "a constant scales it off squares": (partial(off_squares, joins=torch.mul), "no parameter"),
    "a number is added": (lambda m, x: end(m, m.tokens(x) + 1), "add"),
    "a scale is read elsewhere": (
        lambda m, x: end(m, m.gamma * m.tokens(x)) * m.gamma.sum(),
        "gamma.*elsewhere",
    ),
    "two scaled writers": (
        lambda m, x: end(m, (y := m.gamma * m.tokens(x)) + m.gamma * m.outer(y)),
        "elsewhere",
    ),
    "a scaled value is read": (
        lambda m, x: end(m, m.gamma * (y := m.tokens(x))) + m.head(y.mean(1)),
        "makes its",
    ),
    "a scale for each token": (
        lambda m, x: end(m, m.tokens(x) * m.places),
        "places.*one number per channel",
    ),
    "a scale of two modules": (lambda m, x: end(m, m.shared * m.tokens(x)), "shared.*elsewhere"),
    "a called layer's bias scales": (
        lambda m, x: end(m, m.inner.bias * m.outer(m.inner(m.tokens(x)))),
        "inner.bias",
    ),
    "a called layer's bias is added": (
        lambda m, x: end(m, m.inner.bias + m.outer(m.inner(m.tokens(x)))),
        "inner.bias",
    ),
    "a scale of tokens": (
        lambda m, x: end(m, m.gamma[:, None] * torch.cat([y := m.tokens(x), y[:, :2]], 1)),
        "r mul",
    ),
    "a BatchNorm writes": (
        lambda m, x: end(m, m.norm(m.patch(x)).flatten(2).transpose(1, 2)),
        "norm writes to it",
    ),
    "a sum is scaled": (
        lambda m, x: end(m, m.gamma * (m.tokens(x) + m.place)),
        "add makes its input",
    ),
    "a product is read": (
        lambda m, x: (
            end(m, m.gamma * m.inner(y := m.tokens(x)))
            + m.head((m.gamma * m.inner(y)).relu()).mean(1)
        ),
        "inner writes to it, and elsewhere too",
    ),
    "a LayerScale writes elsewhere": (
        lambda m, x: (
            end(m, m.scale(m.inner(y := m.tokens(x)))) + m.head(m.scale(m.inner(y)).relu()).mean(1)
        ),
        "inner writes to it, and elsewhere too",
    ),
    "a square is added": (
        lambda m, x: end(m, (y := m.tokens(x)) + (z := m.inner(y)) * z),
        "is not known after mul",
    ),
    "grouped filters": (
        lambda m, x: end(m, m.grouped(x).flatten(2).transpose(1, 2)),
        "grouped.*groups of filters",
    ),
    "two groups of filters": (
        lambda m, x: end(m, m.halves(m.patch(x)).flatten(2).transpose(1, 2)),
        "halves.*groups of filters",
    ),
    "a function of a block reads it": (
        lambda m, x: m.head((m.two(y := m.tokens(x)) + m.block(y)).mean(1)),
        "relu in block.inner reads it",
    ),
    "tokens and channels together": (
        lambda m, x: m.head(m.plane(m.tokens(x)).mean(1)),
        "more than the channels",
    ),
    "a part of the channels": (
        lambda m, x: m.head(torch.cat([m.two(y := m.tokens(x)), y[..., :3]], 2)[:, 0, :6]),
        "needs its mean",
    ),
}


def placed(m: Any, x: Tensor, *, added: bool) -> Tensor:
    """The embedding is added to the stream, or only read."""
    return end(m, m.tokens(x) + m.place) if added else end(m, m.tokens(x)) * m.place.sigmoid().sum()


for square in (True, False):
    OPEN[f"an embedding is used elsewhere {'off' if square else 'in'} squares"] = (
        lambda m, x, square=square: placed(m, x, added=(x.shape[-1] == x.shape[-2]) is square),
        "place writes to it, and is read elsewhere too",
    )


def turned(m: Any, x: Tensor) -> Tensor:
    """As many tokens as channels, so that both may be added to their transpose."""
    y = m.inner(torch.cat([x := m.tokens(x), x[:, :2]], 1))
    return end(m, y + y.mT)


OPEN["channels in another place are added"] = (
    turned,
    "where the channels are is not known|adds to it",
)


def net(body: Callable[[Any, Tensor], Tensor]) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return inhabit(Net(body).double().eval()), torch.randn(2, 3, 8, 8, dtype=torch.float64)


@pytest.mark.parametrize("name", FINE)
def test_streams_that_can_be_centred(name: str) -> None:
    model, x = net(FINE[name])
    result = converted(model)
    assert distance(run(model, x), run(result, x)) <= TOLERANCE


def test_only_the_last_norm_reads_features_that_users_take() -> None:
    """A norm in a block reads a value that was rearranged, too, and nobody takes that."""

    def body(m: Any, x: Tensor) -> Tensor:
        y = m.tokens(x)
        y = y + m.outer(m.inner(m.one(y)).relu())
        return m.head(m.two(y.mean(1)))

    model, _ = net(body)

    planned, builder = step(model, "rmsnorm")

    assert {"one", "two"} <= {edit.path for edit in planned.edits}
    (note,) = builder.notes
    assert re.match(r"two reads the features after mean: .* lose their mean", note)


@pytest.mark.parametrize("name", OPEN)
def test_streams_whose_mean_has_to_stay(name: str) -> None:
    body, why = OPEN[name]
    model, _ = net(body)
    _, builder = step(model, "rmsnorm")
    (refusal,) = builder.refusals.values()
    assert re.search(why, refusal), refusal


@pytest.mark.parametrize(
    "missing",
    ["patch_embed.proj", "blocks.0.attn.proj", "blocks.1.mlp.fc2", "pos_embed", "cls_token"],
)
def test_every_writer_counts(missing: str) -> None:
    """The checker of this file notices one that is not centred."""
    model, x = small("vit")
    planned, _ = step(model, "rmsnorm")
    args = {
        edit.path: {k: v for k, v in edit.args.items() if k != "centred"} for edit in planned.edits
    }
    edits = [
        replace(edit, args=args[missing]) if edit.path == missing else edit
        for edit in planned.edits
    ]
    edits = [edit for edit in edits if edit.path != missing or edit.layer != "Centred"]

    assert edits != list(planned.edits)

    harmed = applying.apply_step(model, Step("rmsnorm", {}, tuple(edits)))
    assert distance(run(model, x), run(harmed, x)) > 1e-6


@pytest.mark.parametrize("shift", [False, True])
def test_rmsnorm_is_timms(shift: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 4, 6, dtype=torch.float64)
    x -= x.mean(-1, keepdim=True)
    norm = nn.LayerNorm(6, eps=1e-3).double()
    inhabit(norm)
    with torch.no_grad():
        new: Any = channel_norm.RMSNorm.replacing(norm, like=x, shift=shift)
    theirs = RmsNorm(6, eps=1e-3).double()
    theirs.weight.data.copy_(norm.weight)

    with torch.no_grad():
        expected = theirs(x) + (norm.bias if shift else 0)
        assert distance(expected, new(x)) < 1e-14
        assert distance(norm(x), new(x) + (0 if shift else norm.bias)) < 1e-14


def test_maps_too() -> None:
    """LayerNorm over dimension 1 of (N, C, H, W)."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Conv2d(3, 6, 3), timm.layers.LayerNorm2d(6), nn.Conv2d(6, 6, 3), nn.GELU()
    )
    model.pretrained_cfg = {"input_size": (3, 9, 9)}
    inhabit(model.double().eval())
    x = torch.randn(2, 3, 9, 9, dtype=torch.float64)
    result = converted(model)
    assert distance(run(model, x), run(result, x)) <= TOLERANCE
    assert kinds(result, nn.RMSNorm) == ["1"]


class Labels(nn.Module):
    """A classifier that returns the best class alone."""

    def __init__(self, classifier: nn.Module) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        labels: Tensor = self.classifier(x).argmax(1)
        return labels


def test_a_network_of_labels_is_not_judged_by_streams_whose_mean_is_gone() -> None:
    """Labels show no small error, so values at blocks do. Those of the stream have changed."""
    model, x = small("vit")

    report = normswap.convert(Labels(model), "rmsnorm", inputs=x).report

    assert report.passed
