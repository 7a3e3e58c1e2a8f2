"""Private and federated training: what Opacus itself says, and its gradients per sample."""

import copy
import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.hand_written_networks import Net, PreAct
from support.lived_in_networks import batchnorms, distance, lived_in, run
from support.sampled_tables import crossed, named, quick
from support.tiny_modules import C, bn, conv
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import normswap
from normswap import provenance, shipped
from normswap.errors import RefusedError
from normswap.graph import inspection
from normswap.images import datasets
from normswap.layers.channelwise import ChannelBias
from normswap.layers.placeholders import Copy
from normswap.plan import Edit, Step
from normswap.schemes.purposes import plan_opacus
from normswap.storage.checkpoint import open_model
from normswap.surgery import applying

pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # opacus': no secure random numbers, hooks on inputs without gradient
TARGETS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("groupnorm", {"relative_eps": 0}),
    ("layernorm", {"relative_eps": 0}),
    ("skipinit", {}),
    ("regularized-skipinit", {"dropout": 0}),
    ("folded", {}),
    ("nf", {"mean": "keep"}),
    ("weightnorm", {}),
    ("fixup", {}),
    ("frozen-bn", {}),
)
DEFAULTS = [
    target
    for target in TARGETS
    if target[0] in ("groupnorm", "skipinit", "folded", "weightnorm", "frozen-bn")
]
NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 16, 24, 32)},
    "resnetv2_18": {"channels": (8, 16, 24, 32), "stem_chs": 8},
    "seresnet18": {"channels": (8, 16, 24, 32)},
    "test_efficientnet": {},
}
UNFIT = {
    ("test_efficientnet", to) for to in ("skipinit", "regularized-skipinit", "fixup")
}  # no residual blocks


@pytest.fixture(scope="module")
def opacus() -> Any:
    """It brings SciPy along, for which the other tests need not wait."""
    importlib.import_module("opacus.validators")
    return importlib.import_module("opacus")


def small(arch: str) -> nn.Module:
    torch.manual_seed(0)
    model = timm.create_model(arch, num_classes=10, **NARROW[arch])
    return lived_in(model, torch.randn(4, 3, 32, 32, dtype=torch.float64))


@functools.cache
def images(count: int = 16) -> tuple[Tensor, Tensor]:
    loader = datasets.make_loader(
        open_model(str(shipped.FOLDER)),
        str(shipped.FOLDER / "images.tar"),
        workers=0,
        samples=count,
    )
    batches = list(loader)
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


