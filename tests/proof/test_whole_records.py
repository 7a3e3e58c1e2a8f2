"""Law of records: every field of what a proof measures, against a computation by hand."""

import copy
from dataclasses import asdict
from typing import Any

import pytest
import torch
from support.six_networks import images, trained
from torch import Tensor, nn

from normswap.graph import recording
from normswap.models.calling import Example
from normswap.proof import comparison, compiling, held_out, where
from normswap.proof.distance import OutputDistances
from normswap.surgery.network import Network

# The sizes of the batches in which the same 23 images come.
BATCHES = ([1] * 23, [2] * 11 + [1], [3] * 7 + [2], [5, 1, 7, 2, 8], [6, 6, 6, 5], [23])


@pytest.mark.parametrize("sizes", BATCHES, ids=lambda sizes: f"{sizes[0]} first, {len(sizes)}")
def test_every_fourth_image_is_held_out_in_whatever_batches_they_come(sizes: list[int]) -> None:
    images = torch.arange(23.0)[:, None, None, None].expand(-1, 3, 4, 4)
    split = held_out.HeldOutSplit(
        [Example((batch,)) for batch in images.split(sizes)], torch.device("cpu")
    )

    # The second pass is as the first.
    for _ in range(2):
        fitted = [int(number) for call in split for number in call.images[:, 0, 0, 0]]
        held = [int(number) for call in split.held for number in call.images[:, 0, 0, 0]]

        assert held == [*range(3, 23, 4)]
        assert fitted == [number for number in range(23) if number % 4 != 3]
        assert split.copies == 0


