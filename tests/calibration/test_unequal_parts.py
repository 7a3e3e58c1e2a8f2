"""Law of unequal parts: the same images in batches of any sizes give the same, the last batch of
one image too.
"""

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from support.hand_written_networks import Branch
from support.sampled_tables import quick
from support.six_networks import images, measured, trained
from torch import Tensor, nn

import normswap
from normswap.analysis import block_signals
from normswap.calibration import channel_moments, sequential_fit
from normswap.calibration.least_squares import Folds, regress
from normswap.calibration.restoring import restore
from normswap.exporting import checks
from normswap.exporting.signature import Signature
from normswap.images.accuracy import classify
from normswap.models.calling import Example
from normswap.proof import held_out
from normswap.proof.held_out import HeldOutSplit
from normswap.surgery.network import Network

COUNT = 21
Batches = list[Tensor]
SOURCE = trained("post")
X = images(COUNT, 3)
# So dark and so bright that a batch's mean is not that of all images, and its size not either.
X *= torch.linspace(0.2, 3, COUNT).view(-1, 1, 1, 1)


def noisy(source: nn.Module, share: float = 0.03, seed: int = 0) -> nn.Module:
    """A network of the same layers whose weights are somewhat off."""
    model = copy.deepcopy(source)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += (
                share
                * parameter.std(correction=0)
                * torch.randn(parameter.shape, generator=generator)
            )
    return model


class Maps(nn.Module):
    """A network that answers with maps, and has none but small ones: a fit looks at every place of
    them.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.AvgPool2d(4)
        self.body = Branch()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(self.pool(self.stem(x)))
        return y


MAPS = measured(Maps().double().eval(), X)


def labelled(batches: Batches) -> Iterable[tuple[Tensor, Tensor]]:
    labels = torch.arange(COUNT) % 4
    return zip(batches, labels.split([len(batch) for batch in batches]), strict=True)


def of_moments(batches: Batches) -> object:
    layers = {"1": SOURCE.get_submodule("blocks.0.bn1"), "2": SOURCE.get_submodule("blocks.2.bn2")}
    moments = channel_moments.measure(SOURCE, layers, batches).moments
    return [(moment.count, moment.mean, moment.variance) for moment in moments.values()]


def of_regression(batches: Batches) -> object:
    folds = Folds()
    for batch in batches:
        rows = batch.flatten(2).transpose(1, 2)[:, None, :20]
        folds.add(rows[..., :2], rows[..., 2:] ** 2)
    fit = regress(folds, torch.zeros(1, 1, 2).double())
    return fit.weight, fit.bias, fit.ridge


def of_restoring(batches: Batches) -> object:
    folded = [
        normswap.convert(model, "folded", inputs=X[:2]).model for model in (SOURCE, noisy(SOURCE))
    ]
    restore(folded[1], [folded[0]], batches)
    return list(folded[1].state_dict().values())


def of_split(batches: Batches) -> object:
    split = HeldOutSplit([Example((batch,)) for batch in batches], torch.device("cpu"))
    return torch.cat([call.images for call in split]), torch.cat(
        [call.images for call in split.held]
    )


def of_share(source: nn.Module) -> Callable[[Batches], object]:
    """The shares that are kept of a dozen fits: one of them shows if some images count more than
    others.
    """

    def share(batches: Batches) -> object:
        shares = []
        for seed in range(12):
            result = noisy(source, 0.3, seed)
            before = sequential_fit.values_of(noisy(source, 0.25, seed + 12))
            shares.append(
                sequential_fit.keep_share(
                    source, result, before, [Example((batch,)) for batch in batches]
                )
            )
        return shares

    return share


def of_kept(source: nn.Module, result: nn.Module) -> Callable[[Batches], object]:
    def kept(batches: Batches) -> object:
        figures = held_out.measured(source, result, [Example((batch,)) for batch in batches])
        assert figures is not None
        return figures.agreement, figures.relative_l2, figures.count

    return kept


def of_evaluation(batches: Batches) -> object:
    found, answers = classify(SOURCE, labelled(batches))
    return found.top1, found.top5, found.loss, found.count, answers


def of_signal(batches: Batches) -> object:
    points = block_signals.signal_propagation(Network(SOURCE, X[:2]), batches)
    return [
        (point.mean_sq, point.variance, point.branch_variance, point.added_variance)
        for point in points
    ]


def of_file(batches: Batches) -> object:
    reference = checks.Reference(SOURCE, Signature.of_images(SOURCE, "logits"))
    file = noisy(SOURCE).requires_grad_(False)
    found = checks.check(reference, file, labelled(batches), refuse=False)
    return found.relative_l2, found.agreement, found.source_top1, found.top1, found.count


def of_a_fit(scheme: str, model: nn.Module) -> Callable[[Batches], object]:
    def fitted(batches: Batches) -> object:
        done = normswap.convert(model, scheme, inputs=X[:2], calibrate=batches)
        assert done.report.kept is not None
        return [
            *done.model.state_dict().values(),
            done.report.kept.relative_l2,
            done.report.kept.agreement,
        ]

    return fitted


LAWS: dict[str, Callable[[Batches], object]] = {
    "moments": of_moments,
    "regression": of_regression,
    "restoring": of_restoring,
    "split": of_split,
    "share": of_share(SOURCE),
    "share of maps": of_share(MAPS),
    "kept": of_kept(SOURCE, noisy(SOURCE)),
    "kept maps": of_kept(MAPS, noisy(MAPS)),
    "evaluation": of_evaluation,
    "signal": of_signal,
    "file": of_file,
    "groupnorm": of_a_fit("groupnorm", MAPS),
    "dyt": of_a_fit("dyt", MAPS),
}


DEFAULT_LAWS = ("moments", "restoring", "share", "kept", "evaluation", "file", "dyt")


def assert_same(one: Any, two: Any) -> None:
    if isinstance(one, list | tuple):
        assert len(one) == len(two)
        for first, second in zip(one, two, strict=True):
            assert_same(first, second)
    elif isinstance(one, Tensor):
        torch.testing.assert_close(one.double(), two.double(), rtol=1e-7, atol=1e-9)
    else:
        assert one == (None if two is None else pytest.approx(two, rel=1e-7, abs=1e-12))


@functools.cache
def of_all_at_once(name: str) -> Any:
    return LAWS[name]([X])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", quick(LAWS, DEFAULT_LAWS))
@settings(max_examples=2)
@example(cuts=[COUNT - 1])
@given(cuts=st.lists(st.integers(1, COUNT - 1), unique=True, min_size=1))
def test_the_same_images_in_other_batches(name: str, cuts: list[int]) -> None:
    assert_same(of_all_at_once(name), LAWS[name](list(X.tensor_split(sorted(cuts)))))