def trained_privately(opacus: Any, model: nn.Module, steps: int = 3) -> list[float]:
    """The loss on some real images, before each step under Opacus' own engine."""
    x, y = images()
    opacus.validators.ModuleValidator.validate(model.train(), strict=True)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=len(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    private: Any
    private, optimizer, loader = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1e-3,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    losses = []
    for _ in range(steps):
        for inputs, labels in loader:
            loss = F.cross_entropy(private(inputs), labels)
            losses.append(loss.item())
            loss.backward()
            assert all(
                p.grad_sample is not None and len(p.grad_sample) == len(x)
                for p in private.parameters()
                if p.requires_grad
            )
            optimizer.step()
            optimizer.zero_grad()

    return losses


@pytest.mark.slow
@pytest.mark.parametrize("to", quick(["groupnorm", "skipinit"], ["groupnorm"]))
def test_the_demo_network_trains_privately(to: str, tmp_path: Path, opacus: Any) -> None:
    done = normswap.convert(open_model(str(shipped.FOLDER)), to, purpose="opacus")
    normswap.save(done, tmp_path / "out")
    model = normswap.load(tmp_path / "out")
    assert not any(getattr(module, "inplace", False) for module in model.modules())
    losses = trained_privately(opacus, model)
    assert losses[-1] < losses[0] - 0.01


@pytest.mark.one_in(2)
@pytest.mark.parametrize("arch", ["test_efficientnet", "resnetv2_18"])
def test_fused_norms_that_opacus_misses(arch: str, opacus: Any) -> None:
    """`ModuleValidator.fix` leaves BatchNormAct2d and finds nothing wrong with its statistics."""
    model = small(arch).float().train()
    validator = opacus.validators.ModuleValidator
    fixed = validator.fix(model)

    assert any(isinstance(module, BatchNormAct2d) for module in fixed.modules())
    assert validator.validate(fixed, strict=True) == []

    for to in ("layernorm", "skipinit" if arch == "resnetv2_18" else "folded"):
        options = {"relative_eps": 0} if to == "layernorm" else {}
        result = normswap.convert(
            model, to, purpose="opacus", input_size=(3, 32, 32), **options
        ).model
        assert not any(isinstance(module, BatchNormAct2d) for module in result.modules())
        losses = trained_privately(opacus, result)
        assert losses[-1] < losses[0]


@crossed("arch, target", NARROW, TARGETS, ids=named)
@pytest.mark.one_in(2)
def test_gradients_per_sample(arch: str, target: tuple[str, dict[str, Any]], opacus: Any) -> None:
    """Opacus' gradients of each sample are those of plain autograd on that sample alone."""
    to, options = target
    if (arch, to) in UNFIT:
        with pytest.raises(RefusedError, match="no residual blocks"):
            normswap.convert(small(arch), to, purpose="opacus", input_size=(3, 32, 32), **options)
        return

    done = normswap.convert(small(arch), to, purpose="opacus", input_size=(3, 32, 32), **options)
    assert done.steps == 2

    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    y = torch.tensor([0, 3, 7])

    oracle = copy.deepcopy(done.model).train()
    for module in oracle.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    private = opacus.GradSampleModule(copy.deepcopy(oracle))
    F.cross_entropy(private(x), y).backward()

    ours = dict(private._module.named_parameters())
    for i in range(len(x)):
        oracle.zero_grad()
        F.cross_entropy(oracle(x[i : i + 1]), y[i : i + 1]).backward()
        for name, parameter in oracle.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                seen = ours[name].grad_sample[i]
                assert float((seen - parameter.grad).norm()) <= 1e-8 * (
                    1e-3 + float(parameter.grad.norm())
                ), name


@crossed(
    "network, target",
    [("resnetv2_18", "opacus"), ("resnetv2_18", "federated"), ("seresnet18", "opacus")],
    TARGETS,
    ids=lambda row: "-".join(map(str, row)) if isinstance(row[1], str) else named(row),
)
@pytest.mark.one_in(8)
def test_the_function_is_that_of_the_scheme(
    network: tuple[str, str], target: tuple[str, dict[str, Any]]
) -> None:
    arch, purpose = network
    to, options = target
    model = small(arch)
    plain = normswap.convert(model, to, input_size=(3, 32, 32), **options)
    done = normswap.convert(model, to, purpose=purpose, input_size=(3, 32, 32), **options)
    x = torch.randn(2, 3, 48, 48, dtype=torch.float64)

    assert distance(run(plain.model, x), run(done.model, x)) <= 1e-12
    assert [step.scheme for step in done.plan.steps] == [to, purpose]
    assert done.report.exact is plain.report.exact
    assert not any(isinstance(m, ChannelBias) and m.sign is not None for m in done.model.modules())

    names = done.model.state_dict()
    assert all(new in names and old in model.state_dict() for old, new in done.renames)

    record = provenance.of(done.model)
    assert record is not None
    assert record.plan == done.plan


@pytest.mark.parametrize("target", quick(TARGETS, DEFAULTS), ids=named)
@pytest.mark.one_in(2)
def test_federated_training_changes_parameters_only(target: tuple[str, dict[str, Any]]) -> None:
    to, options = target
    model = normswap.convert(
        small("resnetv2_18"), to, purpose="federated", input_size=(3, 32, 32), **options
    ).model.train()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    x, y = images(16)
    F.cross_entropy(model(x.double()), y).backward()
    torch.optim.SGD(model.parameters(), lr=0.01).step()
    model(x.double())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("purpose", "to", "why"),
    [
        ("opacus", "batchnorm", "takes its statistics from the batch"),
        ("federated", "batchnorm", "takes its statistics from the batch"),
        ("opacus", "tune", "learns and holds buffers"),
        ("opacus", "spectralnorm", "buffers"),
        ("federated", "spectralnorm", "buffers that training changes"),
    ],
)
def test_what_no_purpose_allows(purpose: str, to: str, why: str) -> None:
    options = {"ghost_batch": 4} if to == "batchnorm" else {}
    with pytest.raises(RefusedError, match=why):
        normswap.convert(small("resnet18"), to, purpose=purpose, input_size=(3, 32, 32), **options)


@pytest.mark.parametrize("purpose", ["opacus", "federated"])
def test_a_norm_that_is_left_out_is_refused_by_path(purpose: str) -> None:
    with pytest.raises(RefusedError, match="bn1"):
        normswap.convert(
            small("resnet18"), "folded", only="layer1", purpose=purpose, input_size=(3, 32, 32)
        )


def test_sums_in_place_of_other_peoples_networks(opacus: Any) -> None:
    """`out += x` overwrites what the last layer of the branch returned."""
    torch.manual_seed(0)
    model = lived_in(Net(PreAct), torch.randn(4, 3, 33, 33, dtype=torch.float64))
    done = normswap.convert(model, "skipinit", purpose="opacus", input_size=(3, 33, 33))
    assert sum(isinstance(module, Copy) for module in done.model.modules()) == 3
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    opacus.GradSampleModule(copy.deepcopy(done.model).train())(x).sum().backward()
    again = normswap.convert(
        done.model, "skipinit", alpha=0.5, purpose="opacus", input_size=(3, 33, 33)
    ).model
    assert sum(isinstance(module, Copy) for module in again.modules()) == 3


