"""The time that a fit takes, told before: how it is reckoned, and that the command says it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from normswap.calibration import duration
from normswap.cli.app import main
from normswap.cli.commands import convert_command
from normswap.models.calling import Example


@pytest.mark.parametrize(("count", "forwards"), [(100, 100 * 3 + 200 * 9), (600, 600 * 12)])
def test_it_is_so_many_forwards_of_the_images(count: int, forwards: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few are shown in a mirror, too; the first run does not count, and the network is left in its mode."""
    model, seen = nn.Sequential(nn.Linear(3, 2)).train(), [0.0]
    model.register_forward_hook(lambda *_: seen.append(seen[-1] + (50.0 if len(seen) == 1 else 2.0)))
    monkeypatch.setattr(duration.time, "perf_counter", lambda: seen[-1])
    assert duration.expected_seconds(model, Example((torch.zeros(4, 3),)), count) == pytest.approx(forwards * 0.5)
    assert model.training


@pytest.mark.parametrize(("seconds", "said"), [(19.0, ""), (71.0, "about 71 s"), (600.0, "about 10 minutes")])
def test_the_command_says_it_of_a_long_one(
    seconds: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(duration, "expected_seconds", lambda model, few, count: asked.append(count) or seconds)
    narrow = ["resnet18", "--arch-arg", "channels=4,4,8,8", "--weights", "random", "--input-size", "3,32,32"]
    fit = ["--to", "groupnorm", "--calibrate", "demo", "--samples", "8"]
    assert main(["convert", *narrow, *fit, "-o", str(tmp_path / "out")]) == 0
    assert asked == [8]
    err = capsys.readouterr().err
    assert (f"fitting to 8 images will take {said}" in err) if said else ("will take" not in err)


@pytest.mark.parametrize(
    ("schemes", "fits"),
    [(["groupnorm"], True), (["folded", "groupnorm"], True), (["folded"], False), (["none"], False)],
)
def test_a_plan_is_fitted_where_one_of_its_steps_is(schemes: list[str], fits: bool) -> None:
    assert convert_command._fits(*schemes) is fits
