"""Situations that conversions met in other people's networks, each by a small network of its own.

For each that can be converted: the result computes what its source does, by forwards of both, and
is loaded as it was saved, into a skeleton with other weights. For each that cannot: the reason.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import normswap
from normswap.errors import NormswapError, RefusedError, SourceError
from normswap.sites import known_norms

IMAGES = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
SPECTRA = torch.randn(
    2, 3, 16, 16, dtype=torch.complex64, generator=torch.Generator().manual_seed(0)
)
# Whole areas of equal values, so that the largest of a window is in several places.
FLAT = torch.arange(2 * 16 * 16).div(64, rounding_mode="floor").reshape(2, 1, 16, 16)
TIES = FLAT.expand(2, 3, 16, 16) / 8


class Base(nn.Module):
    """A convolution, its norm, and a head."""

    def __init__(self, channels: int = 3, answers: int = 4) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, answers)

    def answer(self, maps: Tensor) -> Tensor:
        answer: Tensor = self.head(maps.relu().mean((2, 3)))
        return answer

    def forward(self, x: Any) -> Tensor:
        return self.answer(self.norm(self.conv(x)))


class TakesSpectra(Base):
    """Its images are complex, and are seen as real and imaginary channels."""

    def __init__(self) -> None:
        super().__init__(channels=6)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x.real, x.imag], 1))


class GivesSpectra(Base):
    """Its output is complex."""

    def forward(self, x: Tensor) -> Tensor:
        spectra: Tensor = torch.fft.rfft2(self.norm(self.conv(x)))
        return spectra


class Domains(Base):
    """A norm for each of two domains, behind one convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)])

    def forward(self, x: Tensor, domain: int = 0) -> Tensor:
        norms: Any = self.norm
        return self.answer(norms[domain](self.conv(x)))


class Grid(Base):
    """Keeps a grid of the last size that it saw."""

    grid: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        maps = self.norm(self.conv(x))
        if self.grid is None or self.grid.shape[-1] != maps.shape[-1]:
            self.grid = torch.linspace(-1, 1, maps.shape[-1]).to(maps)
        return self.answer(maps * self.grid)


class TwoWays(Base):
    """Gives the probability of each of two classes, from one score."""

    def __init__(self) -> None:
        super().__init__(answers=1)

    def forward(self, x: Tensor) -> Tensor:
        yes = super().forward(x).sigmoid()
        return torch.cat([1 - yes, yes], 1)


class Unpools(Base):
    """Puts the largest of each window back where it was."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, return_indices=True)
        self.unpool = nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        maps, places = self.pool(self.norm(self.conv(x)))
        return self.answer(self.unpool(maps, places))


class OwnSync(nn.SyncBatchNorm):
    """A SyncBatchNorm of another package, which counts its calls."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class Synchronized(Base):
    """Its norm is synchronized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = OwnSync(8)


class AsksWidth(Base):
    """Asks its norm for the number of channels."""

    def forward(self, x: Tensor) -> Tensor:
        maps = self.norm(self.conv(x))
        width: Any = self.norm.num_features
        answer: Tensor = self.head(maps.reshape(len(maps), width, -1).mean(2))
        return answer


class ReadsGamma(Base):
    """Reads its norm's gamma a second time."""

    def forward(self, x: Tensor) -> Tensor:
        gamma: Any = self.norm.weight
        return self.answer(self.norm(self.conv(x)) * gamma[:, None, None])


