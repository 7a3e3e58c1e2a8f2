"""Signal propagation: against hooks, against theory, and before and after exact conversions.

`PYTHONPATH=tests:tests/lab/benchmarks python tests/analysis/test_signal_propagation.py` prints
signals.md down to the section of `test_fresh_signals.py`.
"""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import lived_in, swapped
from support.tiny_modules import Net, conv
from timm.layers import BatchNormAct2d, GroupNormAct, LayerNormAct2d, ScaledStdConv2d
from torch import Tensor, nn

from normswap import shipped
from normswap.analysis import plots
from normswap.analysis.block_signals import Point, awake, bare, signal_propagation
from normswap.errors import OutputError, RefusedError
from normswap.graph import inspection
from normswap.images.datasets import make_loader
from normswap.layers.scalars import Scale
from normswap.surgery.network import Network

shipped.register_networks()
NARROW = {"resnet18": {"channels": (8, 16, 32, 64)}, "resnetv2_18": {"channels": (8, 16, 32, 64)}}


def noise(n: int = 4, side: int = 64, seed: int = 0) -> Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


def fresh(name: str, seed: int = 0, **kwargs: object) -> nn.Module:
    torch.manual_seed(seed)
    return awake(timm.create_model(name, **kwargs))


def test_one_constant_factor_is_taken_off_the_branch() -> None:
    """x + 0.5 (3 f(x)): the scalar of the branch, and before it a gain that belongs to f."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return x + net.conv2(net.conv1(x).relu()) * 3.0 * 0.5

    block = Net(forward, conv1=conv(), conv2=conv())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), block, nn.ReLU()).double().eval()
    x = noise(seed=1).double()
    branch_ends: list[Tensor] = []

    def keep(module: nn.Module, args: object, output: Tensor) -> None:
        branch_ends.append(output.clone())

    model.get_submodule("1.conv2").register_forward_hook(keep)
    with torch.no_grad():
        model(x)

    (point,) = signal_propagation(Network(model, x))

    variance = float(branch_ends[0].var((0, 2, 3), correction=0).mean())
    assert point.branch_variance == pytest.approx(9 * variance)
    assert point.added_variance == pytest.approx(2.25 * variance)


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
    half, one = (
        signal_propagation(Network(swapped(model, "skipinit", alpha=alpha), x))[0]
        for alpha in (0.5, 1.0)
    )
    assert half.branch_variance == pytest.approx(one.branch_variance)
    assert half.added_variance == pytest.approx(0.25 * half.branch_variance)
    assert half.variance < one.variance
    # f was divided by its own deviation.
    assert 0.3 < one.branch_variance < 3


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnetv2_18", marks=pytest.mark.slow)])
def test_bare_networks_have_the_identity_for_norms(name: str) -> None:
    """timm's v1 norms are torch's, before ReLUs that work in place; those of v2 hold the ReLU."""
    model = timm.create_model(name, **NARROW[name], zero_init_last=False).double()
    x = noise().double()
    expected = copy.deepcopy(model)
    for module in expected.modules():
        if isinstance(module, nn.BatchNorm2d):
            # Its statistics are 0 and 1, so it is the identity.
            module.eps = 0.0

    lived_in(model, noise().double())
    for key, value in expected.state_dict().items():
        if value.ndim == 4:
            model.get_parameter(key).data.copy_(value)
    points = signal_propagation(Network(bare(model)), x)

    for point, other in zip(points, signal_propagation(Network(expected), x), strict=True):
        assert point.variance == pytest.approx(other.variance, rel=1e-12)
        assert point.branch_variance == pytest.approx(other.branch_variance, rel=1e-12)
    assert any(isinstance(module, nn.BatchNorm2d) for module in model.modules())


NORM_ACTS: dict[str, Callable[[], nn.Module]] = {
    "BatchNormAct2d": lambda: BatchNormAct2d(4, act_layer=nn.SiLU),
    "BatchNormAct2d without activation": lambda: BatchNormAct2d(4, apply_act=False),
    "GroupNormAct": lambda: GroupNormAct(4, 2, act_layer=nn.ReLU),
    "LayerNormAct2d": lambda: LayerNormAct2d(4, act_layer=nn.GELU),
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
}


@pytest.mark.parametrize("name", NORM_ACTS)
def test_the_activation_of_a_norm_stays_where_the_norm_goes(name: str) -> None:
    """EfficientNet's norms apply the activation themselves."""
    norm: Any = NORM_ACTS[name]()
    model = lived_in(nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 5, 1)), noise(side=9))
    x = noise(side=9).double()

    answers = bare(model)(x)

    activation = getattr(norm, "act", nn.Identity())
    wanted = model[2](activation(model[0](x)))
    torch.testing.assert_close(answers, wanted, rtol=1e-12, atol=1e-12)


