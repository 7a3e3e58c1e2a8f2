"""`unfold` of a network of one's own, whose class only the caller has."""

import sys
from pathlib import Path

import pytest
import torch
from support.lived_in_networks import lived_in
from torch import Tensor, nn

import normswap
from normswap.cli.app import main
from normswap.errors import OptionError, RefusedError

FACTORY = "test_own_class_back:make"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))).relu()


class Mine(nn.Module):
    """A residual block, and a norm that no layer before it can absorb."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3)
        self.block = Block(width)
        self.before_head = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.before_head(self.block(self.stem(x))).relu().mean((2, 3)))


def make() -> Mine:
    return Mine()


IMAGES = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    return lived_in(Mine(), IMAGES.double()).float()


def _trained(model: nn.Module) -> nn.Module:
    """The network after one step of SGD, in eval mode."""
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model(IMAGES).square().sum().backward()
    optimizer.step()
    return model.eval()


@pytest.mark.parametrize("scheme", ["folded", "skipinit", "affine", "weightnorm"])
def test_what_was_learned_comes_back_in_the_callers_class(
    source: nn.Module, scheme: str, tmp_path: Path
) -> None:
    normswap.save(normswap.convert(source, scheme, inputs=IMAGES), tmp_path / "result")
    trained = _trained(normswap.load(tmp_path / "result", skeleton=Mine()))
    skeleton = Mine()
    before = {name: tensor.clone() for name, tensor in skeleton.state_dict().items()}

    back = normswap.convert(trained, "unfold", inputs=IMAGES, like=skeleton).model

    # Plain torch loads it into the class, and computes what the trained network computes.
    plain = Mine().eval()
    plain.load_state_dict(back.state_dict())
    with torch.no_grad():
        expected = trained.double()(IMAGES.double())
        error = (plain.double()(IMAGES.double()) - expected).norm() / expected.norm()
    assert type(back) is Mine
    assert error < 1e-6
    assert not torch.equal(plain.stem.weight.float(), source.get_parameter("stem.weight"))
    assert all(torch.equal(value, before[name]) for name, value in skeleton.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_batchnorm_in_the_callers_class_is_in_the_mode_of_the_network(
    source: nn.Module, training: bool
) -> None:
    """The note counts images, and not the batches that they come in."""
    folded = normswap.convert(source, "folded", inputs=IMAGES).model.train(training)

    done = normswap.convert(
        folded, "batchnorm", inputs=IMAGES, calibrate=[IMAGES, IMAGES[:3].flip(3)], like=Mine()
    )

    assert {module.training for module in done.model.modules()} == {training}
    assert any("measured on 7 images" in note for note in done.notes)


@pytest.mark.parametrize("training", [True, False])
def test_what_comes_back_is_in_the_mode_of_the_network(source: nn.Module, training: bool) -> None:
    folded = normswap.convert(source, "folded", inputs=IMAGES).model.train(training)
    skeleton = Mine().train(not training)

    back = normswap.convert(folded, "unfold", inputs=IMAGES, like=skeleton).model

    assert {module.training for module in back.modules()} == {training}


class Dropped(nn.Module):
    """A residual block whose branch ends in dropout."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Sequential(nn.Dropout(share))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head((x + self.drop(self.norm(self.conv(x)))).mean((2, 3)))


def test_a_layer_that_stood_before_a_scalar_has_its_own_path_again() -> None:
    torch.manual_seed(0)
    source = lived_in(Dropped(0.25), IMAGES.double()).float()
    trained = normswap.convert(source, "skipinit", inputs=IMAGES).model
    with torch.no_grad():
        trained.get_parameter("drop.0.then.alpha").fill_(0.6)

    back = normswap.convert(trained, "unfold", inputs=IMAGES, like=Dropped(0.25)).model

    assert type(back) is Dropped
    assert repr(back) == repr(source)
    with torch.no_grad():
        assert torch.allclose(back(IMAGES), trained(IMAGES), rtol=1e-4, atol=1e-5)


def test_without_the_class_the_error_says_how_to_give_it(source: nn.Module) -> None:
    folded = normswap.convert(source, "folded", inputs=IMAGES).model
    with pytest.raises(RefusedError, match="like=MODEL"):
        normswap.convert(folded, "unfold", inputs=IMAGES)


def test_no_other_option_is_taken_be_it_zero(source: nn.Module) -> None:
    folded = normswap.convert(source, "folded", inputs=IMAGES).model

    with pytest.raises(OptionError, match="groups"):
        normswap.convert(folded, "unfold", inputs=IMAGES, like=Mine(), groups=0)


def test_another_class_or_width_is_refused(source: nn.Module) -> None:
    folded = normswap.convert(source, "folded", inputs=IMAGES).model
    other = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    with pytest.raises(RefusedError, match="cannot unfold 0"):
        normswap.convert(folded, "unfold", inputs=IMAGES, like=other)
    with pytest.raises(RefusedError, match=r"block\.norm1\.weight is \(8,\) here, and \(16,\)"):
        normswap.convert(folded, "unfold", inputs=IMAGES, like=Mine(16))
    with pytest.raises(OptionError, match="groups"):
        normswap.convert(folded, "unfold", inputs=IMAGES, groups=2, like=Mine())


def test_the_command_takes_a_factory(
    source: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(sys.modules, "test_own_class_back", sys.modules[__name__])
    torch.save(source.state_dict(), "mine.pth")

    words = [FACTORY, "--weights", "mine.pth", "--input-size", "3,16,16"]
    assert main(["convert", *words, "--to", "folded", "-o", "folded"]) == 0
    unfold = ["convert", "folded", "--trust-factory", "--to", "unfold", "--like", FACTORY]
    assert main([*unfold, "-o", "back"]) == 0

    back = normswap.load("back", trust_factory=True)
    assert type(back).__name__ == "Mine"
    assert torch.allclose(back(IMAGES), source(IMAGES), atol=1e-5)


def test_after_groupnorm_the_way_back_to_batchnorm_is_named(source: nn.Module) -> None:
    groups = normswap.convert(source, "groupnorm", inputs=IMAGES).model

    with pytest.raises(RefusedError, match=r"a conversion replaced its BatchNorms.*calibrate=DATA"):
        normswap.convert(groups, "batchnorm", inputs=IMAGES)
    with pytest.raises(RefusedError, match=r"GroupNorm.*First convert to folded.*calibrate=DATA"):
        normswap.convert(groups, "batchnorm", inputs=IMAGES, like=Mine(), calibrate=[IMAGES])

    # What both remedies name works.
    folded = normswap.convert(groups, "folded", inputs=IMAGES, calibrate=[IMAGES] * 8).model
    assert normswap.convert(groups, "batchnorm", inputs=IMAGES, calibrate=[IMAGES] * 8).model
    assert normswap.convert(
        folded, "batchnorm", inputs=IMAGES, like=Mine(), calibrate=[IMAGES] * 8
    ).report.exact
