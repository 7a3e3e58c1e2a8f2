"""The doctor calls no sound network faulty with certainty, and says which other past it could have.

Each network here stores numbers that look like a fault, and is right with them.
"""

import copy
from typing import Any

import pytest
import torch
from support import zoo_networks
from support.trained_networks import NETWORKS
from test_doctor import FAULTS, norms, opened, reset, settled
from test_doctor_on_images import blue_first, images
from torch import Tensor, nn
from torch.nn import functional as F

import normswap
from normswap.diagnosis.findings import Certainty, Diagnosis

# Faults that no sound network can have. All others are LIKELY.
WITHOUT_DOUBT = {"not-finite", "negative-variance"}


@pytest.fixture(scope="module")
def trained_in_eval() -> tuple[nn.Module, list[Tensor], Tensor]:
    """A network that was never in training mode, with images and their classes."""
    torch.manual_seed(0)
    kinds = torch.randn(6, 3, 12, 12)

    def draw(count: int = 64) -> tuple[Tensor, Tensor]:
        labels = torch.randint(6, (count,))
        noise = torch.randn(count, 3, 12, 12)
        return kinds[labels] * torch.rand(count, 1, 1, 1) * 2 + noise, labels

    layers: list[nn.Module] = []
    for fan_in in (3, 16, 16):
        layers += [nn.Conv2d(fan_in, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 144, 6)).eval()
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(150):
        x, y = draw()
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()

    x, y = draw(256)
    return net, list(x.split(64)), y


@pytest.mark.slow
def test_a_network_that_was_trained_in_eval_mode_is_right_as_it_is(
    trained_in_eval: tuple[nn.Module, list[Tensor], Tensor],
) -> None:
    net, batches, labels = trained_in_eval
    right = (net(torch.cat(batches)).argmax(1) == labels).double().mean()
    assert right > 0.8

    with_images = normswap.diagnose(net, inputs=batches[0][:2], images=batches)
    assert with_images.faults == ()
    assert "trained in eval mode" in with_images.notes[0]

    (finding,) = normswap.diagnose(net, inputs=batches[0][:2]).faults
    assert finding.name == "never-updated"
    assert finding.certainty is Certainty.LIKELY
    assert "trained in eval mode" in finding.evidence


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["plain", "depthwise"])
def test_statistics_that_were_never_updated_are_found_on_images_with_the_mends_effect(
    name: str,
) -> None:
    model = opened(name)
    batches = images(model)
    reset(model)

    (finding,) = normswap.diagnose(model, images=batches).faults

    assert finding.name == "never-updated"
    assert "changed on" in finding.evidence


@torch.no_grad()
def test_channels_that_the_norm_before_makes_constant_are_no_fault() -> None:
    net: Any = nn.Sequential(
        nn.Conv2d(3, 16, 3, bias=False),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 4, 1),
    )
    net[1].weight[:2] = 1e-5
    net[1].bias[:2] = 0.08
    settled(net, times=300)
    assert float(net[3].running_var[:2].max()) < 1e-8

    assert normswap.diagnose(net, inputs=torch.randn(2, 3, 12, 12)).faults == ()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("value", [0.0, 0.99])
def test_a_momentum_is_no_fault_of_a_network_whose_statistics_fit(value: float) -> None:
    model = opened("plain")
    for norm in norms(model):
        norm.momentum = value

    diagnosis = normswap.diagnose(model, images=images(model))

    assert diagnosis.faults == ()
    assert f"momentum is {value:g}" in diagnosis.notes[0]


def test_a_norm_that_is_never_called_cannot_spoil_an_answer() -> None:
    model = opened("demo")
    unused = nn.BatchNorm2d(4).eval()
    unused.running_var[:] = float("nan")
    model.spare = unused  # type: ignore[assignment]

    diagnosis: Diagnosis = normswap.diagnose(model)

    assert diagnosis.faults == ()
    assert "spare" in diagnosis.notes[0]


@pytest.mark.parametrize("fault", sorted(FAULTS))
@pytest.mark.one_in(4)
def test_only_what_no_sound_network_stores_is_certain(fault: str) -> None:
    plant, _ = FAULTS[fault]
    model = opened("demo")
    plant(model)

    for finding in normswap.diagnose(model).faults:
        is_certain = finding.certainty is Certainty.CERTAIN
        assert is_certain == (finding.name in WITHOUT_DOUBT), finding


@pytest.mark.slow
@pytest.mark.parametrize("name", ["demo", "plain"])
def test_exchanged_colours_are_found_by_the_surer_answers(name: str) -> None:
    model = opened("demo") if name in NETWORKS else copy.deepcopy(zoo_networks.trained(name))
    batches = images(model)
    assert normswap.diagnose(model, images=batches).faults == ()

    (finding,) = normswap.diagnose(model, images=blue_first(model, batches)).faults

    assert finding.name == "preprocessing"
    assert "BGR" in finding.evidence


@pytest.mark.slow
def test_surer_answers_name_what_else_could_explain_them() -> None:
    model = opened("demo")

    (finding,) = normswap.diagnose(model, images=blue_first(model, images(model))).faults

    assert finding.certainty is Certainty.LIKELY
    assert "No fault if the network answers most of these images wrongly" in finding.evidence
