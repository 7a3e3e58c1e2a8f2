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


def share_of(answers: expected_accuracy.Answers, others: expected_accuracy.Answers = ()) -> float:
    """What is expected, however unsure."""
    found = expected_accuracy.estimated(answers, others)
    assert found is not None
    return found[0]


@pytest.mark.parametrize(("spread", "slope"), [(0.1, 1.0), (0.5, 1.0), (1.0, 0.7), (2.0, 1.0)])
def test_labels_say_the_same(spread: float, slope: float) -> None:
    """On 20,000 images with labels; told by 40 of them, and by 120 more that the result was fitted to."""
    source, result, labels = gaussian(20_000, spread, slope)
    truth = float((result.argmax(1) == labels).double().mean() / (source.argmax(1) == labels).double().mean())
    there, starts = fitted(source, result, slope), range(0, 20_000, 250)
    parts = [(source[i : i + 40], result[i : i + 40]) for i in starts]
    few = [share_of([part]) for part in parts]
    assert np.mean(few) == pytest.approx(truth, abs=0.01)
    more = [
        share_of([part], [(source[i + 40 : i + 160], there[i + 40 : i + 160])])
        for part, i in zip(parts, starts, strict=True)
    ]
    assert np.mean(more) == pytest.approx(truth, abs=0.01)
    assert np.std(more) < np.std(few)  # what other images gain
    counted = [(one.argmax(1) == other.argmax(1)).double().mean() for one, other in parts]
    assert np.std(few) < 0.7 * np.std(counted)  # what one gains over counting


def fitted(source: Tensor, result: Tensor, slope: float) -> Tensor:
    """What a result says of images that it was fitted to: errors of two thirds."""
    return slope * source + 0.3 + (result - slope * source - 0.3) / 1.5


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (100, 1.0), (1000, 3.0)])
def test_errors_that_go_with_images_are_told(classes: int, spread: float) -> None:
    """Images differ in how large logits and errors are: handed on, a large error costs a quiet image too much, and a
    small one a loud image too little. Told by 25 images and 75 others.
    """
    generator = torch.Generator().manual_seed(classes)
    size = (0.7 * torch.randn(2000, 1, generator=generator)).exp()
    source = torch.randn(2000, classes, generator=generator).double()
    source[torch.arange(2000), torch.randint(classes, (2000,), generator=generator)] += 4.0
    source *= 2 * size
    result = source + spread * size * torch.randn(source.shape, generator=generator)
    assert np.mean(told(source, result, range(0, 800, 100))) == pytest.approx(truth_of(source, result), abs=0.025)


def told(source: Tensor, result: Tensor, starts: range) -> list[float]:
    """By 25 images and the 75 behind them, from each start on."""
    return [
        share_of([(source[i : i + 25], result[i : i + 25])], [(source[i + 25 : i + 100], result[i + 25 : i + 100])])
        for i in starts
    ]


@pytest.mark.parametrize(("classes", "spread"), [(10, 1.0), (100, 1.0), (1000, 3.0)])
def test_the_standard_error_is_how_much_other_images_say(classes: int, spread: float) -> None:
    """Told by many lots of images."""
    generator = torch.Generator().manual_seed(classes)
    source = torch.randn(8000, classes, generator=generator).double()
    source[torch.arange(8000), torch.randint(classes, (8000,), generator=generator)] += 4.0
    size = 0.5 + torch.rand(8000, 1, generator=generator)
    result = source + spread * size * torch.randn(source.shape, generator=generator)
    found, said = [], []
    for lot in torch.arange(8000).split(100):
        pairs = [(source[lot], result[lot])]
        estimate = expected_accuracy.estimated(pairs)
        assert estimate is not None
        found.append(estimate[0])
        said.append(estimate[1])
    assert float(np.square(said).mean() ** 0.5) == pytest.approx(np.std(found), rel=0.35)


@pytest.mark.parametrize(("count", "spread", "known"), [(12, 4.0, False), (1200, 4.0, True), (12, 0.01, True)])
def test_what_is_unsure_by_more_than_three_points_is_not_told(count: int, spread: float, known: bool) -> None:
    source, result, _ = gaussian(count, spread)
    assert (expected_accuracy.kept([(source, result)]) is not None) == known
    assert 0 < share_of([(source, result)]) <= 1


def truth_of(source: Tensor, result: Tensor) -> float:
    """Of labels that the source's softmax is right about, on all images."""
    chances = source.softmax(1)
    return float(chances.gather(1, result.argmax(1, keepdim=True)).mean() / chances.amax(1).mean())


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
    truth = truth_of(source, after)
    assert 0.8 < truth < 0.99
    assert np.mean(told(source, after, range(0, 1600, 100))) == pytest.approx(truth, abs=0.02)


