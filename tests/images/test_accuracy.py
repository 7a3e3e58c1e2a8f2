"""The evaluation: top-1, top-5 and loss against their definitions, and a model left as it was."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from normswap.errors import SourceError
from normswap.images.accuracy import evaluate


class Table(nn.Module):
    """Looks its logits up by the value of the first pixel; drops out in training mode."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.frozen = nn.BatchNorm2d(3).eval()
        self.drop = nn.Dropout(0.9)

    def forward(self, images: Tensor) -> Tensor:
        return self.drop(self.logits[images[:, 0, 0, 0].long()])


def pairs(labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    images = torch.arange(float(len(labels)))[:, None, None, None].expand(-1, 3, 2, 2)
    return list(zip(images.split(size), labels.split(size), strict=True))


@pytest.mark.parametrize("classes", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluate(classes: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(40, classes, generator=draw, dtype=dtype)
    labels = torch.randint(classes, (40,), generator=draw)
    model, calls = Table(logits).train(), list[tuple[int, int]]()
    model.frozen.eval()
    found = evaluate(model, pairs(labels, 15), progress=lambda done, total: calls.append((done, total)))
    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert found.top1 == pytest.approx(100 * (rank == 0).float().mean().item())
    assert found.top5 == pytest.approx(100 * (rank < 5).float().mean().item())
    assert found.loss == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)
    assert (found.count, calls) == (40, [(15, 0), (30, 0), (40, 0)])
    assert found.images_per_s > 0
    assert model.training
    assert model.drop.training
    assert not model.frozen.training


@pytest.mark.parametrize(
    ("labels", "said"), [([0, 3], "label 3 is no class"), ([0, -1], "label -1"), ([], "no images")]
)
def test_evaluate_refuses(labels: list[int], said: str) -> None:
    model = Table(torch.zeros(4, 3)).train()
    with pytest.raises(SourceError, match=said):
        evaluate(model, pairs(torch.tensor(labels), 2) if labels else [])
    assert model.training
