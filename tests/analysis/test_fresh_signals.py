"""Variances of fresh networks by depth, beside the formulas of the papers.

`PYTHONPATH=tests:tests/lab/benchmarks python tests/analysis/test_fresh_signals.py` prints the last
section of signals.md.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.lived_in_networks import swapped
from timm.layers import ScaledStdConv2d
from torch import Tensor, nn

from normswap import shipped
from normswap.analysis.block_signals import Point, awake, signal_propagation
from normswap.graph import inspection
from normswap.surgery.network import Network

shipped.register_networks()


def noise(count: int, side: int) -> Tensor:
    return torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(0)).double()


def without_borders(network: nn.Module) -> None:
    """Let convolutions continue maps at the other side, in place: the papers know no borders."""
    for path, module in list(network.named_modules()):
        if isinstance(module, ScaledStdConv2d) and any(module.padding):
            # timm's standardized convolution knows zeros alone.
            padded = nn.Sequential(nn.CircularPad2d(int(module.padding[0])), module)
            module.padding = (0, 0)
            network.set_submodule(path, padded)
        elif isinstance(module, nn.Conv2d):
            module.padding_mode = "circular"


def he(network: nn.Module) -> Any:
    """The network with He's weights, drawn in place; timm divides by outputs, and not by inputs."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
    return network.double()


def wide_resnet(depth: int, width: int, seed: int = 0) -> Any:
    """A fresh v2 Wide-ResNet with BatchNorms."""
    torch.manual_seed(seed)
    return he(timm.create_model("wide_resnet_cifar", depth=depth, width=width))


def preact_resnet50(seed: int) -> Any:
    """timm's fresh v2 ResNet-50."""
    torch.manual_seed(seed)
    return he(timm.create_model("resnetv2_50", zero_init_last=False))


def mean_squares(points: list[Point]) -> Any:
    """E[x^2] of each block's output."""
    return np.array([point.variance + point.mean_sq for point in points])


Factors = Callable[[int, int], tuple[float, float]]


@dataclass(frozen=True)
class Start:
    """A start of a fresh network.

    Args:
        scheme: The scheme that makes it.
        options: The scheme's options.
        formula: What the paper says of block l of L.
        factors: The paper's a and b in y = a x + b f(x) at block l of L. None stands for the
            analytic variance of normalizer-free networks.
    """

    scheme: str
    options: dict[str, Any]
    formula: str
    factors: Factors | None

    @property
    def words(self) -> str:
        """The scheme and its options, as on the command line."""
        given = (f"--{name} {value}" for name, value in self.options.items())
        return " ".join((self.scheme, *given))

    def theory(self, blocks: list[Any]) -> Any:
        """Return the formula's value at each block, by the first's but for `nf`."""
        values: list[float] = []
        for number, block in enumerate(blocks, 1):
            if self.factors is None:
                before = values[-1] if block.skip != "projection" else 1.0
                values.append(before + 0.2**2)
            elif number == 1:
                values.append(1.0)
            else:
                a, b = self.factors(number, len(blocks))
                values.append(values[-1] * (a**2 + b**2))
        return np.array(values)

    def divided(self, blocks: list[Any]) -> Any:
        """Return by what the stream is divided at each block: v2 skips have no place for a."""
        factor = 1.0
        factors: list[float] = []
        for number, block in enumerate(blocks, 1):
            if self.factors is not None:
                before = factor if block.skip != "projection" else 1.0
                factor = before * self.factors(number, len(blocks))[0]
            factors.append(factor)
        return np.array(factors)


def by_rule(rule: str, formula: str, factors: Factors) -> Start:
    return Start("residual-scale", {"rule": rule, "init": "reset"}, formula, factors)


STARTS = (
    by_rule("balduzzi", "1", lambda block, depth: (0.5**0.5, 0.5**0.5)),
    by_rule("szegedy", "1.04^(l - 1)", lambda block, depth: (1.0, 0.2)),
    by_rule("hanin", "product of 1 + 0.81^i", lambda block, depth: (1.0, 0.9**block)),
    by_rule("arpit", "(1 + 1 / L^2)^(l - 1)", lambda block, depth: (1.0, 1 / depth)),
    by_rule(
        "rescale",
        "1",
        lambda block, depth: ((1 - 1 / (block + depth)) ** 0.5, (block + depth) ** -0.5),
    ),
    Start("nf", {"init": "reset"}, "1.04 after a projection, then 0.04 more", None),
    Start("fixup", {"init": "fixup"}, "1", lambda block, depth: (1.0, 0.0)),
    Start("skipinit", {"alpha": 0}, "1", lambda block, depth: (1.0, 0.0)),
)