class Positive(nn.Module):
    """A parametrization whose values are positive."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(x)


def with_parametrized_gamma() -> nn.Module:
    model = Base()
    parametrize.register_parametrization(model.norm, "weight", Positive())
    return model


def with_old_hooks() -> nn.Module:
    model = Base()
    nn.utils.weight_norm(model.conv)
    nn.utils.spectral_norm(model.head)
    return model


def with_own_attributes() -> nn.Module:
    model = Base()
    norm: Any = model.norm
    norm.tag = "first"
    norm.register_buffer("seen", torch.ones(3))
    norm.scale_of_others = nn.Parameter(torch.ones(2))
    return model


@dataclass(frozen=True)
class Converted:
    """A situation in which each scheme gives a right result.

    Args:
        make: Makes the network.
        inputs: The inputs of the conversion.
        others: Further inputs that the result must be right on.
        note: What a note of the conversion to `folded` must say.
    """

    make: Callable[[], nn.Module]
    inputs: Any = IMAGES
    others: tuple[Any, ...] = ()
    note: str = ""


CONVERTED = {
    "complex input": Converted(TakesSpectra, SPECTRA),
    "complex output": Converted(GivesSpectra),
    "domains, one way given": Converted(Domains, (IMAGES, 1), note="never called: norm.0"),
    "domains, the default": Converted(Domains, note="never called: norm.1"),
    "domains, both ways given": Converted(
        Domains, [(IMAGES, 0), (IMAGES, 1)], note="both were followed"
    ),
    "attributes of a norm": Converted(with_own_attributes),
    "hooks of old": Converted(with_old_hooks),
    "a gamma that is computed": Converted(with_parametrized_gamma),
    "a registered SyncBatchNorm": Converted(Synchronized),
    "a grid that is kept": Converted(Grid, others=(IMAGES[..., :12],)),
    "a sigmoid of two ways": Converted(TwoWays),
    "unpooling": Converted(Unpools),
    "unpooling with ties": Converted(Unpools, TIES),
    "a norm is asked for its width": Converted(AsksWidth),
}


@pytest.fixture
def own_sync_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_norms, "_REGISTERED", dict(known_norms._REGISTERED))
    normswap.register_norm(OwnSync)


def live(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The network in eval mode, with statistics, gammas and betas as training leaves them."""
    torch.manual_seed(seed)
    model = make().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            norm: Any = module
            norm.running_mean.normal_(0, 0.5)
            norm.running_var.uniform_(0.5, 2)
            nn.init.normal_(norm.bias, 0, 0.3)
            if not parametrize.is_parametrized(norm):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
    return model


def answer(model: nn.Module, inputs: Any) -> Tensor:
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    with torch.no_grad():
        given: Tensor = model(*arguments)
    return given


@pytest.mark.one_in(3)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.usefixtures("own_sync_is_registered")
@pytest.mark.parametrize("scheme", ["folded", "affine", "frozen-bn", "tune"])
@pytest.mark.parametrize("name", CONVERTED)
def test_it_is_converted(name: str, scheme: str, tmp_path: Path) -> None:
    case = CONVERTED[name]
    source = live(case.make)
    inputs = [*case.inputs] if isinstance(case.inputs, list) else [case.inputs]

    done = normswap.convert(source, scheme, inputs=case.inputs)
    saved = normswap.save(done, tmp_path / "network")
    loaded = normswap.load(saved, skeleton=live(case.make, seed=1))

    for each in (*inputs, *case.others):
        ours = answer(done.model, each)
        assert torch.equal(answer(loaded, each), ours)
        theirs = answer(source, each)
        assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())
    assert done.report.verdict == "PROVED"
    if scheme == "folded":
        assert any(case.note in note for note in done.notes) or not case.note


REFUSED: dict[str, tuple[Callable[[], object], type[NormswapError], str]] = {
    "an exported program": (
        lambda: torch.export.export(live(Base), (IMAGES,)),
        SourceError,
        "exported program.*that it was made from",
    ),
    "the module of an exported program": (
        lambda: torch.export.export(live(Base), (IMAGES,)).module(),
        SourceError,
        "exported program.*that it was made from",
    ),
    "a gamma is read twice": (lambda: live(ReadsGamma), RefusedError, "norm.weight is read"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_for_what_it_is(name: str) -> None:
    make, kind, reason = REFUSED[name]
    with pytest.raises(kind, match=reason):
        normswap.convert(make(), "folded", inputs=IMAGES)  # type: ignore[arg-type]


@pytest.mark.parametrize("scheme", ["groupnorm", "dyt"])
def test_one_image_is_too_few_to_fit_to(scheme: str) -> None:
    with pytest.raises(SourceError, match="at least 2"):
        normswap.convert(live(Base), scheme, inputs=IMAGES, calibrate=IMAGES[:1])


def test_one_image_is_too_few_to_measure_statistics() -> None:
    with pytest.raises(SourceError, match="1 image is too few"):
        normswap.recalibrate(live(Base), IMAGES[:1])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_hook_of_old_is_not_said_to_see_outputs() -> None:
    """It computes the layer's weight before each forward."""
    with pytest.raises(RefusedError, match="conv has forward pre-hooks"):
        normswap.convert(live(with_old_hooks), "weightnorm", inputs=IMAGES)
