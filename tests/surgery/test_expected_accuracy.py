"""The accuracy that a result is expected to keep: told by a few images without labels, beside what labels say."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import normswap
from normswap.models.calling import Example
from normswap.surgery import expected_accuracy, kept_accuracy
from normswap.surgery.expected_accuracy import Expected
from normswap.surgery.held_out import accuracy_text


def gaussian(count: int, spread: float, slope: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a source whose softmax is right about its labels, of a result, and labels drawn by the softmax."""
    generator = torch.Generator().manual_seed(0)
    source = 2 * torch.randn(count, 5, generator=generator).double()
    result = slope * source + 0.3 + spread * torch.randn(count, 5, generator=generator)
    return source, result, torch.multinomial(source.softmax(1), 1, generator=generator)[:, 0]


def foretold(source: Tensor, result: Tensor, others: Tensor | None = None) -> Expected:
    """What these logits (N, K) say, and those that the source has of other images."""
    more = [] if others is None else [expected_accuracy.places(others)]
    found = expected_accuracy.expected([(expected_accuracy.places(source), expected_accuracy.places(result))], more)
    assert found is not None
    return found


@pytest.mark.parametrize(("spread", "slope"), [(0.1, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 1.0)])
def test_labels_say_the_same(spread: float, slope: float) -> None:
    """On 20,000 images with labels; told by 40 of them, and by 120 more that the result was fitted to."""
    source, result, labels = gaussian(20_000, spread, slope)
    truth = float((result.argmax(1) == labels).double().mean() / (source.argmax(1) == labels).double().mean())
    lots = [slice(i, i + 40) for i in range(0, 20_000, 250)]
    few = [foretold(source[lot], result[lot]).share for lot in lots]
    assert np.mean(few) == pytest.approx(truth, abs=0.01)
    more = [foretold(source[lot], result[lot], source[lot.stop : lot.stop + 120]).share for lot in lots]
    assert np.mean(more) == pytest.approx(truth, abs=0.01)
    assert np.std(more) < np.std(few)  # what other images gain
    counted = [(source[lot].argmax(1) == result[lot].argmax(1)).double().mean() for lot in lots]
    assert np.std(few) < 0.7 * np.std(counted)  # what one gains over counting


def truth_of(source: Tensor, result: Tensor, sharper: float = 1.0) -> float:
    """Of labels that are drawn by the softmax of the source's logits times `sharper`, on all images."""
    chances = (sharper * source).softmax(1)
    return float(chances.gather(1, result.argmax(1, keepdim=True)).mean() / chances.amax(1).mean())


def told(source: Tensor, result: Tensor, starts: range) -> list[Expected]:
    """By 24 images and the 76 behind them, from each start on."""
    return [foretold(source[i : i + 24], result[i : i + 24], source[i + 24 : i + 100]) for i in starts]


def loud(classes: int, spread: float, count: int = 2000) -> tuple[Tensor, Tensor]:
    """Images differ in how large logits and errors are."""
    generator = torch.Generator().manual_seed(classes)
    size = (0.7 * torch.randn(count, 1, generator=generator)).exp()
    source = torch.randn(count, classes, generator=generator).double()
    source[torch.arange(count), torch.randint(classes, (count,), generator=generator)] += 4.0
    source *= 2 * size
    return source, source + spread * size * torch.randn(source.shape, generator=generator)


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (100, 1.0), (1000, 3.0)])
@pytest.mark.parametrize("sharper", [1.0, 1.5])
def test_what_is_told_holds(classes: int, spread: float, sharper: float) -> None:
    """Where errors go with images: handed on, a large one costs a quiet image too much. Where the source is surer than
    its probabilities say, its answers are worth more. At least what is least is kept, and what is told is near.
    """
    source, result = loud(classes, spread)
    truth, found = truth_of(source, result, sharper), told(source, result, range(0, 1900, 50))
    assert sum(one.least > truth for one in found) <= 0.05 * len(found)
    near = 0.02 if truth >= 0.9 else 0.05
    assert all(abs(one.told - truth) <= near for one in found if one.told is not None)


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (100, 1.0), (1000, 1.5)])
def test_many_images_tell_errors_that_go_with_images(classes: int, spread: float) -> None:
    source, result = loud(classes, spread, 4000)
    found = [foretold(source[lot], result[lot]).share for lot in torch.arange(4000).split(500)]
    assert np.mean(found) == pytest.approx(truth_of(source, result), abs=0.025)


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (100, 1.0), (1000, 3.0)])
def test_the_standard_error_is_how_much_other_images_say(classes: int, spread: float) -> None:
    """Told by many lots of images."""
    generator = torch.Generator().manual_seed(classes)
    source = torch.randn(8000, classes, generator=generator).double()
    source[torch.arange(8000), torch.randint(classes, (8000,), generator=generator)] += 4.0
    size = 0.5 + torch.rand(8000, 1, generator=generator)
    result = source + spread * size * torch.randn(source.shape, generator=generator)
    found = [foretold(source[lot], result[lot]) for lot in torch.arange(8000).split(100)]
    said, scatter = [one.error for one in found], np.std([one.share for one in found])
    assert float(np.square(said).mean() ** 0.5) == pytest.approx(scatter, rel=0.35)


