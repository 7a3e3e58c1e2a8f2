"""A converted network that was saved is proved again where rounding alone explains what is seen."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.lived_in_networks import lived_in
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.plan import Arch
from normswap.provenance import Provenance
from normswap.surgery import reverification
from normswap.surgery.network import Network


class Amplifying(nn.Module):
    """Its output changes by some 1e-4 when its input changes in float32's last digit."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (300 * self.body(x)).sin().mean((2, 3))


def _converted() -> tuple[Network, nn.Module]:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    source = lived_in(Amplifying(), images.double()).float()
    result = normswap.convert(source, "folded", inputs=images)
    assert result.report.verdict == "PROVED"
    return Network(source, images), result.model


def test_rounding_leaves_no_doubt_where_the_weights_are_those_of_the_plan(tmp_path: Path) -> None:
    source, result = _converted()
    normswap.save(result, tmp_path / "result")
    loaded = normswap.load(tmp_path / "result", skeleton=Amplifying())

    report = reverification.again(source, loaded)

    assert report.verdict == "PROVED"
    # It would say too little by itself: float32 is off by more than it allows any network.
    assert report.worst.relative_l2 > 1e-5
    assert "float64" in report.tolerance


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


def test_rounding_leaves_no_doubt_where_blocks_are_compared_too() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    source = Amplifying()
    source.body.insert(1, Residual())
    source = lived_in(source, images.double()).float()
    result = normswap.convert(source, "folded", inputs=images).model

    report = reverification.again(Network(source, images), result)

    assert report.verdict == "PROVED"
    assert "float64" in report.tolerance


def test_rounding_excuses_no_weight_that_is_another() -> None:
    source, result = _converted()
    weight = result.get_parameter("body.2.weight")
    with torch.no_grad():
        weight.mul_(1 + 3e-7)

    assert reverification.again(source, result).verdict != "PROVED"


def test_rounding_excuses_no_layer_that_is_another() -> None:
    """Its tensors are those of the plan."""
    source, result = _converted()
    result.body[2].register_forward_hook(lambda _layer, _args, output: 1.001 * output)

    assert reverification.again(source, result).verdict == "WRONG"


def test_rounding_excuses_no_hook_however_little_it_changes() -> None:
    source, result = _converted()
    result.body[2].register_forward_hook(lambda _layer, _args, output: (1 + 3e-7) * output)

    assert reverification.again(source, result).verdict != "PROVED"


def _with_a_forward(layer: nn.Module) -> None:
    forward = layer.forward
    layer.forward = lambda x: (1 + 3e-7) * forward(x)


def _with_another_gain(layer: nn.Module) -> None:
    layer.gain = layer.gain * (1 + 3e-7)


def _with_other_gains(layer: nn.Module) -> None:
    layer.gains = [layer.gains[0], layer.gains[1] * (1 + 3e-7)]


def _with_another_buffer(layer: nn.Module) -> None:
    layer.unsaved.mul_(1 + 3e-7)


class Gains(nn.Conv2d):
    """It multiplies by numbers that no state dict holds."""

    def __init__(self) -> None:
        super().__init__(8, 4, 1)
        self.gain = 1.5
        self.gains = [torch.tensor(0.7), torch.tensor(1.2)]
        self.register_buffer("unsaved", torch.tensor(1.1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.gains
        return super().forward(x) * self.gain * first * second * self.unsaved


@pytest.mark.parametrize(
    "change", [_with_a_forward, _with_another_gain, _with_other_gains, _with_another_buffer]
)
def test_rounding_excuses_nothing_that_no_state_dict_holds(
    change: Callable[[nn.Module], None],
) -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    source = Amplifying()
    source.body[2] = Gains()
    source = lived_in(source, images.double()).float()
    result = normswap.convert(source, "folded", inputs=images).model
    record = Network(source, images)
    assert reverification.again(record, result).verdict == "PROVED"

    change(result.body[2])

    assert reverification.again(record, result).verdict != "PROVED"


class Choosing(nn.Module):
    """Returns the features in the order of scores, some of which are equal but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        order = (30_000 * y[:, 1].flatten(1)).sin().argsort(1)
        return y.flatten(2).gather(2, order[:, None].expand(-1, 8, -1))


def test_a_choice_that_rounding_makes_is_no_mistake() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    source = lived_in(Choosing(), images.double()).float()
    result = normswap.convert(source, "folded", inputs=images)
    assert result.report.verdict == "PROVED"

    report = normswap.verify(source, result.model, images)

    assert report.worst.relative_l2 > 1e-3
    assert report.verdict == "PROVED"


def test_only_an_exact_result_that_is_wrong_is_searched_for_the_first_layer() -> None:
    """What a fit has changed is no mistake, and no layer is to blame for it."""
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    source = lived_in(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), images.double()).float()
    exact = normswap.convert(source, "folded", inputs=images).model
    fitted = normswap.convert(source, "groupnorm", inputs=images).model
    with torch.no_grad():
        exact.get_parameter("0.bias").add_(1)
        fitted.get_parameter("0.bias").add_(1)

    departures = {}
    for name, result in (("exact", exact), ("fitted", fitted)):
        network = Network(source, images)
        report = reverification.again(network, result)
        departures[name] = reverification.first_converted_layer_apart(network, result, report)

    assert departures["exact"] is not None
    assert departures["exact"].site == "0"
    assert departures["fitted"] is None


def test_of_two_layers_that_differ_the_first_is_named() -> None:
    torch.manual_seed(0)
    images = torch.randn(4, 3, 12, 12)
    layers: list[nn.Module] = []
    for fan_in in (3, 8, 8):
        layers += [nn.Conv2d(fan_in, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    source = lived_in(nn.Sequential(*layers), images.double()).float()
    result = normswap.convert(source, "folded", inputs=images).model
    with torch.no_grad():
        for path in ("3", "6"):
            result.get_parameter(f"{path}.bias").add_(1)
    network = Network(source, images)
    report = reverification.again(network, result)

    apart = reverification.first_converted_layer_apart(network, result, report)

    assert apart is not None
    assert (apart.site, apart.kind) == ("3", "Conv2d")
    # Of another source, to which the plan cannot be applied, no layer is known.
    other = Network(nn.Sequential(nn.Flatten(), nn.Linear(432, 2)), images)
    assert reverification.first_converted_layer_apart(other, result, report) is None


def test_a_source_is_opened_at_the_size_that_was_recorded_if_any_was() -> None:
    arch = Arch(builder="timm", name="resnet18")
    sized = Provenance(arch, "timm:resnet18", pretrained_cfg={"input_size": (3, 96, 80)})
    unsized = Provenance(arch, "timm:resnet18")

    with_size = reverification.how(provenance.attach(nn.Identity(), sized))
    without_size = reverification.how(provenance.attach(nn.Identity(), unsized))

    assert tuple(with_size["input_size"]) == (3, 96, 80)
    assert "input_size" not in without_size
