"""What once was PROVED though it was wrong, or WRONG though it was right: one test a kind."""

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.errors import WrongResultError
from normswap.exporting import checks
from normswap.exporting.checks import Batch, Figures, Inside, Reference
from normswap.exporting.signature import Signature
from normswap.models.calling import Example
from normswap.proof import comparison, doubles
from normswap.proof.verdict import Report
from normswap.surgery.network import Network

Forward = Callable[[Tensor, Tensor], object]
ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.ones(4, 3)


class Gives(nn.Module):
    """A network that gives what `forward_of` makes of rows and a weight."""

    def __init__(self, forward_of: Forward) -> None:
        super().__init__()
        self.weight = nn.Parameter(WEIGHT.clone())
        self.forward_of = forward_of

    def forward(self, x: Tensor) -> object:
        return self.forward_of(x, self.weight)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def report_of(source: Forward, result: Forward, dtype: torch.dtype = torch.float32) -> Report:
    return normswap.verify(Gives(source).to(dtype), Gives(result).to(dtype), ROWS.to(dtype))


_kept = torch.zeros(4, 4)
WRONG_PAIRS: dict[str, tuple[Forward, Forward]] = {
    "two outputs whose names collide": (
        lambda x, w: {"a.b": linear(x, w), "a": {"b": 2 * linear(x, w)}},
        lambda x, w: {"a.b": 1.5 * linear(x, w), "a": {"b": 2 * linear(x, w)}},
    ),
    "an output nine lists deep": (
        lambda x, w: (linear(x, w), [[[[[[[[[linear(x, w)]]]]]]]]]),
        lambda x, w: (linear(x, w), [[[[[[[[[2 * linear(x, w)]]]]]]]]]),
    ),
    "one tensor that both write into and give": (
        lambda x, w: _kept.copy_(linear(x, w)),
        lambda x, w: _kept.copy_(2 * linear(x, w)),
    ),
    "a constant output beside the input itself": (
        lambda x, w: (0 * linear(x, w), x),
        lambda x, w: (0 * linear(x, 3 * w), x),
    ),
    "an empty output beside a wrong one": (
        lambda x, w: (linear(x, w)[:0], linear(x, w)),
        lambda x, w: (linear(x, w)[:0], 1.1 * linear(x, w)),
    ),
    "sparse rows": (
        lambda x, w: linear(x, w).to_sparse_csr(),
        lambda x, w: (1.01 * linear(x, w)).to_sparse_csr(),
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("name", WRONG_PAIRS)
def test_a_wrong_output_is_not_proved(name: str) -> None:
    source, result = WRONG_PAIRS[name]

    assert report_of(source, result).verdict in ("WRONG", "NOT PROVED")


def test_complex_numbers_that_are_no_numbers_prove_nothing() -> None:
    def nan(x: Tensor, weight: Tensor) -> Tensor:
        return torch.complex(math.nan * linear(x, weight), linear(x, weight))

    assert report_of(nan, nan).verdict == "NOT PROVED"


def test_each_output_in_half_precision_is_held_to_its_own_rounding() -> None:
    def costly(x: Tensor, weight: Tensor, by: float = 1.0) -> tuple[Tensor, Tensor]:
        return (linear(x, weight) + 20) - 20, by * linear(x, weight)

    wrong = report_of(costly, lambda x, w: costly(x, w, 1.08), torch.bfloat16)

    assert wrong.verdict == "WRONG"


class TwoLevels(nn.Module):
    """One head for two levels, of which labels come out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 8, 3)
        self.second = nn.Conv2d(3, 8, 3)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        return [self.head(level(x)).mean((2, 3)).argmax(1) for level in (self.first, self.second)]


class ConstantHead(nn.Module):
    """Scores of a head of zeros, beside features; the head has a name of its own."""

    def __init__(self, head: str, *, features: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3)
        self.middle = nn.Conv2d(8, 8, 1)
        self.add_module(head, nn.Linear(8, 5))
        self.head_name = head
        self.features = features
        for parameter in self.get_submodule(head).parameters():
            parameter.data.zero_()

    def forward(self, x: Tensor) -> object:
        features = self.stem(x)
        scores = self.get_submodule(self.head_name)(self.middle(features).mean((2, 3)))
        return {"scores": scores, "features": features} if self.features else scores


IMAGES = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class InOrder(nn.Module):
    """It takes images and their places in order, and gives a constant: its ReLUs are dead."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
        if bool((places.diff() < 0).any()) or not bool((scale == 1).all()):
            raise ValueError("these images are not in order")
        return (self.bn(self.conv(x)) - 1e4).relu().mean((1, 2, 3))


@pytest.mark.parametrize("has_scale", [False, True])
def test_a_constant_is_none_the_better_for_a_network_that_takes_no_other_input(
    has_scale: bool,
) -> None:
    """Without the scale, it takes other images in the same order; with it, nothing else at all."""
    source = InOrder().eval()
    wrong = copy.deepcopy(source)
    scale = torch.ones(2, dtype=torch.float32 if has_scale else torch.int64)
    inputs = (IMAGES, torch.arange(2), scale)
    assert normswap.verify(source, copy.deepcopy(source), inputs).verdict == "PROVED"
    nn.init.constant_(wrong.bn.weight, 3.0)
    assert normswap.verify(source, wrong, inputs).verdict != "PROVED"


class NoDouble(nn.Module):
    """It refuses float64, as a kernel that somebody wrote for float32 and half precision does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("the kernel has no float64")
        answer: Tensor = self.bn(self.conv(x))
        return answer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_forward_without_float64_is_proved_in_its_own_precision(dtype: torch.dtype) -> None:
    source = NoDouble().eval().to(dtype)
    conversion = normswap.convert(source, "folded", inputs=IMAGES.to(dtype))
    assert conversion.report.verdict == "PROVED"


@normswap.register_norm
class Clamped(nn.BatchNorm2d):
    """It clamps what it returns, which noise and images never reach."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-8, 8)


class OfAFixedBatch(nn.Module):
    """It takes batches of `count` images only."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), Clamped(4))

    def forward(self, x: Tensor) -> Tensor:
        if len(x) != self.count:
            raise ValueError(f"{len(x)} images")
        answer: Tensor = self.body(x).mean((2, 3))
        return answer


def test_a_network_of_a_fixed_batch_is_compared_at_a_larger_scale_too() -> None:
    source = OfAFixedBatch(2).eval()
    with pytest.raises(WrongResultError):
        normswap.convert(source, "folded", inputs=IMAGES)


def test_every_call_of_a_layer_that_runs_twice_is_compared() -> None:
    source = TwoLevels()
    result = TwoLevels()
    result.first.weight.data[0].mul_(1.0003)

    assert normswap.verify(source, TwoLevels(), IMAGES).verdict == "PROVED"
    assert normswap.verify(source, result, IMAGES).verdict != "PROVED"


class LabelsAndHead(nn.Module):
    """Labels beside their number. Only training runs its auxiliary head, which has a BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.scores = nn.Conv2d(8, 5, 1)
        self.auxiliary = nn.Sequential(nn.Conv2d(8, 5, 1), nn.BatchNorm2d(5))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.norm(self.stem(x)).relu()
        outputs = {"labels": self.scores(features).argmax(1), "brightness": x.mean((1, 2, 3))}
        if self.training:
            outputs["auxiliary"] = self.auxiliary(features)
        return outputs


def test_verify_looks_behind_labels_where_heads_run_in_training_alone() -> None:
    result = LabelsAndHead()
    for parameter in result.scores.parameters():
        parameter.data.mul_(1.5)

    assert normswap.verify(LabelsAndHead(), LabelsAndHead(), IMAGES).verdict == "PROVED"
    assert normswap.verify(LabelsAndHead(), result, IMAGES).verdict != "PROVED"


@pytest.mark.parametrize("features", [True, False], ids=["features too", "scores alone"])
@pytest.mark.parametrize("head", ["head", "classifier"])
def test_what_lies_before_a_constant_output_is_compared(head: str, features: bool) -> None:
    source = ConstantHead("head", features=features)
    result = ConstantHead(head, features=features)
    result.middle.weight.data.mul_(2)

    assert normswap.verify(source, result, IMAGES).verdict != "PROVED"


class Chaotic(nn.Module):
    """Float32 says nothing about it. Larger images are scaled by `larger`."""

    def __init__(self, larger: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 8, 3)
        self.larger = larger

    def forward(self, x: Tensor) -> Tensor:
        scale = self.larger if x.shape[-1] > 6 else 1.0
        return scale * torch.sin(1e5 * self.conv(x)).mean((2, 3))


def test_float64_decides_on_every_call_that_float32_cannot_judge() -> None:
    network = Network(Chaotic(), [IMAGES, torch.randn(2, 3, 9, 9)])
    precise = doubles.compare_double(network, lambda: Chaotic(1.05).double())

    report = comparison.compare_networks(network, Chaotic(1.05), precise=precise)

    assert report.verdict == "WRONG"


def figures_of(
    source: Forward,
    file: Callable[[Tensor], object],
    *given: Tensor,
    dtype: str = "fp32",
    outputs: tuple[str, ...] = ("a",),
    softmax: bool = False,
    rounded: Callable[[Tensor], object] | None = None,
    unfolded: Callable[[Tensor], object] | None = None,
    dynamic_batch: bool = False,
) -> Figures:
    """What is measured on `ROWS`, or on the given batches."""
    signature = Signature(Example((torch.empty(0),)), ("x",), outputs, whole=True)
    reference = Reference(Gives(source), signature, softmax)
    reference = replace(reference, dynamic_batch=dynamic_batch)
    reference = replace(reference, rounded=rounded)  # type: ignore[arg-type]
    inside: Inside | None = None
    if unfolded is not None:
        context: Any = partial(nullcontext, unfolded)
        reference = replace(reference, unfolded=context)
        inside = partial(_inside, source, file)
    batches: list[Batch] = [(rows, None) for rows in given or [ROWS]]
    runs: Any = file
    return checks.check(reference, runs, batches, dtype=dtype, refuse=False, inside=inside)


def _inside(source: Forward, file: Callable[[Tensor], object]) -> tuple[nn.Module, Any]:
    """The network, and a runtime that shows the file's output as the only value inside."""
    return Gives(source), file


def _masked(x: Tensor, weight: Tensor) -> Tensor:
    return linear(x, weight).index_fill(1, torch.tensor([1]), -math.inf)


def test_masked_scores_do_not_allow_any_probability() -> None:
    figures = figures_of(_masked, lambda x: torch.full((len(x), 4), 0.25), softmax=True)

    assert figures.verdict == "WRONG"


def _chaos(x: Tensor, weight: Tensor) -> Tensor:
    return torch.sin(1e8 * linear(x, weight) + weight.sum())


def test_a_file_of_a_network_of_chaos_is_not_proved() -> None:
    figures = figures_of(_chaos, lambda x: torch.rand(len(x), 4))

    assert figures.verdict != "PROVED"


def test_a_file_of_constant_outputs_on_one_image_is_not_proved() -> None:
    figures = figures_of(
        lambda x, w: 0 * linear(x, w) + 1, lambda x: torch.ones(len(x), 4), ROWS[:1]
    )

    assert figures.verdict == "NOT PROVED"


def test_a_file_that_loses_what_moves_less_than_is_allowed_is_not_proved() -> None:
    figures = figures_of(
        lambda x, w: 1000 + 1e-4 * linear(x, w), lambda x: torch.full((len(x), 4), 1000.0)
    )

    assert figures.verdict == "NOT PROVED"


def test_each_output_of_a_file_is_held_to_its_own_rounding() -> None:
    figures = figures_of(
        lambda x, w: (linear(x, w), linear(x, w)),
        lambda x: (1.02 * linear(x, WEIGHT), 1.015 * linear(x, WEIGHT)),
        dtype="fp16",
        outputs=("costly", "tame"),
        rounded=lambda x: (1.01 * linear(x, WEIGHT), 1.000001 * linear(x, WEIGHT)),
    )

    assert figures.verdict == "WRONG"
    assert figures.output == "tame"


def test_a_file_in_half_precision_that_may_be_off_by_most_of_its_size_is_not_proved() -> None:
    figures = figures_of(
        linear,
        lambda x: 1.8 * linear(x, WEIGHT),
        dtype="fp16",
        rounded=lambda x: 1.3 * linear(x, WEIGHT),
    )

    assert figures.verdict == "NOT PROVED"


def test_autocast_around_it_allows_a_file_nothing() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        figures = figures_of(linear, lambda x: 1.02 * (x @ WEIGHT.t().to(x)).float())

    assert figures.verdict == "WRONG"


def test_a_file_that_is_right_on_one_image_is_proved() -> None:
    assert figures_of(linear, lambda x: linear(x, WEIGHT), ROWS[:1]).verdict == "PROVED"


def _that_remembers() -> Callable[[Tensor], Tensor]:
    """A file that gives every row the answer of the first row that it ever had."""
    memory: list[Tensor] = []

    def file(x: Tensor) -> Tensor:
        memory.append(linear(x, WEIGHT)[:1])
        return memory[0].expand(len(x), -1)

    return file


def _of_first_rows(x: Tensor) -> Tensor:
    """A file that gives each row of a batch the answer of the first."""
    return linear(x, WEIGHT)[:1].expand(len(x), -1)


MANY = torch.randn(64, 3, generator=torch.Generator().manual_seed(2))
GIVEN: dict[str, tuple[Tensor, ...]] = {
    "one row": (ROWS[:1],),
    "copies of one row": (ROWS[:1], ROWS[:1].expand(6, 3)),
    "two rows": ROWS[:2].split(1),
    "many rows, one by one": MANY.split(1),
    "batches of copies": tuple(row.expand(5, 3) for row in ROWS.split(1)),
}


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_a_file_is_right_for_more_than_the_rows_that_are_given(
    dynamic_batch: bool, given: str
) -> None:
    """Whatever these are, one answer for all rows, or for all of a batch, is noticed; and what is
    tried beside them is not counted among them.
    """
    batches = GIVEN[given]

    right = figures_of(linear, lambda x: linear(x, WEIGHT), *batches, dynamic_batch=dynamic_batch)
    wrong = figures_of(linear, _that_remembers(), *batches, dynamic_batch=dynamic_batch)

    assert (right.verdict, right.count) == ("PROVED", sum(map(len, batches)))
    assert wrong.verdict == "WRONG"
    if dynamic_batch:
        mixed = figures_of(linear, _of_first_rows, *batches, dynamic_batch=True)
        assert mixed.verdict == "WRONG"
        assert mixed.relative_l2 > 0.2, "also where many rows are right"


def test_a_file_is_held_to_no_answer_that_its_network_does_not_have() -> None:
    """The roots of mirrored rows are no numbers, of which a file may make what it likes."""
    row = torch.tensor([[3.0, 1.0, 0.0]])

    def root(x: Tensor) -> Tensor:
        return (x[:, :1] - x[:, 2:]).sqrt()

    figures = figures_of(lambda x, w: root(x) * w.mean(), lambda x: root(x).nan_to_num(7.0), row)

    assert (figures.verdict, figures.relative_l2) == ("PROVED", 0.0)


@pytest.mark.parametrize("dynamic_batch", [False, True])
def test_a_file_may_be_off_by_what_rounding_moves_where_it_is_tried(dynamic_batch: bool) -> None:
    """The given row is far from 2.0995, and the one that is tried beside it is 2.1 there."""
    row = torch.tensor([[3.0, 1.0, 0.0]])

    figures = figures_of(
        lambda x, w: (x[:, 2:] - 2.0995) * w.mean(),
        lambda x: (x[:, 2:].double() - 2.0995).float(),
        row,
        dynamic_batch=dynamic_batch,
    )

    assert figures.verdict == "PROVED"
    assert (figures.relative_l2 > 1e-5) is not dynamic_batch, "beside large values it is little"


def test_a_file_of_one_number_for_all_images_is_proved() -> None:
    figures = figures_of(lambda x, w: linear(x, w).sum(), lambda x: linear(x, WEIGHT).sum())

    assert figures.verdict == "PROVED"


LABELS = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 3.0], [4.0, 0.0, 0.0]])