@pytest.mark.parametrize(
    ("count", "spread", "known"),
    [(12, 4.0, False), (12, 0.01, True), (24, 0.35, False), (600, 0.35, True)],
)
def test_what_the_images_leave_open_is_not_told(count: int, spread: float, known: bool) -> None:
    source, result, _ = gaussian(count, spread)
    found = foretold(source, result)
    assert (found.told is not None) == known
    assert 0 <= found.least < found.share <= 1
    assert foretold(source, source).least < 0.9999  # another image may be one that changes


def images(count: int, seed: int) -> Tensor:
    """Noise; each image has a colour and a contrast of its own."""
    generator = torch.Generator().manual_seed(seed)
    contrast = (0.5 * torch.randn(count, 1, 1, 1, generator=generator)).exp()
    return contrast * torch.randn(count, 3, 10, 10, generator=generator) + torch.randn(
        count, 3, 1, 1, generator=generator
    )


def uneven(classes: int) -> nn.Module:
    """A network whose channels' variances, before its norms, differ a hundredfold."""
    torch.manual_seed(classes)
    network = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, bias=False), nn.BatchNorm2d(32, momentum=None), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, bias=False), nn.BatchNorm2d(64, momentum=None), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)),
    )
    trunk, head = network[:-1], network[-1]
    with torch.no_grad():
        for conv in (network[0], network[3]):
            factors = 10 ** torch.linspace(-0.5, 0.5, len(conv.weight))
            conv.weight.mul_(factors[torch.randperm(len(factors))].view(-1, 1, 1, 1))
        trunk(images(512, 1))  # statistics
        features = trunk.eval()(images(512, 1))
        head.weight.normal_().mul_(0.5 + torch.rand(classes, 1))
        head.weight.mul_(3 / (features @ head.weight.T).std(0).mean())
        head.bias.copy_(-features.mean(0) @ head.weight.T)
    return network.eval()


@pytest.mark.parametrize("classes", [10, 100, 1000])
def test_channels_of_unlike_variance_are_foretold(classes: int) -> None:
    """Where a sample's own statistics cost much, and how much goes with the sample."""
    network = uneven(classes)
    result = normswap.convert(network, "groupnorm", inputs=images(2, 0)).model
    with torch.no_grad():
        source, after = (model(images(2400, 2)).double() for model in (network, result))
    truth, found = truth_of(source, after), told(source, after, range(0, 2300, 50))
    assert 0.8 < truth < 0.99
    assert foretold(source[:600], after[:600]).share == pytest.approx(truth, abs=0.02)
    assert sum(one.least > truth for one in found) <= 0.05 * len(found)
    assert all(abs(one.told - truth) <= 0.02 for one in found if one.told is not None)


def by_numpy(source: np.ndarray, result: np.ndarray, others: np.ndarray) -> tuple[float, float]:
    """The line by NumPy's least squares; every image with the errors of each that has some, one at a time."""
    count, classes = source.shape
    unknown = np.column_stack([source.reshape(-1), np.concatenate([np.eye(classes)] * count)])
    slope, *offset = np.linalg.lstsq(unknown, result.reshape(-1), rcond=None)[0]
    errors = result - slope * source - np.array(offset)
    right, same, best = [], [], []
    for z in (*source, *others):
        chances, order = np.exp(z) / np.exp(z).sum(), np.argsort(-z)
        best.append(chances.max())
        row = []
        for other, error in zip(source, errors, strict=True):
            handed = np.empty(classes)
            handed[order] = error[np.argsort(-other)]
            answer = (slope * z + np.array(offset) + handed).argmax()
            row.append(chances[answer])
            same.append(answer == z.argmax())
        right.append(row)
    counted = [(np.exp(z) / np.exp(z).sum())[y.argmax()] for z, y in zip(source, result, strict=True)]
    weight = count / (count + 100)
    share = (1 - weight) * np.mean(right) / np.mean(best) + weight * np.sum(counted) / np.sum(best[:count])
    return float(share), float(np.mean(same))


@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
def test_as_numpy_has_it(spread: float) -> None:
    source, result, _ = gaussian(30, spread, 0.8)
    result[::4] = source[::4].flip(1)  # errors that go with images
    share, same = by_numpy(source[:14].numpy(), result[:14].numpy(), source[14:].numpy())
    found = foretold(source[:14], result[:14], source[14:])
    assert found.share == pytest.approx(share, rel=1e-9)
    assert found.least <= max(share - 2 * found.error - 0.1 * ((1 - same) * 14 + 2) / 16, 0.0) + 1e-9


