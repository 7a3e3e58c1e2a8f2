"""The record of a network: what it is made of, what it works out, and that it looks once."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lived_in_networks import lived_in
from support.model_sources import small
from torch import nn

import normswap
from normswap import provenance
from normswap.analysis import advice
from normswap.analysis.block_signals import signal_propagation
from normswap.calibration import synthetic_images
from normswap.graph import inspection
from normswap.models.preprocessing import for_inputs
from normswap.surgery import conversion, reverification
from normswap.surgery.network import Network
from normswap.surgery.recalibration import recalibrate

SIZE = (3, 48, 48)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    seen: list[nn.Module] = []
    look = inspection.inspect

    def counted(model: nn.Module, inputs: object = None) -> inspection.Anatomy:
        seen.append(model)
        return look(model, inputs)

    monkeypatch.setattr(inspection, "inspect", counted)
    return seen


def net() -> nn.Module:
    return lived_in(small(), torch.randn(4, *SIZE)).float()


def test_it_looks_once_when_asked(looks: list[nn.Module]) -> None:
    network = Network(net(), size=SIZE)
    assert looks == []
    assert network.anatomy is network.anatomy
    assert network.form.only_images
    assert network.examples[0].size == SIZE
    assert looks == [network.module]


def test_it_is_made_of_modules_results_and_itself() -> None:
    model = net()
    done = normswap.convert(model, "folded", input_size=SIZE)
    assert Network.of(model).module is model
    assert Network.of(done).module is done.model

    network = Network.of(model, size=SIZE, seed=3)
    assert (network.size, network.seed) == (SIZE, 3)
    assert Network.of(network) is network

    seen = network.anatomy
    assert Network.of(network, calibrate=[torch.randn(2, *SIZE)]).anatomy is seen

    other = Network.of(network, seed=4)
    assert (other.module, other.size, other.seed, network.seed) == (model, SIZE, 4, 3)


def test_a_module_that_holds_a_model_is_a_module() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = net()

    wrapped = Wrapped()
    assert Network.of(wrapped).module is wrapped


def test_inputs_are_the_calls() -> None:
    x = torch.randn(2, *SIZE)
    network = Network(net(), inputs=[x, x[:1]])
    assert [call.images.shape for call in network.calls] == [(2, *SIZE), (1, *SIZE)]
    assert network.examples is network.calls
    assert network.described == "given inputs"
    assert network.anatomy.traced.recorded[0] == "1x3x48x48"


def test_what_is_asked_of_a_record_takes_the_place_of_what_it_has() -> None:
    module = small()
    batch = torch.randn(2, 3, 20, 20)
    with_inputs = Network(module, batch)
    with_size = Network(module, size=SIZE)

    assert Network.of(with_inputs, size=SIZE).calls[0].size == SIZE
    assert Network.of(with_size, inputs=batch).calls[0].images.equal(batch)
    assert Network.of(with_inputs, seed=7).calls[0].images.equal(batch)


def test_another_seed_draws_other_inputs_where_they_are_drawn() -> None:
    module = for_inputs(nn.Linear(8, 2), {"x": ([8], "float32")})
    record = Network(module)
    again = Network.of(record, seed=7)

    assert "seed 7" in again.described
    assert not again.calls[0].images.equal(record.calls[0].images)
    assert again.calls[0].images.equal(Network(module, seed=7).calls[0].images)


def test_what_states_no_size_is_looked_at_as_it_is_calibrated() -> None:
    series = nn.Sequential(
        nn.Conv1d(2, 8, 3), nn.BatchNorm1d(8), nn.Flatten(), nn.Linear(8 * 38, 4)
    ).eval()
    batches = [torch.randn(8, 2, 40) for _ in range(4)]
    for calibrate in (batches, lambda: iter(batches)):
        done = recalibrate(series, calibrate)
        assert {error.size for error in done.report.logits} == {(2, 2, 40)}
    pair = torch.randn(6, 5), torch.randn(6, 3)
    (call,) = Network(nn.Bilinear(5, 3, 4), calibrate=[pair]).calls
    assert torch.equal(call.tensors()[1], pair[1][:2])


def test_one_size_tells_where_all_go_one_way() -> None:
    network = Network(net(), size=(3, 224, 224))
    assert network.anatomy.traced.input_independent
    assert [call.size for call in network.calls] == [(3, 64, 64), (3, 97, 97)]
    assert [call.size for call in network.examples] == [(3, 64, 64)]
    assert torch.equal(network.calls[0].images, network.examples[0].images)


@pytest.mark.needs("a GPU", torch.cuda.is_available())
@pytest.mark.gpu
def test_inputs_are_on_the_device_of_the_network() -> None:
    network = Network(net().cuda(), inputs=torch.randn(2, *SIZE))
    assert network.calls[0].images.is_cuda
    assert network.calls[0].call(network.module) is not None


def test_what_follows_is_another_network(looks: list[nn.Module]) -> None:
    network = Network(net(), size=SIZE, seed=2)
    assert network.anatomy
    other = network.after(net())
    assert other.anatomy is not network.anatomy
    assert (other.size, other.seed) == (SIZE, 2)
    assert looks == [network.module, other.module]


def silent(done: int, total: int) -> None:
    """A callback for progress."""


GIVEN = torch.randn(2, 3, 8, 8)
BATCHES = [torch.randn(4, 3, 8, 8)]
# None of the fields of a record has its default.
FIELDS: dict[str, Any] = {"inputs": GIVEN, "seed": 5, "calibrate": BATCHES, "progress": silent}
# What becomes of a record, and the fields that are others then.
FOLLOWING: dict[str, tuple[Callable[[Network], Network], dict[str, Any]]] = {
    "after a step": (
        lambda network: network.after(copy.deepcopy(network.module)),
        {"calibrate": None, "progress": None},
    ),
    "in float64": (Network.doubled, {"calibrate": None, "progress": None}),
    "with images": (
        lambda network: network.fitted_to([GIVEN]),
        {"calibrate": [GIVEN], "progress": None},
    ),
    "with images and progress": (
        lambda network: network.fitted_to(None, silent),
        {"calibrate": None},
    ),
    "of itself": (Network.of, {}),
    "of another seed": (lambda network: Network.of(network, seed=6), {"seed": 6}),
    "of other images": (
        lambda network: Network.of(network, calibrate=[GIVEN]),
        {"calibrate": [GIVEN]},
    ),
    "where float64 is": (Network.with_double, {}),
}


@pytest.mark.parametrize("given", ["inputs", "size"])
@pytest.mark.parametrize("name", FOLLOWING)
def test_a_record_that_follows_has_every_field_but_those_that_are_changed(
    name: str, given: str
) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    own = dict(FIELDS)
    if given == "size":
        own = {**own, "inputs": None, "size": (3, 8, 8)}
    network = Network(module, **own)
    assert network.calls
    follow, changed = FOLLOWING[name]

    other = follow(network)

    expected = {"size": None, **own, **changed}
    found = {field: getattr(other, field) for field in expected}
    if name == "in float64":
        assert other.dtype == torch.float64
        # Given inputs are calls in the other dtype then.
        found["inputs"], expected["inputs"] = None, None
    assert found == expected
    before, after = (record.calls[0].images.double() for record in (network, other))
    is_drawn_anew = given == "size" and "seed" in changed
    assert torch.equal(before, after) is not is_drawn_anew


def test_weights_that_are_drawn_are_not_those_that_were_there() -> None:
    loaded, drawn = (
        provenance.attach(net(), provenance.Provenance(sha256=digest)) for digest in ("ab12", None)
    )
    assert reverification.unchanged(loaded, loaded) is True
    assert reverification.unchanged(drawn, loaded) is False
    assert reverification.unchanged(loaded, drawn) is None


def once(looks: list[nn.Module]) -> bool:
    """Whether no network was looked at twice."""
    return len({id(model) for model in looks}) == len(looks)


def measured_again(network: Network) -> None:
    reverification.again(network, normswap.convert(network, "folded").model)


X = torch.randn(16, *SIZE)
WAYS: dict[str, Callable[[Any, Path], Any]] = {
    "an exact step": lambda net, _: normswap.convert(net, "skipinit", input_size=SIZE),
    "an approximate one, of images": lambda net, _: normswap.convert(
        net, "groupnorm", input_size=SIZE, calibrate=[X]
    ),
    "of none": lambda net, _: normswap.convert(net, "dyt", input_size=SIZE),
    "several steps": lambda net, _: normswap.convert(
        net, "skipinit", input_size=SIZE, purpose="opacus"
    ),
    "several, of images": lambda net, _: normswap.convert(
        normswap.convert(net, "groupnorm", input_size=SIZE),
        "nf",
        mean="fit",
        input_size=SIZE,
        calibrate=[X],
    ),
    "and back": lambda net, _: normswap.convert(
        normswap.convert(net, "folded", input_size=SIZE), "unfold", input_size=SIZE
    ),
    "measured again": lambda net, _: measured_again(Network(net, size=SIZE)),
    "verify": lambda net, _: normswap.verify(net, copy.deepcopy(net), input_size=SIZE),
    "recalibrate": lambda net, _: recalibrate(net, [X], input_size=SIZE),
    "planned only": lambda net, _: list(
        conversion.plan_steps(Network(net, size=SIZE), "skipinit", purpose="opacus")
    ),
    "advise": lambda net, _: advice.advise(Network(net, size=SIZE), "net", 2),
    "the signal": lambda net, _: signal_propagation(Network(net, X[:4])),
}


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.one_in(2)
def test_each_network_is_looked_at_once(name: str, looks: list[nn.Module], tmp_path: Path) -> None:
    WAYS[name](net(), tmp_path)
    assert once(looks)


@pytest.mark.gpu
def test_a_gpu_that_rounds_float64_is_not_taken_for_a_wrong_conversion() -> None:
    # The root in CUDA's kernel of weight_norm is float32's, whatever the weights are.
    report = normswap.convert(net().cuda(), "weightnorm", input_size=SIZE).report
    assert report.passed
    assert report.worst.relative_l2 < 1e-5


def test_the_record_of_a_conversion_is_that_of_its_network() -> None:
    images = torch.randn(2, 3, 8, 8)
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    conversion = normswap.convert(source, "folded", inputs=images)

    network = Network(conversion, images)  # type: ignore[arg-type]

    assert network.module is conversion.model
    assert normswap.convert(network, "weightnorm").report.passed


@pytest.mark.parametrize(
    "given",
    [{"size": (3, 24, 16)}, {"inputs": torch.zeros(2, 3, 24, 16)}],
    ids=["a size", "inputs"],
)
def test_synthetic_images_are_of_the_size_of_the_inputs(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[tuple[int, ...]] = []

    def make(model: nn.Module, form: object, size: tuple[int, ...], **_: object) -> list[object]:
        sizes.append(tuple(size))
        return [torch.zeros(2, *size)]

    monkeypatch.setattr(synthetic_images, "make", make)
    source = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    network = Network.of(source, calibrate="synthetic", **given)

    assert network.images is not None
    list(network.images)

    assert sizes == [(3, 24, 16)]
