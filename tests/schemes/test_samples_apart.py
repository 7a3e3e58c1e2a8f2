"""The run in training mode behind `purpose=` names what mixes samples, and nothing else."""

import copy
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from support.sampled_tables import quick
from timm.layers import DropPath, EvoNorm2dB0, EvoNorm2dS0, FilterResponseNormTlu2d
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

import normswap
from normswap.errors import RefusedError
from normswap.schemes.scheme import TrainingProof
from normswap.surgery import sample_leaks
from normswap.surgery.network import Network

pytestmark = pytest.mark.filterwarnings("ignore")
# Both purposes make the same run, so tables over networks use one by default.
PURPOSES = ("federated", pytest.param("opacus", marks=pytest.mark.slow))


class Around(nn.Module):
    """A small network whose BatchNorm is converted, with a layer or a function behind it."""

    def __init__(self, mix: nn.Module | Callable[..., Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        if isinstance(mix, nn.Module):
            self.mix = mix
        else:
            self.function = mix
        self.last = nn.Conv2d(8, 8, 1)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x)).relu()
        y = self.last(self.mix(y) if hasattr(self, "mix") else self.function(y)).relu()
        return self.fc(y.mean((2, 3)))


class Own(nn.Module):
    """A layer made of a function of itself and its input, with a scale that learns."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **buffers: Tensor) -> None:
        super().__init__()
        self.function = function
        self.scale = nn.Parameter(torch.ones(8, 1, 1))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x) * self.scale


class WithoutParameters(Own):
    """The same without a scale, so that Opacus has nothing against its buffers."""

    def __init__(self, function: Callable[[Any, Tensor], Any], **buffers: Tensor) -> None:
        super().__init__(function, **buffers)
        self.scale.requires_grad_(False)


class Reader(nn.Module):
    """A network with a layer that reads the positions one after the other, or all of them."""

    def __init__(self, mix: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2)
        self.bn = nn.BatchNorm2d(8)
        self.mix = mix
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        y = self.bn(self.conv(x)).relu().flatten(2).transpose(1, 2)
        y = self.mix(y, y, y) if isinstance(self.mix, nn.MultiheadAttention) else self.mix(y)
        return self.fc((y[0] if isinstance(y, tuple) else y).mean(1))


class Cell(nn.Module):
    """A recurrent cell, called for each position."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Any:
        state: Any = None
        for position in x.unbind(1)[:4]:
            state = self.cell(position, state)
        return (state[0] if isinstance(state, tuple) else state)[:, None]


class StraightThrough(torch.autograd.Function):
    """The identity, whose gradient is divided by the norm of the batch's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] / grads[0].norm()


class Training(nn.Module):
    """A function of its input in training mode."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x) if self.training else x


class Compiled(nn.Module):
    """A scale that learns, in a form that torch.jit compiles."""

    def __init__(self, *, centred: bool) -> None:
        super().__init__()
        self.centred = centred
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1.5))

    def forward(self, x: Tensor) -> Tensor:
        if self.centred:
            x = x - x.mean(0)
        return x * self.scale


class Listed(nn.Module):
    """A list of modules, in a form that torch.jit compiles. The list itself has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Compiled(centred=False), Compiled(centred=True)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Zero(nn.Module):
    """A branch over the batch behind a factor that begins at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        return x + self.alpha * (x - x.mean(0))


def standardized(x: Tensor, *dims: int) -> Any:
    return (x - x.mean(dims, keepdim=True)) / (x.var(dims, keepdim=True) + 1e-5).sqrt()


def running(self: Any, x: Tensor) -> Any:
    return F.batch_norm(x, self.mean, self.var, training=self.training)


def updated(self: Any, x: Tensor) -> Any:
    if self.training:
        with torch.no_grad():
            self.mean.lerp_(x.mean((0, 2, 3)), 0.1)
    return x - self.mean[:, None, None]