def test_the_same_answers_keep_all_and_places_of_maps_count_like_images() -> None:
    source, result, _ = gaussian(64 * expected_accuracy.PLACES, 1.0)
    assert foretold(source, source).told == pytest.approx(1.0)
    assert foretold(source, 3 * source + 1).told == pytest.approx(1.0)  # larger logits, the same answers
    maps = [value.view(64, 4, -1, 5).movedim(3, 1) for value in (source, result)]
    assert foretold(*maps).share == pytest.approx(foretold(source, result).share, abs=0.01)
    halves = [tuple(expected_accuracy.places(value[i : i + 32]) for value in maps) for i in (0, 32)]
    assert expected_accuracy.expected(halves) == foretold(*maps)


def test_places_of_one_image_go_together() -> None:
    """As sixteen images, places that are alike would say four times as much as they know."""
    source, result, _ = gaussian(64, 1.0)
    alike = [value[:, :, None, None].expand(-1, -1, 8, 8) for value in (source, result)]
    assert foretold(*alike).error == pytest.approx(foretold(source, result).error, rel=1e-6)


@pytest.mark.parametrize(
    ("source", "result"),
    [((14, 1), (14, 1)), ((11, 3), (11, 3)), ((14, 3), (14, 2)), ((14, 3, 9), (14, 3, 9))],
)
def test_what_is_no_answer_keeps_nothing_known(source: tuple[int, ...], result: tuple[int, ...]) -> None:
    pair = (expected_accuracy.places(torch.zeros(source)), expected_accuracy.places(torch.zeros(result)))
    assert expected_accuracy.expected([pair]) is None


def test_numbers_that_are_none_and_batches_of_other_classes_keep_nothing_known() -> None:
    assert expected_accuracy.expected([]) is None
    three, two = torch.zeros(14, 3, 1), torch.zeros(14, 2, 1)
    assert expected_accuracy.expected([(three, torch.full((14, 3, 1), torch.nan))]) is None
    assert expected_accuracy.expected([(three, three)], [torch.full((14, 3, 1), torch.inf)]) is None
    assert expected_accuracy.expected([(three, three), (two, two)]) is None
    assert expected_accuracy.expected([(three, three)], [two]) is None


@pytest.mark.parametrize(
    ("right", "least", "text"),
    [(0.9876, 0.9789, "98.8 % (at least 97 %)"), (None, 0.9099, "at least 90 %"), (None, None, "")],
)
def test_what_is_said_of_it(right: float | None, least: float | None, text: str) -> None:
    assert accuracy_text(right, least) == text


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
    held = [torch.zeros(6, 3, 96, 96) for _ in range(2)]
    for channel, x in enumerate(held):
        x[:, channel] = torch.randn(6, 96, 96)
    seen: list[Tensor] = []

    def expected(answers: list[tuple[Tensor, Tensor]], others: list[Tensor]) -> Expected:
        seen.extend([*itertools.chain(*answers), *others])
        return Expected(0.99, 0.001, 0.98)

    monkeypatch.setattr(expected_accuracy, "expected", expected)
    kept = kept_accuracy.measured(one, two, [Example((x,)) for x in held], [Example((held[0],)), Example((held[1],))])
    assert kept is not None
    assert (kept.right, kept.right_least) == (0.99, 0.98)
    assert [tuple(value.shape) for value in seen] == [(6, 2, expected_accuracy.PLACES)] * 6


@pytest.mark.parametrize(("count", "known"), [(47, False), (48, True)])
def test_a_conversion_asks_about_images_it_was_fitted_to(count: int, known: bool) -> None:
    """Of twelve that are held out at least."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images = torch.randn(300, 3, 6, 6)
    network(images)  # statistics
    images = images[:count]
    done = normswap.convert(network.eval(), "groupnorm", calibrate=[images])
    kept, held = done.report.kept, torch.arange(count) % 4 == 3
    assert kept is not None
    assert (kept.right_least is not None) == known
    if known:
        with torch.no_grad():
            found = foretold(network(images[held]), done.model(images[held]), network(images[~held]))
        assert (kept.right, kept.right_least) == (found.told, pytest.approx(found.least, abs=1e-5))


@pytest.mark.parametrize("classes", [0, 10])
def test_of_features_no_answer_is_told(classes: int) -> None:
    """The largest feature of an encoder is no answer, and nothing is right or wrong about it."""
    torch.manual_seed(0)
    head = [nn.Linear(8, classes)] if classes else []
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *head
    )
    images = torch.randn(64, 3, 6, 6)
    network(images)  # statistics
    kept = normswap.convert(network.eval(), "groupnorm", calibrate=[images]).report.kept
    assert kept is not None
    assert kept.relative_l2 > 0
    assert (kept.agreement is not None, kept.right_least is not None) == (classes > 0, classes > 0)