def as_the_theory_has_it(model: nn.Module) -> nn.Module:
    """Take two things off timm's nf_resnet50, in place, that the analytic variance leaves out.

    The stem's filters are scaled by ReLU's gamma though no ReLU comes before them. The shortcuts
    average 2x2 pixels, which takes variance away unless the pixels agree.
    """
    for module in model.modules():
        if type(module).__name__ == "DownsampleAvg" and not isinstance(module.pool, nn.Identity):
            module.pool = nn.AvgPool2d(1, stride=2)
    stem = next(module for module in model.modules() if isinstance(module, ScaledStdConv2d))
    with torch.no_grad():
        stem.gain.div_(1.7139588594436646)
    return model


@pytest.mark.slow
def test_nf_resnet50_follows_the_analytic_variance() -> None:
    model = as_the_theory_has_it(fresh("nf_resnet50"))

    # 1 + alpha^2 after a projection, whose skip starts anew from variance 1, and alpha^2 more after
    # each further block: the code of the ICLR 2022 blog post, "Multi-layer SPPs".
    expected: list[float] = []
    for block in inspection.inspect(model).blocks:
        skip_variance = 1.0 if block.skip == "projection" else expected[-1]
        expected.append(skip_variance + 0.2**2)
    assert expected[:4] == pytest.approx([1.04, 1.08, 1.12, 1.04])

    points = signal_propagation(Network(model), noise(4, 96))

    # Scaled weight standardization keeps the means near 0.
    assert [point.variance for point in points] == pytest.approx(expected, rel=0.2)
    assert max(point.mean_sq for point in points) < 0.1


def stacked(branch: Callable[[], nn.Module], x: Tensor, depth: int) -> list[Point]:
    blocks = [Net(lambda m, x: x + m.branch(x), branch=branch()) for _ in range(depth)]
    return signal_propagation(Network(nn.Sequential(*blocks), x.detach()), batch_statistics=True)


