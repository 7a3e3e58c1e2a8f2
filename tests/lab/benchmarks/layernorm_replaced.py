"""What a trained ViT keeps when each LayerNorm of its blocks becomes a layer without statistics per token.

    PYTHONPATH=tests:tests/lab/benchmarks python tests/lab/benchmarks/layernorm_replaced.py > FILE.md

No command of normswap does this: it asks whether one should. In order of the forward, each layer is fitted by least
squares per channel, from what reaches it to what the LayerNorm there gives in the source: s x + t (`affine`, which is
BatchNorm in eval mode), or gamma tanh(alpha x) + beta (`dyt`, alpha of a grid). Then two epochs of distillation on 4000
images. Top-1 on 2000 CIFAR-10 test images.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
import zoo_networks
from recalibrate_pruned import DATA, top1
from torch import Tensor, nn

from normswap.images.datasets import make_loader

GRID = [2.0**power for power in range(-6, 4)]


class Bent(nn.Module):
    """weight * bend(x) + bias per channel of the last dimension; alpha None: no bend."""

    def __init__(self, weight: Tensor, bias: Tensor, alpha: float | None) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(weight), nn.Parameter(bias)
        self.alpha = None if alpha is None else nn.Parameter(torch.tensor(alpha))

    def forward(self, x: Tensor) -> Tensor:
        return (x if self.alpha is None else torch.tanh(self.alpha * x)) * self.weight + self.bias


def fitted(x: Tensor, y: Tensor, alpha: float | None) -> tuple[float, Bent]:
    """The least-squares layer from rows x to rows y, (R, C), and the squared error it leaves."""
    z = x if alpha is None else torch.tanh(alpha * x)
    spread = z.var(0, correction=0).clamp_min(1e-8)
    weight = ((z - z.mean(0)) * (y - y.mean(0))).mean(0) / spread
    bias = y.mean(0) - weight * z.mean(0)
    return float((z * weight + bias - y).square().mean()), Bent(weight, bias, alpha)


@torch.no_grad()
def replaced(source: nn.Module, images: Tensor, *, bends: bool) -> nn.Module:
    result = copy.deepcopy(source)
    for path, norm in list(source.named_modules()):
        if not isinstance(norm, nn.LayerNorm):
            continue
        y, x = (seen(model, path, images) for model in (source, result))
        layer = min((fitted(x[0], y[1], alpha) for alpha in (GRID if bends else [None])), key=lambda pair: pair[0])[1]
        parent, _, name = path.rpartition(".")
        setattr(result.get_submodule(parent), name, layer)
    return result


def seen(model: nn.Module, path: str, images: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that a layer reads, and gives."""
    rows: list[Tensor] = []

    def keep(_layer: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        rows.extend(tensor.flatten(0, -2) for tensor in (args[0], out))

    handle = model.get_submodule(path).register_forward_hook(keep)
    model(images)
    handle.remove()
    return rows[0], rows[1]


def distilled(source: nn.Module, result: nn.Module, images: Tensor) -> nn.Module:
    other = copy.deepcopy(result).train()
    optimizer = torch.optim.AdamW(other.parameters(), lr=5e-4)
    torch.manual_seed(0)
    for _ in range(2):
        for chosen in torch.randperm(len(images)).split(50):
            x = images[chosen]
            with torch.no_grad():
                wanted = source(x).softmax(1)
            optimizer.zero_grad()
            F.cross_entropy(other(x), wanted).backward()
            nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            optimizer.step()
    return other.eval()


def main() -> None:
    source = zoo_networks.trained("vit").eval()
    load: Callable[[str, int], list[tuple[Tensor, Tensor]]] = lambda name, count: list(  # noqa: E731
        make_loader(source, str(DATA / name), batch_size=100, workers=1, samples=count)
    )
    test, images = load("test.tar.xz", 2000), torch.cat([x for x, _ in load("train.tar.xz", 4000)])
    print("| LayerNorms become | top-1 | without a step | after the distillation |\n|---|---|---|---|")
    whole = top1(source, test)
    print(f"| stay | {whole:.1f} | {whole:.1f} | {top1(distilled(source, source, images), test):.1f} |", flush=True)
    for label, bends in (("`affine`", False), ("`dyt`", True)):
        result = replaced(source, images[:500], bends=bends)
        print(f"| {label} | {whole:.1f} | {top1(result, test):.1f} "
              f"| {top1(distilled(source, result, images), test):.1f} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
