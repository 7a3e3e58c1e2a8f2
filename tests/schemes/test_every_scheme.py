"""The laws that hold for every row of test_schemes.py, on small networks of every kind."""

import functools
import hashlib
import operator
import random
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import batchnorms, distance, run, step
from support.narrow_networks import RESNETS, applied, skeleton, source
from support.sampled_tables import crossed, quick, sampled
from support.scheme_rows import EXACT, ROWS, Row
from torch import Tensor, fx, nn

from normswap import schemes
from normswap.graph import inspection
from normswap.layers.scalars import Scale
from normswap.plan import Step
from normswap.surgery import applying, conversion

everywhere = crossed("arch, row", RESNETS, ROWS)
exact_everywhere = crossed("arch, row", RESNETS, EXACT)


@dataclass(frozen=True)
class Case:
    """A lived-in source, one input with what the source makes of it, the step, and the result."""

    source: nn.Module
    x: Tensor
    reference: Tensor
    step: Step
    result: nn.Module


@functools.cache
def _case(arch: str, index: int) -> Case:
    model, x, reference = source(arch)
    planned, builder = step(model, ROWS[index].scheme, **ROWS[index].options)
    assert not builder.refusals
    return Case(model, x, reference, planned, applied(model, planned))


def case(arch: str, row: Row) -> Case:
    """Shared between tests, so no test may change what is in it."""
    return _case(arch, ROWS.index(row))


def twin(arch: str, row: Row) -> Any:
    """A result of one's own."""
    own = case(arch, row)
    return applied(own.source, own.step)


def fingerprint(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy().tobytes())
    for name, module in model.named_modules():
        digest.update(f"{name} {type(module)} {module.training}".encode())
    digest.update(str([(name, p.requires_grad) for name, p in model.named_parameters()]).encode())
    return digest.hexdigest()


@everywhere
@pytest.mark.one_in(2)
def test_a_symbolic_trace_is_the_network(arch: str, row: Row) -> None:
    """As `torch.fx` fuses, quantizes or cuts networks of torch's own layers."""
    own = case(arch, row)
    assert torch.equal(fx.symbolic_trace(own.result)(own.x), run(own.result, own.x))


@everywhere
@pytest.mark.one_in(2)
def test_edits_have_no_order(arch: str, row: Row) -> None:
    own = case(arch, row)
    expected = own.result.state_dict()
    for seed in range(2):
        edits = list(own.step.edits)
        random.Random(seed).shuffle(edits)
        shuffled = applying.apply_step(
            own.source, Step(own.step.scheme, own.step.options, tuple(edits))
        )
        state = shuffled.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in expected)
        assert torch.equal(run(shuffled, own.x), run(own.result, own.x))


@pytest.mark.one_in(3)
@everywhere
def test_source_is_never_touched(arch: str, row: Row) -> None:
    model = skeleton(arch).float().train()
    model.get_submodule("fc" if hasattr(model, "fc") else "head").requires_grad_(False)
    before = fingerprint(model)
    objects = [*model.parameters(), *model.buffers()]
    images = torch.randn(2, 3, 33, 33)
    drawn_so_far = torch.get_rng_state()
    done = conversion.convert(model, row.scheme, inputs=images, **row.options)
    assert fingerprint(model) == before
    assert all(map(operator.is_, [*model.parameters(), *model.buffers()], objects))
    assert torch.equal(torch.get_rng_state(), drawn_so_far), "it drew the caller's random numbers"
    with torch.no_grad():
        for parameter in done.model.parameters():
            parameter.add_(1)
    assert fingerprint(model) == before, "the result shares tensors with the source"
    assert all(module.training for module in done.model.modules())


@everywhere
@pytest.mark.one_in(2)
def test_timm_methods_live_on(arch: str, row: Row) -> None:
    own = case(arch, row)
    result = twin(arch, row)
    before: Any = own.source

    assert type(result) is type(before)

    kept = row.exact
    with torch.no_grad():
        assert result.forward_features(own.x).shape == before.forward_features(own.x).shape
        final, maps = result.forward_intermediates(own.x)
        reference, expected = before.forward_intermediates(own.x)
        for a, b in zip([reference, *expected], [final, *maps], strict=True):
            assert a.shape == b.shape
            assert not kept or distance(a, b) <= 1e-12

    result.reset_classifier(7)
    assert run(result, own.x).shape == (3, 7)

    result.reset_classifier(0)
    features = run(result, own.x)
    assert features.shape == (3, result.num_features)

    with torch.no_grad():
        expected = before.forward_head(before.forward_features(own.x), pre_logits=True)
    assert not kept or distance(expected, features) <= 1e-12


@pytest.mark.one_in(3)
@exact_everywhere
def test_gradients_reach_every_parameter(arch: str, row: Row) -> None:
    for checkpointing in (False, True):
        result = twin(arch, row)
        result.set_grad_checkpointing(checkpointing)
        result.train()
        result(case(arch, row).x).square().sum().backward()
        lost = [
            name
            for name, p in result.named_parameters()
            if p.grad is None or not float(p.grad.abs().max()) > 0
        ]
        assert lost == []


