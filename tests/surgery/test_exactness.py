"""Laws of the proof: exact means exact whatever a network answers, holds or keeps, and the source
stays as it is.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import itertools
import pkgutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.hand_written_networks import Answers
from support.lived_in_networks import distance, lived_in
from support.sampled_tables import crossed
from torch import Tensor, nn

import normswap
from normswap.analysis import block_signals
from normswap.errors import NormswapError, VerificationError
from normswap.surgery import recalibration
from normswap.surgery.network import Network

ANSWERS: dict[str, Callable[[Tensor], Any]] = {
    "floats": lambda y: y,
    "labels": lambda y: y.argmax(1),
    "label of each image": lambda y: y.mean((2, 3)).argmax(1),
    "mask": lambda y: y[:, 0] > 0,
    "top-k": lambda y: y.mean((2, 3)).topk(2).indices,
    "complex": lambda y: torch.fft.rfft2(y),
    "a dict of labels and a constant": lambda y: {"labels": y.argmax(1), "scale": torch.ones(3)},
    "squeezed": lambda y: y[:, :1].sigmoid().squeeze(),
    "counts": lambda y: (y > 0).sum((2, 3)),
    "sparse": lambda y: y.relu().to_sparse(),
}
IMAGES = torch.randn(64, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def _network(answer: Callable[[Tensor], Any]) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(Answers(answer), IMAGES[:8].double()).float()


@pytest.mark.parametrize("name", ANSWERS)
def test_a_result_is_proved_and_a_corrupted_one_fails(name: str) -> None:
    source = _network(ANSWERS[name])
    done = normswap.convert(source, "folded", inputs=IMAGES)
    assert done.report.passed
    assert normswap.verify(source, done.model, IMAGES).passed
    broken: Any = copy.deepcopy(done.model)
    broken.body[3].weight.data.neg_()
    assert not normswap.verify(source, broken, IMAGES).passed


def test_empty_outputs_prove_nothing() -> None:
    source = _network(lambda y: y[:, :0])

    report = normswap.verify(source, copy.deepcopy(source), IMAGES)

    assert report.verdict == "NOT PROVED"
    assert "empty" in report.unproved
    with pytest.raises(VerificationError, match="nothing proves the result"):
        normswap.convert(source, "folded", inputs=IMAGES)


def test_constant_outputs_are_proved_by_what_stands_before_them() -> None:
    source = _network(lambda y: y.mean((2, 3)) * 0)

    done = normswap.convert(source, "folded", inputs=IMAGES)

    assert done.report.verdict == "PROVED"
    assert done.report.remarks == ("proved at the last layers; the outputs are constant",)
    broken: Any = copy.deepcopy(done.model)
    broken.body[3].weight.data.neg_()
    assert normswap.verify(source, broken, IMAGES).verdict == "WRONG"


def test_labels_that_are_the_same_for_every_input_are_said() -> None:
    report = normswap.convert(
        _network(lambda y: y.mean((1, 2, 3)) > 1e6), "folded", inputs=IMAGES
    ).report
    assert report.remarks == ("proved at the last layers; the outputs are labels",)


def test_a_network_that_amplifies_rounding_in_float64_is_not_called_wrong() -> None:
    with pytest.raises(
        VerificationError, match="nothing proves the result of folded: in float64, too"
    ):
        normswap.convert(_network(lambda y: (1e9 * (1e9 * y).sin()).sin()), "folded", inputs=IMAGES)


def test_a_linear_layer_of_another_axis_is_not_rescaled() -> None:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(16, 8), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)
    result = normswap.convert(
        lived_in(nn.Sequential(*layers), IMAGES[:8].double()).float(), "groupnorm", inputs=IMAGES
    )
    assert torch.equal(result.model[1].weight, layers[1].weight)


def _tables() -> dict[type[nn.Module], set[str]]:
    """The classes in the tables by which rooms that decide what is folded go, and which tables
    those are.
    """
    tables: dict[type[nn.Module], set[str]] = {}
    for room in ("calibration", "folding", "graph", "layers", "schemes", "sites"):
        for file in pkgutil.iter_modules([str(Path(normswap.__file__).parent / room)]):
            # Its table says what Opacus refuses; nothing is folded by it.
            if file.name == "purposes":
                continue
            module = importlib.import_module(f"normswap.{room}.{file.name}")
            for name, table in vars(module).items():
                for kind in table if isinstance(table, tuple | set | frozenset | dict) else ():
                    if isinstance(kind, type) and issubclass(kind, nn.Module):
                        tables.setdefault(kind, set()).add(f"{room}.{file.name}.{name}")
    return tables


TABLES = _tables()
# They take no maps of channels, stand in the same tables as layers that do, and are read by the
# same code.
OTHERS = {
    *(
        "Flatten",
        "Linear",
        "LayerNorm",
        "LayerNormAct",
        "LayerNormFp32",
        "RMSNorm",
        "RmsNorm",
        "RmsNormAct",
    ),
    *("RmsNormFp32", "SimpleNorm", "MultiheadAttention", "ModuleDict", "ModuleList"),
}


def _layer(kind: type[nn.Module]) -> nn.Module | None:
    """A layer of the class that takes maps of 8 channels."""
    for arguments in ((), (2,), (8,), (8, 2), (8, 8, 3)):
        with contextlib.suppress(Exception):
            layer = kind(*arguments).eval()
            maps = layer(torch.ones(1, 8, 16, 16))
            if maps.ndim == 4 and maps.shape[1] == 8:
                return layer
    return None


def _name(row: Any) -> str:
    return getattr(row, "__name__", str(row))


def test_every_class_of_a_table_is_tried() -> None:
    public = [
        kind
        for kind in TABLES
        if kind.__name__[0] != "_" and not kind.__module__.startswith("normswap.")
    ]
    names = {kind.__name__ for kind in public if _layer(kind) is None}
    assert {name for name in names if not name.endswith(("1d", "3d"))} == OTHERS


@crossed(
    "kind, scheme",
    [kind for kind in TABLES if _layer(kind)],
    ["folded", "tune", "affine"],
    ids=_name,
)
@pytest.mark.one_in(4)
def test_a_forward_of_its_own_is_never_taken_for_its_class(
    kind: type[nn.Module], scheme: str
) -> None:
    """It bends values that N(0, 1) noise does not reach."""
    for patched, place in itertools.product((False, True), (0, 1)):
        layer: Any = _layer(kind)
        forward: Any = kind.forward

        def bends(self: nn.Module, *args: Any, forward: Any = forward, **kwargs: Any) -> Tensor:
            y: Tensor = forward(self, *args, **kwargs)
            return y.clamp(-20, 20)

        if patched:
            layer.forward = functools.partial(bends, layer)
        else:
            layer.__class__ = type("Bends", (kind,), {"forward": bends})
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 1)]
        layers.insert(1 + place, layer)
        source = lived_in(nn.Sequential(*layers), IMAGES[:8].double()).float()
        try:
            done = normswap.convert(source, scheme, inputs=IMAGES[:4]).model
        except NormswapError as error:
            assert "a bug of normswap" not in str(error)  # noqa: PT017 - either way is right
            continue
        large = 300 * IMAGES[:4]
        with torch.no_grad():
            assert distance(source(large), done(large)) < 1e-5


class Renamed(nn.Module):
    """An encoder of two names, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.head = nn.Sequential(nn.Conv2d(8, 4, 1), nn.BatchNorm2d(4))
        self.backbone = self.encoder

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.backbone(x))
        return y


