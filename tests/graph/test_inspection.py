"""What `inspect` sees in small networks, and that it changes nothing."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.tiny_modules import ONE, Net, Untraceable, bn, conv, net
from torch import Tensor, nn

from normswap.errors import TraceError
from normswap.graph.inspection import inspect
from normswap.graph.tracing import inputs


@pytest.mark.parametrize("arch", ["seresnet18", "resnetv2_18"])
def test_drop_path_is_seen_in_any_mode(arch: str) -> None:
    model = timm.create_model(arch, drop_path_rate=0.2)
    for training in (True, False):
        seen = inspect(model.train(training))
        assert [block.drop_path for block in seen.blocks] == [
            None,
            *(f"{block.path}.drop_path" for block in seen.blocks[1:]),
        ]
        assert [block.tail for block in seen.blocks[1:]] == [
            f"{block.path}.drop_path" for block in seen.blocks[1:]
        ]


def down(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 2)


def up(x: Tensor) -> Tensor:
    return F.interpolate(x, scale_factor=2.0)


# A forward, the modules that it calls, and (path, skip, tail) of each block.
SHAPES: dict[str, tuple[Any, dict[str, Any], list[tuple[str, str, str | None]]]] = {
    "in the root": (lambda m, x: F.relu(m.bn(m.conv(x)) + x), ONE, [("", "identity", "bn")]),
    "two in one module": (
        lambda m, x: m.bn2(m.conv2(y := F.relu(m.bn(m.conv(x)) + x))) + y,
        {**ONE, "conv2": conv, "bn2": bn},
        [("", "identity", "bn"), ("+2", "identity", "bn2")],
    ),
    "pooled skip": (
        lambda m, x: m.bn(m.conv(x)) + F.max_pool2d(x, 3, 1, 1),
        ONE,
        [("", "other", "bn")],
    ),
    "projected skip": (
        lambda m, x: m.bn2(m.conv2(F.relu(m.bn(m.conv(x))))) + m.down(x),
        {**ONE, "conv2": conv, "bn2": bn, "down": conv},
        [("", "projection", "bn2")],
    ),
    "branch ends in a function": (
        lambda m, x: 2 * m.bn(m.conv(x)) + x,
        ONE,
        [("", "identity", None)],
    ),
    "branch used elsewhere": (
        lambda m, x: (y := m.bn(m.conv(x))) + x + F.silu(y),
        ONE,
        [("", "identity", None)],
    ),
    "parallel branches": (
        lambda m, x: m.bn(m.conv(x)) + m.bn2(m.conv2(x)),
        {**ONE, "conv2": conv, "bn2": bn},
        [],
    ),
    "a pyramid's level": (
        lambda m, x: m.conv2(x) + up(m.bn(m.conv(down(x)))),
        {**ONE, "conv2": conv},
        [],
    ),
    "a level, then scaled": (
        lambda m, x: m.conv2(x) + 2 * up(m.bn(m.conv(m.conv(down(x))))),
        {**ONE, "conv2": conv},
        [],
    ),
    "two levels": (
        lambda m, x: m.conv2(x) + up(m.conv2(y := down(x)) + up(m.bn(m.conv(m.conv(down(y)))))),
        {**ONE, "conv2": conv},
        [],
    ),
    "enlarged, beside an identity": (
        lambda m, x: x + up(m.bn(m.conv(down(x)))),
        ONE,
        [("", "identity", None)],
    ),
    "made smaller": (
        lambda m, x: m.conv2(down(x)) + down(m.bn(m.conv(m.conv(x)))),
        {**ONE, "conv2": conv},
        [("", "projection", None)],
    ),
    "a gate of what was enlarged": (
        lambda m, x: m.conv2(y := up(m.conv2(down(x)))) + y * m.bn(m.conv(m.conv(y))).sigmoid(),
        {**ONE, "conv2": conv},
        [("", "projection", None)],
    ),
    "a gate of one part in four": (
        lambda m, x: m.conv2(x) + (y := x.chunk(4, 1))[0] * m.bn(m.conv(m.conv(torch.cat(y, 1)))),
        {**ONE, "conv2": conv},
        [("", "projection", None)],
    ),
    "enlarged before its convolution": (
        lambda m, x: x + m.bn(m.conv(up(down(x)))),
        ONE,
        [("", "identity", "bn")],
    ),
    "a number per channel, spread out": (
        lambda m, x: x + m.bn(m.conv(x.mean((2, 3), keepdim=True))),
        ONE,
        [("", "identity", "bn")],
    ),
    "bias": (lambda m, x: m.bn(m.conv(x)) + 1, ONE, []),
    "no sum": (lambda m, x: m.bn(m.conv(x)), ONE, []),
    "called in a loop": (
        lambda m, x: [x := x + m.bn(m.conv(x)) for _ in range(2)][-1],
        ONE,
        [("", "identity", None)] * 2,
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_of_blocks(name: str) -> None:
    body, parts, expected = SHAPES[name]
    found = inspect(net(body, **parts)()).blocks
    if name == "called in a loop":
        assert [(block.skip, block.tail) for block in found] == [
            (skip, tail) for _, skip, tail in expected
        ]
    else:
        assert [(block.path, block.skip, block.tail) for block in found] == expected


# The node that carries the signal to the last operation: its only input, or x of a gate x g(x).
CARRIERS: dict[str, tuple[Any, str | None]] = {
    "one input": (lambda m, x: F.relu(m.conv(x)), "conv"),
    "a gate": (lambda m, x: (y := m.conv(x)) * m.conv2(y).sigmoid(), "conv"),
    "a gate, the other way round": (lambda m, x: m.conv2(y := m.conv(x)).sigmoid() * y, "conv"),
    "a product of two": (lambda m, x: m.conv(x) * m.conv2(x), None),
    "a sum": (lambda m, x: (y := m.conv(x)) + m.conv2(y), None),
    "joined": (lambda m, x: torch.cat([y := m.conv(x), m.conv2(y)], 1), None),
}


@pytest.mark.parametrize("name", CARRIERS)
def test_what_carries_the_signal(name: str) -> None:
    body, carrier = CARRIERS[name]
    traced = inspect(net(body, conv=conv, conv2=conv)()).traced
    (last,) = inputs(traced.nodes[-1])
    found = traced.main_input(last)
    assert getattr(found, "target", None) == carrier


def test_a_branch_that_ends_in_a_sum_has_no_last_norm() -> None:
    body = lambda m, x: x + ((y := m.bn(m.conv(x))) + m.conv2(y))  # noqa: E731
    blocks = inspect(net(body, **ONE, conv2=conv)()).blocks
    assert [(block.path, block.norms, block.last) for block in blocks] == [
        ("", (), None),
        ("+2", ("bn",), None),
    ]


def nested(path: str) -> nn.Module:
    """A network whose one residual block has this path."""
    model = net(lambda m, x: x + m.bn(m.conv(x)), **ONE)()
    for name in reversed(path.split(".") if path else []):
        model = Net(lambda m, x, name=name: getattr(m, name)(x), **{name: model})
    return model


@pytest.mark.parametrize(
    ("path", "stage"),
    [
        ("layer1.0", "layer1"),
        ("s1.b1", "s1"),
        ("stages.0.blocks.1", "stages.0"),
        ("trunk.blocks.2", "trunk"),
        ("blocks.3", "blocks"),
        ("trunk", "trunk"),
        ("b1", "b1"),
        ("layer1.beta", "layer1.beta"),
        ("a.blocks", "a.blocks"),
        ("", ""),
    ],
)
def test_stages_by_the_paths_of_blocks(path: str, stage: str) -> None:
    (block,) = inspect(nested(path)).blocks
    assert (block.path, block.stage) == (path, stage)


def test_a_shared_norm_counts_once_and_an_unused_one_last() -> None:
    model = net(lambda m, x: m.bn(m.conv(m.bn(m.conv(x)))), unused=bn, **ONE)()
    assert [norm.path for norm in inspect(model).norms] == ["bn", "unused"]


@pytest.mark.parametrize("folder", ["normswap", "torch", "elsewhere"])
def test_models_that_do_not_run_say_where(folder: str, tmp_path: Path) -> None:
    """The line is the model's own, wherever its file lies.

    A clone of this repository is called normswap, too.
    """
    file = tmp_path / folder / "mine.py"
    file.parent.mkdir()
    file.write_text(
        "import torch\nclass Mine(torch.nn.Conv2d):\n    def forward(self, x):\n        return"
        " x.view(7, 7)\n",
        encoding="utf-8",
    )
    mine: dict[str, Any] = {}
    exec(compile(file.read_text(encoding="utf-8"), file, "exec"), mine)

    with pytest.raises(
        TraceError, match=r"Sequential does not run on an input of size 1x\d+x.*, at 1: "
    ) as caught:
        inspect(nn.Sequential(conv(), mine["Mine"](4, 4, 1)))

    assert f"{file}:4, `return x.view(7, 7)`" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_parts_that_look_at_values_are_followed_and_said() -> None:
    model = net(lambda m, x: m.inner(m.bn(m.conv(x))) + x, inner=Untraceable, **ONE)()
    model.spare = nn.BatchNorm2d(4)
    seen = inspect(model)
    assert seen.refusals == ()
    assert any("inner looks at values" in remark for remark in seen.traced.remarks)
    assert "never called: spare" in seen.traced.remarks
    assert [norm.path for norm in seen.norms] == ["bn", "inner.norm", "spare"]
    assert [block.path for block in seen.blocks] == [""]


class Dirty(nn.Module):
    """Keeps what passes through it, as timm's levit does, and has optional arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.kept = torch.zeros(1)
        self.cache: dict[str, Any] = {}

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        self.kept = self.cache["x"] = self.conv(x)
        return self.kept if mask is None else self.kept * mask * scale


