"""BatchNorm with the statistics of all processes, on any device and backend (torch's SyncBatchNorm needs a GPU).

Ghost batch norm is left alone: small batches are its purpose.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.layers.site_norm import SiteNorm


class _Sum(torch.autograd.Function):
    """The sum over all processes; so is its gradient, since every process has used it."""

    @staticmethod
    def forward(ctx: object, value: Tensor) -> Tensor:
        value = value.clone()
        dist.all_reduce(value)
        return value

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        grad = grads[0].clone()
        dist.all_reduce(grad)
        return grad


class Synced(_BatchNorm):
    """The class that replaces a BatchNorm's: in training, mean and variance over all processes."""

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, ...) to (N, C, ...)."""
        if not self.training:
            return super().forward(input)
        x, over = input.to(torch.promote_types(input.dtype, torch.float32)), [0, *range(2, input.ndim)]
        rest = (1, -1, *(1,) * (input.ndim - 2))
        number = x.new_tensor([x.numel() / x.shape[1]])
        sums: Tensor = _Sum.apply(torch.cat([x.sum(over), number]))
        count = sums[-1].detach()
        mean = sums[:-1] / count
        centred = x - mean.view(rest)
        squares: Tensor = _Sum.apply(centred.square().sum(over))
        var = squares / count
        self._remember(mean.detach(), var.detach() * count / (count - 1))
        x = centred * torch.rsqrt(var + self.eps).view(rest)
        if self.weight is not None:
            x = x * self.weight.view(rest)
        if self.bias is not None:
            x = x + self.bias.view(rest)
        x = x.to(input.dtype)
        for name in ("drop", "act"):  # timm's BatchNormAct2d has both, a SiteNorm may have an activation
            part = getattr(self, name, None)
            x = x if part is None else part(x)
        return x

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        weight = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), weight)
        self.running_var.lerp_(var.to(self.running_var), weight)


def synchronize(model: nn.Module) -> int:
    """Let the BatchNorms of `model` use the statistics of all processes, in place; returns how many do."""
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNormAct2d, SiteNorm)
    norms = [m for m in model.modules() if type(m) in kinds and not getattr(m, "ghost", 0)]
    for module in norms:
        module.__class__ = type(f"Synced{type(module).__name__}", (Synced, type(module)), {})
    return len(norms)
