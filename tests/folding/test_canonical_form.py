"""Graphs that fusers get silently wrong (pytorch/pytorch#104593, #197539), and graphs like them.

Each is folded exactly, or refused.
"""

import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.graph_cases import CASES, EXACT, REFUSED, Case, build, outputs
from support.lived_in_networks import batchnorms, distance, lived_in, run, step
from support.narrow_networks import NORM_FREE, STANDARDIZED, applied, norm_free, randomized
from support.sampled_tables import sampled
from support.tiny_modules import C, bn, conv, net
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.folding.overwriting import overwrites
from normswap.graph import inspection
from normswap.layers.channelwise import ChannelBias
from normswap.layers.scalars import Scale
from normswap.plan import Plan
from normswap.surgery import applying


def trained(model: nn.Module, alpha: float | None = None) -> None:
    """Move every parameter, so that no scalar is 1 and no bias 0; then set scalars to `alpha`."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 + 0.2 * torch.rand(
                parameter.shape, generator=generator, dtype=torch.float64
            )
        for module in model.modules():
            if alpha is not None and isinstance(module, Scale):
                module.alpha.fill_(alpha)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_fold_is_exact_or_refused(case: Case) -> None:
    model, x = build(case)
    reference = outputs(model, x)

    planned, builder = step(model, "folded")
    for path, pattern in case.expect.items():
        if pattern.startswith(REFUSED):
            assert re.search(pattern.removeprefix(REFUSED), builder.refusals.pop(path))
            assert path not in {edit.path for edit in planned.edits}
        else:
            assert re.search(pattern, str(builder.outcomes[path])), builder.outcomes[path]

    assert builder.refusals == {}

    result = applying.apply_step(model, planned)
    assert distance(reference, outputs(result, x)) <= EXACT
    assert torch.equal(outputs(model, x), reference), "the source was changed"

    left = {path for path, pattern in case.expect.items() if pattern.startswith((REFUSED, "never"))}
    assert set(batchnorms(result)) == left


@pytest.mark.one_in(3)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_skipinit_is_exact_or_refused(case: Case) -> None:
    model, x = build(case)
    reference = outputs(model, x)

    why = ""
    try:
        planned, builder = step(model, "skipinit")
    except RefusedError as error:
        planned = None
        builder = None
        why = str(error)

    if planned is None or builder is None:
        assert re.search("no residual blocks|would need two edits", why)
    elif not builder.refusals:
        result = applying.apply_step(model, planned)
        assert distance(reference, outputs(result, x)) <= EXACT
        for alpha in (None, 0.0, -0.7):
            trained(result, alpha)
            reference = outputs(result, x)
            planned, builder = step(result, "folded")
            assert builder.refusals == {}
            assert distance(reference, outputs(applying.apply_step(result, planned), x)) <= EXACT


@pytest.mark.parametrize("case", [case for case in CASES if case.fuser], ids=str)
def test_float32_too_where_torch_fuses_wrongly(case: Case) -> None:
    """The cases that `torch.fx.experimental.optimization.fuse` was seen to get wrong."""
    model, x = build(case)
    reference = outputs(model, x)
    model.float()
    planned, _ = step(model, "folded")
    result = applying.apply_step(model, planned)
    assert distance(reference, outputs(result, x.float()).double()) <= 1e-5


def test_an_aliased_conv_stays_one() -> None:
    case = next(case for case in CASES if case.name == "aliased conv, one call")
    model, _ = build(case)
    result: Any = applying.apply_step(model, step(model, "folded")[0])
    assert result.conv is result.alias


def test_the_checker_notices_a_wrong_fold() -> None:
    """A norm folded into a convolution that is called elsewhere too: what torch's fuser does."""
    from torch.nn.utils.fusion import fuse_conv_bn_eval

    model, x = build(next(case for case in CASES if case.name == "conv twice, norm on one"))
    wrong: Any = applying.apply_step(model, step(model, "folded")[0])
    source: Any = model
    wrong.conv = fuse_conv_bn_eval(source.conv, source.bn)
    wrong.bn = nn.Identity()
    assert distance(outputs(model, x), outputs(wrong, x)) > 1e-3