def state(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        digest.update(f"{name} {tensor.requires_grad} {id(tensor)}".encode())
        digest.update(tensor.detach().numpy().tobytes())

    for name, module in model.named_modules():
        own = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        hooks = [len(hook) for key, hook in vars(module).items() if key.endswith("_hooks")]
        digest.update(f"{name} {id(module)} {sorted(own.items(), key=str)} {hooks}".encode())

    return digest.hexdigest()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: timm.create_model("seresnet18", drop_rate=0.1), Dirty], ids=["timm", "dirty"]
)
def test_looking_changes_nothing(make: Any, training: bool) -> None:
    model = make().train(training)
    before = state(model)
    inspect(model)
    assert state(model) == before
    next(model.parameters()).data += 1
    assert state(model) != before, "the fingerprint is alive"


class Head(nn.Module):
    """Dropout by function, at a rate of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.drop_rate = 0.1
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.dropout(x.mean((2, 3)), self.drop_rate, self.training))


def test_the_rate_of_a_head_is_the_heads() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Sequential(Head()))
    assert inspect(model.eval()).dropout == "3.0.drop_rate"


class RateOfTimm(Head):
    """A network as timm writes it: at a rate of 0, forward leaves out the dropout."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop_rate = rate

    def forward(self, x: Tensor) -> Tensor:
        pooled = x.mean((2, 3))
        if self.drop_rate:
            pooled = F.dropout(pooled, self.drop_rate, self.training)
        return self.fc(pooled)


