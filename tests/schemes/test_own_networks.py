"""Networks that users write themselves: residual branches that end in a convolution, in a norm, in
a function.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchvision
from support.hand_written_networks import Net, PostAct, PreAct
from support.lived_in_networks import distance, lived_in, run
from torch import Tensor, nn
from torchvision.models import vgg
from torchvision.ops.misc import FrozenBatchNorm2d

import normswap
from normswap.errors import RefusedError
from normswap.surgery import conversion


def lived(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(Net(block), torch.randn(4, 3, 33, 33, dtype=torch.float64))


@pytest.mark.parametrize("block", [PreAct, PostAct])
def test_dropout_in_front_of_the_classifier(block: type[nn.Module], tmp_path: Path) -> None:
    """The pool is a function: the dropout sits in the linear layer's place. It can be set anew, and
    taken out.
    """
    source = lived(block)
    x = torch.randn(2, 3, 41, 41, dtype=torch.float64)
    done = normswap.convert(source, "regularized-skipinit", dropout=0.6, input_size=(3, 33, 33))
    torch.manual_seed(0)

    with torch.no_grad():
        seen: list[Tensor] = []
        done.model.head.inner.register_forward_hook(lambda module, args, out: seen.append(args[0]))  # type: ignore[union-attr]
        for _ in range(50):
            done.model.train()(x)

        assert float((torch.stack(seen) == 0).double().mean()) == pytest.approx(0.6, abs=0.06)

        again = normswap.convert(
            done.model, "regularized-skipinit", dropout=0.1, input_size=(3, 33, 33)
        )
        plain = normswap.convert(again.model, "skipinit", input_size=(3, 33, 33))

        assert torch.equal(plain.model.train()(x), plain.model(x))
        assert (plain.model.eval()(x) - source(x)).norm() <= 1e-10 * source(x).norm()

    loaded = normswap.load(normswap.save(plain, tmp_path / "out"), skeleton=Net(block).double())
    assert torch.equal(loaded(x), plain.model(x))
    with pytest.raises(RefusedError, match="nothing to convert"):
        normswap.convert(plain.model, "skipinit", input_size=(3, 33, 33))


def test_a_classifier_that_is_read_elsewhere_gets_no_dropout() -> None:
    class Tied(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.head.weight.norm()

    torch.manual_seed(0)
    source = lived_in(Tied(PostAct), torch.randn(4, 3, 33, 33, dtype=torch.float64))
    with pytest.raises(RefusedError, match="no place for a dropout"):
        normswap.convert(source, "regularized-skipinit", input_size=(3, 33, 33))


class Smooth(PostAct):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).add(x))


def test_a_factor_does_not_pass_gelu() -> None:
    with pytest.raises(RefusedError, match="cannot pass the activation that follows"):
        normswap.convert(lived(Smooth), "residual-scale", rule="balduzzi", input_size=(3, 33, 33))
    normswap.convert(lived(Smooth), "residual-scale", rule="hanin", input_size=(3, 33, 33))


resnet = partial(torchvision.models.resnet18, num_classes=5)
layers = partial(vgg.make_layers, [8, "M", 16, 16, "M"])


def unet(norm: bool) -> nn.Module:
    import segmentation_models_pytorch as smp

    wide: Any = {"encoder_depth": 3, "decoder_channels": (16, 8, 8), "encoder_weights": None}
    return smp.Unet("resnet18", decoder_use_norm=norm, **wide)


CASES: dict[str, tuple[Callable[[], nn.Module], str, dict[str, Any], Callable[[], nn.Module]]] = {
    "torchvision, GroupNorm": (
        resnet,
        "groupnorm",
        {"relative_eps": 0},
        lambda: resnet(norm_layer=partial(nn.GroupNorm, 1)),
    ),
    "torchvision, GroupNorm, 32 groups": (
        resnet,
        "groupnorm",
        {"relative_eps": 0, "groups": 32},
        lambda: resnet(norm_layer=partial(nn.GroupNorm, 32)),
    ),
    "torchvision, frozen": (resnet, "frozen-bn", {}, lambda: resnet(norm_layer=FrozenBatchNorm2d)),
    "torchvision, VGG without norms": (
        lambda: layers(batch_norm=True),
        "folded",
        {},
        lambda: layers(batch_norm=False),
    ),
    "segmentation_models_pytorch, decoder without norms": (
        lambda: unet(True),
        "folded",
        {"only": ["decoder"]},
        lambda: unet(False),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_it_loads_without_normswap(case: str) -> None:
    source, to, options, made = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    model = lived_in(source(), x)
    done = conversion.convert(model, to, inputs=x, **options).model
    theirs = made().double().eval()
    state = done.state_dict()
    if "VGG" in case:  # places without a norm have other numbers there
        state = dict(zip(theirs.state_dict(), state.values(), strict=True))
    theirs.load_state_dict(state, strict=True)

    assert distance(run(done, x), run(theirs, x)) < 1e-13

    if to != "groupnorm":
        assert distance(run(model, x), run(theirs, x)) < 1e-12


class Unused(nn.Module):
    """Its forward calls no norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu()


@pytest.mark.parametrize("scheme", ["folded", "groupnorm"])
def test_a_norm_that_forward_never_calls_is_not_what_the_scheme_places(scheme: str) -> None:
    with pytest.raises(RefusedError, match="Forward calls none of them"):
        normswap.convert(Unused().eval(), scheme, inputs=torch.randn(2, 3, 8, 8))


def test_a_norm_that_stays_says_why() -> None:
    source = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU())

    with pytest.raises(
        RefusedError, match="1: stays with its scale and shift: 2 reads it"
    ) as error:
        normswap.convert(source.eval(), "folded", inputs=torch.randn(2, 8))

    # `folded` places no LayerNorm.
    assert "would place" not in str(error.value)


def test_a_network_that_is_nothing_but_a_norm_is_wrapped() -> None:
    norm = nn.BatchNorm2d(3).eval()
    images = torch.randn(2, 3, 8, 8)

    with pytest.raises(RefusedError, match=r"the network itself: .*nn\.Sequential"):
        normswap.convert(norm, "folded", inputs=images)

    result = normswap.convert(nn.Sequential(norm), "folded", inputs=images)
    assert result.report.verdict == "PROVED"
