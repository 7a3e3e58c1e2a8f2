"""A result that is wrong anywhere is never PROVED: planted faults in networks of several kinds."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from timm.layers import LayerScale2d
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, VerificationError
from normswap.exporting import exported_file
from normswap.exporting.exported_file import ExportedFile
from normswap.proof import comparison, compiling
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

SIZE = (3, 12, 12)


class Residual(nn.Module):
    """A residual block of two convolutions with norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (x + branch).relu()


def _scores(scores: Tensor, _features: Tensor) -> object:
    return scores


def _two(scores: Tensor, features: Tensor) -> object:
    return {"scores": scores, "features": features}


def _labels(scores: Tensor, _features: Tensor) -> object:
    return scores.argmax(1)


def _labels_beside(scores: Tensor, features: Tensor) -> object:
    return {"labels": scores.argmax(1), "features": features}


def _mask(scores: Tensor, _features: Tensor) -> object:
    return scores > 0


class Net(nn.Module):
    """A stem, some blocks and a head, which gives what `outputs` makes of scores and features."""

    def __init__(self, blocks: int, outputs: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.stem_bn = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(Residual(8) for _ in range(blocks)))
        self.head = nn.Linear(8, 5)
        self.outputs = outputs
        self.tamper: Callable[[Tensor], Tensor] | None = None

    def forward(self, x: Tensor) -> object:
        x = self.blocks(self.stem_bn(self.stem(x)).relu())
        features = x.mean((2, 3))
        given_out = self.outputs(self.head(features), features)
        if self.tamper is None:
            return given_out
        if isinstance(given_out, dict):
            return {**given_out, "features": self.tamper(given_out["features"])}
        assert isinstance(given_out, Tensor)
        return self.tamper(given_out)


NETWORKS: dict[str, tuple[int, Callable[[Tensor, Tensor], object]]] = {
    "without blocks": (0, _scores),
    "with blocks": (2, _scores),
    "constant outputs": (2, _scores),
    "constant, without blocks": (0, _scores),
    "several outputs": (2, _two),
    "labels": (2, _labels),
    "labels, without blocks": (0, _labels),
    "labels beside features": (2, _labels_beside),
    "masks": (2, _mask),
}


@torch.no_grad()
def made(name: str, seed: int = 0) -> Net:
    """A network of that kind with norms that do something."""
    torch.manual_seed(seed)
    model = Net(*NETWORKS[name])
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.3)  # type: ignore[union-attr]
            module.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            module.weight.uniform_(0.5, 1.5)
            module.bias.normal_(0, 0.3)
    if name.startswith("constant"):
        model.head.weight.zero_()
        model.head.bias.zero_()
    return model.eval()


def _other_sample(value: Tensor) -> Tensor:
    """The output with its second sample changed, where there is one."""
    changed = value.clone()
    if len(value) == 1:
        return changed
    if value.dtype == torch.bool:
        changed[1, 0] = ~changed[1, 0]
    else:
        changed[1] = changed[1] + (1e-3 if value.is_floating_point() else 1)
    return changed


def _last(model: Net) -> nn.Module:
    """The last convolution."""
    return [module for module in model.modules() if isinstance(module, nn.Conv2d)][-1]


def one_channel(model: Net) -> None:
    _last(model).get_parameter("weight")[3].mul_(1.01)


def one_block(model: Net) -> None:
    if len(model.blocks):
        model.blocks[0].get_submodule("bn2").get_parameter("bias").add_(0.01)
    else:
        model.stem_bn.bias.add_(0.01)


def one_sample(model: Net) -> None:
    model.tamper = _other_sample


def one_output(model: Net) -> None:
    model.tamper = lambda value: value + 1 if value.dtype != torch.bool else ~value


def a_sign(model: Net) -> None:
    model.stem.weight[2].neg_()


def an_eps(model: Net) -> None:
    model.stem_bn.eps = 1e-3


def a_dtype(model: Net) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


def after_the_last_block(model: Net) -> None:
    model.head.bias[1].add_(1e-3)


def a_mean(model: Net) -> None:
    model.stem_bn.get_buffer("running_mean")[0].add_(1e-2)


FAULTS: list[Callable[[Net], None]] = [
    one_channel,
    one_block,
    one_sample,
    one_output,
    a_sign,
    an_eps,
    a_dtype,
    after_the_last_block,
    a_mean,
]