@pytest.mark.parametrize("rate", [0, 0.0, 0.3])
def test_a_rate_of_zero_is_the_place_of_the_dropout_too(rate: float) -> None:
    model = RateOfTimm(rate).eval()

    seen = inspect(model, torch.randn(2, 4, 8, 8))

    assert seen.dropout == "drop_rate"
    assert model.drop_rate == rate


@pytest.mark.parametrize(
    ("name", "options", "features"),
    [
        ("resnet10t", {"num_classes": 0}, True),  # pooled, after an activation of a sum
        ("resnetv2_18", {"num_classes": 0}, True),  # pooled, after a norm
        ("resnet10t", {}, False),
        ("deit_tiny_distilled_patch16_224", {"depth": 1}, False),  # the mean of two heads
        ("deit_tiny_distilled_patch16_224", {"depth": 1, "num_classes": 0}, True),
    ],
)
def test_features_are_told_from_scores(name: str, options: dict[str, int], features: bool) -> None:
    assert inspect(timm.create_model(name, **options).eval()).features is features


def test_several_maps_of_scores_behind_a_bound_are_no_features() -> None:
    heads = {name: nn.Sequential(nn.Conv2d(3, 2, 1), nn.Sigmoid()) for name in "ab"}
    maps = Net(lambda m, x: {"a": m.a(x), "b": m.b(x)}, **heads).eval()
    assert not inspect(maps, [torch.randn(1, 3, 32, 32)]).features
