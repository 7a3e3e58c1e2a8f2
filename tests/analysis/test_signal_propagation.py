"""Signal propagation: measured against hooks, against theory, and before and after exact conversions."""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import timm
import torch
from lived import lived_in, swapped
from matplotlib.figure import Figure
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn

from normswap.analysis import plots
from normswap.analysis.block_signals import Point, awake, signal_propagation
from normswap.errors import OutputError, RefusedError
from normswap.graph import inspection
from normswap.graph.inspection import Anatomy
from normswap.surgery.network import Network

NARROW = {"resnet18": {"channels": (8, 16, 32, 64)}, "resnetv2_18": {"channels": (8, 16, 32, 64)}}


def noise(n: int = 4, side: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def fresh(name: str, seed: int = 0, **kwargs: object) -> nn.Module:
    torch.manual_seed(seed)
    return awake(timm.create_model(name, **kwargs))


class TwoFactors(nn.Module):
    """x + 0.5 (3 f(x)): the scalar of the branch, and before it a gain that belongs to the branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(self.conv1(x).relu()) * 3.0 * 0.5


def test_one_constant_factor_is_taken_off_the_branch() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), TwoFactors(), nn.ReLU()).double().eval()
    x = noise(seed=1).double()
    seen: list[Tensor] = []
    model.get_submodule("1.conv2").register_forward_hook(lambda m, a, y: seen.append(y.clone()))
    with torch.no_grad():
        model(x)
    (point,) = signal_propagation(Network(model, x))
    of_branch = float(seen[0].var((0, 2, 3), correction=0).mean())
    assert (point.branch_variance, point.added_variance) == pytest.approx((9 * of_branch, 2.25 * of_branch))


def test_the_model_is_left_alone() -> None:
    model = lived_in(timm.create_model("resnet18", **NARROW["resnet18"]), noise())
    x = noise(6, seed=1).double()
    before = copy.deepcopy(model.state_dict())
    model.train()
    signal_propagation(Network(model, x), batch_statistics=True)
    assert model.training
    assert model.bn1.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_reset_changes_them_and_branch_variance_is_taken_before_alpha() -> None:
    model = lived_in(timm.create_model("resnet18", **NARROW["resnet18"]), noise())
    x = noise(seed=1).double()
    half, one = (signal_propagation(Network(swapped(model, "skipinit", alpha=alpha), x))[0] for alpha in (0.5, 1.0))
    assert half.branch_variance == pytest.approx(one.branch_variance)
    assert half.added_variance == pytest.approx(0.25 * half.branch_variance)
    assert half.variance < one.variance
    assert 0.3 < one.branch_variance < 3  # f was divided by its own deviation


def expected_nf(seen: Anatomy, alpha: float) -> list[float]:
    """The variance after each block if all branches have 1 (the code of the ICLR 2022 blog post, "Multi-layer SPPs").

    1 + alpha^2 after a projection, whose skip starts anew from variance 1, and alpha^2 more after each further block.
    """
    variances: list[float] = []
    for block in seen.blocks:
        before = 1.0 if block.skip == "projection" else variances[-1]
        variances.append(before + alpha**2)
    return variances


def as_the_theory_has_it(model: nn.Module) -> nn.Module:
    """timm's nf_resnet50 without the two things the analytic variance knows nothing of: the stem's filters are scaled
    by ReLU's gamma though no ReLU comes before them, and the shortcuts average 2x2 pixels, which takes variance
    away unless the pixels agree."""
    for module in model.modules():
        if type(module).__name__ == "DownsampleAvg" and not isinstance(module.pool, nn.Identity):
            module.pool = nn.AvgPool2d(1, stride=2)
    stem = next(m for m in model.modules() if isinstance(m, ScaledStdConv2d))
    with torch.no_grad():
        stem.gain.div_(1.7139588594436646)
    return model


def test_nf_resnet50_follows_the_analytic_variance() -> None:
    model = as_the_theory_has_it(fresh("nf_resnet50"))
    seen = inspection.inspect(model)
    wanted = expected_nf(seen, alpha=0.2)
    assert wanted[:4] == pytest.approx([1.04, 1.08, 1.12, 1.04])
    points = signal_propagation(Network(model), noise(8, 128))
    assert [p.variance for p in points] == pytest.approx(wanted, rel=0.2)
    assert max(p.mean_sq for p in points) < 0.1  # scaled weight standardization keeps the means near 0


def test_normalized_branches_add_one_each() -> None:
    """De & Smith 2020, section 2.1: every branch adds 1; a projection starts anew, from 1."""
    model = fresh("resnet50")
    points = signal_propagation(Network(model, noise(8, 64)), batch_statistics=True)
    assert [p.branch_variance for p in points] == pytest.approx([1.0] * 16, rel=1e-2)
    starts = [
        p for p, block in zip(points, inspection.inspect(model).blocks, strict=True) if block.skip == "projection"
    ]
    assert [p.variance for p in starts] == pytest.approx([2.0] * 4, rel=0.05)
    assert expected_nf(inspection.inspect(model), alpha=1.0)[:4] == [2.0, 3.0, 4.0, 2.0]
    # E[x^2] of what the blocks of the second stage read after its reset: 1, 1, 1 by Kim et al., equation 11.
    assert [p.variance + p.mean_sq - 1 for p in points[4:7]] == pytest.approx([1.0, 1.69, 2.43], rel=0.05)


def test_awake_revives_what_timm_zeroes() -> None:
    nfnet = {"channels": (256, 256, 256, 256)}
    for name, args in (("resnet18", NARROW["resnet18"]), ("nf_resnet26", {}), ("dm_nfnet_f0", nfnet)):
        asleep = timm.create_model(name, **args)
        x = noise(1, 64)
        dead = [p.added_variance for p in signal_propagation(Network(asleep, x), batch_statistics=True)]
        alive = [p.added_variance for p in signal_propagation(Network(awake(asleep), x), batch_statistics=True)]
        assert max(dead) == 0 < min(alive)


@pytest.mark.parametrize(
    ("name", "args"),
    [("vit_tiny_patch16_224", {"embed_dim": 48}), ("swin_tiny_patch4_window7_224", {"embed_dim": 24})],
)
def test_transformers(name: str, args: dict[str, int]) -> None:
    points = signal_propagation(Network(timm.create_model(name, **args), noise(1, 224)))
    assert len(points) == 24
    assert all(0 < p.variance < 100 and p.added_variance > 0 for p in points)


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = timm.create_model("resnet18", **NARROW["resnet18"])
    with pytest.raises(RefusedError, match="more than 1 value per channel"):
        signal_propagation(Network(model, noise(1, 32)), batch_statistics=True)
    with pytest.raises(RefusedError, match="size"):
        signal_propagation(Network(model), torch.zeros(1, 4, 64, 64))
    assert model.bn1.running_mean is not None


CURVES = {
    "small": [Point("s.0", "s", 1, 0.1, 1.0, 1.0, 0.5), Point("t.0", "t", 2, 0.2, 2.0, 1.0, 0.5)],
    "exploding": [Point("s.0", "s", 1, 0.1, 1.0, 1.0, 1.0), Point("t.0", "t", 2, 0.0, math.inf, 1e9, 1e9)],
}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    file = plots.plot(CURVES, tmp_path / f"a.{suffix}")
    assert file.stat().st_size > 5000
    if suffix == "svg":
        text = file.read_text()
        assert all(f"<!-- {label}" in text for label in ("small", "exploding", "residual block"))
    assert [f.name for f in tmp_path.iterdir()] == [file.name]


def test_every_other_stage_is_shaded() -> None:
    axes = Figure().subplots()
    plots.over_blocks(axes, ["a", "b", "b", "c", "c", "c"])
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert spans == [(0.5, 1.5), (3.5, 6.5)]


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="png"):
        plots.plot(CURVES, tmp_path / "a.xyz")
    with pytest.raises(OutputError, match="cannot write"):
        plots.plot(CURVES, tmp_path / "nowhere" / "a.png")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        plots.plot(CURVES, tmp_path / "taken.png")
    assert [f.name for f in tmp_path.iterdir()] == ["taken.png"]