@dataclass(frozen=True)
class Curves:
    """What was measured of a start in several networks (network, block), beside its formula."""

    start: Start
    values: Any
    theory: Any


def curves(draw: Callable[[int], nn.Module], x: Tensor, networks: int) -> Iterator[Curves]:
    """Measure fresh networks after each start.

    Args:
        draw: Draws a network with BatchNorms, given a seed.
        x: N(0, 1) noise.
        networks: The number of networks.
    """
    sources = [draw(seed) for seed in range(networks)]
    blocks = list(inspection.inspect(sources[0], x[:1]).blocks)
    for start in STARTS:
        values = [measured(source, start, x) for source in sources]
        stream = np.array(values) * start.divided(blocks) ** 2
        if start.factors is not None:
            stream = stream / stream[:, :1]
        yield Curves(start, stream, start.theory(blocks))


def measured(source: nn.Module, start: Start, x: Tensor) -> Any:
    """Return E[x^2] after each block of a network after a start."""
    result = swapped(source, start.scheme, **start.options)
    without_borders(result)
    if start.factors is not None:
        return mean_squares(signal_propagation(Network(result), x))

    # SkipInit's gain of 0 would hide the branches.
    return mean_squares(signal_propagation(Network(awake(result)), x))


@dataclass(frozen=True)
class Equation:
    """An equation of Kim et al., and what was measured at each place that it speaks of."""

    name: str
    formula: str
    expected: float
    values: list[float] = field(default_factory=list)


# Any numbers that differ: gamma_0, gamma_1, gamma_2, gamma_down and gamma_last.
GAMMA_0 = 1.3
GAMMA_1 = 0.5
GAMMA_2 = 1.5
DOWN = 0.7
LAST = 1.2


def equations() -> Iterator[Equation]:
    yield from of_preact_blocks()
    yield from of_original_blocks()


def set_gammas(network: nn.Module, value: float, ending: str) -> None:
    """Set all gammas whose names end so to a value, in place."""
    for name, gamma in network.named_parameters():
        if name.endswith(ending):
            nn.init.constant_(gamma, value)


def of_preact_blocks() -> Iterator[Equation]:
    """Equations 4 to 6, 16 and 17: PreActResNet, cases 1 and 3."""
    network = wide_resnet(22, 8)
    without_borders(network)
    set_gammas(network, GAMMA_1, "norm1.weight")
    set_gammas(network, GAMMA_2, "norm2.weight")
    points = signal_propagation(Network(network), noise(8, 32), batch_statistics=True)
    blocks = inspection.inspect(network, noise(1, 32)).blocks

    sums = mean_squares(points)
    added = []
    reset = []
    for number, block in enumerate(blocks):
        if block.skip == "projection":
            reset.append(float(sums[number]))
        else:
            added.append(float(sums[number] - sums[number - 1]))
    yield Equation("equations 4 to 6, v2: added by a block", "gamma_2^2", GAMMA_2**2, added)
    both = GAMMA_1**2 + GAMMA_2**2
    yield Equation(
        "equations 16 and 17, v2: after a downsampling block", "gamma_1^2 + gamma_2^2", both, reset
    )


