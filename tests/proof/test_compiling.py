"""Networks under torch.compile against eager mode."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from normswap.cli.app import main
from normswap.errors import VerificationError
from normswap.graph import recording
from normswap.layers.dynamic_tanh import DynamicTanh
from normswap.models.calling import Example
from normswap.proof import compiling, where
from normswap.surgery.network import Network


class Fault(nn.Module):
    """Compiled, it scales its output, or only what its input receives in backward."""

    def __init__(self, output: float, gradient: float) -> None:
        super().__init__()
        self.output = output
        self.gradient = gradient

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return 2 * self.output * (x + self.gradient * (x - x.detach()))
        return 2 * x


def departed(output: float = 1.0, gradient: float = 0.0) -> list[str]:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3), Fault(output, gradient), nn.BatchNorm2d(4), nn.Dropout(0.5)
    network = Network(
        nn.Sequential(*body, nn.Flatten(), nn.Linear(144, 2)), torch.randn(4, 3, 8, 8)
    )
    departures = compiling.compare_compiled(network, network.calls[0])
    assert len(departures) == 2
    apart = compiling.first_compiled_layer_apart(network, network.calls[0], departures)
    assert (apart and (apart.site, apart.kind)) == (None if output == 1 else ("1", "Fault"))
    return [departure.what for departure in departures if not departure.passes]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile records the network, and generates no code."""
    monkeypatch.setattr(
        nn.Module, "compile", functools.partialmethod(nn.Module.compile, backend="aot_eager")
    )


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_what_departs_is_named() -> None:
    assert not departed()
    assert departed(output=1.001)[0] == "output"
    assert departed(gradient=0.01) == ["gradient of 0.weight"]


class Overwrites(nn.Linear):
    """Its backward fails: what it needs has been overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        half = super().forward(x).sigmoid()
        square = half * half
        half.mul_(0.5)
        return square


class Labels(nn.Linear):
    """Its output has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


@pytest.mark.usefixtures("quick")
def test_gradients_are_left_out_where_there_are_none_and_nowhere_else() -> None:
    rows = torch.randn(2, 8)
    labels = compiling.compare_compiled(Network(Labels(8, 8), rows), Example((rows,)))
    assert [deviation.what for deviation in labels] == ["output"]
    with pytest.raises(VerificationError, match="does not train, so no gradients"):
        compiling.compare_compiled(Network(Overwrites(8, 8), rows), Example((rows,)))


class Enlarges(nn.Module):
    """It enlarges rounding, so that eager mode itself is far from float64."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e4 * x)


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_rounding_that_is_enlarged_excuses_no_error_and_proves_none() -> None:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 4, 3), Enlarges(), Fault(1.0005, 0.0), nn.Flatten(), nn.Linear(144, 2)
    network = Network(nn.Sequential(*body), torch.randn(4, 3, 8, 8))

    output = compiling.compare_compiled(network, network.calls[0])[0]

    assert output.allowed == pytest.approx(1e-4)
    assert not output.passes
    assert output.is_unproved


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_network_that_is_not_compiled_is_no_proof() -> None:
    with (
        torch.compiler.set_stance("force_eager"),
        pytest.raises(VerificationError, match="compiled nothing"),
    ):
        departed()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_no_compiler_is_one_line() -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": (None, "nowhere")}),
        pytest.raises(
            VerificationError, match=r"cannot compile the network here: .*nowhere.* such as g\+\+"
        ),
    ):
        departed()


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_command(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = str(tmp_path / "out")
    assert main(["convert", "demo", "--to", "dyt", "-o", out]) == 0
    command = ["verify", out, "--compile", "--data", "demo", "--samples", "4", "--workers", "0"]
    assert main(command) == 0
    assert capfd.readouterr().out.count("\ncompiled ") == 2
    forward = DynamicTanh.forward

    def faulty(layer: DynamicTanh, x: Tensor) -> Tensor:
        return forward(layer, x) * (1.01 if torch.compiler.is_compiling() else 1.0)

    monkeypatch.setattr(DynamicTanh, "forward", faulty)
    assert main(command) == 1
    failure = (
        "WRONG: under torch.compile the output differs from eager mode, first at conv1.1"
        " (DynamicTanh): relative L2"
    )
    assert failure in capfd.readouterr().out


def constant_groups(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """GroupNorm of one group per channel, on a map that is 1 but for rounding: in eager mode, and
    compiled.
    """
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    model = nn.Sequential(kind(shape[1]), nn.ELU(), nn.GroupNorm(shape[1], shape[1])).eval()
    torch._dynamo.reset()
    with torch.no_grad():
        return model(torch.ones(shape)), torch.compile(model)(torch.ones(shape))


POSTED = [
    pytest.param((6, 10, 12), marks=pytest.mark.xfail(strict=True, reason="pytorch issue 181696")),
    pytest.param((4, 5, 6, 6), marks=pytest.mark.xfail(strict=True, reason="pytorch issue 183120")),
]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("shape", POSTED)
def test_posted_cases(shape: tuple[int, ...]) -> None:
    eager, compiled = (values.clamp(min=1e-6).log() for values in constant_groups(shape))
    assert float((eager - compiled).abs().max()) < 1e-4


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_posted_cases_are_rounding_of_constant_groups() -> None:
    """A constant group's output is 0; rounding of its mean, times 1 / sqrt(eps), is what both modes
    give instead.
    """
    rounding = torch.finfo(torch.float32).eps / 1e-5**0.5
    for values in constant_groups((4, 5, 6, 6)):
        assert float(values.abs().max()) < rounding


class Gated(nn.Module):
    """Its gate is 0.5 and hardly moves: an error of `gate` is 1e-4 of that in what the gate
    multiplies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.act = nn.ReLU()
        self.gate = nn.Conv2d(8, 8, 1)
        self.body = nn.Conv2d(8, 8, 3)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.stem(x))
        x = x * (1e-3 * self.gate(x.mean((2, 3), keepdim=True))).sigmoid()
        return self.head(self.act(self.body(x)).mean((2, 3)))


@pytest.mark.parametrize("fused", [(), ("stem", "body")])
@pytest.mark.parametrize("faulty", ["stem", "gate", "body", "head", "", "stem gate body"])
def test_the_layer_is_named(faulty: str, fused: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    network = Gated().eval()
    values = dict[str, object]()
    other = copy.deepcopy(network)
    example = Example((torch.randn(2, 3, 12, 12),))
    for layer in faulty.split():
        other.get_parameter(f"{layer}.weight").data.mul_(1.3)
    recording.record_once(
        other, example, lambda name, value: values.update({name: copy.deepcopy(value)})
    )
    results = [value for name, value in values.items() if name not in fused]
    apart = where.first_layer_apart(network, example, results, 1e-6)

    assert (apart and apart.site) == next(iter(faulty.split()), None)