# What a forward does with the output of a convolution.
DONE: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "relu": lambda m, y: y.relu(),
    "relu_": lambda m, y: y.relu_(),
    "F.relu, in place": lambda m, y: F.relu(y, inplace=True),
    "F.relu, in place by position": lambda m, y: F.relu(y, True),
    "torch.relu_": lambda m, y: torch.relu_(y),
    "a module": lambda m, y: m.act(y),
    "a module, in place": lambda m, y: m.act_(y),
    "+": lambda m, y: y + 1,
    "+=": lambda m, y: operator.iadd(y, 1),
    "**=": lambda m, y: operator.ipow(y, 2),
    "add_": lambda m, y: y.add_(1),
    "clamp_": lambda m, y: y.clamp_(min=0),
    "flatten": lambda m, y: y.flatten(1),
    "mean": lambda m, y: y.mean(1, True),
    "interpolate": lambda m, y: F.interpolate(y, None, 2, "bilinear", True),
    "dropout": lambda m, y: F.dropout(y, 0.5, False),
}


@pytest.mark.parametrize("name", DONE)
def test_what_writes_into_its_input_is_told_from_what_does_not(name: str) -> None:
    """Torch counts how often a tensor was written to."""
    model = net(
        lambda m, x: DONE[name](m, m.conv(x)), conv=conv, act=nn.ReLU(), act_=nn.ReLU(inplace=True)
    )()
    y = torch.randn(2, C, 5, 5)
    before = y._version
    DONE[name](model, y)
    traced = inspection.inspect(model, torch.randn(2, C, 5, 5)).traced
    (node,) = traced.users[next(node for node in traced.nodes if str(node.target) == "conv")]
    assert overwrites(traced, node) is (y._version > before)


def gated(conv: nn.Module, gate: nn.Module, x: Tensor) -> Tensor:
    y = conv(x)
    return y * gate(y).sigmoid()


def behind_a_gate_read_elsewhere(m: Any, x: Tensor) -> Tensor:
    y = m.a(x)
    return m.scale(y * m.b(y).sigmoid()) + m.c(y.relu())


