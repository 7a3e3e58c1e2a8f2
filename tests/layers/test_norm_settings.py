"""Law of settings: what is placed for a norm has its eps, and its momentum where it learns on."""

from typing import Any

import pytest
import torch
from support.lived_in_networks import distance
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

import normswap
from normswap.layers import per_sample
from normswap.layers.frozen_norm import EvalNorm, FrozenNorm
from normswap.layers.planned_layer import PlannedLayer
from normswap.layers.site_norm import SiteNorm

# Pairs of eps and momentum, of which the first is torch's own.
SETTINGS: tuple[tuple[float, float | None], ...] = ((1e-5, 0.1), (1e-3, 0.01), (0.3, None))
KINDS: dict[str, type[Any]] = {"torch's": nn.BatchNorm2d, "with an activation": BatchNormAct2d}
LIKE = torch.empty(0, dtype=torch.float64)
# Small numbers, beside which every eps counts.
SMALL = 0.01 * torch.randn(6, 4, 5, 5, generator=torch.Generator().manual_seed(0)).double()


def norm_of(kind: str, eps: float, momentum: float | None) -> Any:
    """A norm in eval mode whose variances are as small as those of `SMALL`."""
    torch.manual_seed(0)
    norm = KINDS[kind](4, eps=eps, momentum=momentum).double().eval()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
        norm.bias.normal_(0, 0.1)
        norm.running_mean.normal_(0, 0.01)
        norm.running_var.uniform_(0.5e-4, 2e-4)
        norm.num_batches_tracked.fill_(7)
    return norm


def settings_of(norm: Any) -> tuple[float, float | None, int]:
    return norm.eps, norm.momentum, int(norm.num_batches_tracked)


def placed(layer: type[PlannedLayer], old: nn.Module, **args: object) -> Any:
    with torch.no_grad():
        new: Any = layer.replacing(old, like=LIKE, **args)
    return new.eval()


def run(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        output: Tensor = layer(x)
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("eps", "momentum"), SETTINGS)
def test_a_layer_in_the_place_of_a_norm_computes_with_its_eps(
    kind: str, eps: float, momentum: float | None
) -> None:
    old = norm_of(kind, eps, momentum)
    before = run(old, SMALL)

    for layer, args in (
        (FrozenNorm, {}),
        (EvalNorm, {}),
        (SiteNorm, {"dims": 4}),
        (SiteNorm, {"ghost": 2}),
    ):
        new = placed(layer, old, **args)
        assert distance(before, run(new, SMALL)) < 1e-12, (layer, args)
        assert new.eps == eps
        if layer is SiteNorm:
            assert settings_of(new)[1] == momentum


NEW_NORMS: dict[str, dict[str, Any]] = {
    "groupnorm": {"groups": 2},
    "layernorm": {},
    "instancenorm": {},
    "dyt": {},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scheme", NEW_NORMS)
def test_what_is_normalized_times_gamma_and_with_beta_is_the_layers_output(
    scheme: str, kind: str
) -> None:
    """A fit sets gamma and beta by this; with an eps as large as the variances."""
    source = Sandwich(norm_of(kind, 1e-4, 0.1)).eval()
    options = NEW_NORMS[scheme]
    converted = normswap.convert(source, scheme, inputs=SMALL, **options).model
    layers: list[Any] = [layer for layer in converted.modules() if per_sample.normalizes(layer)]
    x = torch.randn(3, 4, 5, 5, dtype=torch.float64)

    (layer,) = layers
    with torch.no_grad():
        value = per_sample.normalized(layer, x) * layer.weight.view(1, -1, 1, 1)
        value = value + layer.bias.view(1, -1, 1, 1)
    activation = getattr(layer, "act", None) or nn.Identity()
    assert distance(run(layer, x), run(activation, value)) < 1e-12


class Sandwich(nn.Module):
    """A norm between two convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(4, 4, 1, dtype=torch.float64)
        self.norm = norm
        self.last = nn.Conv2d(4, 3, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.mark.parametrize("between", ["folded", "frozen-bn", "affine", "tune", "batchnorm"])
@pytest.mark.parametrize(("eps", "momentum"), SETTINGS[1:])
def test_a_norm_that_is_given_back_has_the_settings_that_it_had(
    between: str, eps: float, momentum: float | None
) -> None:
    source = Sandwich(norm_of("torch's", eps, momentum)).eval()
    options: dict[str, Any] = {"ghost_batch": 2} if between == "batchnorm" else {}
    converted = normswap.convert(source, between, inputs=SMALL, **options).model

    back: Any = normswap.convert(converted, "batchnorm", inputs=SMALL).model

    assert type(back.norm) is nn.BatchNorm2d
    assert settings_of(back.norm) == (eps, momentum, 7)
    assert distance(run(source, SMALL), run(back.eval(), SMALL)) < 1e-6