def fully_connected(depth: int, width: int, norm: bool, relu: bool) -> list[Point]:
    """The networks of De & Smith's figures 2 (a), 2 (b) and 5.

    They are set as in De & Smith's appendix B and appendix C.
    """

    def layer(inputs: int = width) -> nn.Module:
        linear = nn.Linear(inputs, width, bias=False)
        nn.init.normal_(linear.weight, std=math.sqrt((1 + relu) / inputs))
        return nn.Sequential(
            *[nn.BatchNorm1d(inputs, eps=1e-12)] * norm, *[nn.ReLU()] * relu, linear
        )

    torch.manual_seed(0)
    return stacked(layer, layer(width // 10)(torch.randn(width, width // 10)), depth)


@cache
def wide_resnet(
    depth: int,
    width: int,
    norm: bool,
    seeds: int = 1,
    *,
    relu: bool = True,
    dtype: torch.dtype = torch.float64,
) -> list[list[Point]]:
    """The network of De & Smith's Table 1, at several seeds.

    The bordering zeros are left out, as section 2.1 has none. Without ReLUs the weights of its
    blocks are smaller by sqrt(2).
    """
    network: Any = timm.create_model(
        "wide_resnet_cifar", depth=depth, width=width, norm=norm, per_image=True
    ).to(dtype)
    if not norm:
        network = swapped(network.eval(), "skipinit", alpha=1)
    convs = [module for module in network.stages.modules() if isinstance(module, nn.Conv2d)]

    for module in network.modules():
        module.padding_mode = "circular"
        if not relu and hasattr(module, "conv1"):
            module.act1 = module.act2 = nn.Identity()

    points = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        network.init_weights()
        for conv_layer in convs:
            conv_layer.weight.data *= 1 if relu else math.sqrt(0.5)
        x = noise(8, 8 + 8 * norm, seed).to(dtype)
        points.append(signal_propagation(Network(network, x), batch_statistics=norm))

    return points


def mean_squares(points: list[Point]) -> list[float]:
    """E[x^2] of each block's output."""
    return [point.variance + point.mean_sq for point in points]


@dataclass(frozen=True)
class Row:
    """What is measured of blocks l = 2, 3 ..., beside a paper.

    Args:
        name: The place in the paper, and the quantity.
        values: The measured value of each block.
        formula: What the paper says, as a function of l.
        theory: The values of the formula, perhaps of more blocks.
    """

    name: str
    values: list[float]
    formula: str
    theory: Any

    @property
    def ratios(self) -> Any:
        return np.array(self.values) / self.theory[: len(self.values)]


def of_papers(
    depth: int, width: int, seeds: int, shapes: tuple[tuple[int, int], ...] = ((16, 8), (100, 2))
) -> Iterator[Row]:
    yield from of_linear_networks(depth, width)
    yield from of_relu_network(depth, width)
    for layers, wide in shapes:
        yield from of_wide_resnet(layers, wide, seeds)


def of_linear_networks(depth: int, width: int) -> Iterator[Row]:
    block = np.arange(2, 200)
    plain = fully_connected(depth, width, norm=False, relu=False)
    branch = [point.branch_variance for point in plain[1:]]
    doubled = 2.0 ** (block - 1)
    yield Row(
        "De & Smith, figure 2 (a), linear, no norm: skip",
        mean_squares(plain),
        "2^(l - 1)",
        doubled,
    )
    yield Row("the same: branch", branch, "2^(l - 1)", doubled)

    normed = fully_connected(depth, width, norm=True, relu=False)
    branch = [point.branch_variance for point in normed[1:]]
    yield Row("figure 2 (b), linear, BatchNorm: skip", mean_squares(normed), "l", block)
    yield Row("the same: branch", branch, "1", block**0)


def of_relu_network(depth: int, width: int) -> Iterator[Row]:
    block = np.arange(2, 200)
    points = fully_connected(depth, width, norm=True, relu=True)
    variances = [point.variance for point in points]
    squared_means = [point.mean_sq for point in points]
    yield Row("figure 5, ReLU, BatchNorm: skip", mean_squares(points), "l", block)
    yield Row("the same: moving variance", variances, "l (1 - 1/pi)", block * (1 - 1 / math.pi))
    yield Row("the same: squared moving mean", squared_means, "l / pi", block / math.pi)


def of_wide_resnet(depth: int, width: int, seeds: int) -> Iterator[Row]:
    block = np.arange(2, 200)
    networks = wide_resnet(depth, width, norm=False, seeds=seeds)
    skips = np.array([mean_squares(points) for points in networks])
    branch_by_skip = (skips[:, 1:] / skips[:, :-1] - 1).mean(0)
    yield Row(
        f"section 2.1, {depth}-{width}, alpha = 1: branch by skip",
        list(branch_by_skip),
        "1",
        block**0,
    )

    stage = wide_resnet(depth, width, norm=True)[0][1 : skips.shape[1] // 3]
    shares = [point.added_variance / point.variance for point in stage]
    yield Row(
        f"section 2.1, {depth}-{width}, BatchNorm: share of the branch",
        shares,
        "1 / (l + 1)",
        1 / (block + 1),
    )


def on_cifar10(images: Tensor, depth: int) -> Iterator[Row]:
    """Figure 2 (c): a convolutional network on 100 of CIFAR-10's training images."""

    def layer(stride: int = 1, inputs: int = 100) -> nn.Sequential:
        convolution = nn.Conv2d(inputs, 100, 3, stride, 1, bias=False)
        nn.init.kaiming_normal_(convolution.weight)
        return nn.Sequential(nn.BatchNorm2d(inputs), nn.ReLU(), convolution)

    torch.manual_seed(0)
    points = stacked(layer, layer(2)(layer(2, 3)[-1](images)), depth)
    block = np.arange(2, 200)
    skip = mean_squares(points)
    variances = [point.variance for point in points]
    squared_means = [point.mean_sq for point in points]
    yield Row("figure 2 (c), convolutions, ReLU, BatchNorm: skip", skip, "l, a little less", block)
    yield Row("the same: moving variance", variances, "a little below the skip's", np.array(skip))
    yield Row(
        "the same: squared moving mean",
        squared_means,
        "grows with l",
        block * squared_means[0] / 2,
    )


def growth(depth: int, width: int, seeds: int, kind: str = "", **args: Any) -> str:
    """A row of the table: E[x^2] at block l by 2^l, over random networks.

    2^l is the paper's 2^(l - 1) for a stem that gives 2.
    """
    networks = wide_resnet(depth, width, norm=False, seeds=seeds, **args)
    skips = np.array([mean_squares(points) for points in networks])
    ratios = skips / 2.0 ** np.arange(2, skips.shape[1] + 2)

    cells: list[str] = []
    for block in (2, 5, -1):
        column = ratios[:, block]
        standard_error = column.std(ddof=1) / math.sqrt(seeds)
        cells.append(f"{column.mean():.2f} ± {standard_error:.2f}")
    last = ratios[:, -1]
    ends = f"{np.median(last):.2f} | {np.log2(last).std(ddof=1):.1f}"
    return f"| {depth}-{width}{kind} | {seeds} | {' | '.join(cells)} | {ends} |"


def after_reset() -> list[float]:
    """E[x^2] of blocks 2, 3 and 4 of a ResNet-50's second stage, where the branch adds 1."""
    points = signal_propagation(Network(fresh("resnet50"), noise(8, 64)), batch_statistics=True)
    return [value - 1 for value in mean_squares(points)[4:7]]


def slope(role: str) -> float:
    """Figure 6 of Kim et al. for a class of gammas.

    It is the log-log slope of the first update of gamma / |gamma| by |gamma|.
    """
    network = fresh("resnet18", channels=(16, 32, 64, 128), num_classes=10).double().train()
    for module in network.modules():
        # A larger eps is seen beside the variance that a small gamma leaves.
        module.eps = 1e-15  # type: ignore[assignment]

    x = noise(8, 32).double()
    gammas = [
        network.get_parameter(f"{norm.path}.weight")
        for norm in inspection.inspect(network, x[:2]).norms
        if norm.role == role
    ]

    powers = (-3, 0, 3)
    updates: list[float] = []
    for power in powers:
        network.zero_grad()
        for gamma in gammas:
            nn.init.constant_(gamma, 2.0**power)
        F.cross_entropy(network(x), torch.arange(8)).backward()
        size = torch.nn.utils.get_total_norm(gammas)
        update = torch.nn.utils.get_total_norm([gamma.grad for gamma in gammas])
        updates.append(math.log2(float(update / size)))

    return float(np.polyfit(powers, updates, 1)[0])


@pytest.mark.slow
def test_the_signal_at_initialization_is_the_papers() -> None:
    for row in of_papers(12, 200, 2, ((16, 8),)):
        assert np.mean(row.ratios) == pytest.approx(1, rel=0.15), (row.name, row.formula)
    assert after_reset() == pytest.approx([1.0, 1.69, 2.43], rel=0.05)
    assert slope("other") == pytest.approx(-2, abs=0.01)
    assert slope("last") > -1


class Gained(nn.Module):
    """A block with a scalar on its branch, as in timm's NF networks."""

    def __init__(self, skipinit_gain: float) -> None:
        super().__init__()
        self.conv = ScaledStdConv2d(3, 3, 3)
        self.skipinit_gain = nn.Parameter(torch.tensor(skipinit_gain))


def test_awake_sets_to_1_what_multiplies_by_0_and_nothing_else() -> None:
    """A gamma is set if all of it is 0. Filters and betas of 0 multiply no output by 0."""
    model = nn.ModuleDict(
        {
            "zero": nn.BatchNorm2d(3),
            "partly": nn.GroupNorm(1, 2),
            "two": nn.LayerNorm(3),
            "filters": nn.Conv2d(3, 2, 3),
            "gained": Gained(0.0),
            "live": Gained(0.25),
            "scalar": Scale(0.0),
        }
    )
    values = dict(model.named_parameters())
    with torch.no_grad():
        values["zero.weight"].zero_()
        values["partly.weight"][0] = 0
        values["two.weight"].fill_(2)
        values["filters.weight"].zero_()
        values["gained.conv.gain"].zero_()
    expected = {name: value.detach().clone() for name, value in values.items()}
    for name in ("zero.weight", "gained.conv.gain", "gained.skipinit_gain", "scalar.alpha"):
        expected[name] = torch.ones_like(expected[name])

    found = dict(awake(model).named_parameters())

    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not value.equal(expected[name])] == []
    assert not values["zero.weight"].any()


@pytest.mark.slow
def test_awake_revives_what_timm_zeroes() -> None:
    nfnet = {"channels": (256, 256, 256, 256)}
    for name, args in (
        ("resnet18", NARROW["resnet18"]),
        ("nf_resnet26", {}),
        ("dm_nfnet_f0", nfnet),
    ):
        asleep = timm.create_model(name, **args)
        x = noise(2, 32)
        dead = signal_propagation(Network(asleep, x), batch_statistics=True)
        alive = signal_propagation(Network(awake(asleep), x), batch_statistics=True)

        assert max(point.added_variance for point in dead) == 0
        assert min(point.added_variance for point in alive) > 0


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("vit_tiny_patch16_224", {"embed_dim": 48}),
        ("swin_tiny_patch4_window7_224", {"embed_dim": 24}),
    ],
)
def test_transformers(name: str, args: dict[str, int]) -> None:
    points = signal_propagation(Network(timm.create_model(name, **args), noise(1, 224)))
    assert len(points) == 24
    for point in points:
        assert 0 < point.variance < 100
        assert point.added_variance > 0


