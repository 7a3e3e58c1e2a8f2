"""What a verdict rests on where outputs alone do not decide: ties, labels, rounding, scales."""

import copy

import pytest
import torch
from support.six_networks import images, trained
from test_blind_spots import IMAGES, Chaotic
from test_whole_records import values_of
from torch import Tensor, nn

from normswap.models.calling import Example
from normswap.proof import allowance, comparison, doubles, intermediates, running
from normswap.proof.distance import Error, distance
from normswap.surgery.network import Network


class Tie(nn.Module):
    """It scales its images by the place of the largest of a thousand equal weights."""

    def __init__(self, chosen: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scores = nn.Parameter(torch.ones(1000))
        self.conv = nn.Conv2d(3, 4, 3)
        self.chosen = chosen

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.scores.argmax() if self.chosen is None else torch.tensor(self.chosen)
        return self.conv(x).mean((2, 3)) * (1 + chosen)


def test_a_tie_that_the_weights_decide_is_said_and_proves_nothing() -> None:
    """No rounding of the input decides it, so the network does not amplify rounding."""
    source = Tie()
    other = Tie(chosen=7)
    other.load_state_dict(source.state_dict())
    network = Network(source, IMAGES)

    precise = doubles.compare_double(network, lambda: copy.deepcopy(other).double())
    report = comparison.compare_networks(network, other, precise=precise, traced=False)

    assert precise is not None
    assert "tie" in precise.hangs_on
    assert report.verdict == "NOT PROVED"
    assert report.unproved == precise.hangs_on


def test_rounding_that_explains_an_error_in_float32_leaves_it_unproved() -> None:
    """The last digit of the weights moves the source as far as the result is off."""
    source = Chaotic()
    other = allowance.with_other_digits(source, torch.float32)

    report = comparison.compare_networks(Network(source, IMAGES), other, traced=False)

    assert report.logits[0].relative_l2 > 1e-4
    assert report.verdict == "NOT PROVED"
    assert "Its weights amplify rounding" in report.remedy


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_half_precision_costs_is_also_seen_without_float64(dtype: torch.dtype) -> None:
    """The last digit of the input moves the outputs by a few times as much as their rounding."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).to(dtype)
    x = torch.randn(2, 3, 9, 9).to(dtype)
    outputs, _ = running.run(model, Example((x,)))
    with torch.no_grad():
        right = copy.deepcopy(model).double()(x.double())
    true_cost = distance(right, outputs[""]).relative_l2
    error = Error("logits", str(dtype).removeprefix("torch."), tuple(x.shape), 0.9, 0.9)

    cost = allowance.cost_of_half(model, Example((x,)), outputs, error, has_double=False, seed=0)

    assert true_cost < cost < 10 * true_cost


def test_a_block_in_half_precision_may_be_off_by_three_times_its_distance_to_float64() -> None:
    source = copy.deepcopy(trained("post")).bfloat16().eval()
    result = copy.deepcopy(source)
    with torch.no_grad():
        result.get_parameter("blocks.1.bn2.weight").mul_(1.2)
    x = images(3, 1).bfloat16()
    paths = ["blocks.0", "blocks.1", "blocks.2"]

    report = comparison.compare_networks(Network(source, x), result)

    own = values_of(source, paths, x)
    wide = values_of(copy.deepcopy(source).double(), paths, x.double())
    base = torch.finfo(torch.bfloat16).eps
    for path in ["blocks.1", "blocks.2"]:
        expected = max(base, min(0.05, 3 * distance(own[path].double(), wide[path]).relative_l2))
        assert report.site_tolerance[path] == pytest.approx(expected, rel=0.02)
    assert report.verdict == "WRONG"


class ChaoticBlock(nn.Module):
    """A residual block whose branch depends on the last digits of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(1e7 * self.conv(x))


class LabelsBehindABlock(nn.Module):
    """Labels that the block hardly moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.block = ChaoticBlock()

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1e-3 * self.block(x)).mean((2, 3)).argmax(1)


def test_labels_that_are_right_in_float64_excuse_no_block_that_is_far_off() -> None:
    """Chaos would allow any error, but a block may never be off by more than 5 %."""
    source = LabelsBehindABlock()
    wrong = LabelsBehindABlock()
    wrong.block.conv.bias.data.add_(0.1)  # type: ignore[union-attr]
    network = Network(source, IMAGES)
    precise = doubles.compare_double(network, lambda: copy.deepcopy(source).double())

    report = comparison.compare_networks(network, wrong, precise=precise)

    assert precise is not None
    assert precise.error is not None
    assert precise.error.relative_l2 == 0
    assert report.site_tolerance["block"] == 0.05
    assert report.verdict == "WRONG"


class ScoresAndLabels(nn.Module):
    """Scores beside the labels that are made from them."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head = nn.Conv2d(3, 5, 6)
        self.factor = factor

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.head(x).flatten(1)
        return {"scores": self.factor * scores, "labels": scores.argmax(1)}


@pytest.mark.parametrize(("factor", "verdict"), [(1 + 4e-6, "PROVED"), (1 + 4e-5, "WRONG")])
def test_scores_beside_labels_are_allowed_what_scores_are(factor: float, verdict: str) -> None:
    network = Network(ScoresAndLabels(), IMAGES)

    report = comparison.compare_networks(network, ScoresAndLabels(factor), traced=False)

    assert report.verdict == verdict
    assert report.site_tolerance["labels"] == 0


class Foreign(nn.Module):
    """A layer of another package: it scales, and keeps its values within `most`."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.5, 1.5, 1.0]).view(3, 1, 1))
        self.most = most

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).clamp(-self.most, self.most)


@pytest.mark.parametrize("layers", [[], [nn.ReLU(), nn.Identity()]], ids=["alone", "beside"])
@pytest.mark.parametrize(("most", "verdict"), [(1e4, "PROVED"), (20.0, "WRONG")])
def test_a_foreign_layer_is_also_held_at_ten_times_the_images(
    layers: list[nn.Module], most: float, verdict: str
) -> None:
    """No image comes near 20."""
    source = nn.Sequential(*layers, Foreign(1e4))
    result = nn.Sequential(*layers, Foreign(most))
    assert float((10 * IMAGES).abs().max()) > 20

    report = comparison.compare_networks(Network(source, IMAGES), result)

    assert report.verdict == verdict


class HandsOut(nn.Module):
    """As timm's networks, it hands out the maps of its layers, by themselves if it is asked to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)

    def forward_intermediates(self, x: Tensor, intermediates_only: bool = False) -> object:
        maps = [self.first(x), self.second(self.first(x))]
        return maps if intermediates_only else (maps[-1], maps)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).mean((2, 3))


@torch.no_grad()
def test_of_the_maps_that_are_handed_out_those_that_differ_are_named() -> None:
    """A factor goes from the first layer to the second, so the outputs stay."""
    source = HandsOut()
    result = HandsOut()
    for parameter in result.first.parameters():
        parameter.mul_(1.5)
    result.second.weight.div_(1.5)
    network = Network(source, IMAGES)

    assert intermediates.note(network, HandsOut()) == ""
    assert "of 2, number 0 by 50%" in intermediates.note(network, result)
