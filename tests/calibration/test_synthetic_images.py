"""Images made from a network's statistics: they have these, the network stays, and what cannot be
made is refused.
"""

from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import distance, lived_in, run
from torch import Tensor, nn
from torch.nn import functional as F

from normswap.calibration import synthetic_images
from normswap.errors import NormswapError, OptionError, SourceError
from normswap.models.calling import form
from normswap.surgery import conversion

SIZE = (3, 32, 32)


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(
        "resnet18", num_classes=10, channels=(8, 16, 24, 32), layers=(1, 1, 1, 1)
    )
    return lived_in(model, 2 * synthetic_images.pink(64, SIZE, 9).double() + 1).float()


@torch.no_grad()
def statistics_error(model: nn.Module, x: Tensor) -> float:
    """The mean over norms and channels, by torch's batch_norm in float64."""
    errors: list[Tensor] = []

    def compare(norm: Any, args: tuple[Tensor, ...]) -> None:
        z = F.batch_norm(
            args[0].double(), norm.running_mean.double(), norm.running_var.double(), eps=norm.eps
        )
        rows = z.transpose(0, 1).flatten(1)
        kept = (norm.running_var / (norm.running_var + norm.eps)).sqrt()
        errors.append((rows.mean(1).square() + (rows.std(1, correction=0) - kept).square()).mean())

    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.register_forward_pre_hook(compare)
    model(x)
    return float(torch.stack(errors).mean())


@pytest.mark.slow
def test_they_have_the_statistics_that_are_kept_and_the_network_stays(network: nn.Module) -> None:
    network.train()
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first, *others = synthetic_images.make(network, form(network), SIZE, seed=0)

    assert [len(batch) for batch in (first, *others)] == [32] * 4
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    assert all(module.training and not module._forward_pre_hooks for module in network.modules())
    assert all(
        parameter.requires_grad and parameter.grad is None for parameter in network.parameters()
    )

    noise_error = statistics_error(network.eval(), synthetic_images.pink(32, SIZE, 0))
    assert statistics_error(network, first) < 0.03 * noise_error


@pytest.mark.parametrize(
    ("model", "size", "error", "message"),
    [
        (
            nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
            (3, 9, 9),
            OptionError,
            "no BatchNorm is left",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
            (4,),
            OptionError,
            "more than images, or none",
        ),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), (3, 9, 9), SourceError, "channels"),
    ],
)
def test_where_none_can_be_made_it_says_why(
    model: nn.Module, size: tuple[int, ...], error: type[NormswapError], message: str
) -> None:
    with pytest.raises(error, match=rf"{message}[\s\S]*calibrate=DATA"):
        synthetic_images.make(model, form(model), size, seed=0)


@pytest.mark.slow
def test_nf_is_fitted_to_them_and_nothing_is_told_of_agreement(
    network: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_images, "COUNT", 64)
    done = conversion.convert(network, "nf", input_size=SIZE, calibrate="synthetic")
    on_noise = conversion.convert(
        network, "nf", input_size=SIZE, calibrate=[torch.randn(64, *SIZE)]
    )
    x = 2 * synthetic_images.pink(64, SIZE, 9) + 1
    made, noise = (distance(run(network, x), run(each.model, x)) for each in (done, on_noise))

    assert made < 0.7 * noise
    assert done.report.kept is None
    assert any("made from the network's own statistics" in note for note in done.notes)


@pytest.mark.parametrize(
    ("norm", "to", "message"),
    [
        (nn.Identity(), "batchnorm", "measures statistics on images"),
        (nn.BatchNorm2d(4), "folded", "no use for"),
    ],
)
def test_they_are_refused_before_they_are_made(
    norm: nn.Module, to: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_images, "make", lambda *_, **__: pytest.fail("made"))
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    with pytest.raises(OptionError, match=message):
        conversion.convert(model, to, input_size=(3, 9, 9), calibrate="synthetic")


def test_leaves_that_were_written_to_are_drawn_afresh() -> None:
    """They are cached, and a network may write into its images."""
    first = synthetic_images.leaves(2, (3, 12, 10), seed=5)
    kept = first.clone()

    first.zero_()

    assert torch.equal(synthetic_images.leaves(2, (3, 12, 10), seed=5), kept)
