"""Doors for others: norms and schemes of third parties, by call and by an installed package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.lived_in_networks import distance
from torch import Tensor, nn

import normswap
from normswap import plugins, schemes
from normswap.errors import OptionError, RefusedError
from normswap.sites import affine, known_norms

PACKAGE = Path(__file__).parent / "plugin"
DEMO = Path(normswap.__file__).parent / "demo_data"


class Odd(nn.BatchNorm2d):
    """A BatchNorm with a forward of its own, which computes the same.

    That forward must not be run on small maps.
    """

    def forward(self, input: Tensor) -> Tensor:
        assert input.shape[-1] > 4
        return super().forward(input) + 0


class PerPixel(nn.Module):
    """A norm that is no BatchNorm: y = 2 x + 1 per channel."""

    def __init__(self) -> None:
        super().__init__()
        self.two = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.two.view(1, -1, 1, 1) + 1


@pytest.fixture(autouse=True)
def forgetful(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(known_norms, "_REGISTERED", {})
    monkeypatch.setattr(schemes, "_registered", {})


def network(norm: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 5))
    for name, value in norm.named_buffers():
        if value.is_floating_point():
            value.copy_(torch.rand(4) + 0.5 if "var" in name else torch.randn(4))
    return model.eval()


def test_an_unknown_norm_is_refused_with_the_way_to_register_it() -> None:
    with pytest.raises(
        RefusedError, match=r"1: Odd has a forward of its own.*normswap\.register_norm\(Odd"
    ):
        normswap.convert(network(Odd(4)), to="folded", input_size=(3, 8, 8))


def test_a_batchnorm_that_somebody_vouches_for_folds() -> None:
    assert normswap.register_norm(Odd) is Odd
    done = normswap.convert(network(Odd(4)), to="folded", input_size=(3, 8, 8))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in done.model.modules())
    assert done.report.exact
    assert done.report.worst.relative_l2 < 1e-6


def test_a_subclass_of_what_is_vouched_for_is_not_meant() -> None:
    class Odder(Odd):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) * 2

    normswap.register_norm(Odd)

    with pytest.raises(RefusedError, match="Odder has a forward of its own"):
        normswap.convert(network(Odder(4)), to="folded", input_size=(3, 8, 8))


def test_an_affine_norm_of_any_class_folds() -> None:
    normswap.register_norm(PerPixel, affine=lambda norm: (norm.two, torch.ones(4)))
    source = network(PerPixel())
    done = normswap.convert(source, to="folded", input_size=(3, 8, 8))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert distance(source(x), done.model(x)) < 1e-6

    assert not any(isinstance(module, PerPixel) for module in done.model.modules())


def test_a_wrong_reading_is_noticed() -> None:
    normswap.register_norm(PerPixel, affine=lambda norm: (norm.two, torch.zeros(4)))
    with pytest.raises(normswap.NormswapError, match="the result of folded is wrong"):
        normswap.convert(network(PerPixel()), to="folded", input_size=(3, 8, 8))


def test_a_norm_with_statistics_per_sample_is_left_alone_and_can_be_estimated() -> None:
    class Mine(nn.GroupNorm):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input)

    model = network(Mine(2, 4))

    with pytest.raises(RefusedError, match="nothing to convert"):
        normswap.convert(
            model, to="folded", input_size=(3, 8, 8), calibrate=[torch.randn(8, 3, 8, 8)]
        )

    normswap.register_norm(Mine, per_sample=True)
    done = normswap.convert(
        model, to="folded", input_size=(3, 8, 8), calibrate=[torch.randn(8, 3, 8, 8)]
    )

    assert not any(affine.is_norm(module) for module in done.model.modules())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (nn.GroupNorm, {}),
        (Odd, {"affine": lambda norm: (norm.weight, norm.bias), "per_sample": True}),
    ],
)
def test_what_cannot_be_vouched_for(kind: type[nn.Module], options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        normswap.register_norm(kind, **options)  # type: ignore[arg-type]


def test_a_scheme_has_a_name_of_its_own() -> None:
    scheme = normswap.Scheme(schemes.get("folded").plan)
    for name in ("folded", "opacus", "unfold"):
        with pytest.raises(OptionError, match=f"there is a scheme '{name}' already"):
            normswap.register_scheme(name, scheme)

    assert normswap.register_scheme("mine", scheme).name == "mine"
    assert "mine" in schemes.names()

    done = normswap.convert(network(nn.BatchNorm2d(4)), to="mine", input_size=(3, 8, 8))

    assert [step.scheme for step in done.plan.steps] == ["mine"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment in which the example package is installed."""
    site = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(site),
    ]
    done = subprocess.run([*command, str(PACKAGE)], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr

    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *filter(None, sys.path)])}


def cli(environment: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "normswap", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_an_installed_scheme_is_a_target_of_the_command_line(
    installed: dict[str, str], tmp_path: Path
) -> None:
    listed = json.loads(cli(installed, "schemes", "--json").stdout)
    mine = next(row for row in listed if row["name"] == "halved-skipinit")

    assert mine["options"] == {"share": 0.5}
    assert not mine["exact"]

    words = (
        "convert",
        str(DEMO),
        "--to",
        "halved-skipinit",
        "--share",
        "0.25",
        "-o",
        str(tmp_path / "out"),
        "--json",
    )
    done = cli(installed, *words)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps"][0]["options"]["share"] == 0.25
    assert cli(installed, "inspect", str(tmp_path / "out")).returncode == 0


def test_an_installed_norm_folds(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed["PYTHONPATH"].split(os.pathsep)[0])
    plugins.load.cache_clear()
    name = "normswap_example.tempered"

    assert name not in sys.modules

    normswap.convert(network(nn.BatchNorm2d(4)), to="folded", input_size=(3, 8, 8))
    done = normswap.convert(
        network(sys.modules[name].TemperedNorm(4)), to="folded", input_size=(3, 8, 8)
    )

    assert done.report.passed
    assert [type(m).__name__ for m in done.model] == [
        "Conv2d",
        "Vacant",
        "ReLU",
        "Flatten",
        "Linear",
    ]


def test_a_broken_plugin_is_one_line(installed: dict[str, str], tmp_path: Path) -> None:
    info = tmp_path / "broken-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: broken\nVersion: 1\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[normswap.schemes]\nbroken = nowhere_at_all\n", encoding="utf-8"
    )
    done = cli(
        {**installed, "PYTHONPATH": f"{tmp_path}{os.pathsep}{installed['PYTHONPATH']}"}, "schemes"
    )

    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: the plugin nowhere_at_all cannot be loaded: ModuleNotFoundError"
    )
    assert done.stderr.count("\n") == 1
