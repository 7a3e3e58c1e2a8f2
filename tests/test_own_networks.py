"""Networks that users write themselves: residual branches that end in a convolution, in a norm, in a function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lived import lived_in
from torch import Tensor, nn

import normswap
from normswap.errors import RefusedError
from normswap.layers.scalars import Scale


class PreAct(nn.Module):
    """He et al. 2016, written by hand: functional ReLU, the branch ends in its last convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(channels), nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(torch.relu(self.bn2(out)))
        out += x
        return out


class PostAct(nn.Module):
    """The branch ends in its norm; the sum is a method call."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn2(self.conv2(self.bn1(self.conv1(x)).relu())).add(x).relu_()


class Net(nn.Module):
    def __init__(self, block: type[nn.Module], channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, stride=2)
        self.blocks = nn.Sequential(*(block(channels) for _ in range(3)))
        self.head = nn.Linear(channels, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def lived(block: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return lived_in(Net(block), torch.randn(4, 3, 33, 33, dtype=torch.float64))


@pytest.mark.parametrize("block", [PreAct, PostAct])
@pytest.mark.parametrize("to", ["folded", "skipinit", "regularized-skipinit"])
def test_exact_with_one_scalar_per_block(block: type[nn.Module], to: str, tmp_path: Path) -> None:
    if to == "regularized-skipinit":
        with pytest.raises(RefusedError, match="no seat for a dropout"):
            normswap.convert(lived(block), to, size=(3, 33, 33))
        return
    source = lived(block)
    done = normswap.convert(source, to, size=(3, 33, 33))
    x = torch.randn(2, 3, 41, 41, dtype=torch.float64)
    with torch.no_grad():
        a, b = source(x), done.model(x)
    assert (a - b).norm() <= 1e-10 * a.norm()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in done.model.modules())
    assert sum(isinstance(module, Scale) for module in done.model.modules()) == (3 if to == "skipinit" else 0)
    loaded = normswap.load(normswap.save(done, tmp_path / "out"), skeleton=Net(block).double())
    assert torch.equal(loaded(x), done.model(x))
    names = dict(done.renames)
    assert all(old in source.state_dict() and new in done.model.state_dict() for old, new in names.items())
    if to == "skipinit":  # and on to the canonical form
        folded = normswap.convert(loaded, "folded", size=(3, 33, 33)).model
        with torch.no_grad():
            assert (folded(x) - a).norm() <= 1e-10 * a.norm()
        assert not any(isinstance(module, Scale) for module in folded.modules())