def test_inputs_that_do_not_fit_are_refused() -> None:
    model = timm.create_model("resnet18", **NARROW["resnet18"])
    with pytest.raises(RefusedError, match="more than 1 value per channel"):
        signal_propagation(Network(model, noise(1, 32)), batch_statistics=True)
    with pytest.raises(RefusedError, match="size"):
        signal_propagation(Network(model), torch.zeros(1, 4, 64, 64))
    assert model.bn1.running_mean is not None


CURVES = {
    "small": [Point("s.0", "s", 1, 0.1, 1.0, 1.0, 0.5), Point("t.0", "t", 2, 0.2, 2.0, 1.0, 0.5)],
    "exploding": [
        Point("s.0", "s", 1, 0.1, 1.0, 1.0, 1.0),
        Point("t.0", "t", 2, 0.0, math.inf, 1e9, 1e9),
    ],
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_pictures(tmp_path: Path, suffix: str) -> None:
    file = plots.plot(CURVES, tmp_path / f"a.{suffix}", "ten images")

    assert file.stat().st_size > 5000
    if suffix == "svg":
        text = file.read_text(encoding="utf-8")
        title = "Signal by residual block, on ten images (logarithmic axes)"
        labels = ("small", "exploding", "residual block", title)
        assert all(f"<!-- {label}" in text for label in labels)
    assert [path.name for path in tmp_path.iterdir()] == [file.name]


def test_all_axes_are_of_one_kind() -> None:
    """The variance alone spans a factor of a thousand."""
    steep = {"one": [Point("s.0", "s", 1, 0.5, 1.0, 1.0, 0.5), Point("t", "t", 2, 1, 1000, 1, 1)]}
    flat = {"one": [Point("s.0", "s", 1, 0.5, 1.0, 1.0, 0.5), Point("t", "t", 2, 1, 10, 1, 1)]}

    assert plots.is_logarithmic(steep, plots.PANELS)
    assert not plots.is_logarithmic(flat, plots.PANELS)


@pytest.mark.parametrize("value", [0.0, math.inf])
def test_a_quantity_without_a_number_to_draw_asks_for_no_axis(value: float, tmp_path: Path) -> None:
    """As the branches of a fresh network, which are all multiplied by 0."""
    points = [Point("s.0", "s", 1, 0.5, 1.0, value, value), Point("t", "t", 2, 1, 2, value, value)]

    assert not plots.is_logarithmic({"one": points}, plots.PANELS)
    assert plots.plot({"one": points}, tmp_path / "a.svg", "noise").exists()


def test_every_other_stage_is_shaded() -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    plots.over_blocks(axes, ["a", "b", "b", "c", "c", "c"])
    spans = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in axes.patches]  # type: ignore[attr-defined]
    assert spans == [(0.5, 1.5), (3.5, 6.5)]