def attribute(self: Any, x: Tensor) -> Any:
    past = getattr(self, "past", torch.zeros(8, 1, 1).to(x))
    self.past = 0.9 * past + 0.1 * x.detach().mean((0, 2, 3))[:, None, None]
    return x - past


def kept(self: Any, x: Tensor) -> Any:
    """Subtract a sample of the batch before. No operation mixes the samples of one batch."""
    past = getattr(self, "past", None)
    self.past = x.detach()
    return x if past is None else x - past[0]


def rewritten(self: Any, x: Tensor) -> Any:
    """Change what the layer has beside its parameters in several ways, and read none of it."""
    self.register_buffer("constant", torch.ones(3).to(x))
    self.register_buffer("measured", x.detach().mean())
    with torch.no_grad():
        self.counted += 1
        self.frozen.lerp_(torch.ones(4).to(x), 0.5)
    return x


def shuffled(x: Tensor) -> Any:
    return x[torch.randperm(len(x))]


def attending(x: Tensor) -> Any:
    rows = x.flatten(1)
    return (torch.softmax(rows @ rows.T / 100, 1) @ rows).view_as(x)


def memory() -> dict[str, Tensor]:
    return {"mean": torch.zeros(8), "var": torch.ones(8)}


# A leak, and what the refusal must name of it.
LEAKS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "functional": (
        lambda: Around(lambda x: F.batch_norm(x, None, None, training=True)),
        "F.batch_norm",
    ),
    "running": (lambda: Around(WithoutParameters(running, **memory())), "F.batch_norm"),
    # It is the network's own forward that mixes, behind modules that have run.
    "mean": (lambda: Around(lambda x: x - x.mean(0)), "forward: Tensor.mean (in a Around)"),
    "training alone": (lambda: Around(Training(lambda x: x - x.mean(0))), "mix: Tensor.mean"),
    "all": (lambda: Around(lambda x: standardized(x, 0, 2, 3)), "Tensor.mean"),
    "std": (lambda: Around(lambda x: x / (1 + x.std(0))), "Tensor.std"),
    "norm": (lambda: Around(lambda x: x / x.norm()), "norm"),
    "softmax": (lambda: Around(lambda x: x.softmax(0)), "softmax"),
    "cumsum": (lambda: Around(lambda x: x.cumsum(0)), "cumsum"),
    "roll": (lambda: Around(lambda x: x.roll(1, 0)), "roll"),
    "flip": (lambda: Around(lambda x: x.flip(0)), "flip"),
    "shuffle": (lambda: Around(shuffled), "getitem"),
    "attention": (lambda: Around(attending), "matmul"),
    "maximum": (lambda: Around(lambda x: x / x.abs().amax()), "amax"),
    "quantized": (lambda: Around(lambda x: (x / x.detach().amax() * 7).round() + x), "div"),
    "layer": (lambda: Around(Own(lambda self, x: standardized(x, 0))), "mix"),
    "nested": (
        lambda: Around(nn.Sequential(nn.Identity(), Own(lambda self, x: x - x.mean(0)))),
        "mix.1: Tensor.mean (in a Own)",
    ),
    # Nothing inside a compiled module is seen, so its whole forward is named.
    "compiled": (
        lambda: Around(torch.jit.script(Compiled(centred=True))),
        "mix: the forward that torch.jit compiled",
    ),
    "compiled, nested": (
        lambda: Around(nn.Sequential(nn.Identity(), torch.jit.script(Listed()))),
        "mix.1: the forward that torch.jit compiled",
    ),
    "evonorm": (lambda: Around(EvoNorm2dB0(8)), "mix"),
    "updated": (lambda: Around(WithoutParameters(updated, **memory())), "mix"),
    "attribute": (lambda: Around(Own(attribute)), "mix: Tensor.mean (in a Own)"),
    "kept as it is": (lambda: Around(Own(kept)), "mix: the output of a sample moves"),
    "gradient": (lambda: Around(StraightThrough.apply), "gradient"),
    "detached": (
        lambda: Around(lambda x: x + (x.mean(0) - x.mean(0).detach()) ** 1),
        "Tensor.mean",
    ),
    "zero": (lambda: Around(Zero()), "mix"),
    "dropped": (
        lambda: Around(nn.Sequential(nn.Dropout(0.5), Own(lambda self, x: x - x.mean(0)))),
        "mix.1",
    ),
}
CLEAN: dict[str, Callable[[], nn.Module]] = {
    "nothing": lambda: Around(nn.Identity()),
    "dropout": lambda: Around(nn.Dropout(0.5)),
    "functional dropout": lambda: Around(Training(lambda x: F.dropout2d(x, 0.3))),
    "drop path": lambda: Around(nn.Sequential(nn.Conv2d(8, 8, 1), DropPath(0.5))),
    "stochastic depth": lambda: Around(StochasticDepth(0.2, "batch")),
    "noise": lambda: Around(Training(lambda x: x + torch.randn_like(x))),
    "python's noise": lambda: Around(Training(lambda x: x * random.random() * np.random.rand())),
    "groupnorm": lambda: Around(nn.GroupNorm(2, 8)),
    "instancenorm": lambda: Around(nn.InstanceNorm2d(8, affine=True)),
    "layernorm": lambda: Around(lambda x: F.layer_norm(x, x.shape[1:])),
    "evonorm of a sample": lambda: Around(EvoNorm2dS0(8, groups=2)),
    "filter response": lambda: Around(FilterResponseNormTlu2d(8)),
    "squeezed": lambda: Around(lambda x: x * x.mean((2, 3), keepdim=True).sigmoid()),
    "in place": lambda: Around(lambda x: (x + 0.1).mul_(2).relu_()),
    "batch second": lambda: Around(lambda x: x.transpose(0, 1).softmax(0).transpose(0, 1)),
    "written down": lambda: Around(Own(lambda self, x: vars(self).update(seen=x.mean()) or x)),
}
# One leak, or more, of each kind that is looked for: an operation that mixes values, one that moves
# them, numbers that are kept for the next forward, a gradient, and a path behind a factor of zero.
LEAKS_OF_EACH_KIND = [
    "running",
    "mean",
    "training alone",
    "cumsum",
    "flip",
    "layer",
    "nested",
    "compiled, nested",
    "attribute",
    "kept as it is",
    "gradient",
    "detached",
    "zero",
]