@pytest.mark.parametrize("option", ["only", "skip"])
@pytest.mark.parametrize("pattern", ["encoder", "backbone", "backbone.*", "enc*"])
@pytest.mark.parametrize("scheme", ["folded", "groupnorm", "frozen-bn", "affine", "tune"])
def test_a_pattern_fits_any_name_of_a_module(scheme: str, pattern: str, option: Any) -> None:
    done: Any = normswap.convert(
        Renamed().eval(), scheme, inputs=IMAGES[:2], **{option: [pattern]}
    ).model
    stays = [isinstance(norm, nn.BatchNorm2d) for norm in (done.encoder[1], done.head[1])]
    assert stays == [option == "skip", option == "only"]


@pytest.mark.parametrize("scheme", ["folded", "groupnorm", "tune", "affine"])
def test_a_result_that_was_made_in_inference_mode_can_be_trained(scheme: str) -> None:
    with torch.inference_mode():
        model = normswap.convert(
            _network(ANSWERS["floats"]), scheme, inputs=IMAGES[:4]
        ).model.train()
    model(IMAGES[:4]).square().mean().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())


def test_the_memory_format_stays() -> None:
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3, groups=2)
    source = nn.Sequential(*layers).eval().to(memory_format=torch.channels_last)
    done = normswap.convert(source, "folded", inputs=IMAGES[:2]).model
    assert all(done[i].weight.is_contiguous(memory_format=torch.channels_last) for i in (0, 2))  # type: ignore[index]


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + super().forward(x)
        return y