def of_original_blocks() -> Iterator[Equation]:
    """Equations 12 to 15, 18 and 19: ResNet, cases 2 and 4, with x after the ReLU."""
    torch.manual_seed(0)
    network: Any = timm.create_model("resnet18").double().train()
    without_borders(network)
    nn.init.constant_(network.bn1.weight, GAMMA_0)
    set_gammas(network, LAST, "bn2.weight")
    set_gammas(network, DOWN, "downsample.1.weight")

    seen: dict[str, float] = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: Tensor) -> None:
            seen[name] = float(output.square().mean())

        return hook

    downsampling = [network.layer2[0], network.layer3[0], network.layer4[0]]
    network.act1.register_forward_hook(keep("stem"))
    for number, block in enumerate(downsampling):
        block.downsample.register_forward_hook(keep(f"skip {number}"))
        block.bn2.register_forward_hook(keep(f"branch {number}"))
        block.act2.register_forward_hook(keep(f"block {number}"))
    with torch.no_grad():
        network(noise(8, 64))

    def of(name: str) -> list[float]:
        return [seen[f"{name} {number}"] for number in range(len(downsampling))]

    yield Equation("equation 12, v1: downsampling skip", "gamma_down^2", DOWN**2, of("skip"))
    yield Equation("equation 13, v1: its branch", "gamma_last^2", LAST**2, of("branch"))
    half = (DOWN**2 + LAST**2) / 2
    formula = "(gamma_down^2 + gamma_last^2) / 2"
    yield Equation("equations 14 and 15, v1: after the block", formula, half, of("block"))
    yield Equation(
        "equations 18 and 19, v1: behind the stem", "gamma_0^2 / 2", GAMMA_0**2 / 2, [seen["stem"]]
    )


@pytest.mark.slow
def test_fresh_starts_have_the_papers_variances() -> None:
    """Of WRN-16-8. A finite width leaves a tenth."""

    def draw(seed: int) -> nn.Module:
        return wide_resnet(16, 8, seed)

    for start in curves(draw, noise(4, 16), networks=4):
        ratios = start.values / start.theory
        assert np.mean(ratios) == pytest.approx(1, rel=0.1), start.start.words
        assert np.mean(ratios[:, -1]) == pytest.approx(1, rel=0.15), start.start.words


@pytest.mark.slow
def test_variances_by_gammas_are_kims() -> None:
    for equation in equations():
        assert equation.values == pytest.approx([equation.expected] * len(equation.values), rel=0.1)


def tables() -> Iterator[str]:
    """The lines of signals.md."""
    yield """
Fresh networks with He's weights after a start, on N(0, 1) noise: three WRN-40-10 on 4 images of
16 pixels, and six ResNet-50 (timm's `resnetv2_50`, since the formulas are of v2 blocks) on 2 of
96. E[x^2] after block l by that after block 1, and of `nf` E[x^2] itself, with SkipInit's gains
at 1; its formula takes what the stem gives for variance 1, which the max pool of ResNet-50
changes. The skips of v2 blocks have no place for the a of `balduzzi` and `rescale`, so the stream
is divided by it, and what reads the stream multiplies by it: the figures are of what is read.
Mean over the networks, and of the last block the standard error, too, which is the drift of
finite width.

| network | start | paper | l = 2 | l = 8 | last | paper's last |
|---|---|---|---|---|---|---|"""
    wide = curves(lambda seed: wide_resnet(40, 10, seed), noise(4, 16), networks=3)
    preact = curves(preact_resnet50, noise(2, 96), networks=6)
    for name, starts in (("WRN-40-10", wide), ("ResNet-50", preact)):
        for curve in starts:
            mean = curve.values.mean(0)
            error = curve.values[:, -1].std(ddof=1) / math.sqrt(len(curve.values))
            shown = f"{mean[1]:.3g} | {mean[7]:.3g} | {mean[-1]:.3g} ± {error:.2g}"
            cells = f"{curve.start.formula} | {shown} | {curve.theory[-1]:.3g}"
            yield f"| {name} | `{curve.start.words}` | {cells} |"

    yield f"""
Kim et al., with gamma_0 = {GAMMA_0}, gamma_1 = {GAMMA_1}, gamma_2 = {GAMMA_2}, gamma_down = {DOWN},
gamma_last = {LAST}, in a WRN-22-8 (v2) and in a ResNet-18 (v1):

| Kim et al. | paper | is | measured, lowest and highest | off, % |
|---|---|---|---|---|"""
    for equation in equations():
        low, high = min(equation.values), max(equation.values)
        off = 100 * (math.fsum(equation.values) / len(equation.values) / equation.expected - 1)
        shown = f"{equation.expected:.3g} | {low:.3g} to {high:.3g}"
        yield f"| {equation.name} | {equation.formula} | {shown} | {off:+.0f} |"


if __name__ == "__main__":
    import circumstances

    print("## Fresh networks, and Kim et al.'s equations\n")
    print("\n".join(circumstances.lines("python tests/analysis/test_fresh_signals.py", "cpu")))
    print("\n".join(tables()))