# A forward with a scalar, and whether the layers before it absorb it.
SCALARS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "behind a convolution": (lambda m, x: m.scale(m.a(x)) + m.b(x), True),
    "behind a convolution, twice": (lambda m, x: m.scale(m.a(x)) + m.scale(m.a(x.flip(-1))), True),
    "behind two convolutions": (lambda m, x: m.scale(m.a(x)) + m.scale(m.b(x)), True),
    "behind a gate": (lambda m, x: m.scale(gated(m.a, m.b, x)) + m.c(x), True),
    "behind a gate, which is read elsewhere": (behind_a_gate_read_elsewhere, True),
    "behind two gates": (
        lambda m, x: m.scale(gated(m.a, m.b, x)) + m.scale(gated(m.c, m.d, x)),
        False,
    ),
    "behind a sum": (lambda m, x: m.scale(m.a(x) + m.b(x)) + m.c(x), True),
    "behind a sum with a gate": (lambda m, x: m.scale(gated(m.a, m.b, x) + m.c(x)), True),
    "behind a sum, which is read elsewhere": (
        lambda m, x: m.scale(y := m.a(x) + m.b(x)) + m.c(y),
        True,
    ),
    "behind a sum, which is returned": (lambda m, x: m.scale(y := m.a(x) + m.b(x)) + y, False),
    "behind a sum with the input": (lambda m, x: m.scale(m.a(x) + x) + m.c(x), False),
    "behind a sum with the input, first": (lambda m, x: m.scale(x + m.a(x)) + m.c(x), False),
    "behind a sum with a sigmoid": (
        lambda m, x: m.scale(gated(m.a, m.b, x) + m.c(x).sigmoid()),
        False,
    ),
    "behind a square": (lambda m, x: m.scale((y := m.a(x)) * y) + m.c(x), False),
    "behind twice a convolution": (lambda m, x: m.scale(2 * m.a(x)) + m.c(x), True),
    "behind a sum whose square is read": (
        lambda m, x: m.scale(y := m.a(x) + m.b(x)) + m.c(y * y),
        False,
    ),
    "behind a sum of which twice is read": (
        lambda m, x: m.scale(y := m.a(x) + m.b(x)) + m.c(y * 2),
        True,
    ),
    "behind two sums": (lambda m, x: m.scale(m.a(x) + m.b(x)) + m.scale(m.c(x) + m.d(x)), False),
    "behind the input": (lambda m, x: m.a(m.scale(x)), False),
    "behind a sigmoid": (lambda m, x: m.b(m.scale(m.a(x).sigmoid())), False),
    "behind a ReLU": (lambda m, x: m.b(m.scale(m.a(x).relu())), True),
    "behind what is read through a ReLU": (
        lambda m, x: m.scale(y := m.a(x)) + m.b(y.relu()),
        True,
    ),
}
# Of these, whether the layers before the scalar absorb it if it is negative.
NEGATIVE_SCALARS = {
    "behind a convolution": True,
    "behind two convolutions": True,
    "behind twice a convolution": True,
    "behind a ReLU": False,
    "behind what is read through a ReLU": False,
}


def with_norm() -> nn.Module:
    """A convolution that takes in a norm, so that the plan knows it before a scalar moves."""
    return nn.Sequential(conv(bias=False), bn())


@pytest.mark.parametrize("alpha", [0.3, -0.7])
@pytest.mark.parametrize("layer", [conv, with_norm], ids=["plain", "with norms"])
@pytest.mark.parametrize("name", SCALARS)
def test_scalars_fold_where_they_can(
    name: str, layer: Callable[[], nn.Module], alpha: float
) -> None:
    body, gone = SCALARS[name]
    torch.manual_seed(0)
    model = net(body, a=layer, b=layer, c=layer, d=layer, scale=Scale(alpha))().double().eval()
    x = torch.randn(2, C, 9, 9, dtype=torch.float64)
    model = lived_in(model, x)
    seen = inspection.inspect(model, x)
    result = applying.apply_step(model, step(seen, "folded")[0])
    assert distance(outputs(model, x), outputs(result, x)) <= EXACT
    # A scalar that is called behind two norms stays, as each norm folds by itself.
    if alpha > 0 and layer is conv:
        assert any(isinstance(module, Scale) for module in result.modules()) is not gone


@pytest.mark.parametrize("name", NEGATIVE_SCALARS)
def test_a_negative_scalar_passes_linear_steps_alone(name: str) -> None:
    body, _ = SCALARS[name]
    torch.manual_seed(0)
    model = net(body, a=conv, b=conv, c=conv, scale=Scale(-0.7))().double().eval()
    x = torch.randn(2, C, 9, 9, dtype=torch.float64)

    result = applying.apply_step(model, step(inspection.inspect(model, x), "folded")[0])

    stays = any(isinstance(module, Scale) for module in result.modules())
    assert stays is not NEGATIVE_SCALARS[name]
    assert distance(outputs(model, x), outputs(result, x)) <= EXACT


architectures = pytest.mark.parametrize("arch", NORM_FREE)