class Keeper(nn.Module):
    """A layer whose forward keeps things: a count, a buffer, a list, the first batch's moments in a
    parameter.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(1, 4, 1, 1))
        self.register_buffer("total", torch.zeros(1))
        self.calls = 0
        self.sizes = []
        self.cache = {}
        self.before = None
        self.nested: dict[str, Any] = {"deep": ([],)}

    total: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            self.shift.data.copy_(-x.mean((0, 2, 3), True))
        self.calls += 1
        self.total += 1
        self.sizes.append(x.shape)
        self.cache[len(self.cache)] = x
        self.nested["deep"][0].append(self.calls)
        self.before = x
        return x + self.shift


def _state(model: nn.Module) -> list[object]:
    keeper: Any = model[-1]  # type: ignore[index]
    tensors = [(name, value.tolist()) for name, value in model.state_dict().items()]
    modes = [module.training for module in model.modules()]

    return [
        tensors,
        modes,
        keeper.calls,
        list(keeper.sizes),
        dict(keeper.cache),
        str(keeper.nested),
        keeper.before,
    ]


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "inspect": lambda net: normswap.inspect(net, IMAGES[:2]),
    "folded": lambda net: normswap.convert(net, "folded", inputs=IMAGES[:2]),
    "folded on noise": lambda net: normswap.convert(net, "folded", input_size=(3, 16, 16)),
    "groupnorm": lambda net: normswap.convert(net, "groupnorm", inputs=IMAGES[:2]),
    "groupnorm on images": lambda net: normswap.convert(
        net, "groupnorm", inputs=IMAGES[:2], calibrate=[IMAGES]
    ),
    "nf on images": lambda net: normswap.convert(net, "nf", inputs=IMAGES[:2], calibrate=[IMAGES]),
    "nf on synthetic images": lambda net: normswap.convert(
        net, "nf", inputs=IMAGES[:2], calibrate="synthetic"
    ),
    "dyt on images": lambda net: normswap.convert(
        net, "dyt", inputs=IMAGES[:2], calibrate=[IMAGES]
    ),
    "export": lambda net: normswap.export(net, Path("network.pt2"), inputs=IMAGES[:1]),
    "param_groups": lambda net: normswap.param_groups(net),
    "verify": lambda net: normswap.verify(net, copy.deepcopy(net), IMAGES[:2]),
    "diagnose": lambda net: normswap.diagnose(net, inputs=IMAGES[:2]),
    "recalibrate": lambda net: recalibration.recalibrate(
        net, [IMAGES[:32], IMAGES[32:]], inputs=IMAGES[:2]
    ),
    "signal propagation": lambda net: block_signals.signal_propagation(
        Network.of(net, inputs=IMAGES[:2]), [IMAGES]
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_source_stays_as_it_is(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    block = Residual(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), block, nn.Conv2d(8, 4, 1), Keeper()
    ).eval()
    net[1].train()
    before = _state(net)

    try:
        FUNCTIONS[name](net)
    except NormswapError as error:
        assert "Keeper" in str(error) or "4" in str(error), error  # noqa: PT017 - it may be refused, by path

    assert _state(net) == before


class Tapped(nn.Module):
    """Forward reads what a hook on one of its layers keeps."""

    def __init__(self, hook: Callable[[Tapped], Callable[..., None]]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 2, 1)
        self.features: dict[str, Tensor] = {}
        self.body[2].register_forward_hook(hook(self))

    def keep(self, module: nn.Module, args: object, output: Tensor) -> None:
        self.features["last"] = output

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.body(x), self.head(self.features["last"])


class Called(nn.Module):
    """A norm after a convolution, called as `call` does it."""

    def __init__(self, call: Callable[[Any, Any], Any], layers: Any = ()) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.call = call
        self.layers = layers

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


class Record:
    def __init__(self, tensors: Tensor, mask: Tensor) -> None:
        self.tensors = tensors
        self.mask = mask


def _by_list(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.layers[0](net.norm(net.conv(x)))
    return y


def _compiled() -> nn.Module:
    net = Called(lambda net, x: net.norm(net.conv(x)))
    net.conv.compile(backend="eager")
    return net


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook that holds the network": (
        lambda: Tapped(lambda net: lambda *args: net.keep(*args)),
        "a hook of body.2",
    ),
    "a norm called by keyword": (
        lambda: Called(lambda net, x: net.norm(input=net.conv(x))),
        "norm is called by keyw",
    ),
    "a layer in a plain list": (
        lambda: Called(_by_list, [nn.Conv2d(8, 4, 1)]),
        "no state_dict has",
    ),
    "a compiled layer": (_compiled, "conv is compiled"),
    "a forward that asks its layers": (
        lambda: Called(lambda net, x: net.norm(net.conv(x)) / net.norm.momentum),
        "asks a layer for something that the new",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_copied_is_refused_with_its_cause(name: str) -> None:
    make, cause = REFUSED[name]
    net = make().eval()
    with pytest.raises(NormswapError, match=cause):
        normswap.convert(net, "folded", inputs=IMAGES[:2])


def _illegal(net: Any, x: Tensor) -> Tensor:
    y: Tensor = net.norm(net.conv(x)).mean((2, 3))
    return y.masked_fill(torch.arange(8) % 3 == 0, -torch.inf)


def _one_by_one(net: Any, x: Tensor) -> Tensor:
    maps = net.norm(net.conv(x))
    best = torch.zeros(len(maps), 2)
    for i in range(len(maps)):
        best[i] = maps[i].amax((1, 2)).sort(descending=True).values[:2]
    return best


class Clamped(nn.Conv2d):
    """Its filter is made anew where torch's forward calls for it."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight.clamp(-0.1, 0.1), bias)


