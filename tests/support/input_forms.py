"""Networks that take their inputs in other forms than a tensor, around one plain network."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.lived_in_networks import lived_in

SIZE = (3, 24, 24)


class Trunk(nn.Module):
    """A residual network in miniature: (N, 3, H, W) -> (N, classes)."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.one = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(8)
        self.two = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        branch = self.norm2(self.two(self.norm1(self.one(x)).relu()))
        return self.head((x + branch).relu().mean((2, 3)))


class Keyword(nn.Module):
    """Takes its images by keyword, and returns a dict."""

    def __init__(self, trunk: Trunk) -> None:
        super().__init__()
        self.trunk = trunk

    def forward(self, *, pixel_values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.trunk(pixel_values)}


class Record(Keyword):
    """Takes a dict as its one argument, and returns a dict."""

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        return {"logits": self.trunk(batch["image"])}


class Listed(Keyword):
    """Takes a list of images, and returns a list of dicts, as detectors do."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        assert isinstance(images, list)
        return [{"scores": row} for row in self.trunk(torch.stack(images))]


class Unpacked(Keyword):
    """Takes two arguments, which together are an image."""

    def forward(self, colours: Tensor, grey: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        logits = self.trunk(torch.cat([colours, grey], 1))
        return logits, logits.softmax(-1)


def trunk() -> Trunk:
    torch.manual_seed(0)
    return lived_in(Trunk(), torch.randn(8, *SIZE, dtype=torch.float64)).float()  # type: ignore[return-value]


# A network around a trunk, and the form in which it takes images (N, C, H, W).
FORMS: dict[str, tuple[Callable[[Trunk], nn.Module], Callable[[Tensor], Any]]] = {
    "keywords": (Keyword, lambda x: {"pixel_values": x}),
    "a record": (Record, lambda x: ({"image": x},)),
    "a list": (Listed, lambda x: (list(x),)),
    "two arguments": (Unpacked, lambda x: (x[:, :2], x[:, 2:])),
}


def batches(count: int = 4, each: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(each, *SIZE, generator=generator) for _ in range(count)]


def resnet() -> nn.Module:
    """A ResNet of transformers, which takes keywords and returns its hidden states, too."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=5,
        output_hidden_states=True,
    )
    net = ResNetForImageClassification(config).eval()
    return lived_in(net, torch.randn(8, *SIZE, dtype=torch.float64)).float()


class Boxes(Listed):
    """Returns as many boxes as scores are positive, which may depend on the last digit."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:  # type: ignore[override]
        rows = self.trunk(torch.stack(images))
        return [{"scores": row[row > 0], "labels": torch.where(row > 0)[0]} for row in rows]


def scaled(x: Tensor) -> Tensor:
    """Images of such different contrast that another number of scores is positive."""
    return x * torch.logspace(-2, 1.5, len(x))[:, None, None, None]
