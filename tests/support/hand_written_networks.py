"""Networks as users write them: residual branches that end in a convolution or in a norm."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PreAct(nn.Module):
    """He et al. 2016, written by hand: functional ReLU, the branch ends in its last convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        out = self.conv2(torch.relu(self.bn2(out)))
        out += x
        return out


class PostAct(nn.Module):
    """The branch ends in its norm; the sum is a method call."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 1)
        self.bn2 = nn.BatchNorm2d(channels)

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


class Branch(nn.Module):
    """A residual block of four channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.bn(self.conv(x)))


class Anchored(nn.Module):
    """A detector's map, to which the position of each number on it is added."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 2, 3, 2, 1), nn.BatchNorm2d(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        rows, columns = (torch.arange(end).type_as(x) + 0.5 for end in x.shape[2:])
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        return x.flatten(2) + grid.flatten(1)


class Spectrum(nn.Sequential):
    """A network with a Fourier transform and complex numbers, which runtimes of phones lack."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.fft2(super().forward(x)).real.mean((2, 3))


class Answers(nn.Module):
    """Convolutions and a norm, and a function `answer` of their output."""

    def __init__(self, answer: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)
        )
        self.answer = answer

    def forward(self, x: Tensor) -> Any:
        return self.answer(self.body(x))