@everywhere
def test_surviving_tensors_keep_their_names(arch: str, row: Row) -> None:
    own = case(arch, row)
    before = own.source.state_dict()
    after = own.result.state_dict()
    renamed = dict(applying.renames(own.source, own.step))
    norms = tuple(f"{path}." for path in batchnorms(own.source))

    edited = {edit.path for edit in own.step.edits}
    for name, tensor in before.items():
        path = name.rpartition(".")[0]
        if name.startswith(norms):
            continue
        assert renamed.get(name, name) in after
        if path not in edited:
            assert torch.equal(tensor, after[renamed.get(name, name)])

    for name in after.keys() - before.keys() - set(renamed.values()):
        assert any(name.startswith(f"{path}.") for path in edited), f"{name} is new"


@exact_everywhere
@pytest.mark.one_in(8)
def test_trained_scalars_fold_too(arch: str, row: Row) -> None:
    """After training alpha is anything: negative, zero, small; whatever comes next keeps that
    function.
    """
    result = twin(arch, row)
    scalars = [module for module in result.modules() if isinstance(module, Scale)]
    with torch.no_grad():
        for parameter in result.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, dtype=torch.float64)
        for scalar, alpha in zip(scalars, (-0.5, 0.0, 0.3), strict=False):
            scalar.alpha.fill_(alpha)

    x = case(arch, row).x
    reference = run(result, x)

    seen = inspection.inspect(result)
    for then in EXACT:
        if (then.scheme, row.scheme) == ("folded", "folded"):
            continue
        planned, builder = step(seen, then.scheme, **then.options)
        if builder.refusals:  # behind a gate, a negative scalar that has a bias is stuck
            assert then.scheme == "residual-scale"
            assert all("it has a scalar that stays" in why for why in builder.refusals.values())
            continue
        assert distance(reference, run(applying.apply_step(result, planned), x)) <= 1e-12


@crossed("dtype, row", [torch.float32, torch.bfloat16, torch.float16], ROWS)
@pytest.mark.one_in(4)
def test_dtype_is_kept(row: Row, dtype: torch.dtype) -> None:
    for arch in ("seresnet18", "resnetv2_18"):
        small = {"input_size": (3, 33, 33)}  # on a CPU convolutions in float16 are slow
        model = skeleton(arch, pretrained_cfg_overlay=small)
        model.load_state_dict(source(arch)[0].state_dict())
        model.to(dtype)
        planned, _ = step(model, row.scheme, **row.options)
        result = applying.apply_step(model, planned)

        assert {
            tensor.dtype for tensor in result.state_dict().values() if tensor.is_floating_point()
        } == {dtype}

        # the same function as the narrow source has in exact arithmetic, to the narrow type's
        # rounding
        if row.exact:
            x = source(arch)[1]
            error = distance(run(model.double(), x), run(result.double(), x))
            assert error <= 300 * torch.finfo(dtype).eps


@pytest.mark.slow
@pytest.mark.parametrize("row", sampled(EXACT, every=8), ids=str)
def test_compile_without_graph_breaks(row: Row) -> None:
    own = case("seresnet18", row)
    torch._dynamo.reset()
    compiled: Any = torch.compile(own.result.eval(), backend="eager", fullgraph=True)
    with torch.no_grad():
        assert distance(own.reference, compiled(own.x)) <= 1e-12


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "arch", quick(["seresnet18", "resnetv2_18"], ["seresnet18"], pytest.mark.long)
)
def test_compile_to_machine_code(arch: str) -> None:
    own = case(arch, ROWS[1])
    torch._dynamo.reset()
    compiled: Any = torch.compile(own.result.eval())
    with torch.no_grad():
        assert distance(own.reference, compiled(own.x)) <= 1e-12


@pytest.mark.parametrize("name", schemes.names())
def test_plan_runs_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the network was inspected, a plan reads the graph and stored tensors: no module is
    called.
    """
    torch.manual_seed(0)
    vit: dict[str, Any] = {
        "img_size": 32,
        "patch_size": 8,
        "embed_dim": 24,
        "depth": 2,
        "num_heads": 2,
    }
    resnet: dict[str, Any] = {"channels": (8, 8, 8, 8), "layers": (1, 1, 1, 1)}
    arch, width = ("vit_tiny_patch16_224", vit) if name == "rmsnorm" else ("resnet18", resnet)
    model = timm.create_model(arch, num_classes=3, **width).eval()
    # At 32 pixels the last stage of a ResNet is one pixel, which instancenorm refuses.
    side = 32 if name == "rmsnorm" else 64
    anatomy = inspection.inspect(model, torch.randn(2, 3, side, side))
    monkeypatch.setattr(
        nn.Module, "__call__", lambda *args, **kwargs: pytest.fail("the plan ran a module")
    )
    builder = schemes.get(name).plan(anatomy, **schemes.get(name).defaults)

    assert not builder.refusals