@torch.no_grad()
def broken(model: Net, fault: Callable[[Net], None]) -> Net:
    """A copy of the network with a fault."""
    result = copy.deepcopy(model)
    fault(result)
    return result


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
@pytest.mark.parametrize("name", NETWORKS)
def test_a_planted_fault_is_never_proved(name: str, fault: Callable[[Net], None]) -> None:
    source = made(name)
    images = torch.randn(4, *SIZE, generator=torch.Generator().manual_seed(1))
    result = broken(source, fault)

    by_verify = normswap.verify(source, result, images)
    by_compare = comparison.compare_networks(Network(source, images), result)

    assert by_verify.verdict in ("WRONG", "NOT PROVED")
    assert by_compare.verdict in ("WRONG", "NOT PROVED")


@pytest.mark.parametrize("name", NETWORKS)
def test_the_right_result_is_proved_where_anything_shows_errors(name: str) -> None:
    source = made(name)
    images = torch.randn(4, *SIZE, generator=torch.Generator().manual_seed(1))
    report = normswap.convert(source, "folded", inputs=images).report

    inside = [line for line in report.remarks if line.startswith("proved at")]
    kind = name.split(",")[0]
    assert report.verdict == "PROVED"
    assert bool(inside) == (kind in ("constant outputs", "constant", "labels", "masks"))


def test_one_image_that_the_output_does_not_depend_on_proves_nothing() -> None:
    class Anchors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grid = nn.Parameter(torch.rand(6, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.grid * 2

    source = Anchors()

    report = normswap.verify(source, copy.deepcopy(source), torch.randn(1, 3, 8, 8))

    assert report.verdict == "NOT PROVED"


def test_scores_that_are_all_masked_prove_nothing() -> None:
    source = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten()).eval()
    source[0].register_forward_hook(_masked)

    report = normswap.verify(source, copy.deepcopy(source), torch.randn(2, 3, 4, 4))

    assert report.verdict == "NOT PROVED"


def _masked(_module: nn.Module, _args: object, output: Tensor) -> Tensor:
    return torch.full_like(output, float("-inf"))


def compared_value(model: Net, name: str, images: Tensor) -> Tensor:
    """What shows an error: the scores, or what the head reads where these are constant."""
    features = model.blocks(model.stem_bn(model.stem(images)).relu()).mean((2, 3))
    return features if name.startswith("constant") else model.head(features)


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(list(NETWORKS)),
    seed=st.integers(0, 2**16),
    exponent=st.floats(-5, 0),
    data=st.data(),
)
@torch.no_grad()
def test_no_random_pair_that_differs_is_proved(
    name: str, seed: int, exponent: float, data: st.DataObject
) -> None:
    """What is compared differs by ten times the allowance, which is 1e-5 of these networks."""
    source = made(name, seed)
    names = [key for key, _ in source.named_parameters() if not key.startswith("head")]
    changed_name = data.draw(st.sampled_from(names))
    result = copy.deepcopy(source)
    parameter = result.get_parameter(changed_name)
    parameter.add_(10**exponent * parameter.abs().max())
    images = torch.randn(3, *SIZE, generator=torch.Generator().manual_seed(seed))

    before = compared_value(source, name, images)
    after = compared_value(result, name, images)
    if float((before - after).norm() / before.norm()) <= 1e-4:
        return

    try:
        verdict = normswap.verify(source, result, images).verdict
    except NormswapError:
        return
    assert verdict in ("WRONG", "NOT PROVED")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The network with blocks as a file of each format that opens here."""
    folder = tmp_path_factory.mktemp("files")
    source = made("with blocks")
    written: dict[str, Path] = {}
    for ending in ("pt2", "onnx", "xml"):
        file = folder / f"model.{ending}"
        normswap.export(source, file, input_size=SIZE, dynamic_batch=True)
        written[ending] = file
    return written


@pytest.mark.one_in(3)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: str(fault.__name__))
@pytest.mark.parametrize("ending", ["pt2", "onnx", "xml"])
def test_a_planted_fault_is_never_proved_through_a_file(
    ending: str, fault: Callable[[Net], None], files: dict[str, Path]
) -> None:
    exported = ExportedFile.find(str(files[ending]))
    assert exported is not None

    figures = exported_file.verify(exported, broken(made("with blocks"), fault))
    right = exported_file.verify(exported, made("with blocks"))

    assert figures.verdict in ("WRONG", "NOT PROVED")
    assert right.verdict == "PROVED"


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["pt2", "onnx"])
def test_a_file_that_answers_every_image_alike_is_not_proved(ending: str, tmp_path: Path) -> None:
    source = made("constant outputs")

    with pytest.raises(VerificationError, match="nothing proves the exported file"):
        normswap.export(source, tmp_path / f"model.{ending}", input_size=SIZE)

    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("fault", [one_block, a_sign, an_eps], ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_seen_under_torch_compile(
    fault: Callable[[Net], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiled copy alone gets the fault."""
    source = made("with blocks")
    images = torch.randn(4, *SIZE, generator=torch.Generator().manual_seed(1))
    network = Network(source, images)
    compile_module = nn.Module.compile

    def compile_broken(self: Net, *args: object, **options: object) -> None:
        with torch.no_grad():
            fault(self)
        compile_module(self, *args, **options)

    right = compiling.compare_compiled(network, network.calls[0])
    monkeypatch.setattr(nn.Module, "compile", compile_broken)
    wrong = compiling.compare_compiled(network, network.calls[0])

    assert all(deviation.passes for deviation in right)
    assert not all(deviation.passes for deviation in wrong)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("option", ["", "dynamic_batch", "normalize"])
