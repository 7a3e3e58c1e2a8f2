"""What is no network, no size and no image is named with a remedy, before anything runs."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import (
    NormswapError,
    OptionError,
    OutputError,
    SourceError,
    command_line,
    spelled,
)
from normswap.models import zoo


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()


def broken(tensor: str, value: float) -> nn.Sequential:
    model = network()
    model.state_dict()[tensor].view(-1)[0] = value
    return model


class WeightedQuantizedModule(nn.Linear):
    """The name of the base of torch's int8 layers, which old and new versions keep in different
    places.
    """


class Times(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Silent(nn.Sequential):
    """Computes, and returns nothing."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.eval()

    def forward(self, x: Tensor) -> None:
        super().forward(x)


class Restless(nn.Sequential):
    """Adds noise in eval mode, too."""

    def __init__(self) -> None:
        super().__init__(*network())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + torch.randn_like(x)


SIZE = (3, 16, 16)
X = torch.ones(2, *SIZE)
CASES: dict[str, tuple[Callable[[], Any], dict[str, Any], list[str]]] = {
    "a name": (lambda: "resnet50", {}, ["of type str", "timm.create_model"]),
    "weights": (lambda: network().state_dict(), {}, ["of type OrderedDict", "normswap.load"]),
    "a class": (lambda: nn.Sequential, {}, ["of type type", "Give an instance"]),
    "a number": (lambda: 3, {}, ["not something of type int"]),
    "one side": (network, {"input_size": 64}, ["input_size=64", "(C, H, W)"]),
    "the name of a record": (network, {"size": SIZE}, ["scheme 'folded' has no option size"]),
    "a text": (network, {"input_size": "3,64,64"}, ["size='3,64,64'", "(C, H, W)"]),
    "meta": (
        lambda: network().to("meta"),
        {"input_size": SIZE},
        ["0.weight has no values", "meta device"],
    ),
    "NaN": (
        lambda: broken("0.weight", torch.nan),
        {"input_size": SIZE},
        ["0.weight holds NaN or", "weights again"],
    ),
    "infinite": (
        lambda: broken("0.weight", torch.inf),
        {"input_size": SIZE},
        ["0.weight holds NaN or infinite", "weights again"],
    ),
    "mean": (
        lambda: broken("1.running_mean", torch.nan),
        {"input_size": SIZE},
        ["statistics of 1 are broken"],
    ),
    "variance": (
        lambda: broken("1.running_var", -1),
        {"input_size": SIZE},
        ["statistics of 1 are broken", "below zero"],
    ),
    "int8": (
        lambda: WeightedQuantizedModule(8, 8),
        {"input_size": (8,)},
        ["is quantized", "as it was before"],
    ),
    "complex": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3, dtype=torch.complex64)),
        {},
        ["complex64 and float32"],
    ),
    "two kinds of number": (
        lambda: nn.Sequential(network(), nn.Conv2d(8, 8, 1).half()),
        {},
        ["float32 and float16"],
    ),
    "bytes": (network, {"inputs": X.to(torch.uint8)}, ["float32 and uint8", "Cast them"]),
    "doubles": (network, {"inputs": X.double()}, ["float32 and float64"]),
    "no values": (network, {"inputs": X.to("meta")}, ["the inputs have no values"]),
    "an overflow": (
        lambda: nn.Sequential(network(), Times(1e38), Times(1e38)),
        {"input_size": SIZE},
        ["gives NaN", "too large"],
    ),
    "inputs and their size": (
        network,
        {"inputs": X, "input_size": SIZE},
        ["inputs= and input_size=", "Give one"],
    ),
    "a pattern": (network, {"input_size": SIZE, "only": 3}, ["only=3 is no pattern"]),
    "a seed": (network, {"input_size": SIZE, "seed": "one"}, ['seed="one" is no whole number']),
    "no image": (
        network,
        {"inputs": torch.zeros(0, *SIZE)},
        ["no image (0x3x16x16)", "at least one"],
    ),
    "no pixel in one of two": (
        network,
        {"inputs": [torch.ones(1, *SIZE), torch.ones(1, 3, 0, 9)]},
        ["(1x3x0x9)"],
    ),
    "NaN inputs": (
        network,
        {"inputs": torch.full((1, *SIZE), torch.nan)},
        ["inputs (1x3x16x16) hold NaN"],
    ),
    "a norm alone": (
        lambda: nn.BatchNorm2d(3).eval(),
        {"input_size": SIZE},
        ["the network itself: ", "nn.Sequential"],
    ),
    "nothing returned": (Silent, {"input_size": SIZE}, ["gives no tensor", "nothing to compare"]),
    "random": (Restless, {"input_size": SIZE}, ["gives another answer each time"]),
}