def numpys_share(source: np.ndarray, straight: np.ndarray, rest: np.ndarray) -> tuple[float, float]:
    """Counted on each image, and handed on from every image to all others, by class and by rank."""
    counted, handed, best = [], [], []
    for i, z in enumerate(source):
        truth = np.exp(z) / np.exp(z).sum()
        best.append(truth.max())
        for j, error in enumerate(rest):
            ranked = np.empty(5)
            ranked[np.argsort(-z)] = error[np.argsort(-source[j])]
            if i == j:
                counted.append(truth[(straight[i] + error).argmax()])
            else:
                handed += [truth[(straight[i] + one).argmax()] for one in (error, ranked)]
    return float(np.mean(counted) / np.mean(best)), float(np.mean(handed) / np.mean(best))


@pytest.mark.parametrize("spread", [1.0, 2.0, 4.0])
def test_as_numpy_has_it(spread: float) -> None:
    """The line by NumPy's least squares; the jackknife by leaving out each image; errors go with images."""
    source, result, _ = (value.numpy() for value in gaussian(16, spread, 0.8))
    result[::4] = source[::4][:, ::-1]
    seen, there = slice(0, 9), slice(9, 16)
    result[there] = 0.8 * source[there] + 0.3 + (result - 0.8 * source - 0.3)[there] / 4  # it was fitted to them
    rows = np.concatenate([np.eye(5)] * 9)  # the offset of each class, beside the slope
    unknown = np.column_stack([source[seen].reshape(-1), rows])
    slope, *offset = np.linalg.lstsq(unknown, result[seen].reshape(-1), rcond=None)[0]
    straight = slope * source + np.array(offset)
    rest = result - straight
    rest[there] *= max(1.0, (rest[seen].var(0, ddof=1).mean() / np.square(rest[there]).mean()) ** 0.5)
    counted, handed = numpys_share(source, straight, rest)
    again = [
        np.subtract(*numpys_share(*(np.delete(value, i, 0) for value in (source, straight, rest)))) for i in range(16)
    ]
    chance = np.var(again) * 15
    expected = handed + max(0.0, 1 - chance / (counted - handed) ** 2) * (counted - handed)
    pairs = [(torch.tensor(source[part]), torch.tensor(result[part])) for part in (seen, there)]
    assert share_of(pairs[:1], pairs[1:]) == pytest.approx(expected, rel=1e-9)


def test_the_same_answers_keep_all_and_places_of_maps_count_like_images() -> None:
    source, result, _ = gaussian(64, 1.0)
    assert expected_accuracy.kept([(source, source)]) == pytest.approx(1.0)
    assert expected_accuracy.kept([(source, 3 * source + 1)]) == pytest.approx(1.0)  # larger logits, the same answers
    flat = share_of([(source, result)])
    maps = [value.view(4, 4, 4, 5).movedim(3, 1) for value in (source, result)]
    assert share_of([(maps[0], maps[1])]) == pytest.approx(flat)
    halves = [(source[:20], result[:20]), (source[20:], result[20:])]
    assert share_of(halves) == pytest.approx(flat)


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
    held = [torch.zeros(6, 3, 96, 96) for _ in range(2)]
    for channel, x in enumerate(held):
        x[:, channel] = torch.randn(6, 96, 96)
    seen: list[tuple[Tensor, Tensor]] = []
    monkeypatch.setattr(expected_accuracy, "kept", lambda answers, others: seen.extend([*answers, *others]) or 0.5)
    kept = kept_accuracy.measured(one, two, [Example((x,)) for x in held], [Example((held[0],)), Example((held[1],))])
    assert kept is not None
    assert kept.right == 0.5
    assert [tuple(value.shape) for pair in seen for value in pair] == [(6 * expected_accuracy.PLACES, 2)] * 8
    few = kept_accuracy.measured(one, two, [Example((held[0],)), Example((held[1][:5],))])
    assert few is not None
    assert (few.count, few.right) == (11, None)
    assert few.agreement is not None


def test_a_conversion_asks_about_images_it_was_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images = torch.randn(300, 3, 6, 6)
    network(images)  # statistics
    seen: list[list[tuple[Tensor, Tensor]]] = []
    monkeypatch.setattr(expected_accuracy, "kept", lambda *given: seen.extend(given) or 0.5)
    done = normswap.convert(network.eval(), "groupnorm", calibrate=list(images.split(100)))
    assert done.report.kept is not None
    assert done.report.kept.right == 0.5
    (answers, others), held = seen, torch.arange(300) % 4 == 3
    with torch.no_grad():
        for at, model in enumerate((network, done.model)):
            torch.testing.assert_close(torch.cat([pair[at] for pair in answers]), model(images[held]))
            torch.testing.assert_close(torch.cat([pair[at] for pair in others]), model(images[~held][:192]))


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
    assert (kept.agreement is not None, kept.right is not None) == (classes > 0, classes > 0)