class SignsAndSums(nn.Module):
    """Steps in place of every kind: of modules, of a module's part, of functions, one after one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = conv()
        self.relu = nn.ReLU(inplace=True)
        sign = torch.tensor([1.0, -1.0, 0.0, 1.0])
        self.signs = ChannelBias(torch.rand(C), sign, nn.SiLU(inplace=True))
        self.conv2 = conv()
        self.conv3 = conv()
        self.drop = nn.Dropout(0.1, inplace=True)
        self.head = nn.Linear(C, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.signs(self.relu(self.conv1(x))))
        # Both functions write into what `conv2` returned.
        y += x
        y = F.relu(y, inplace=True)
        # This one writes into a view of what `conv3` returned.
        y = self.conv3(y).flatten(2).relu_()
        return self.head(self.drop(y).mean(2))


def test_the_plan_for_opacus_says_what_no_longer_writes_in_place() -> None:
    anatomy = inspection.inspect(SignsAndSums().eval(), torch.randn(2, C, 8, 8))

    builder = plan_opacus(anatomy)

    edits = [
        Edit("signs", "ChannelAffine", out_of_place=True),
        Edit("relu", "OutOfPlace"),
        Edit("drop", "OutOfPlace"),
        # One copy is enough for both functions.
        Edit("conv2", "Copy", keep=True),
        Edit("conv3", "Copy", keep=True),
    ]
    assert {edit.path: edit for edit in builder.edits()} == {edit.path: edit for edit in edits}
    assert builder.refusals == {}
    assert builder.notes == []


def test_the_network_for_opacus_writes_into_no_learning_layers_output() -> None:
    model = SignsAndSums().eval()
    x = torch.randn(2, C, 8, 8)
    planned = Step("opacus", {}, plan_opacus(inspection.inspect(model, x)).edits())

    result = applying.apply_step(model, planned)

    assert distance(run(model, x), run(result, x)) < 1e-6
    returned: dict[str, tuple[Tensor, int]] = {}

    def look(path: str, output: Tensor) -> None:
        returned[path] = (output, output._version)

    for path in ("conv1", "signs", "conv2.inner", "conv3.inner", "head"):
        layer = result.get_submodule(path)
        layer.register_forward_hook(lambda m, args, output, path=path: look(path, output))
    run(result, x)
    assert set(returned) == {"conv1", "signs", "conv2.inner", "conv3.inner", "head"}
    assert [path for path, (y, version) in returned.items() if y._version != version] == []


class Tempered(nn.Module):
    """A layer of the user's that learns and holds a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))
        self.register_buffer("temperature", torch.full((1,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor / self.temperature


@pytest.mark.parametrize("learns", [True, False])
def test_a_layer_that_learns_and_holds_a_buffer_is_refused_by_path(learns: bool) -> None:
    model = nn.Sequential(conv(), Tempered(), conv()).eval()
    model[1].requires_grad_(learns)

    refusals = plan_opacus(inspection.inspect(model, torch.randn(2, C, 8, 8))).refusals

    assert set(refusals) == ({"1"} if learns else set())
    assert not learns or "temperature" in refusals["1"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parametrized_layer_gets_the_bias_by_which_opacus_finds_it(dtype: torch.dtype) -> None:
    layers = [conv(), bn(), nn.ReLU(), nn.Conv2d(C, 5, 1, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.ConvTranspose2d(5, 7, 1, bias=False)).to(dtype).eval()
    x = torch.randn(2, C, 8, 8, dtype=dtype)

    done = normswap.convert(model, "weightnorm", purpose="opacus", inputs=x)
    result = done.model

    normed = normswap.convert(model, "weightnorm", inputs=x).model
    builder = plan_opacus(inspection.inspect(normed, x))
    assert set(builder.outcomes) == {"3", "5"}
    assert done.plan.steps[-1].edits == builder.edits()
    for path, channels in (("3", 5), ("5", 7)):
        bias = result.get_submodule(path).bias
        assert isinstance(bias, nn.Parameter)
        assert bias.dtype is dtype
        assert bias.tolist() == [0.0] * channels
    assert distance(run(model, x), run(result, x)) < 1e-5


def doubled(layer: nn.Module) -> nn.Module:
    """Give the layer a parametrization that holds nothing."""
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


# Layers of which Opacus may, or may not, have gradients per sample.
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "convolution": conv,
    "with a learning factor": lambda: Tempered(),
    "weight norm": lambda: parametrizations.weight_norm(conv()),
    "weight norm without bias": lambda: parametrizations.weight_norm(conv(bias=False)),
    "weight norm by a hook": lambda: nn.utils.weight_norm(conv()),
    "weight norm by a hook, without bias": lambda: nn.utils.weight_norm(conv(bias=False)),
    "spectral norm": lambda: parametrizations.spectral_norm(conv()),
    "orthogonal": lambda: parametrizations.orthogonal(conv(bias=False)),
    "parametrized": lambda: doubled(conv(bias=False)),
    "parametrized norm": lambda: doubled(nn.GroupNorm(2, C)),
    "parametrized norm without bias": lambda: doubled(nn.LayerNorm(8, bias=False)),
    "InstanceNorm": lambda: nn.InstanceNorm2d(C, affine=True),
    "InstanceNorm with statistics": lambda: nn.InstanceNorm2d(C, track_running_stats=True),
}
# Which parameters of the layer are frozen.
FROZEN: dict[str, Callable[[str], bool]] = {
    "nothing frozen": lambda name: False,
    "frozen": lambda name: True,
    "bias frozen": lambda name: name == "bias",
    "weight frozen": lambda name: name != "bias",
}


def trains_per_sample(opacus: Any, model: nn.Module, x: Tensor) -> bool:
    """Whether Opacus' gradients per sample are those of plain autograd, of all that learns."""
    model = model.train()
    if opacus.GradSampleModule.validate(model) or opacus.validators.ModuleValidator.validate(model):
        return False
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    try:
        opacus.GradSampleModule(model)(x).square().flatten(1).sum(1).mean().backward()
        of_samples = {name: p.grad_sample for name, p in learning.items()}
    # Opacus raises what comes.
    except Exception:
        return False

    for i in range(len(x)):
        loss = model(x[i : i + 1]).square().sum()
        gradients = torch.autograd.grad(loss, [*learning.values()])
        for name, gradient in zip(learning, gradients, strict=True):
            if not torch.allclose(of_samples[name][i], gradient, atol=1e-9):
                return False
    return True


def moves_buffers(model: nn.Module, x: Tensor) -> bool:
    """Whether a forward in training changes a buffer."""
    model = model.train()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    with torch.no_grad():
        model(x)
    return any(not torch.equal(before[name], buffer) for name, buffer in model.named_buffers())


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("layer", LAYERS)
def test_what_opacus_cannot_train_is_refused_and_nothing_else(
    layer: str, frozen: str, opacus: Any
) -> None:
    """A layer whose buffers move is refused as well, whether or not it learns."""

    def network() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(conv(), LAYERS[layer](), conv())
        for name, parameter in model[1].named_parameters():
            parameter.requires_grad_(not FROZEN[frozen](name))
        return model.double().eval()

    model = network()
    x = torch.randn(3, C, 8, 8, dtype=torch.float64)
    model(x)

    builder = plan_opacus(inspection.inspect(model, x))

    if builder.refusals:
        assert not trains_per_sample(opacus, network(), x) or moves_buffers(network(), x)
        return
    result = applying.apply_step(model, Step("opacus", {}, builder.edits()))
    assert trains_per_sample(opacus, result, x)
    # What was frozen stays so, and a frozen layer gets nothing that learns.
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    learns = {name for name, parameter in result.named_parameters() if parameter.requires_grad}
    assert learns - learned <= ({"1.bias"} if any(name[0] == "1" for name in learned) else set())
    assert learned <= learns


def test_without_copies_opacus_fails(opacus: Any) -> None:
    """The test above can fail: the same network, not prepared."""
    model = normswap.convert(small("resnet18"), "skipinit", input_size=(3, 32, 32)).model
    with pytest.raises(RuntimeError, match="modified inplace"):
        opacus.GradSampleModule(model.train())(torch.randn(2, 3, 32, 32, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("arch", quick(["resnetv2_18", "resnet18"], ["resnetv2_18"]))
def test_the_way_back_stays_open(arch: str) -> None:
    """Folded, given norms, unfolded: a network made for a purpose is like any other."""
    model = small(arch)
    x = torch.randn(2, 3, 32, 32, dtype=torch.float64)
    made = normswap.convert(model, "skipinit", purpose="opacus", input_size=(3, 32, 32)).model
    for to in ("folded", "batchnorm", "fixup", "unfold"):
        back = normswap.convert(made, to, input_size=(3, 32, 32)).model
        assert distance(run(model, x), run(back, x)) <= 1e-10
        if to in ("batchnorm", "unfold"):
            assert len(batchnorms(model)) == len(batchnorms(back))