def _remade() -> nn.Module:
    net = Called(lambda net, x: net.norm(net.conv(x)))
    net.conv = Clamped(3, 8, 3)
    return net


def _scripted() -> nn.Module:
    net = Called(lambda net, x: net.head(net.norm(net.conv(x))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net.head = torch.jit.script(nn.Conv2d(8, 4, 1))
    return net


WORKS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "a method as hook": (lambda: Tapped(lambda net: net.keep), IMAGES[:2]),
    "a list, masked": (lambda: Called(_illegal), IMAGES[:2]),
    "a loop over the images": (lambda: Called(_one_by_one), IMAGES[:2]),
    "a scripted part": (_scripted, IMAGES[:2]),
    "a filter remade in _conv_forward": (_remade, IMAGES[:2]),
    "a record of tensors": (
        lambda: Called(lambda net, x: {"boxes": net.norm(net.conv(x.tensors)) * ~x.mask[:, None]}),
        (Record(IMAGES[:2], torch.zeros(2, 14, 14, dtype=torch.bool)),),
    ),
}


@pytest.mark.parametrize("name", WORKS)
def test_what_a_forward_may_do_folds_exactly(name: str) -> None:
    make, inputs = WORKS[name]
    torch.manual_seed(0)
    net: Any = make().eval()
    norm = net.norm if hasattr(net, "norm") else net.body[1]
    norm.running_mean.normal_()
    done = normswap.convert(net, "folded", inputs=inputs)

    assert done.report.passed
    assert not any(isinstance(module, nn.BatchNorm2d) for module in done.model.modules())
    assert [
        fault.name
        for fault in normswap.diagnose(net, inputs=inputs).faults
        if fault.name == "shared-norm"
    ] == []


@pytest.mark.parametrize("scheme", ["groupnorm", "layernorm", "instancenorm", "dyt"])
def test_norms_that_the_target_does_not_ask_for_stay(scheme: str) -> None:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8, affine=True),
    ]
    source = lived_in(nn.Sequential(*layers, nn.Conv2d(8, 4, 1)), IMAGES.double()).float()

    norm: Any = source[4]  # type: ignore[index]
    for images in (None, [IMAGES]):
        done: Any = normswap.convert(source, scheme, inputs=IMAGES[:2], calibrate=images).model
        assert type(done[4]) is nn.InstanceNorm2d
        assert torch.equal(done[4].weight, norm.weight)


class Ways(nn.Module):
    """A norm for each of two domains, and the features on demand."""

    def __init__(self, way: Callable[[Tensor, Any], int]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(8) for _ in range(2))
        self.way = way

    def forward(self, x: Tensor, domain: Any = 0) -> Tensor:
        y: Tensor = self.conv(x)
        way = self.way(x, domain)
        return y if way == 2 else self.norms[way](y).relu()