# Layers of torch that Opacus refuses, and its own in their place.
REFUSED_LAYERS: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "LSTM": (lambda: nn.LSTM(8, 8, batch_first=True), "mix", "DPLSTM"),
    "deep LSTM": (lambda: nn.LSTM(8, 4, 2, batch_first=True, bidirectional=True), "mix", "DPLSTM"),
    "GRU": (lambda: nn.GRU(8, 8, batch_first=True), "mix", "DPGRU"),
    "RNN": (lambda: nn.RNN(8, 8, batch_first=True), "mix", "DPRNN"),
    "LSTM cell": (lambda: Cell(nn.LSTMCell(8, 8)), "mix.cell", "DPLSTMCell"),
    "GRU cell": (lambda: Cell(nn.GRUCell(8, 8)), "mix.cell", "DPGRUCell"),
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        "mix",
        "DPMultiheadAttention",
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        "mix.self_attn",
        "DPMultiheadAttention",
    ),
    "encoder": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2),
        "mix.layers.1.self_attn",
        "DPMultiheadAttention",
    ),
}


class Outputs(nn.Module):
    """A network of any input whose outputs have a form of their own."""

    def __init__(self, form: Callable[[Tensor], object], *, training: bool = True) -> None:
        super().__init__()
        self.inner = Around(nn.Identity())
        self.form = form
        self.only_training = training

    def forward(self, x: Tensor) -> object:
        y = self.inner(x)
        return self.form(y) if self.training or not self.only_training else y


