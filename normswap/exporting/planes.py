"""3-D convolutions as 2-D ones, for runtimes that have only those.

A kernel of depth d sees d planes at once. Their channels laid side by side are the channels of one image, and what the
kernel gives there is a plane of the result: the same sums of products, exact but for their order.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

T = TypeVar("T", bound=nn.Module)


def in_planes(network: T) -> T:
    """A copy in which 3-D convolutions that pad with zeros are 2-D ones; it computes the same."""
    twin = copy.deepcopy(network)
    for path, module in list(twin.named_modules()):
        if type(module) is nn.Conv3d and module.padding_mode == "zeros" and not isinstance(module.padding, str):
            twin.set_submodule(path, _PlaneByPlane(module))
    return twin


class _PlaneByPlane(nn.Module):
    """A convolution with kernels (O, I / groups, d, h, w) as one with kernels (O, I / groups * d, h, w)."""

    def __init__(self, conv: nn.Conv3d) -> None:
        super().__init__()
        self.depth, self.stride, self.gap = conv.kernel_size[0], conv.stride[0], conv.dilation[0]
        self.padding = int(conv.padding[0])
        self.conv = nn.Conv2d(
            conv.in_channels * self.depth, conv.out_channels, _across(conv.kernel_size), _across(conv.stride),
            _across(conv.padding), _across(conv.dilation), conv.groups, conv.bias is not None, dtype=conv.weight.dtype,
        ).requires_grad_(False)  # fmt: skip
        self.conv.weight.copy_(conv.weight.flatten(1, 2))
        if conv.bias is not None and self.conv.bias is not None:
            self.conv.bias.copy_(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, I, D, H, W) to (N, O, D', H', W')."""
        x = F.pad(x, (0, 0, 0, 0, self.padding, self.padding))
        span = x.shape[2] - self.gap * (self.depth - 1)  # of where a kernel may begin
        seen = [x[:, :, first : first + span : self.stride] for first in range(0, self.gap * self.depth, self.gap)]
        planes = torch.stack(seen, 3).transpose(1, 2)  # (N, D', I, d, H, W)
        flat = self.conv(planes.flatten(0, 1).flatten(1, 2))
        return flat.unflatten(0, planes.shape[:2]).transpose(1, 2)


def _across(sizes: Sequence[int | str]) -> tuple[int, int]:
    """Those of a plane, of sizes (depth, height, width)."""
    return int(sizes[1]), int(sizes[2])