def test_answers_that_are_nearly_zero_are_held_to_a_file_of_the_source(
    option: str, tmp_path: Path
) -> None:
    """onnxruntime's sigmoid gives 0 for 3e-9; whatever is wrong before it is still seen."""
    source = made("with blocks")
    source.outputs = _saturated
    file = tmp_path / "model.onnx"

    options: Any = {option: True} if option else {}
    figures = normswap.export(source, file, input_size=SIZE, **options).figures
    exported = ExportedFile.find(str(file))
    assert exported is not None
    wrong = exported_file.verify(exported, broken(source, one_block))

    assert figures is not None
    assert figures.verdict == "PROVED"
    assert "nearly zero" in figures.remark
    assert wrong.verdict == "WRONG"


def _saturated(scores: Tensor, _features: Tensor) -> object:
    return (scores - 20).sigmoid()


def with_statistics(model: nn.Module) -> nn.Module:
    """The network itself, with random statistics in its norms."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()  # type: ignore[union-attr]
            module.running_var.uniform_(0.3, 3)  # type: ignore[union-attr]
    return model


def assert_proved_beside_a_block(
    done: Conversion, source: nn.Module, images: Tensor, *, block: str, wrong: str
) -> None:
    """A result is PROVED, though a block has another value; and WRONG with another bias.

    Args:
        done: The conversion.
        source: The source.
        images: The input of both.
        block: The path of the block.
        wrong: The path of the layer whose bias is changed.
    """
    at_block = next(error for error in done.report.sites if error.site == block)
    assert at_block.relative_l2 > 1e-2
    assert done.report.verdict == "PROVED"

    changed = copy.deepcopy(done.model)
    with torch.no_grad():
        changed.get_submodule(wrong).get_parameter("bias")[0].add_(0.01)
    assert normswap.verify(source, changed, images).verdict == "WRONG"


class Ends(nn.Module):
    """A residual block that ends in a norm, which the convolution behind it can take in."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.last = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x + self.norm(self.conv(x))).relu())


def test_a_block_whose_norm_moves_into_the_layer_behind_it_is_proved() -> None:
    """Its own output differs then, which is no mistake; one that is wrong elsewhere still is."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Ends(), nn.Conv2d(8, 8, 1)
    source = with_statistics(nn.Sequential(*layers, nn.ReLU(), nn.Conv2d(8, 4, 1)).eval())
    images = torch.randn(2, *SIZE)

    done = normswap.convert(source, "weightnorm", inputs=images, skip=["0"])

    assert_proved_beside_a_block(done, source, images, block="2", wrong="5")


class Mixer(nn.Module):
    """A sum with a projection behind it, so that the sum is a block of this module."""

    def __init__(self) -> None:
        super().__init__()
        self.local = nn.Conv2d(8, 8, 3, padding=1)
        self.project = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.project((x + self.local(x)).relu())


class Scaled(nn.Module):
    """A residual block whose branch is a mixer, and its norm and LayerScale outside of that."""

    def __init__(self) -> None:
        super().__init__()
        self.mixer = Mixer()
        self.norm = nn.BatchNorm2d(8)
        self.scale = LayerScale2d(8, init_values=0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale(self.norm(self.mixer(x)))


def test_a_block_that_takes_in_the_layers_behind_it_is_proved() -> None:
    """As EfficientFormerV2's attention takes in its LayerScale; a wrong one is still seen."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), Scaled(), nn.Conv2d(8, 4, 1)
    source = with_statistics(nn.Sequential(*layers).eval())
    images = torch.randn(2, *SIZE)

    done = normswap.convert(source, "folded", inputs=images)

    assert_proved_beside_a_block(done, source, images, block="2.mixer", wrong="2.mixer.local")