class Inputs(nn.Module):
    """A network of several inputs, or of a list of images, or of words."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Around(mix)
        self.words = nn.Embedding(10, 3)

    def forward(self, x: Any, mask: Tensor | None = None, scale: Tensor | None = None) -> Any:
        if isinstance(x, list):
            x = torch.stack(x)
        if not x.is_floating_point():
            x = self.words(x).movedim(-1, 1)
        if mask is not None:
            x = x * mask[:, None]
        if scale is not None:
            x = x * scale
        return self.inner(x)


# Outputs in training mode, and what is named of them; None where samples stay apart.
OUTPUTS: dict[str, tuple[Callable[[Tensor], object], str | None]] = {
    "dict": (lambda y: {"logits": y, "features": [y, y.flip(1)]}, None),
    "dict that leaks": (lambda y: {"logits": y, "features": [y, y - y.mean(0)]}, "features.1"),
    "one output that leaks": (lambda y: (y, y.square(), y - y.mean(0)), "output 2 of a sample"),
    "one output that is not finite": (lambda y: (y, y / 0 * 0), "not finite"),
    "a name that others decide": (lambda y: {str(float(y.sum())): y}, "moves by 100 %"),
    # Rounding is relative to the output's own size.
    "a small leak in small numbers": (
        lambda y: 1e-6 * (y + 1e-7 * y.mean(0)),
        "Tensor.mean",
    ),
    "rounding in large numbers": (lambda y: 1e6 * ((y + y.mean(0)) - y.mean(0)), None),
    "list of samples": (lambda y: [{"scores": row} for row in y], None),
    "list that leaks": (lambda y: [{"scores": row} for row in y - y.mean(0)], "scores"),
    "list in another order": (lambda y: list(y.roll(1, 0)), "roll"),
    "samples second": (lambda y: y.T, None),
    "samples second that leak": (lambda y: (y - y.mean(0)).T, "mean"),
    "a sum of losses": (lambda y: {"loss": y.square().mean()}, None),
    "a loss of the batch": (lambda y: {"loss": y.std(0).mean()}, "loss"),
    "a mean of the batch": (lambda y: (y, y.mean(0)), "mean"),
    "classes": (lambda y: (y, y.argmax(1)), None),
    "ranks": (lambda y: (y, y.argsort(0)), "argsort"),
    "complex": (lambda y: torch.fft.fft(y, dim=1), None),
    "complex that leaks": (lambda y: torch.fft.fft(y, dim=0), "fft"),
    "not finite": (lambda y: y / 0 * 0, "not finite"),
    "of no sample": (lambda y: torch.zeros_like(y), "depends on the samples"),
}
OUTPUTS_OF_EACH_KIND = [
    "one output that leaks",
    "one output that is not finite",
    "a name that others decide",
    "a small leak in small numbers",
    "rounding in large numbers",
    "list of samples",
    "list that leaks",
    "list in another order",
    "samples second",
    "samples second that leak",
    "classes",
    "ranks",
    "complex",
    "complex that leaks",
    "of no sample",
]
INPUTS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: torch.randn(3, 3, 12, 12),
    "single": lambda: torch.randn(1, 3, 12, 12),
    "large": lambda: torch.randn(2, 3, 96, 80),
    "tuple": lambda: (torch.randn(3, 3, 12, 12), torch.rand(3, 12, 12)),
    "dict": lambda: {"x": torch.randn(2, 3, 12, 12), "mask": torch.rand(2, 12, 12)},
    "a number for all": lambda: {"x": torch.randn(2, 3, 12, 12), "scale": torch.tensor(0.7)},
    "list of batches": lambda: [torch.randn(2, 3, 12, 12), torch.randn(2, 3, 16, 16)],
    "list of images": lambda: ([torch.randn(3, 12, 12), torch.randn(3, 12, 12)],),
    "words": lambda: torch.randint(0, 10, (2, 12, 12)),
}

INPUTS_OF_EACH_KIND = [
    "large",
    "tuple",
    "dict",
    "a number for all",
    "list of batches",
    "list of images",
]


def convert(model: nn.Module, purpose: Any, x: Any = None, to: str = "groupnorm") -> Any:
    torch.manual_seed(0)
    x = torch.randn(3, 3, 12, 12) if x is None else x
    return normswap.convert(model.eval(), to, inputs=x, purpose=purpose)


def refusal(model: nn.Module, purpose: str, x: Any = None) -> str:
    with pytest.raises(RefusedError) as refused:
        convert(model, purpose, x)
    assert purpose in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("leak", quick(LEAKS, LEAKS_OF_EACH_KIND))
def test_a_leak_is_named(leak: str, purpose: str) -> None:
    make, named = LEAKS[leak]

    message = refusal(make(), purpose)

    assert named in message


@pytest.mark.one_in(3)
@pytest.mark.parametrize("purpose", PURPOSES)
@pytest.mark.parametrize("name", CLEAN)
def test_what_keeps_samples_apart_passes(name: str, purpose: str) -> None:
    model = CLEAN[name]().eval()
    before = copy.deepcopy(model.state_dict())

    done = convert(model, purpose)

    assert done.report.passed
    assert not done.model.training
    assert all(parameter.grad is None for parameter in done.model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("kind", REFUSED_LAYERS)
@pytest.mark.one_in(2)
def test_layers_of_torch_that_opacus_refuses(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are named with Opacus' own layer, also where Opacus is not installed."""
    make, path, layer = REFUSED_LAYERS[kind]
    monkeypatch.setitem(sys.modules, "opacus", None)

    message = refusal(Reader(make()), "opacus")

    assert f"{path}: " in message
    assert f"opacus.layers.{layer} " in message
    assert convert(Reader(make()), "federated").report.passed