@pytest.mark.parametrize(
    ("shift", "verdict"), [(1e-3, "MEASURED"), (2.0, "WRONG")], ids=["too little", "enough"]
)
def test_equal_labels_of_a_file_prove_no_scores(shift: float, verdict: str) -> None:
    added = torch.tensor([0.0, 0.0, shift])

    figures = figures_of(
        lambda x, w: (x * w.mean()).argmax(1), lambda x: (x + added).argmax(1), LABELS
    )

    assert figures.verdict == verdict
    assert "labels" in figures.remark


def test_labels_beside_numbers_of_a_file_are_said_to_be_labels() -> None:
    figures = figures_of(
        lambda x, w: ((x * w.mean()).argmax(1), linear(x, w)),
        lambda x: (x.argmax(1), linear(x, WEIGHT)),
        LABELS,
        outputs=("labels", "scores"),
    )

    assert figures.verdict == "PROVED"
    assert "labels" in figures.remark


def test_a_file_of_labels_beside_a_constant_number_is_not_proved() -> None:
    figures = figures_of(
        lambda x, w: ((x * w.mean()).argmax(1), 0 * linear(x, w) + 1),
        lambda x: (x.argmax(1), torch.ones(len(x), 4)),
        LABELS,
        outputs=("labels", "scores"),
    )

    assert figures.verdict == "MEASURED"


