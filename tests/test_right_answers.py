"""The accuracy that a result is expected to keep: told by a few images without labels, beside what labels say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normswap.models.calling import Example
from normswap.surgery import keeping, right_answers


def gaussian(count: int, spread: float, slope: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a source whose softmax is right about its labels, of a result, and labels drawn by the softmax."""
    generator = torch.Generator().manual_seed(0)
    source = 2 * torch.randn(count, 5, generator=generator).double()
    result = slope * source + 0.3 + spread * torch.randn(count, 5, generator=generator)
    return source, result, torch.multinomial(source.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize(("spread", "slope"), [(0.1, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 1.0)])
def test_labels_say_the_same(spread: float, slope: float) -> None:
    """On 20,000 images with labels; told by 40 of them."""
    source, result, labels = gaussian(20_000, spread, slope)
    truth = float((result.argmax(1) == labels).double().mean() / (source.argmax(1) == labels).double().mean())
    parts = [(source[i : i + 40], result[i : i + 40]) for i in range(0, 800, 40)]
    few = [right_answers.kept([part]) for part in parts]
    assert np.mean(few) == pytest.approx(truth, abs=0.01)
    counted = [
        (source[i : i + 40].argmax(1) == result[i : i + 40].argmax(1)).double().mean() for i in range(0, 800, 40)
    ]
    assert np.std(few) < 0.6 * np.std(counted)  # what one gains over counting


def test_as_numpy_has_it() -> None:
    """Every image with every image's error, the line by NumPy's least squares."""
    source, result, _ = (value.numpy() for value in gaussian(9, 1.0, 0.8))
    rows = np.concatenate([np.eye(5)] * 9)  # the offset of each class, beside the slope
    unknown = np.column_stack([source.reshape(-1), rows])
    slope, *offset = np.linalg.lstsq(unknown, result.reshape(-1), rcond=None)[0]
    straight = slope * source + np.array(offset)
    truth = np.exp(source) / np.exp(source).sum(1, keepdims=True)
    right = [truth[i, (straight[i] + (result - straight)[j]).argmax()] for i in range(9) for j in range(9)]
    expected = np.mean(right) / truth.max(1).mean()
    assert right_answers.kept([(torch.tensor(source), torch.tensor(result))]) == pytest.approx(expected, rel=1e-12)


def test_the_same_answers_keep_all_and_places_of_maps_count_like_images() -> None:
    source, result, _ = gaussian(64, 1.0)
    assert right_answers.kept([(source, source)]) == pytest.approx(1.0)
    assert right_answers.kept([(source, 3 * source + 1)]) == pytest.approx(1.0)  # larger logits, the same answers
    flat = right_answers.kept([(source, result)])
    maps = [value.view(4, 4, 4, 5).movedim(3, 1) for value in (source, result)]
    assert right_answers.kept([(maps[0], maps[1])]) == pytest.approx(flat)
    halves = [(source[:20], result[:20]), (source[20:], result[20:])]
    assert right_answers.kept(halves) == pytest.approx(flat)


@pytest.mark.parametrize(
    "answers",
    [[], [(torch.zeros(4), torch.zeros(4))], [(torch.zeros(4, 1), torch.zeros(4, 1))], [(torch.zeros(1, 3),) * 2],
     [(torch.zeros(4, 3), torch.zeros(4, 2))], [(torch.zeros(4, 3), torch.full((4, 3), torch.nan))],
     [(torch.zeros(4, 3),) * 2, (torch.zeros(4),) * 2], [(torch.zeros(4, 3),) * 2, (torch.zeros(4, 2),) * 2],
     [(torch.zeros(4, 3, 9),) * 2]],
)  # fmt: skip
def test_what_is_no_answer_keeps_nothing_known(answers: list[tuple[Tensor, Tensor]]) -> None:
    assert right_answers.kept(answers) is None


class TwoMaps(nn.Module):
    """Coarse classes and fine ones, per place."""

    def __init__(self) -> None:
        super().__init__()
        self.coarse, self.fine = nn.Conv2d(3, 2, 1), nn.Conv2d(3, 7, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"coarse": self.coarse(x), "fine": self.fine(x)}


def test_one_output_counts_and_few_places_of_it_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch one output is off most, in the next the other: they have other classes."""
    torch.manual_seed(0)
    one, two = TwoMaps(), TwoMaps()
    two.load_state_dict(one.state_dict())
    with torch.no_grad():
        two.coarse.weight[:, 0] += 0.5
        two.fine.weight[:, 1] += 0.5
    held = [torch.zeros(2, 3, 96, 96) for _ in range(2)]
    for channel, x in enumerate(held):
        x[:, channel] = torch.randn(2, 96, 96)
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(right_answers, "kept", lambda answers: seen.extend(answers) or 0.5)
    kept = keeping.measured(one, two, [Example((x,)) for x in held])
    assert kept is not None
    assert kept.right == 0.5
    assert [tuple(value.shape) for pair in seen for value in pair] == [(2 * right_answers.PLACES, 2)] * 4