@pytest.mark.one_in(3)
@architectures
def test_folded_exactly(arch: str) -> None:
    model, x = norm_free(arch)
    reference = run(model, x)
    assert distance(reference, reference.flip(0)) > 0.01

    planned, builder = step(model, "folded")
    assert builder.refusals == {}

    result: Any = applied(model, planned)
    assert distance(reference, run(result, x)) <= 1e-12
    assert not any(isinstance(module, STANDARDIZED) for module in result.modules())
    assert type(result) is type(model)

    for stage in result.stages:
        for block in stage:
            assert (block.alpha, block.beta, block.skipinit_gain) == (1.0, 1.0, None)
            assert block.attn_gain == 1.0 or (block.attn is None and block.attn_last is None)
            assert all(
                getattr(act, "gamma", 1.0) == 1.0 for act in (block.act1, block.act2, block.act3)
            )

    with torch.no_grad():
        assert distance(model.forward_features(x), result.forward_features(x)) <= 1e-12
    fresh = timm.create_model(arch, num_classes=10, **NORM_FREE[arch]).double().eval()
    fresh = applying.apply(fresh, Plan.from_json(Plan().then(planned).to_json()).steps)
    fresh.load_state_dict(result.state_dict(), strict=True)

    assert torch.equal(run(fresh, x), run(result, x))


@pytest.mark.slow
@pytest.mark.parametrize("arch", sampled(NORM_FREE, every=4))
def test_converted_to_other_schemes(arch: str) -> None:
    model, x = norm_free(arch)
    reference = run(model, x)

    folded = applied(model, step(model, "folded")[0])
    for start in (model, folded):
        for scheme, options in (("weightnorm", {}), ("spectralnorm", {})):
            planned, _ = step(start, scheme, **options)
            assert distance(reference, run(applying.apply_step(start, planned), x)) <= 1e-12

    rescalings = [("skipinit", {}), ("fixup", {}), ("residual-scale", {"rule": "szegedy"})]
    for scheme, options in rescalings:
        planned, builder = step(folded, scheme, **options)
        if not builder.refusals:
            assert distance(reference, run(applying.apply_step(folded, planned), x)) <= 1e-12


def test_learned_gains_of_any_sign() -> None:
    for gain in (-0.7, 0.0):
        for arch in ("nf_resnet26", "nfnet_l0"):
            model, x = norm_free(arch, skipinit=True)
            randomized(model, skipinit=gain)
            planned, builder = step(model, "folded")
            result: Any = applied(model, planned)
            assert distance(run(model, x), run(result, x)) <= 1e-12
            gone = result.stages[0][0].skipinit_gain is None
            # A gate passes no negative scalars.
            assert gone is (arch == "nf_resnet26" or gain == 0)
            assert gone or any("skipinit" in note or "factor" in note for note in builder.notes)


def test_gradients_train_and_weights_stay_put() -> None:
    model, x = norm_free("nf_resnet26")
    result = applied(model, step(model, "folded")[0]).train()
    result(x).square().sum().backward()
    assert all(
        parameter.grad is not None and bool(parameter.grad.any())
        for parameter in result.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_channel_of_a_small_scale_stays_alive(dtype: torch.dtype) -> None:
    """Scales of 1 to 2^-7 stay behind a pooling as a shift; none is taken for a constant."""
    torch.manual_seed(0)
    behind = nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)
    source = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.ReLU(), *behind
    ).eval()
    scales = 2.0 ** -torch.arange(8)
    with torch.no_grad():
        # The map before the norm is larger where the norm's scale is smaller.
        source[0].weight /= scales.view(-1, 1, 1, 1)
        source[2].running_var[:] = scales**-2
        source[2].bias[:] = 0.5
    source = source.to(dtype)
    images = torch.randn(2, 3, 12, 12).to(dtype)
    reference = source.double()(images.double())
    source = source.to(dtype)

    result = normswap.convert(source, "folded", inputs=images).model

    norm = result.get_submodule("2")
    assert isinstance(norm, ChannelBias)
    assert norm.sign is None, "no sign is 0"
    eps = torch.finfo(dtype).eps
    assert (result(images).double() - reference).norm() <= 4 * eps * reference.norm()