def _mixed(x: Tensor, weight: Tensor, by: float = 1.0) -> Tensor:
    """Boxes of some hundreds beside scores of about 1e-3, in one tensor."""
    return torch.cat([640 * linear(x, weight), by * 1e-3 * linear(x, weight)], 1)


@pytest.mark.parametrize("by", [1.0, 1.0 + 1e-6, 1.01, 1.5])
@pytest.mark.parametrize("is_last", [False, True], ids=["channels first", "channels last"])
def test_small_channels_beside_large_ones_are_compared_by_themselves(
    by: float, is_last: bool
) -> None:
    def arranged(x: Tensor, weight: Tensor, by: float = 1.0) -> Tensor:
        mixed = _mixed(x, weight, by)
        return mixed.unsqueeze(1).repeat(1, 5, 1) if is_last else mixed.unsqueeze(2)

    report = report_of(arranged, lambda x, w: arranged(x, w, by))

    assert report.verdict == ("PROVED" if by < 1.001 else "WRONG")


def test_small_channels_that_rounding_moves_are_no_mistake() -> None:
    """What is left of a difference of large numbers is rounding, whoever computes it."""

    def cancelled(x: Tensor, weight: Tensor, first: float = 1.0) -> Tensor:
        large = linear(x, weight)
        rest = (large + first * 3e3) - (first * 3e3 + large * (1 + 1e-6))
        return torch.cat([large, rest], 1)

    report = report_of(cancelled, lambda x, w: cancelled(x, w, 1.5))

    assert report.verdict == "PROVED"


@pytest.mark.parametrize(("own", "verdict"), [(0.0, "PROVED"), (1e6, "WRONG")])
def test_a_file_of_the_source_that_is_garbage_excuses_nothing(own: float, verdict: str) -> None:
    """Answers near zero are held to a file of the source, but never to more than giving 0."""
    tiny = 1e-9
    figures = figures_of(
        lambda x, w: linear(x, tiny * w),
        lambda x: (5 if own else 0) * linear(x, tiny * WEIGHT),
        unfolded=lambda x: own * linear(x, tiny * WEIGHT),
    )

    assert figures.verdict == verdict