@pytest.mark.parametrize("case", CASES)
def test_no_network(case: str) -> None:
    make, options, words = CASES[case]
    with pytest.raises(NormswapError) as caught:
        normswap.convert(make(), "folded", **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


VERBS: dict[str, Callable[[Any], object]] = {
    "inspect": normswap.inspect,
    "export": lambda model: normswap.export(model, "net.onnx"),
    "save": lambda model: normswap.save(model, "out"),
    "verify": lambda model: normswap.verify(network(), model, input_size=SIZE),
    "param_groups": normswap.param_groups,
    "diagnose": normswap.diagnose,
}


OTHERS: dict[str, tuple[Callable[..., object], list[str]]] = {
    "a recipe's name": (
        lambda: normswap.finetune(network(), cast(Any, "skipinit"), "run"),
        ["load_recipe"],
    ),
    "another option": (
        lambda: normswap.export(network(), "net.onnx", **cast(Any, {"precision": "fp16"})),
        ["no option precision", "dtype"],
    ),
    "no class": (
        lambda: normswap.register_norm(cast(Any, 3)),
        ["a class of norms is wanted, not 3"],
    ),
    "no plan": (lambda: normswap.Plan.from_json("[1]", "p.json"), ["p.json is no plan", "list"]),
}


@pytest.mark.parametrize("case", OTHERS)
def test_arguments_of_another_kind(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call, words = OTHERS[case]
    with pytest.raises(NormswapError) as caught:
        call()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_asks_for_a_network(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceError, match="a network is wanted, not something of type str"):
        VERBS[verb]("resnet50")
    assert not any(tmp_path.iterdir())


PYTHON: list[tuple[Any, dict[str, Any], str]] = [
    ("nf", {}, '`calibrate=DATA` .*`calibrate="synthetic"`'),
    ("groupnorm", {"groups": 0}, "groups=0 is not"),
    ("groupnorm", {"groups": 2, "group_size": 4}, "groups= and group_size="),
    ("folded", {"only": "layer9"}, 'only="layer9" names no norm'),
    ("opacus", {}, 'purpose="opacus"'),
    ("skipinit", {"purpose": "privacy"}, "purpose=federated"),
    ("skipinit", {}, '`to="folded"` needs none'),
    ("skipnit", {}, "Did you mean skipinit"),
    (None, {}, "unknown scheme None"),
]


@pytest.mark.parametrize(("to", "options", "message"), PYTHON, ids=[str(row[0]) for row in PYTHON])
def test_options_are_spelled_as_the_reader_writes_them(
    to: str, options: dict[str, Any], message: str
) -> None:
    """In Python `calibrate=`; what the command line says, its own tests hold."""
    with pytest.raises(NormswapError, match=message) as caught:
        normswap.convert(network(), to, input_size=SIZE, **options)
    assert "--" not in str(caught.value)
    assert (spelled("calibrate", metavar="DATA"), spelled("force", True)) == (
        "calibrate=DATA",
        "force=True",
    )

    with command_line():
        assert (spelled("calibrate", metavar="DATA"), spelled("force", True)) == (
            "--calibrate DATA",
            "--force",
        )
        assert (spelled("purpose", "opacus"), spelled("only", "a b")) == (
            "--for opacus",
            "--only 'a b'",
        )


def test_a_conversion_shows_its_report_first() -> None:
    done = normswap.convert(network(), "folded", input_size=SIZE)
    assert re.fullmatch(
        r"Conversion\(PROVED, exact, relative L2 \d\.\de-\d\d: Sequential -> folded\)", repr(done)
    )


def test_an_output_inside_a_network_is_refused(tmp_path: Path) -> None:
    done = normswap.convert(network(), "folded", input_size=SIZE)
    place = normswap.save(done, tmp_path / "out")
    with pytest.raises(OutputError, match=r"lies in .*out: that is the directory of a network"):
        normswap.save(done, place / "inner" / "deeper")
    assert not (place / "inner").exists()


def test_pixels_as_bytes() -> None:
    bytes_ = torch.zeros(4, *SIZE, dtype=torch.uint8)
    with pytest.raises(NormswapError, match="floating-point"):
        normswap.convert(network(), "groupnorm", input_size=SIZE, calibrate=[bytes_])


def test_a_missing_file_is_called_missing(tmp_path: Path) -> None:
    model = network()
    place = normswap.save(normswap.convert(model, "folded", input_size=SIZE), tmp_path / "out")
    (place / "norms.safetensors").unlink()
    with pytest.raises(NormswapError, match=r"norms.safetensors are not those .*missing, damaged"):
        normswap.load(place, skeleton=model)


def test_an_exported_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "net.onnx").write_bytes(b"")
    with pytest.raises(NormswapError, match=r"net.onnx is an exported file"):
        zoo.open_source(str(tmp_path / "net.onnx"))


def test_what_is_broken_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"0\.weight holds NaN"):
        normswap.save(broken("0.weight", torch.nan), tmp_path / "broken")
    assert not list(tmp_path.iterdir())


def test_a_scheme_is_one() -> None:
    with pytest.raises(OptionError, match="a Scheme is wanted, not something of type int"):
        normswap.register_scheme("mine", cast(Any, 3))
