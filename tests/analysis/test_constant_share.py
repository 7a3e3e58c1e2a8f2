"""What a GroupNorm in the place of a BatchNorm normalizes, beside torch's own norm on images."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.command_line import Capture, run_json
from torch import Tensor, nn

import normswap
from normswap.analysis import summary
from normswap.plan import Body
from normswap.surgery.network import Network

GROUPS = 4


@pytest.fixture(scope="module")
def images() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    contrast = torch.rand(64, 1, 1, 1, generator=generator) + 0.5
    return contrast * torch.randn(64, 3, 16, 16, generator=generator)


@pytest.fixture(scope="module")
def source(images: Tensor) -> nn.Module:
    """A network whose first norm has the statistics of the images."""
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(12, momentum=None, eps=1e-3)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(12 * 14**2, 5)
    )
    with torch.no_grad():
        model[0].weight.mul_(torch.linspace(0.5, 2, 12).view(-1, 1, 1, 1))
        model[0].bias.uniform_(-1, 1)
        model(images)
    return model.eval()


def site_of_norm(model: nn.Module, images: Tensor) -> Body:
    """What `inspect` says of the only norm."""
    (site,) = summary.of_network(Network(model, inputs=images[:2]), "")["sites"]
    return site


@torch.no_grad()
def variance_at_norm(model: nn.Sequential, images: Tensor) -> float:
    """The variance of a group of channels over all images and positions, averaged over groups."""
    by_group = model[0](images).double().unflatten(1, (GROUPS, -1))
    return float(by_group.var((0, 2, 3, 4), correction=0).mean())


@pytest.mark.parametrize("relative_eps", [0.0, 0.5, 9.0])
def test_the_shares_are_those_of_torchs_own_norm(
    source: nn.Module, images: Tensor, relative_eps: float
) -> None:
    """A sample of the average variance, and one that is louder by 1e-4, go through the norm."""
    converted = normswap.convert(
        source, "groupnorm", inputs=images[:2], groups=GROUPS, relative_eps=relative_eps
    ).model

    site = site_of_norm(converted, images)

    eps = converted[1].eps
    variance = variance_at_norm(converted, images)
    assert site["constant"] == pytest.approx(eps / (eps + variance), rel=2e-3)
    if relative_eps:
        assert site["constant"] == pytest.approx(relative_eps / (relative_eps + 1), rel=1e-2)

    sample = torch.randn(1, 12, 9, 9, dtype=torch.float64).unflatten(1, (GROUPS, -1))
    sample = F.layer_norm(sample, sample.shape[2:], eps=0.0).flatten(1, 2) * variance**0.5
    quiet, loud = (
        F.group_norm(factor * sample, GROUPS, eps=eps).std() for factor in (1.0, 1 + 1e-4)
    )
    kept = float((loud / quiet).log() / torch.tensor(1 + 1e-4).log())
    assert site["removed"] == pytest.approx(1 - kept, abs=3e-3)


def test_norms_of_other_kinds_have_no_shares(source: nn.Module, images: Tensor) -> None:
    assert site_of_norm(source, images)["constant"] is None

    own = nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(GROUPS, 12), nn.ReLU()).eval()
    assert site_of_norm(own, images)["removed"] is None


@pytest.mark.slow
def test_a_saved_conversion_tells_its_shares(tmp_path: Path, capfd: Capture) -> None:
    converted = str(tmp_path / "converted")
    run_json(capfd, "convert", "demo", "--to", "groupnorm", "-o", converted)

    body = run_json(capfd, "inspect", converted)

    assert {round(site["constant"], 2) for site in body["sites"]} == {0.9}
