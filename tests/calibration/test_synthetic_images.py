"""Images made from a network's statistics: they have them, they bring fits near the source, and bad cases end well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import zoo_networks
from lived import distance, lived_in, run
from normswap.schemes.parts.steady_signs import Site
from tiny import ONE, C, net
from torch import Tensor, nn
from torch.nn import functional as F

import normswap
from normswap import demo_files
from normswap.calibration import natural_noise, synthetic_images
from normswap.cli.app import main
from normswap.errors import NormswapError, OptionError, RefusedError, SourceError
from normswap.images.datasets import make_loader
from normswap.models.calling import form
from normswap.plan import Plan
from normswap.surgery import carrying_out, conversion, made_images
from normswap.surgery.held_out import Kept
from normswap.surgery.network import Network
from normswap.surgery.recalibration import recalibrate
from normswap.surgery.report import Report

SIZE = (3, 32, 32)


def network(side: int = 32) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model("resnet18", num_classes=10, channels=(8, 16, 24, 32), layers=(1, 1, 1, 1))
    return lived_in(model, 2 * natural_noise.pink(64, (3, side, side), 9).double() + 1).float()


def one() -> nn.Module:
    torch.manual_seed(0)
    return lived_in(net(lambda m, x: m.bn(m.conv(x)).relu(), **ONE)(), torch.randn(8, C, 9, 9).double()).float()


def make(model: nn.Module, size: Any = SIZE, **given: Any) -> list[Tensor]:
    return synthetic_images.make(model, form(model), size, **{"seed": 0, "count": 32, **given})


@torch.no_grad()
def off(model: nn.Module, x: Tensor) -> float:
    """How far the batch's statistics are from those kept: the mean over norms and channels, in float64."""
    found: list[Tensor] = []

    def look(norm: Any, args: tuple[Tensor, ...]) -> None:
        z = F.batch_norm(args[0].double(), norm.running_mean.double(), norm.running_var.double(), eps=norm.eps)
        rows, kept = z.transpose(0, 1).flatten(1), (norm.running_var / (norm.running_var + norm.eps)).sqrt()
        found.append((rows.mean(1).square() + (rows.std(1, correction=0) - kept).square()).mean())

    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    handles = [m.register_forward_pre_hook(look) for m in norms]
    model(x)
    for handle in handles:
        handle.remove()
    assert len(found) == len(norms)
    return float(torch.stack(found).mean())


def test_they_have_the_statistics_that_are_kept() -> None:
    model = network()
    (images,) = make(model)
    assert off(model, images) < 0.03 * off(model, natural_noise.pink(32, SIZE, 0))


def test_what_is_minimized_is_what_is_said() -> None:
    model, x = network(), torch.randn(4, *SIZE)
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.eps = 0.5  # as much as some variances
    with synthetic_images._remembering(norms) as distances:
        run(model, x)
    assert float(torch.stack(distances).mean()) == pytest.approx(off(model, x), rel=1e-3)


def test_the_network_stays_as_it_is() -> None:
    model = network().train()
    model.conv1.weight.requires_grad_(False)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    asking = [p.requires_grad for p in model.parameters()]
    make(model, count=2)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == asking
    assert all(p.grad is None for p in model.parameters())
    assert all(m.training for m in model.modules())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_a_seed_is_a_choice_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_images, "STEPS", 2)
    model, steps = one(), []
    first, again, other = (make(model, (C, 9, 9), count=70, seed=seed) for seed in (0, 0, 1))
    assert [len(part) for part in first] == [24, 23, 23]
    assert all(map(torch.equal, first, again))
    every = torch.cat([*first, *other]).flatten(1)
    assert float(torch.corrcoef(every).triu(1).max()) < 0.99
    make(model, (C, 9, 9), count=70, progress=lambda *at: steps.append(at))
    assert steps == [(i + 1, 6) for i in range(6)]