@pytest.mark.parametrize("size", [1, 8, 12, 40])
def test_no_more_images_are_held_out_than_fit_in_memory(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are the first ones, and what is fitted to is the same."""
    monkeypatch.setattr(held_out, "MOST", 5)
    images = torch.arange(40.0)[:, None, None, None].expand(-1, 3, 4, 4)
    calls = [Example((batch,)) for batch in images.split(size)]
    split = held_out.HeldOutSplit(calls, torch.device("cpu"))

    fitted = [int(number) for call in split for number in call.images[:, 0, 0, 0]]

    held = [int(number) for call in split.held for number in call.images[:, 0, 0, 0]]
    assert held == [3, 7, 11, 15, 19]
    assert fitted == [number for number in range(40) if number % 4 != 3]


def test_of_calls_that_stay_whole_every_fourth_is_held_out() -> None:
    """As of a network whose forward fixes its number of images."""
    calls = [Example((torch.full((3, 3, 4, 4), float(number)),)) for number in range(9)]
    split = held_out.HeldOutSplit(calls, torch.device("cpu"), whole=True)

    fitted = [int(call.images[0, 0, 0, 0]) for call in split]

    assert fitted == [0, 1, 2, 4, 5, 6, 8]
    assert [int(call.images[0, 0, 0, 0]) for call in split.held] == [3, 7]


def test_a_whole_call_of_nothing_but_copies_is_not_held_out() -> None:
    """One with a new image beside a copy is."""
    calls = [Example((torch.full((2, 3, 4, 4), float(number)),)) for number in range(12)]
    calls[3] = calls[0]
    calls[7].images[0] = calls[1].images[0]
    calls[11] = calls[7]
    split = held_out.HeldOutSplit(calls, torch.device("cpu"), whole=True)

    fitted = [*split]

    assert len(fitted) == 9
    (held,) = split.held
    assert held.images[:, 0, 0, 0].tolist() == [1, 7]
    assert split.copies == 4


def test_the_error_of_several_outputs_has_the_largest_distance_and_the_least_agreement() -> None:
    """The outputs agree on 3, 1 and 2 of 4 images, in two batches; all by hand."""
    source = torch.eye(4)
    right = {"all": source, "few": 2 * source, "half": 4 * source}
    found = {name: value.clone() for name, value in right.items()}
    found["all"][3] = source[0]
    found["few"][1:] = 2 * source[[2, 3, 0]]
    found["half"][2:] = 4 * source[[3, 2]]
    found["half"] *= 1.5
    distances = OutputDistances("float32")

    for rows in (slice(0, 1), slice(1, 4)):
        example = Example((torch.zeros(4, 3, 8, 9)[rows],))
        first, second = (
            {name: value[rows] for name, value in outputs.items()} for outputs in (right, found)
        )
        distances.add(example, first, second)

    # Three of the four rows of `few` are wrong: |a - b|^2 is 2 * 3 of |a|^2 = 4. Of `half` two rows
    # are wrong (1 + 1.5^2) and two are too large (0.5^2).
    expected = {
        "all": (2 / 4) ** 0.5,
        "few": (6 / 4) ** 0.5,
        "half": ((2 * 3.25 + 2 * 0.25) / 4) ** 0.5,
    }
    measured = {name: each.relative_l2 for name, each in distances.by_output.items()}
    assert measured == pytest.approx(expected)
    assert max(expected, key=lambda name: expected[name]) == "half"
    answer = "the largest of 4 on axis 1 of few; 75.0% by the largest of 4 on axis 1 of all"
    assert asdict(distances.error()) == {
        "site": "logits",
        "precision": "float32",
        "size": (1, 3, 8, 9),
        "relative_l2": pytest.approx(expected["half"]),
        "largest": pytest.approx(1.5),
        "agreement": 0.25,
        "output": "half",
        "answer": f"{answer}; 50.0% by the largest of 4 on axis 1 of half",
        "axis": None,
    }
    assert distances.least_agreement()[0] == 0.25
    assert distances.count == 4


@pytest.mark.parametrize("count", [1, 7, 50, 400])
def test_the_least_agreement_is_the_share_that_chance_would_still_show(count: int) -> None:
    """Wilson's bound is the root of (p - b)^2 = z^2 b (1 - b) / n below p."""
    for same in {0, 1, count // 2, count - 1, count}:
        kept = held_out.Kept(same / count, 0.25, count, "the largest of 3 on axis 1", 1)

        bound = kept.least

        assert bound is not None
        spread = 1.96 * (max(bound * (1 - bound), 0) / count) ** 0.5
        assert same / count - bound == pytest.approx(spread, abs=1e-9)
        assert kept.least_percent == int(100 * bound + 1e-12)
        assert f"{100 * same / count:.1f} % of {count} held-out images" in str(kept)
        assert f"at least {kept.least_percent} %" in str(kept)
        assert "relative L2 2.5e-01" in str(kept)


class Chain(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.sigmoid(self.first(x)))


@pytest.mark.parametrize("place", ["first", "second"])
@torch.no_grad()
def test_a_departure_says_what_was_and_what_is_where_they_are_farthest(place: str) -> None:
    """The layer's own numbers on an input that is right, and its numbers in the result."""
    network = Chain().eval()
    other = copy.deepcopy(network)
    other.get_parameter(f"{place}.weight").mul_(1.3)
    x = torch.randn(6, 3)
    values: list[object] = []
    recording.record_once(
        other, Example((x,)), lambda _name, value: values.append(copy.deepcopy(value))
    )

    departure = where.first_layer_apart(network, Example((x,)), values, 1e-6)

    right = network.first(x)
    wrong = other.first(x)
    if place == "second":
        right = network.second(right.sigmoid())
        wrong = other.second(wrong.sigmoid())
    index = int((right - wrong).abs().argmax())
    assert departure is not None
    assert asdict(departure) == {
        "site": place,
        "kind": "Linear",
        "relative_l2": pytest.approx(float((wrong - right).norm() / right.norm()), rel=1e-5),
        "network": pytest.approx(float(right.flatten()[index])),
        "result": pytest.approx(float(wrong.flatten()[index])),
    }
    said = f"where {departure.network:.4g} in the network is {departure.result:.4g}"
    assert said in str(departure)


@pytest.mark.parametrize(("jump", "named"), [(0, "first"), (5, "second"), (20, None)])
@torch.no_grad()
def test_a_layer_stands_out_against_the_others_of_its_kind(jump: float, named: str | None) -> None:
    """The first is off by a hundredth, and the second by a tenth: ten times as far."""
    network = Chain().eval()
    x = torch.randn(6, 3)
    first = 1.01 * network.first(x)
    between = first.sigmoid()
    second = 1.1 * network.second(between)

    departure = where.first_layer_apart(
        network, Example((x,)), [first, between, second], 1e-6, jump
    )

    assert (departure and departure.site) == named


class TwoOutputs(nn.Module):
    """Two heads, of which one gives numbers that are ten thousand times as small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.large = nn.Linear(6, 4)
        self.small = nn.Linear(6, 4)
        nn.init.zeros_(self.small.bias)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"large": self.large(x), "small": 1e-4 * torch.sin(3e4 * self.small(x))}


@pytest.fixture
def wrong_compiler(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """`nn.Module.compile` scales each output by a factor, which is given by name."""
    from torch._dynamo.utils import counters

    factors: dict[str, float] = {}

    # As torch counts a graph when it is made, at the first call.
    def scale(_module: nn.Module, _args: object, outputs: Any) -> dict[str, Tensor]:
        counters["stats"]["unique_graphs"] += 1
        return {name: factors[name] * value for name, value in outputs.items()}

    def compiled(module: nn.Module) -> None:
        module.register_forward_hook(scale)

    monkeypatch.setattr(nn.Module, "compile", compiled)
    return factors


def test_what_departs_most_of_what_it_may_is_told_of_a_compiled_network(
    wrong_compiler: dict[str, float],
) -> None:
    """The small output may be off by more, as rounding moves it. The large one is what is wrong."""
    wrong_compiler |= {"large": 1 + 5e-5, "small": 1 + 9e-5}
    network = Network(TwoOutputs().eval(), torch.randn(8, 6))

    output, gradient = compiling.compare_compiled(network, network.calls[0])

    assert output.what == "output large"
    assert output.relative_l2 == pytest.approx(5e-5, rel=1e-2)
    assert output.allowed == pytest.approx(1e-5)
    assert not output.passes
    assert output.is_output
    assert not gradient.is_output


def values_of(model: nn.Module, paths: list[str], x: Tensor) -> dict[str, Tensor]:
    """The outputs of a network ("logits") and of some of its modules, by torch's own hooks."""
    found: dict[str, Tensor] = {}

    def keep(path: str) -> Any:
        return lambda _module, _args, output: found.update({path: output.clone()})

    handles = [model.get_submodule(path).register_forward_hook(keep(path)) for path in paths]
    with torch.no_grad():
        found["logits"] = model(x)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("exact", [False, True])
def test_a_report_has_each_error_of_each_size_and_precision(*, exact: bool) -> None:
    """A result whose second block and head are off, on images of two sizes."""
    source = copy.deepcopy(trained("post")).float().eval()
    result = copy.deepcopy(source)
    with torch.no_grad():
        result.get_parameter("blocks.1.bn2.weight").mul_(1.2)
        result.get_parameter("head.weight").mul_(0.9)
    x = [images(3, 1).float(), images(2, 2).float()[..., :12]]
    paths = ["blocks.0", "blocks.1", "blocks.2"]

    report = comparison.compare_networks(Network(source, x), result, exact=exact)

    for error in (*report.logits, *report.sites):
        (given,) = [each for each in x if each.shape[2:] == error.size[2:]]
        dtype = getattr(torch, error.precision)
        one, other = (
            values_of(copy.deepcopy(model).to(dtype), paths, given.to(dtype))[error.site].double()
            for model in (source, result)
        )
        difference = one - other
        rel = 1e-9 if error.precision == "float64" else 1e-3
        assert error.relative_l2 == pytest.approx(
            float(difference.norm() / one.norm()), rel=rel, abs=1e-7
        )
        assert error.largest == pytest.approx(
            float(difference.abs().max() / one.abs().max()), rel=rel, abs=1e-7
        )
        if error.site == "logits":
            same = one.argmax(1) == other.argmax(1)
            assert error.agreement == pytest.approx(float(same.double().mean()))
            assert error.answer == "the largest of 4 on axis 1"
            assert error.axis == 1
    assert {error.size[2:] for error in report.logits} == {(16, 16), (16, 12)}
    assert {error.site for error in report.sites} == {*paths}
    assert report.worst.relative_l2 == max(
        error.relative_l2 for error in report.logits if error.precision == "float32"
    )
    assert report.verdict == ("WRONG" if exact else "MEASURED")
    assert (report.exact, report.passed, report.kept, report.steps_before) == (
        exact,
        not exact,
        None,
        0,
    )


def test_a_function_is_named_by_the_innermost_module_around_it() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Tanh()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(x).roll(1, 1)

    network = nn.Sequential(nn.Sequential(nn.Conv2d(3, 3, 1), Inner()))
    traced = recording.record(network, torch.randn(2, 3, 5, 5))
    (node,) = [each for each in traced.nodes if "roll" in str(each.target)]

    departure = where._departure(traced, node, torch.ones(2), torch.tensor([1.0, 1.5]))

    assert departure.site == "0.1"
    assert departure.kind == "roll"
    assert (departure.network, departure.result) == (1.0, 1.5)