def test_opacus_own_validator_is_asked_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that Opacus comes to refuse is named by its path."""
    validators = pytest.importorskip("opacus.validators")
    monkeypatch.setitem(
        validators.ModuleValidator.VALIDATORS,
        nn.Linear,
        lambda module: [ValueError("no such layers")],
    )

    message = refusal(Around(nn.Identity()), "opacus")

    assert "fc: " in message
    assert "no such layers" in message
    assert convert(Around(nn.Identity()), "federated").report.passed


@pytest.mark.parametrize("form", quick(OUTPUTS, OUTPUTS_OF_EACH_KIND))
def test_outputs_of_any_form(form: str) -> None:
    make, named = OUTPUTS[form]
    if named is None:
        assert convert(Outputs(make), "federated").report.passed
        return

    message = refusal(Outputs(make), "federated")

    assert named in message


@pytest.mark.parametrize("form", quick(INPUTS, INPUTS_OF_EACH_KIND))
def test_inputs_of_any_form(form: str) -> None:
    x = INPUTS[form]()

    assert convert(Inputs(lambda y: y), "federated", x).report.passed
    assert "Tensor.mean" in refusal(Inputs(lambda y: y - y.mean(0)), "federated", x)


@pytest.mark.parametrize("purpose", PURPOSES)
def test_a_network_that_does_not_train_is_not_passed(purpose: str) -> None:
    def fail(y: Tensor) -> object:
        raise ValueError("no targets given")

    message = refusal(Outputs(fail), purpose)

    assert "no targets given" in message
    assert "inputs=" in message


def test_a_network_of_one_sample_is_not_passed() -> None:
    message = refusal(Outputs(lambda y: y.view(1, 5)), "federated", torch.randn(1, 3, 12, 12))

    assert "4x3x12x12" in message


def test_a_network_of_a_fixed_batch_is_run_on_that() -> None:
    x = torch.randn(6, 3, 12, 12)

    assert convert(Outputs(lambda y: y.view(6, 5)), "federated", x).report.passed
    assert "roll" in refusal(Outputs(lambda y: y.view(6, 5).roll(2, 0)), "federated", x)


class InRows(nn.Module):
    """A linear layer that takes each position of each sample as a row."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        rows = x.movedim(1, -1)
        return self.linear(rows.flatten(0, 2)).view(rows.shape).movedim(-1, 1)


