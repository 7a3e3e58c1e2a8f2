"""How far a result is from its source: against numbers worked out by hand."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.errors import VerificationError
from normswap.models.calling import Example
from normswap.proof import comparison
from normswap.proof.distance import Distance, between, class_axes, distance
from normswap.proof.verdict import Report
from normswap.surgery.network import Network
from normswap.surgery.verification import verify

INFINITE = float("inf")
X = torch.randn(2, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Gives(nn.Module):
    """Whatever it is told to, of images in float64."""

    def __init__(self, output: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.anchor = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.output = output

    def forward(self, x: Tensor) -> Any:
        return self.output(x)


def compared(
    one: Callable[[Tensor], Any], other: Callable[[Tensor], Any], exact: bool = False
) -> Report:
    return verify(Gives(one), Gives(other), X, exact=exact)


def rows(count: int) -> Callable[[Tensor], dict[str, Tensor]]:
    """Boxes, so many of them, as a detector gives them."""
    return lambda x: {"boxes": torch.ones(count, 4, dtype=torch.float64)}


def nan(x: Tensor) -> Tensor:
    return x * float("nan")


def masked(*columns: int) -> Callable[[Tensor], Tensor]:
    """Scores of which some are minus infinity, as of classes that are not to be chosen."""
    return lambda x: x.index_fill(-1, torch.tensor(columns, dtype=torch.long), -INFINITE)


ERRORS: dict[str, tuple[Any, Any, tuple[float, float]]] = {  # relative L2, largest over largest
    "the same": (lambda x: x, lambda x: x.clone(), (0, 0)),
    "half": (lambda x: x, lambda x: x / 2, (0.5, 0.5)),
    "turned round": (lambda x: x, lambda x: -x, (2, 2)),
    "nothing instead": (lambda x: x, lambda x: 0 * x, (1, 1)),
    "two nothings": (lambda x: 0 * x, lambda x: 0 * x, (0, 0)),
    "something for nothing": (lambda x: 0 * x, lambda x: 0 * x + 2, (2 * 96**0.5, 2 * 96**0.5)),
    "the result is not finite": (lambda x: x, nan, (INFINITE, INFINITE)),
    "the source is not finite": (nan, lambda x: x, (INFINITE, INFINITE)),
    "the same mask": (masked(1), masked(1), (0, 0)),
    "a lost mask": (masked(1), masked(), (INFINITE, INFINITE)),
    "a mask more": (masked(1), masked(1, 2), (INFINITE, INFINITE)),
    "the worst of two": (lambda x: (x, x), lambda x: (x / 2, x), (0.5, 0.5)),
    "another number of boxes": (rows(3), rows(5), (1, 1)),
    "boxes of other numbers": (
        rows(3),
        lambda x: {"boxes": torch.ones(3, 5)},
        (INFINITE, INFINITE),
    ),
    "one output more": (
        rows(3),
        lambda x: {**rows(3)(x), "scores": torch.ones(3)},
        (INFINITE, INFINITE),
    ),
    "one output less": (
        lambda x: {**rows(3)(x), "scores": torch.ones(3)},
        rows(3),
        (INFINITE, INFINITE),
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    one, other, wanted = ERRORS[name]
    (error,) = compared(one, other).logits
    found = (error.relative_l2, error.largest)
    assert found == pytest.approx(wanted, abs=1e-12)


def test_of_an_exact_conversion_another_number_of_boxes_is_no_figure() -> None:
    (error,) = compared(rows(3), rows(5), exact=True).logits
    assert error.relative_l2 == INFINITE


def test_a_size_that_the_source_does_not_take_is_left_out_and_those_behind_it_are_not() -> None:
    def picky(x: Tensor) -> Tensor:
        if x.shape[-1] == 5:
            raise KeyError(5)
        return x

    inputs = [torch.ones(1, 3, side, side, dtype=torch.float64) for side in (4, 5, 6)]
    report = verify(Gives(picky), Gives(lambda x: x), inputs, exact=False)
    assert [error.size[-1] for error in report.logits] == [4, 6]


def test_a_source_that_fails_on_other_images_of_one_size_is_an_error() -> None:
    def bright_only(x: Tensor) -> Tensor:
        if x.max() < 1:
            raise KeyError("dark")
        return x

    dark = torch.zeros(1, 3, 4, 4, dtype=torch.float64)
    with pytest.raises(VerificationError, match="the source does not run on"):
        verify(Gives(bright_only), Gives(lambda x: x), [dark + 1, dark])


class Block(nn.Module):
    """A residual block whose branch is so much of what goes by."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.norm.weight.data.fill_(share)
        nn.init.dirac_(self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (
            1e-6,
            [
                "0: the residual branch is 1e-06 of the block's output, so this check says nothing"
                " about it"
            ],
        ),
        (1e-2, []),
    ],
)
def test_branches_that_do_nothing_are_said(share: float, said: list[str]) -> None:
    model = nn.Sequential(Block(share), nn.Conv2d(3, 2, 1)).double().eval()
    assert list(comparison.compare_networks(Network(model, X), model).remarks) == said


