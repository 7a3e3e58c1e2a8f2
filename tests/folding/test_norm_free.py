"""Normalizer-free networks as sources: plain convolutions afterwards, exactly, and no standardization left."""

from typing import Any

import pytest
import timm
import torch
from crossed import sampled
from lived import distance, run, step
from narrow_networks import NORM_FREE, STANDARDIZED, applied, norm_free, randomized

from normswap.plan import Plan
from normswap.surgery import applying

architectures = pytest.mark.parametrize("arch", NORM_FREE)


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
            assert all(getattr(act, "gamma", 1.0) == 1.0 for act in (block.act1, block.act2, block.act3))
    with torch.no_grad():
        assert distance(model.forward_features(x), result.forward_features(x)) <= 1e-12
    fresh = timm.create_model(arch, num_classes=10, **NORM_FREE[arch]).double().eval()
    fresh = applying.apply(fresh, Plan.from_json(Plan().then(planned).to_json()).steps)
    fresh.load_state_dict(result.state_dict(), strict=True)
    assert torch.equal(run(fresh, x), run(result, x))


@pytest.mark.parametrize("arch", sampled(NORM_FREE, every=4))
def test_converted_to_other_schemes(arch: str) -> None:
    model, x = norm_free(arch)
    reference = run(model, x)
    folded = applied(model, step(model, "folded")[0])
    for start in (model, folded):
        for scheme, options in (("weightnorm", {}), ("spectralnorm", {})):
            planned, _ = step(start, scheme, **options)
            assert distance(reference, run(applying.apply_step(start, planned), x)) <= 1e-12
    for scheme, options in (("skipinit", {}), ("fixup", {}), ("residual-scale", {"rule": "szegedy"})):
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
            assert gone is (arch == "nf_resnet26" or gain == 0)  # a gate passes no negative scalars
            assert gone or any("skipinit" in note or "factor" in note for note in builder.notes)


def test_gradients_train_and_weights_stay_put() -> None:
    model, x = norm_free("nf_resnet26")
    result = applied(model, step(model, "folded")[0]).train()
    result(x).square().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in result.parameters())
