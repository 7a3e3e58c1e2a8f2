"""Law of unequal parts in training: a loss is a mean over its own images, however an epoch is cut and shared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from torch import Tensor
from trained import network, recipe, train, write_images

from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.training import engine


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same picture and label forty times, so that the loss of a network that does not change is one number."""
    folder = tmp_path_factory.mktemp("alike")
    Image.new("RGB", (32, 32), (200, 90, 30)).save(folder / "one.png")
    (folder / "all.csv").write_text("file,label\n" + "one.png,3\n" * 40)
    return folder / "all.csv"


@settings(max_examples=4)
@given(
    epochs=st.sampled_from([0.4, 1.0, 1.25, 2.6]),
    batch=st.sampled_from([4, 8, 12]),
    accumulate=st.sampled_from([1, 2]),
    checkpoint=st.sampled_from([None, 1, 3]),
)
def test_every_row_has_the_loss_of_its_updates(
    alike: Path, tmp_path_factory: pytest.TempPathFactory, epochs: float, batch: int, accumulate: int, checkpoint: Any
) -> None:
    """The rate is so small that no digit of the loss changes."""
    model = network("affine", double=True)
    with torch.no_grad():
        loss = evaluate(model, make_loader(model, str(alike), workers=0)).loss
    plan = recipe(
        alike, data={"batch_size": batch}, optim={"lr": 1e-12},
        train={"epochs": epochs, "accumulate": accumulate, "checkpoint": checkpoint},
    )  # fmt: skip
    result = train(model, plan, tmp_path_factory.mktemp("run") / "out")
    rows = result.rows[1:]
    assert [row["train_loss"] for row in rows] == pytest.approx([loss] * len(rows), rel=1e-5)
    assert [row["val_loss"] for row in rows] == pytest.approx([loss] * len(rows), rel=1e-5)
    assert rows[-1]["epoch"] == pytest.approx(result.updates / (40 // batch))


class OneOfTwo:
    """A process of two, of which the other has measured already."""

    device, num_processes = torch.device("cpu"), 1

    def __init__(self, other: Tensor | None = None) -> None:
        self.other, self.sums = other, torch.zeros(0)

    def reduce(self, parts: Tensor, how: str) -> Tensor:
        assert how == "sum"
        self.sums = parts.clone()
        return parts if self.other is None else parts + self.other


@pytest.mark.parametrize("share", [1, 13, 39])
def test_two_processes_of_unequal_shares_measure_what_one_does(share: int, tmp_path: Path) -> None:
    model = network("affine")
    whole = make_loader(model, str(write_images(tmp_path / "images")), workers=0, batch_size=7)
    first: Any = OneOfTwo()
    engine.measure(model, whole.only(range(share)), first)
    second: Any = OneOfTwo(first.sums)
    together = engine.measure(model, whole.only(range(share, 40)), second)
    alone = evaluate(model, whole)
    assert together is not None
    assert (together.top1, together.top5, together.count) == pytest.approx((alone.top1, alone.top5, 40))
    assert together.loss == pytest.approx(alone.loss)
