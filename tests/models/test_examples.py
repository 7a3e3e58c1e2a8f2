"""One call of a network: what a loader's batch becomes, and how a batch is cut."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from normswap.models import calling
from normswap.models.calling import Example

X = torch.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
Y = -X
MASK = torch.tensor([True, False])
LABELS = torch.tensor([7, 8])
EMPTY = torch.empty(0)


def plain(value: Any) -> Any:
    """The same structure with every tensor as a list of numbers, which can be compared."""
    if isinstance(value, Example):
        return plain(value.args), plain(value.kwargs)
    return calling.changed(value, Tensor.tolist)


# How a network takes its inputs, in which tensors are empty.
ONE = Example((EMPTY,))
TWO = Example((EMPTY, EMPTY))
LISTED = Example(([EMPTY],))
BY_NAME = Example((), {"pixel_values": EMPTY})
WITH_LABELS = Example((), {"pixel_values": EMPTY, "labels": EMPTY})
A_DICT = Example(({"image": EMPTY},))
BESIDE_A_NUMBER = Example((EMPTY, 3), {"deep": True})

# The form, the batch of a loader, the call that it becomes, and its labels.
READ: dict[str, tuple[Example, object, Example, Tensor | None]] = {
    "a tensor": (ONE, X, Example((X,)), None),
    "a tensor with labels": (ONE, (X, LABELS), Example((X,)), LABELS),
    "a list of tensor and labels": (ONE, [X, LABELS], Example((X,)), LABELS),
    "more behind the labels": (ONE, (X, LABELS, "path"), Example((X,)), LABELS),
    "a tensor beside other arguments": (
        BESIDE_A_NUMBER,
        X,
        Example((X, 3), {"deep": True}),
        None,
    ),
    "a tensor by name": (BY_NAME, X, Example((), {"pixel_values": X}), None),
    "a tensor by name with labels": (
        BY_NAME,
        (X, LABELS),
        Example((), {"pixel_values": X}),
        LABELS,
    ),
    "an example": (ONE, Example((X,), {"mask": MASK}), Example((X,), {"mask": MASK}), None),
    "an example with labels": (ONE, (Example((Y,)), LABELS), Example((Y,)), LABELS),
    "a dict": (
        BY_NAME,
        {"pixel_values": X, "mask": MASK},
        Example((), {"pixel_values": X, "mask": MASK}),
        None,
    ),
    "a dict with labels": (
        BY_NAME,
        {"pixel_values": X, "labels": LABELS},
        Example((), {"pixel_values": X}),
        LABELS,
    ),
    "a dict with labels that the network takes": (
        WITH_LABELS,
        {"pixel_values": X, "labels": LABELS},
        Example((), {"pixel_values": X, "labels": LABELS}),
        LABELS,
    ),
    "a dict beside labels": (
        BY_NAME,
        ({"pixel_values": X}, LABELS),
        Example((), {"pixel_values": X}),
        LABELS,
    ),
    "a dict that is the one argument": (
        A_DICT,
        {"image": X, "labels": LABELS},
        Example(({"image": X, "labels": LABELS},)),
        LABELS,
    ),
    "two tensors": (TWO, (X, Y), Example((X, Y)), None),
    "two tensors with labels": (TWO, (X, Y, LABELS), Example((X, Y)), LABELS),
    "a list of images": (LISTED, list(X), Example(([X[0], X[1]],)), None),
    "a list of records": (LISTED, [{"image": X[0]}], Example(([{"image": X[0]}],)), None),
    "images and labels": (LISTED, (list(X), LABELS), Example(([X[0], X[1]],)), LABELS),
    "a tuple of images and labels": (
        LISTED,
        (tuple(X), LABELS),
        Example(([X[0], X[1]],)),
        LABELS,
    ),
    "a tensor for a network that takes a list": (LISTED, X, Example(([X[0], X[1]],)), None),
    "a list for a network that takes a tensor": (
        ONE,
        (list(X), LABELS),
        Example(([X[0], X[1]],)),
        LABELS,
    ),
    "what is none of these": (ONE, 3, Example((3,)), None),
}


@pytest.mark.parametrize("case", READ)
def test_a_loaders_batch_becomes_a_call_and_labels(case: str) -> None:
    form, batch, expected_call, expected_labels = READ[case]

    call, labels = form.read(batch)

    assert plain(call) == plain(expected_call)
    assert plain(labels) == plain(expected_labels)


def five_samples() -> Example:
    images = torch.arange(5.0 * 2).reshape(5, 2)
    return Example((images, ["a", "b", "c", "d", "e"]), {"flags": torch.arange(5), "scale": 2.0})


def rows(*numbers: int) -> Example:
    """The rows with these numbers of `five_samples`."""
    images = torch.arange(5.0 * 2).reshape(5, 2)
    names = ["abcde"[number] for number in numbers]
    return Example((images[[*numbers]], names), {"flags": torch.tensor(numbers), "scale": 2.0})


def test_a_batch_is_cut_by_samples_in_every_tensor_and_list() -> None:
    batch = five_samples()
    marked = torch.tensor([True, False, False, True, False])

    assert batch.count == 5
    assert plain(batch.first(2)) == plain(rows(0, 1))
    assert batch.first(5) is batch
    assert plain(batch.take(marked)) == plain(rows(0, 3))
    assert batch.take(torch.ones(5, dtype=torch.bool)) is batch
    assert batch.take(torch.zeros(5, dtype=torch.bool)) is None
    parts = [plain(part) for part in batch.parted(2)]
    assert parts == [plain(rows(0, 1)), plain(rows(2, 3)), plain(rows(4))]


@pytest.mark.parametrize(
    "batch",
    [
        Example((torch.zeros(5, 2), torch.zeros(4, 2))),
        Example((torch.zeros(5, 2), ["a", "b", "c"])),
        Example((torch.zeros(5, 2),), {"scale": torch.tensor(2.0)}),
    ],
    ids=["two tensors", "a list", "a single number"],
)
def test_a_batch_of_unequal_parts_stays_whole(batch: Example) -> None:
    some = torch.tensor([True, False, True, False, False])

    assert batch.first(1) is batch
    assert batch.take(some) is None
    assert batch.parted(2) == [batch]


class Many(nn.Module):
    def forward(
        self, x: Tensor, scale: float = 1.0, *more: object, deep: bool = False, mask: object = None
    ) -> Tensor:
        return x


def test_arguments_are_told_by_their_names_in_forward() -> None:
    example = Example((X, 2.0, 7, Y), {"mask": [MASK]})

    named = calling.named_arguments(Many(), example)

    wanted = {"x": X, "scale": 2.0, "2": 7, "3": Y, "mask": [MASK]}
    assert plain(named) == plain(wanted)
    assert list(named) == list(wanted)
    assert calling.plain_arguments(Many(), example) == {"scale": 2.0, "2": 7}
    assert calling.defaults(Many(), example) == ["deep"]


def test_the_entries_of_a_dict_are_told_by_their_keys() -> None:
    example = Example(({"image": X, "width": 5},), {"deep": True})

    named = calling.named_arguments(Many(), example)

    assert plain(named) == plain({"image": X, "width": 5, "deep": True})
    assert calling.plain_arguments(Many(), example) == {"width": 5, "deep": True}


@pytest.mark.parametrize(
    ("inputs", "mirrors", "only_images"),
    [
        (Example((X,)), True, True),
        (Example((X, 3)), True, True),
        (Example((list(X),)), True, True),
        (Example((X, Y)), False, False),
        (Example((X[0],)), False, True),
        (Example((X.long(),)), False, True),
        (Example(([X],)), False, True),
        (Example((list(X), list(Y))), False, False),
        (Example((list(X), Y)), False, False),
        (Example(([{"image": X[0]}],)), True, False),
        (Example(([X[0], X[1].long()],)), False, True),
    ],
)
def test_inputs_that_are_images_and_nothing_else(
    inputs: Example, mirrors: bool, only_images: bool
) -> None:
    assert (inputs.mirrors, inputs.only_images) == (mirrors, only_images)


def test_the_size_of_a_sample_and_the_number_of_samples() -> None:
    assert (Example((3, LABELS, X)).size, Example((3, LABELS, X)).count) == ((3, 4, 5), 2)
    assert (Example((list(X[:1]),)).size, Example((list(X[:1]),)).count) == ((3, 4, 5), 1)
    assert (Example((LABELS[:, None],)).size, Example((LABELS[:, None],)).count) == ((1,), 2)
    assert Example((torch.tensor(3.0),)).count == 1
    assert str(Example((X, [MASK]))) == "2x3x4x5, 2"
    assert Example((X, 3), {"mask": [MASK]}).plain == "((None, 3), {'mask': [None]})"
