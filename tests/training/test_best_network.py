"""Which network best/ holds, by accuracies that are made up; and the loss that a run reports, by
hand.
"""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.small_trainings import network, recipe, train, weights, write_images
from torch import Tensor
from torch.nn.functional import cross_entropy

from normswap.images.accuracy import Evaluation
from normswap.training import engine
from normswap.training.engine import TrainingRun, score
from normswap.training.run_folder import COLUMNS, Row, TrainingState


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", per_class=1)


EMA = {"decay": 0.5, "warmup": False}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("own", "averaged", "epoch", "which"),
    [
        ([5, 10, 50, 30], None, 2, "own"),
        ([5, 10, 50, 30], [20, 40, 35], 2, "own"),
        ([5, 10, 20, 30], [60, 40, 50], 1, "averaged"),
        ([5, 10, 20, 30], [20, 30, 40], 3, "averaged"),
        ([70, 10, 20, 30], [20, 30, 40], 0, "own"),
        ([5, 30, 30, 30], None, 1, "own"),
    ],
)
def test_best_is_the_network_that_was_most_accurate(
    images: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    own: list[int],
    averaged: list[int] | None,
    epoch: int,
    which: str,
) -> None:
    """Its tensors are what the network, or its average, had when that accuracy was measured."""
    calls: list[tuple[str, int, dict[str, Tensor]]] = []

    def made_up(model: Any, *_: Any) -> Evaluation:
        began = bool(calls)
        second = bool(averaged) and began and len(calls) % 2 == 0
        name = "averaged" if second else "own"
        at = sum(one == name for one, _, _ in calls)
        calls.append(
            (name, at + (name == "averaged"), {k: v.clone() for k, v in model.state_dict().items()})
        )
        top1 = averaged[at] if second and averaged else own[at]
        return Evaluation(top1, 100.0, 1.0, 10, 1.0)

    monkeypatch.setattr("normswap.training.engine.measure", made_up)
    train_parts: dict[str, Any] = {"epochs": 3, **({"ema": EMA} if averaged else {})}
    plan = recipe(images, data={"batch_size": 5}, optim={"lr": 0.1}, train=train_parts)
    result = train(network("skipinit"), plan, tmp_path / "out")
    assert result.best_epoch == epoch
    (expected,) = (state for name, at, state in calls if (name, at) == (which, epoch))
    found = weights(result.best)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    others = [state for name, at, state in calls if (name, at) != (which, epoch)]
    assert all(any(not torch.equal(found[name], state[name]) for name in found) for state in others)
    last = next(state for name, at, state in calls if (name, at) == ("own", 3))
    assert all(torch.equal(weights(result.last)[name], tensor) for name, tensor in last.items())


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"top1": 30.0, "ema_top1": None, "train_loss": 9.0}, 30.0),
        ({"top1": 30.0, "ema_top1": 40.0, "train_loss": 9.0}, 40.0),
        ({"top1": 30.0, "ema_top1": 20.0, "train_loss": 9.0}, 30.0),
        ({"top1": 0.0, "train_loss": 9.0}, 0.0),
        ({"train_loss": 2.0, "val_loss": 3.0}, -3.0),
        ({"train_loss": 2.0, "val_loss": float("nan")}, float("-inf")),
        ({}, float("-inf")),
    ],
)
def test_the_score_is_the_best_accuracy_or_the_held_out_loss_where_none_is_known(
    known: Any, expected: float
) -> None:
    assert score({**dict.fromkeys(COLUMNS), **known}) == expected


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_the_loss_that_is_reported_is_the_mean_over_the_batch(
    images: Path, tmp_path: Path, accumulate: int
) -> None:
    """However many parts it comes in: of the first update of ten images, the cross-entropy of the
    untrained network.
    """
    plan = recipe(images, data={"batch_size": 10}, train={"epochs": 1, "accumulate": accumulate})
    model: Any = network("skipinit", double=True)
    result = train(model, plan, tmp_path / "out")
    from normswap.images.datasets import make_loader

    ((x, labels),) = make_loader(model, str(images), batch_size=10, workers=0)
    with torch.no_grad():
        expected = cross_entropy(model.train()(x.double()), labels)
    assert result.rows[-1]["train_loss"] == pytest.approx(expected.item(), rel=1e-6)


def unlabelled(images: Path, **parts: Any) -> Any:
    """A recipe in which the source teaches, without labels and validation images."""
    return recipe(
        images,
        data={"batch_size": 4, "validation": None},
        convert={"to": "frozen-bn"},
        distill={"teacher": "source", "weight": 1},
        **parts,
    )


def test_without_labels_the_network_as_it_began_stays_best_if_training_only_harms(
    images: Path, tmp_path: Path
) -> None:
    """It is exact, so its loss is 0, and the first update at such a rate spoils it."""
    model = network()
    said: list[str] = []
    plan = unlabelled(images, optim={"lr": 5.0}, train={"epochs": 2})

    result = train(model, plan, tmp_path / "out", say=said.append)

    assert result.best_epoch == 0
    found = weights(result.best)
    for name, parameter in model.named_parameters():
        if found[name].ndim == 4:
            assert torch.equal(found[name], parameter), name
    losses = [row["val_loss"] for row in result.rows]
    assert losses[0] == pytest.approx(0.0, abs=1e-6)
    assert losses[-1] > 0.01
    assert any("has risen" in sentence and "lower optim.lr" in sentence for sentence in said)


@pytest.mark.slow
def test_held_out_inputs_are_taken_out_of_training(tmp_path: Path) -> None:
    many = write_images(tmp_path / "photos", per_class=3)
    result = train(network(), unlabelled(many), tmp_path / "out")

    # 27 of 30 images in batches of 4: six updates in each of two epochs.
    assert result.updates == 12


@pytest.mark.parametrize(
    ("loss", "began_with", "is_risen"),
    [
        (2.03, 2.0, True),
        (2.01, 2.0, False),
        (2.0, 2.0, False),
        (1.0, 2.0, False),
        (math.nan, 2.0, True),
        (None, 2.0, False),
        (1e-7, 0.0, False),
        (1e-5, 0.0, True),
    ],
)
def test_a_loss_has_risen_if_it_is_higher_by_more_than_rounding(
    loss: float | None, began_with: float, is_risen: bool
) -> None:
    """By more than a hundredth, or where there was none by more than a millionth."""
    assert engine._is_risen(loss, began_with) is is_risen


def test_a_loss_that_has_risen_is_told_when_it_first_has_and_at_the_end() -> None:
    losses = [2.0, 1.0, 3.0, 4.0, 1.5, 5.0, 6.0]
    told: list[int] = []
    run: Any = TrainingRun.__new__(TrainingRun)
    run.at = TrainingState(best_epoch=1)
    run.task = SimpleNamespace(updates=6)
    run.say = lambda _: told.append(run.at.update)

    for epoch, loss in enumerate(losses):
        row: Row = {**dict.fromkeys(COLUMNS), "val_loss": loss}
        run.at.rows = [*run.at.rows, row]
        run.at.update = epoch
        run._warn_of_rise(loss)

    assert told == [2, 6]