WAYS: dict[str, tuple[Callable[[Tensor, Any], int], list[Any]]] = {
    "an argument": (lambda x, domain: domain, [{"x": IMAGES[:2], "domain": i} for i in range(2)]),
    "positional": (lambda x, domain: domain, [(IMAGES[:2], i) for i in range(2)]),
    "a flag": (
        lambda x, flag: 2 if flag else 0,
        [{"x": IMAGES[:2]}, {"x": IMAGES[:2], "domain": True}],
    ),
    "a value": (lambda x, _: int(x.mean() > 0), [IMAGES[:2] - 1, IMAGES[:2] + 1]),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("scheme", ["folded", "affine", "tune"])
def test_every_way_that_inputs_give_is_followed(scheme: str, name: str) -> None:
    way, batches = WAYS[name]
    torch.manual_seed(0)
    net = Ways(way).eval()
    for norm in net.norms:
        norm.running_mean.normal_()  # type: ignore[union-attr, operator]
        norm.running_var.uniform_(0.3, 3)  # type: ignore[union-attr, operator]
    done = normswap.convert(net, scheme, inputs=batches)
    for batch in batches:
        assert normswap.verify(net, done.model, batch).passed
    assert any("another way" in note for note in done.notes)


def test_a_norm_that_an_argument_would_call_is_named() -> None:
    done = normswap.convert(Ways(lambda x, domain: domain).eval(), "folded", inputs=IMAGES[:2])
    assert "never called: norms.1; forward had the default of domain" in done.notes


class Twice(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x) + super().forward(x.flip(-1))
        return y


@pytest.mark.parametrize("scheme", ["skipinit", "fixup", "residual-scale"])
def test_a_body_that_is_called_twice_is_refused_for_that(scheme: str) -> None:
    block = Residual(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8))
    with pytest.raises(NormswapError, match="calls its layers several times"):
        normswap.convert(
            Twice(nn.Conv2d(3, 8, 3), block, nn.ReLU()).eval(), scheme, inputs=IMAGES[:2]
        )


def test_input_biases_that_fixup_has_learned_cannot_be_unfolded() -> None:
    torch.manual_seed(0)
    source = timm.create_model("resnet10t", num_classes=5, channels=(8, 8, 8, 8)).eval()
    done: Any = normswap.convert(source, "fixup", input_size=(3, 32, 32)).model
    with torch.no_grad():
        for name, parameter in done.named_parameters():
            if "in_bias" in name:
                parameter.fill_(0.1)
    with pytest.raises(NormswapError, match="has learned a bias of its input"):
        normswap.convert(done, "unfold", input_size=(3, 32, 32))


def test_norms_that_share_their_statistics_are_not_recalibrated() -> None:
    layers: list[Any] = [
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.BatchNorm2d(8),
    ]
    layers[4].running_mean = layers[1].running_mean
    layers[4].running_var = layers[1].running_var

    with pytest.raises(NormswapError, match="1 and 4 share their running statistics"):
        recalibration.recalibrate(nn.Sequential(*layers).eval(), [IMAGES[:32]], inputs=IMAGES[:2])


class Imaginary(nn.Module):
    """Complex weights behind a norm, and perhaps what `torch.vmap` calls."""

    def __init__(self, *, maps: bool = False) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.maps = maps
        self.weight = nn.Parameter(torch.randn(8, 1, 1, dtype=torch.cfloat))

    def forward(self, x: Tensor) -> Tensor:
        y = (self.norm(self.conv(x)) * self.weight).abs()
        return torch.vmap(self.conv)(y[:, None, :3]) if self.maps else y


def test_complex_weights_are_saved_and_loaded(tmp_path: Path) -> None:
    done = normswap.convert(Imaginary().eval(), "folded", inputs=IMAGES[:2])
    normswap.save(done, tmp_path / "net")
    again = normswap.load(tmp_path / "net", skeleton=Imaginary())
    assert torch.equal(again(IMAGES[:2]), done.model(IMAGES[:2]))
    with pytest.raises(NormswapError, match="what happens in there cannot be seen"):
        normswap.convert(Imaginary(maps=True).eval(), "folded", inputs=IMAGES[:2])


def test_sync_batchnorms_are_recalibrated_as_others() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    first, second = (
        recalibration.recalibrate(net, [IMAGES], inputs=IMAGES[:2]).model for net in (plain, sync)
    )
    assert torch.equal(first[1].running_var, second[1].running_var)  # type: ignore[index]