def test_a_picture_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="png"):
        plots.plot(CURVES, tmp_path / "a.xyz", "noise")
    with pytest.raises(OutputError, match="cannot write"):
        plots.plot(CURVES, tmp_path / "nowhere" / "a.png", "noise")
    (tmp_path / "taken.png").mkdir()
    with pytest.raises(OutputError, match="cannot write"):
        plots.plot(CURVES, tmp_path / "taken.png", "noise")
    assert [path.name for path in tmp_path.iterdir()] == ["taken.png"]


if __name__ == "__main__":
    import circumstances
    from support.cifar_tars import unpacked
    from support.trained_networks import SHARED

    tar = str(unpacked(SHARED / "data" / "cifar10" / "train.tar.xz"))
    ((images, _),) = make_loader(
        timm.create_model("wide_resnet_cifar"), tar, batch_size=100, workers=0, samples=100
    )
    print("# Signals at initialization, beside De & Smith's and Kim et al.'s\n")
    print("\n".join(circumstances.lines("python tests/analysis/test_signal_propagation.py", "cpu")))
    print(
        "Of block l, and how far off, on average over blocks and at most; of one network, branch by"
        " skip of 64.\n"
    )
    print(
        "| where | paper | l = 2 | l = 4 | l = 48 | off, % | at most"
        " |\n|---|---|---|---|---|---|---|"
    )
    reset = Row("Kim et al., equation 11, resnet50: E[x^2]", after_reset(), "1", np.ones(3))
    for row in (*of_papers(48, 1000, 64), *on_cifar10(images, 48), reset):
        cells = [f"{value:.3g}" for value in row.values] + [""] * 48
        off = 100 * (row.ratios - 1)
        ends = f"{np.mean(off):+.0f} | {max(abs(off)):.0f}"
        print(f"| {row.name} | {row.formula} | {cells[0]} | {cells[2]} | {cells[46]} | {ends} |")
    print("""
De & Smith, section 2.1, alpha = 1: E[x^2] of the input of block l, by 2^(l - 1) and the stem's 2:
mean over networks and its standard error; for the last block median and deviation of log2, too. The
mean is the paper's. A network of finite width drifts: the chances of blocks multiply, and the
product spreads like a log-normal one, whose median is below its mean. ReLUs widen that: their
outputs have a mean, so that all images and pixels of a channel come to agree, and only channels are
left to average over.

| network | networks | l = 4 | l = 7 | last | median | deviation of log2 |
|---|---|---|---|---|---|---|""")
    for shape in ((16, 2, 64), (16, 8, 64), (100, 2, 64), (100, 8, 16)):
        print(growth(*shape))
    print(growth(100, 2, 64, ", linear", relu=False))
    print(growth(100, 2, 64, ", float32", dtype=torch.float32))
    print("\n| Kim et al., figure 6 | paper | slope |\n|---|---|---|")
    for role in ("other", "stem", "down", "last"):
        print(f"| {role} | near -2 | {slope(role):.2f} |")
    print("\nIn a ResNet-18 of 16 to 128 channels with 10 classes, on 8 images of 32 pixels.")


