"""How many answers a recalibration changes is said, and most of them changed is not called good."""

from pathlib import Path

import pytest
import torch
from support.command_line import MODEL, Capture, here, run_json
from torch import nn

from normswap.models.calling import form
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import ChangedAnswers, changed_answers

__all__ = ["here"]  # a fixture


class Scores(nn.Module):
    """Gives the scores of its input, times a factor for each class."""

    def __init__(self, *factors: float) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.tensor(factors))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors


def test_the_share_of_images_with_another_class_is_told() -> None:
    x = torch.tensor([[1.0, 0.9], [1.0, 0.5], [0.2, 1.0], [1.0, 0.0]])
    before = Scores(1.0, 1.0)
    calls = [form(before).of(x[:2]), form(before).of(x[2:])]

    change = changed_answers(before, Scores(0.8, 1.0), calls)

    assert change is not None
    assert (change.count, change.changed) == (4, 0.25)
    distance = torch.tensor([0.2, 0.2, 0.04, 0.2]).norm() / x.norm()
    assert change.relative_l2 == pytest.approx(float(distance), rel=1e-5)
    assert "25.0 %" in str(ChangedAnswers(4, 0.25, 0.1))


def test_answers_that_were_not_finite_are_not_compared() -> None:
    net = Scores(float("nan"), 1.0)
    assert changed_answers(net, net, [form(net).of(torch.ones(2, 2))]) is None


@pytest.mark.slow
@pytest.mark.parametrize("are_reset", [False, True])
def test_the_command_does_not_call_it_passed_when_most_answers_change(
    *, are_reset: bool, here: Path, capfd: Capture
) -> None:
    model = open_model("demo")
    for module in model.modules():
        if are_reset and isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    torch.save(model.state_dict(), "net.pth")
    images = ("--data", "demo", "--samples", "96", "--workers", "0")

    body = run_json(capfd, "recalibrate", MODEL, "--weights", "net.pth", *images, "-o", "out")

    assert (body["answers"]["changed"] > 0.5) == are_reset
    assert body["passed"] == body["report"]["passed"] == (not are_reset)