@pytest.mark.parametrize(
    ("conv", "norm", "size"),
    [(nn.Conv1d, nn.BatchNorm1d, (3, 24)), (nn.Conv3d, nn.BatchNorm3d, (3, 4, 8, 8)),
     (nn.Conv2d, nn.BatchNorm2d, (3, 8, 9))],
)  # fmt: skip
def test_signals_and_clips(conv: Any, norm: Any, size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(conv(3, 8, 3, padding=1), norm(8), nn.ReLU(), conv(8, 8, 3), norm(8)).eval()
    model = lived_in(model, 2 * natural_noise.pink(64, size, 5).double() + 1)
    (images,) = make(model, size)
    assert images.shape == (32, *size)
    assert images.dtype == torch.float64
    assert off(model, images) < 0.1 * off(model, natural_noise.pink(32, size, 0).double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision(dtype: torch.dtype) -> None:
    model = network()
    (images,) = make(model.to(dtype))
    assert images.dtype == dtype
    assert off(network(), images.float()) < 0.1 * off(network(), natural_noise.pink(32, SIZE, 0))


def no_gradients() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            return m.bn(m.conv(x))

    return net(forward, **ONE)().eval()


def overflowing() -> nn.Module:
    model = one()
    with torch.no_grad():
        model.conv.weight.mul_(1e30)
    return model


@pytest.mark.parametrize(
    ("model", "size", "error", "message"),
    [
        (lambda: nn.Sequential(nn.Conv2d(C, 4, 3), nn.ReLU()), (C, 9, 9), OptionError, "no BatchNorm is left"),
        (lambda: nn.Sequential(nn.Conv2d(C, 4, 3), nn.GroupNorm(2, 4)), (C, 9, 9), OptionError, "no BatchNorm"),
        (lambda: nn.Sequential(nn.Conv2d(C, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)), (C, 9, 9),
         OptionError, "no BatchNorm"),
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (4,), OptionError, "networks that take images"),
        (one, (C + 1, 9, 9), SourceError, "channels"),
        (no_gradients, (C, 9, 9), SourceError, "gradients"),
        (overflowing, (C, 9, 9), SourceError, "overflow"),
    ],
)  # fmt: skip
def test_where_none_can_be_made_it_says_why(
    model: Any, size: tuple[int, ...], error: type[NormswapError], message: str
) -> None:
    built = model()
    with pytest.raises(error, match=message) as caught:
        make(built, size)
    assert "calibrate=DATA" in str(caught.value)
    assert not any(m._forward_pre_hooks for m in built.modules())
    assert all(p.requires_grad for p in built.parameters())


@pytest.fixture(scope="module")
def pictures() -> Tensor:
    loader = make_loader(zoo_networks.PREPROCESSING, str(demo_files.FOLDER / "images.tar"), workers=0)
    return torch.cat([x for x, _ in loader])[:100]


@pytest.mark.slow
@pytest.mark.parametrize(("to", "least"), [("groupnorm", [0.7, 0.9]), ("nf", [0.2])])
def test_a_trained_network_fitted_to_them_is_near_its_source(
    to: str, least: list[float], pictures: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On real images: nearer than without any, and than one fitted to noise of the same spectrum.

    Also nearer, by as much as ever, than without any and with the channels as they are.
    """
    model = zoo_networks.trained("dense")
    noise, own = [natural_noise.pink(32, SIZE, i) for i in range(2)], normswap.Synthetic(64)
    ways = [noise, own] if to == "nf" else [noise, None, own]
    done = [conversion.convert(model, to, inputs=pictures[:2], calibrate=way) for way in ways]
    *others, made = [distance(run(model, pictures), run(one.model, pictures)) for one in done]
    assert all(made < share * other for share, other in zip(least, others, strict=True))
    if to == "groupnorm":
        with monkeypatch.context() as patch:
            patch.setattr(Site, "quieted", lambda site: torch.ones(site.var.numel()).double())
            bare = conversion.convert(model, to, inputs=pictures[:2]).model
        assert made < 0.7 * distance(run(model, pictures), run(bare, pictures))
    kept = done[-1].report.kept
    assert kept is not None
    assert (kept.of, kept.count, kept.agreement) == ("synthetic images", 16, None)
    assert kept.right_least is not None
    assert kept.right_least > 0.85
    assert Report.from_dict(json.loads(json.dumps(done[-1].report.to_dict()))).kept == kept
    assert any("64 images made from the network's own statistics" in note for note in done[-1].notes)


def test_of_noise_nothing_is_held_out() -> None:
    done = conversion.convert(one(), "groupnorm", size=(C, 9, 9), calibrate=made_images.Noise(64))
    assert done.report.kept is None
    assert any("noise" in note for note in done.notes)


def test_they_are_made_from_the_network_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several steps the later ones start from networks that keep nothing any more."""
    monkeypatch.setattr(synthetic_images, "STEPS", 2)
    model = network()
    first = conversion.convert(model, "folded", size=SIZE)
    with pytest.raises(OptionError, match="no BatchNorm is left"):
        conversion.convert(first.model, "nf", size=SIZE, calibrate="synthetic")
    asked: list[nn.Module] = []
    make = synthetic_images.make
    monkeypatch.setattr(synthetic_images, "make", lambda net, *a, **k: [asked.append(net), *make(net, *a, **k)][1:])
    chained = conversion.convert(first.model, "nf", size=SIZE, calibrate=[torch.randn(32, *SIZE)])
    source = model
    given = Network(source, size=SIZE, calibrate=normswap.Synthetic(40)).images
    for step in chained.plan.steps:
        last = carrying_out.carry_out(Network(model, size=SIZE, calibrate=given), step)
        model = last.model
    assert len(asked) == 1
    assert asked[0] is source
    assert any("fitted to 40 images" in note for note in last.notes)


def test_none_are_made_for_what_has_no_use_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic_images, "make", lambda *_, **__: pytest.fail("made"))
    with pytest.raises(OptionError, match="no use for calibration data"):
        conversion.convert(one(), "folded", size=(C, 9, 9), calibrate="synthetic")


def test_recalibrating_takes_none() -> None:
    for word in ("synthetic", normswap.Synthetic(), made_images.Noise()):
        with pytest.raises(RefusedError, match="without images"):
            recalibrate(one(), word, size=(C, 9, 9))  # type: ignore[arg-type]


def test_on_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_images, "STEPS", 5)
    model = ["resnet18", "--arch-arg", "channels=8,16,24,32", "--weights", "random", "--num-classes", "10"]
    model += ["--input-size", "3,48,48"]
    place = tmp_path / "out"
    fit = ["--calibrate", "synthetic", "--samples", "40"]
    assert (
        main(["convert", *model, "--to", "groupnorm", *fit, "-o", str(place), "--plan", str(tmp_path / "p.json")]) == 0
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "fitted to 40 images made from the network's own statistics" in said
    assert "held-out synthetic images" in said
    assert "of the synthetic images, to which nothing was fitted" in (place / "README.md").read_text()
    again = tmp_path / "again"
    assert main(["convert", *model, "--from-plan", str(tmp_path / "p.json"), *fit, "-o", str(again), "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["steps"][-1]["report"]["kept"]["of"] == "synthetic images"
    assert main(["convert", str(place), "--to", "nf", *fit, "-o", str(tmp_path / "no")]) == 2
    assert "no BatchNorm is left" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_plan_of_several_steps_takes_those_of_its_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(synthetic_images, "STEPS", 2)
    model = ["resnet18", "--arch-arg", "channels=8,16,24,32", "--weights", "random", "--num-classes", "10"]
    folded, both = tmp_path / "folded", tmp_path / "both.json"
    assert main(["convert", *model, "--to", "folded", "-o", str(folded), "--plan", str(tmp_path / "1.json")]) == 0
    later = ["--calibrate", "noise", "--samples", "32", "-o", str(tmp_path / "nf"), "--plan", str(tmp_path / "2.json")]
    assert main(["convert", str(folded), "--to", "nf", *later]) == 0
    plans = [Plan.from_json((tmp_path / name).read_text(), name) for name in ("1.json", "2.json")]
    both.write_text(Plan((*plans[0].steps, *plans[1].steps)).to_json())
    capsys.readouterr()
    given = ["--from-plan", str(both), "--calibrate", "synthetic", "--samples", "32", "-o", str(tmp_path / "out")]
    assert main(["convert", *model, *given, "--json"]) == 0
    first, *_, last = json.loads(capsys.readouterr().out)["steps"]
    assert first["report"]["exact"]
    assert last["report"]["kept"]["of"] == "synthetic images"


def test_dead_leaves_are_the_same_in_every_release() -> None:
    """A conversion with a seed can be made again: these numbers were drawn when leaves were brought in."""
    found = natural_noise.leaves(2, (3, 8, 8), 0).double()
    assert found[0, 0, 0, :4].tolist() == pytest.approx([-0.66309, -0.11863, 0.01432, -1.14699], abs=1e-4)
    assert float(found.std()) == pytest.approx(1, abs=1e-5)


def test_how_often_answers_agree_on_made_images_is_not_told() -> None:
    kept = Kept(0.1, 0.9, 16).of_made()
    assert (kept.agreement, kept.count, kept.of) == (None, 16, "synthetic images")