class Rows(nn.Module):
    """A residual block of one dimension: (N, C, L), which has the shape of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


class ChannelsLast(nn.Module):
    """A residual block of (N, H, W, C), in a network that does not say so."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(self.fc1(self.norm(x)).relu())


class Turned(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


@pytest.mark.parametrize("batches", [(16,), (16, 5)])
@pytest.mark.parametrize("kind", ["one dimension", "channels last"])
def test_channels_are_where_the_layers_have_them(kind: str, batches: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    shape: tuple[int, ...] = (4, 50)
    stem: list[nn.Module] = [nn.Conv1d(4, 8, 3)]
    block: nn.Module = Rows()
    axes = (0, 2)
    if kind == "channels last":
        shape, stem, block, axes = (
            (3, 9, 7),
            [nn.Conv2d(3, 8, 3), Turned()],
            ChannelsLast(),
            (0, 1, 2),
        )
    model = nn.Sequential(*stem, block).double().eval()
    inputs = [torch.randn(count, *shape, dtype=torch.float64) for count in batches]

    (point,) = signal_propagation(Network(model, inputs[0]), inputs)

    with torch.no_grad():
        outputs = torch.cat([model(x) for x in inputs])
    assert point.mean_sq == pytest.approx(float(outputs.mean(axes).square().mean()))
    assert point.variance == pytest.approx(float(outputs.var(axes, correction=0).mean()))