def test_an_answer_of_zeros_points_nowhere() -> None:
    nothing = torch.zeros(1, 2)

    assert distance(torch.tensor([[1.0, 2.0]]), nothing).relative_l2 == 1.0


def test_labels_are_compared_by_their_share_and_by_what_guesses_would_get_wrong() -> None:
    """A guess is right by the sum of the squared frequencies; in two batches, by hand."""
    labels = torch.tensor([0, 0, 1, 0, 2, 0, 1, 0])
    found = torch.tensor([0, 1, 1, 0, 2, 2, 1, 0])
    measured = Distance()

    for rows in (slice(0, 3), slice(3, 8)):
        measured.add(labels[rows], found[rows])

    assert measured.are_labels
    assert measured.relative_l2 == measured.largest == 2 / 8
    assert measured.of_guesses == pytest.approx(1 - (5**2 + 2**2 + 1) / 8**2)
    assert measured.error("logits", "float32", (8, 3)).agreement == 6 / 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", [1e-4, 3e4])
def test_numbers_of_any_precision_are_measured_in_float64(dtype: torch.dtype, size: float) -> None:
    """Sums of ten thousand squares leave the range of float16."""
    generator = torch.Generator().manual_seed(0)
    expected = (size * torch.rand(10_000, generator=generator)).to(dtype)
    values = (size * torch.rand(10_000, generator=generator)).to(dtype)

    measured = distance(expected, values)

    difference = expected.double() - values.double()
    relative_l2 = float(difference.norm() / expected.double().norm())
    largest = float(difference.abs().max() / expected.double().abs().max())
    assert measured.relative_l2 == pytest.approx(relative_l2, rel=1e-12)
    assert measured.largest == pytest.approx(largest, rel=1e-12)


def test_results_are_exact_unless_it_is_said_that_they_are_not() -> None:
    """Another number of boxes is an infinite error of an exact result, and 1 of another one."""
    call = Example((X,))
    boxes = rows(3)(X)
    more_boxes = rows(5)(X)

    exact = between(call, boxes, more_boxes, precision="float64")
    approximate = between(call, boxes, more_boxes, precision="float64", exact=False)

    assert (exact.relative_l2, approximate.relative_l2) == (INFINITE, 1.0)


@pytest.mark.parametrize(
    ("shape", "widths", "axis"),
    [
        ((2, 5), {5}, 1),
        ((2, 7, 5), {5}, 2),
        ((2, 7, 5), {7}, 1),
        ((2, 7, 5), {7, 5}, 1),
        ((2, 7, 5), {4}, None),
        ((2, 5, 6, 3), {5}, 1),
        ((2, 6, 3, 5), {5}, 3),
        ((2, 6, 5, 3), {5}, None),
        ((2, 1), {1}, None),
        ((2, 5), set(), 1),
        ((2, 7, 5), set(), None),
    ],
)
def test_classes_are_where_the_last_layer_puts_its_channels(
    shape: tuple[int, ...], widths: set[int], axis: int | None
) -> None:
    anatomy: Any = SimpleNamespace(features=False, widths=frozenset(widths))

    axes = class_axes({"scores": torch.zeros(shape)}, anatomy)

    assert axes == ({} if axis is None else {"scores": axis})
