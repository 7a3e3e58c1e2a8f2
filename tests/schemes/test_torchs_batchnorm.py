"""`--to batchnorm` places torch's own BatchNorm, which other programs know, wherever it can."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import timm
import torch
from torch import Tensor, nn

import normswap
from normswap.layers.site_norm import SiteNorm
from normswap.plan import Plan
from normswap.surgery import applying

SCHEMES = ("frozen-bn", "folded", "skipinit", "affine", "tune")
Source = tuple[nn.Module, Tensor]


def _trained(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(layer.running_mean, 0, 0.2)
            nn.init.uniform_(layer.running_var, 0.5, 2)
            nn.init.uniform_(layer.weight, 0.5, 1.5)
    return model.eval()


def in_1d() -> Source:
    layers = (nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten())
    rows = (nn.Linear(4 * 14, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    return _trained(nn.Sequential(*layers, *rows)), torch.randn(4, 3, 16)


def in_2d() -> Source:
    model = timm.create_model("resnet18", channels=(4, 4, 8, 8), num_classes=3)
    return _trained(model), torch.randn(4, 3, 32, 32)


def in_3d() -> Source:
    layers = (nn.Conv3d(3, 4, 3), nn.BatchNorm3d(4), nn.ReLU(), nn.Flatten())
    return _trained(nn.Sequential(*layers, nn.Linear(4 * 6**3, 2))), torch.randn(4, 3, 8, 8, 8)


def norms_of(model: nn.Module) -> dict[str, type]:
    return {
        path: type(layer)
        for path, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("build", [in_1d, in_2d, in_3d], ids=lambda build: build.__name__)
def test_the_norms_are_the_sources_classes(scheme: str, build: Callable[[], Source]) -> None:
    if scheme == "skipinit" and build is not in_2d:
        scheme = "folded"
    source, x = build()
    converted = normswap.convert(source, to=scheme, inputs=x).model
    back = normswap.convert(converted, to="batchnorm", inputs=x).model

    wanted = {path for path, kind in norms_of(source).items()}
    assert norms_of(back) == {path: norms_of(source)[path] for path in wanted}
    assert torch.allclose(back(x), source(x), rtol=1e-3, atol=1e-4)


# torch 2.14 warns that its own TorchScript is deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("scheme", ["frozen-bn", "skipinit"])
def test_a_trace_made_in_training_mode_goes_to_eval_mode(scheme: str) -> None:
    source, x = in_2d()
    converted = normswap.convert(source, to=scheme, inputs=x).model
    back = normswap.convert(converted, to="batchnorm", inputs=x).model

    traced = torch.fx.symbolic_trace(copy.deepcopy(back).train()).eval()
    scripted = torch.jit.script(copy.deepcopy(back))

    assert torch.equal(traced(x), back(x))
    assert torch.allclose(scripted(x), back(x), atol=1e-5)


def test_where_torch_has_no_such_norm_it_is_ours() -> None:
    source, x = in_2d()
    ghost = normswap.convert(source, to="batchnorm", ghost_batch=2, inputs=x).model
    plain = normswap.convert(ghost, to="batchnorm", inputs=x).model

    assert set(norms_of(ghost).values()) == {SiteNorm}
    assert set(norms_of(plain).values()) == {nn.BatchNorm2d}
    assert plain.state_dict().keys() == source.state_dict().keys()


def test_a_plan_of_before_says_no_dimensions() -> None:
    source, x = in_2d()
    frozen = normswap.convert(source, to="frozen-bn", inputs=x).model
    done = normswap.convert(frozen, to="batchnorm", inputs=x)

    (step,) = [step for step in done.plan.steps if step.scheme == "batchnorm"]
    without = [
        replace(edit, args={key: value for key, value in edit.args.items() if key != "dims"})
        for edit in step.edits
    ]
    before = Plan((replace(step, edits=tuple(without)),))
    result = applying.apply(frozen, before.steps)

    assert set(norms_of(result).values()) == {SiteNorm}
    assert torch.equal(result.eval()(x), done.model.eval()(x))
    # Converted again, such norms become torch's own.
    assert set(norms_of(normswap.convert(result, to="batchnorm", inputs=x).model).values()) == {
        nn.BatchNorm2d
    }
