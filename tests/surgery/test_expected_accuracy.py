"""The accuracy that a result is expected to keep: told by a few images without labels, beside what labels say."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.models.calling import Example
from normswap.surgery import expected_accuracy, kept_accuracy


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
    few = [expected_accuracy.kept([part]) for part in parts]
    assert np.mean(few) == pytest.approx(truth, abs=0.01)
    more = [
        expected_accuracy.kept([part], [source[i : i + 120]])
        for part, i in zip(parts, range(1000, 3400, 120), strict=True)
    ]
    assert np.mean(more) == pytest.approx(truth, abs=0.01)
    assert np.std(more) < np.std(few)  # what other images' margins gain
    counted = [
        (source[i : i + 40].argmax(1) == result[i : i + 40].argmax(1)).double().mean() for i in range(0, 800, 40)
    ]
    assert np.std(few) < 0.6 * np.std(counted)  # what one gains over counting


def test_as_numpy_has_it() -> None:
    """Every image, three that only the source has seen among them, with every error, by class and by rank; the line by
    NumPy's least squares.
    """
    source, result, _ = (value.numpy() for value in gaussian(9, 1.0, 0.8))
    others = gaussian(12, 1.0)[0][9:]
    rows = np.concatenate([np.eye(5)] * 9)  # the offset of each class, beside the slope
    unknown = np.column_stack([source.reshape(-1), rows])
    slope, *offset = np.linalg.lstsq(unknown, result.reshape(-1), rcond=None)[0]
    rest = result - slope * source - np.array(offset)
    right, best = [], []
    for z in (*source, *others.numpy()):
        truth = np.exp(z) / np.exp(z).sum()
        best.append(truth.max())
        for of, error in zip(source, rest, strict=True):
            ranked = np.empty(5)
            ranked[np.argsort(-z)] = error[np.argsort(-of)]
            right += [truth[(slope * z + offset + one).argmax()] for one in (error, ranked)]
    expected = np.mean(right) / np.mean(best)
    answers = [(torch.tensor(source), torch.tensor(result))]
    assert expected_accuracy.kept(answers, [others[:1], others[1:]]) == pytest.approx(expected, rel=1e-12)
    assert expected_accuracy.kept(answers) != pytest.approx(expected, rel=1e-9)


def test_the_same_answers_keep_all_and_places_of_maps_count_like_images() -> None:
    source, result, _ = gaussian(64, 1.0)
    assert expected_accuracy.kept([(source, source)]) == pytest.approx(1.0)
    assert expected_accuracy.kept([(source, 3 * source + 1)]) == pytest.approx(1.0)  # larger logits, the same answers
    flat = expected_accuracy.kept([(source, result)])
    maps = [value.view(4, 4, 4, 5).movedim(3, 1) for value in (source, result)]
    assert expected_accuracy.kept([(maps[0], maps[1])]) == pytest.approx(flat)
    halves = [(source[:20], result[:20]), (source[20:], result[20:])]
    assert expected_accuracy.kept(halves) == pytest.approx(flat)


@pytest.mark.parametrize(
    "answers",
    [[], [(torch.zeros(4), torch.zeros(4))], [(torch.zeros(4, 1), torch.zeros(4, 1))], [(torch.zeros(1, 3),) * 2],
     [(torch.zeros(4, 3), torch.zeros(4, 2))], [(torch.zeros(4, 3), torch.full((4, 3), torch.nan))],
     [(torch.zeros(4, 3),) * 2, (torch.zeros(4),) * 2], [(torch.zeros(4, 3),) * 2, (torch.zeros(4, 2),) * 2],
     [(torch.zeros(4, 3, 9),) * 2]],
)  # fmt: skip
def test_what_is_no_answer_keeps_nothing_known(answers: list[tuple[Tensor, Tensor]]) -> None:
    assert expected_accuracy.kept(answers) is None


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
    monkeypatch.setattr(
        expected_accuracy, "kept", lambda answers, others: seen.extend([*answers, tuple(others)]) or 0.5
    )
    kept = kept_accuracy.measured(one, two, [Example((x,)) for x in held], [Example((held[0],)), Example((held[1],))])
    assert kept is not None
    assert kept.right == 0.5
    assert [tuple(value.shape) for pair in seen for value in pair] == [(2 * expected_accuracy.PLACES, 2)] * 6


def test_a_conversion_asks_the_source_about_images_it_was_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images = torch.randn(300, 3, 6, 6)
    network(images)  # statistics
    seen: list[tuple[Tensor, ...]] = []
    monkeypatch.setattr(expected_accuracy, "kept", lambda *given: seen.extend(given) or 0.5)
    done = normswap.convert(network.eval(), "groupnorm", calibrate=list(images.split(100)))
    assert done.report.kept is not None
    assert done.report.kept.right == 0.5
    (answers, others), held = seen, torch.arange(300) % 4 == 3
    with torch.no_grad():
        for at, model in enumerate((network, done.model)):
            torch.testing.assert_close(torch.cat([pair[at] for pair in answers]), model(images[held]))
        torch.testing.assert_close(torch.cat(others), network(images[~held][:192]))