class InColumns(nn.Module):
    """A linear layer that takes samples in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        columns = x[:, :, :, 0].permute(2, 0, 1)
        return self.linear(columns).permute(1, 2, 0)[..., None] + x


class Shuffled(nn.Module):
    """A layer between two shuffles, of which the second undoes the first."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x.flip(0)).flip(0)


def test_a_step_that_changes_what_is_kept_beside_the_parameters_is_refused() -> None:
    """What the forward makes again with the same numbers is a constant, and is not named."""
    layer = Own(rewritten, counted=torch.zeros(()), untouched=torch.zeros(2))
    layer.frozen = nn.Parameter(torch.zeros(4), requires_grad=False)

    message = refusal(Around(layer), "federated")

    assert "mix: a step of training changes" in message
    for changed in ("counted", "frozen", "measured"):
        assert changed in message
    for unchanged in ("untouched", "constant", "scale"):
        assert unchanged not in message


def test_opacus_takes_a_layer_whose_row_i_is_sample_i() -> None:
    assert convert(Around(nn.Conv2d(8, 8, 1)), "opacus").report.passed


def test_opacus_gets_no_parameters_of_a_compiled_module() -> None:
    """No hook sees its input, so nothing tells that row i is sample i."""
    model = Around(torch.jit.script(Compiled(centred=False)))
    assert convert(model, "federated").report.passed

    message = refusal(model, "opacus")

    assert "mix: " in message
    assert "torch.jit" in message


@pytest.mark.parametrize("mix", [InRows, InColumns, Shuffled])
def test_opacus_takes_row_i_for_sample_i(mix: type[nn.Module]) -> None:
    """These layers keep samples apart, but a row is not a sample, and Opacus would clip rows."""
    assert convert(Around(mix()), "federated").report.passed

    message = refusal(Around(mix()), "opacus")

    assert "mix." in message
    assert "sample" in message


@pytest.mark.parametrize(
    "arch",
    quick(
        ["vit_tiny_patch16_224", "resnet18", "regnety_002", "mobilenetv3_small_100"],
        ["vit_tiny_patch16_224"],
    ),
)
@pytest.mark.parametrize("purpose", PURPOSES)
def test_networks_of_timm_pass(arch: str, purpose: Any) -> None:
    is_transformer = arch.startswith("vit")
    size: dict[str, Any] = {"img_size": 32, "depth": 2} if is_transformer else {}
    model = timm.create_model(arch, num_classes=10, drop_rate=0.2, **size)

    done = normswap.convert(
        model, "rmsnorm" if is_transformer else "groupnorm", input_size=(3, 32, 32), purpose=purpose
    )

    assert done.report.passed


def test_the_run_disturbs_nothing() -> None:
    """Random numbers go on, modes and buffers stay, and the network of the user is not trained."""
    model = Around(nn.Dropout(0.5)).train()
    result = copy.deepcopy(model)
    model.bn.eval()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    state = copy.deepcopy(result.state_dict())
    network = Network.of(
        model, inputs=torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    )

    with pytest.raises(RefusedError, match="bn"):
        sample_leaks.check(network, result, TrainingProof(), "federated")

    assert torch.equal(expected[0], torch.rand(3))
    assert expected[1:] == (random.random(), np.random.rand())
    assert result.training
    assert not model.bn.training
    assert all(torch.equal(state[name], tensor) for name, tensor in result.state_dict().items())


def test_without_the_run_a_leak_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: the same network, and no run."""
    monkeypatch.setattr(sample_leaks, "check", lambda *_: None)

    assert convert(LEAKS["functional"][0](), "federated").report.passed
