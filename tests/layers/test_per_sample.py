"""Norms with statistics of a sample, or of a few, against torch's own BatchNorm."""

import pytest
import torch
from torch import nn

from normswap.layers.per_sample import GroupNorm
from normswap.layers.site_norm import SiteNorm


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("eps", [None, 3.0])
def test_an_average_sample_sees_the_batchnorm(groups: int, eps: float | None) -> None:
    """Half of a channel's values lie a deviation above its mean, half below."""
    torch.manual_seed(0)
    old = nn.BatchNorm2d(8, eps=1e-3).double().eval()
    for tensor in (old.weight, old.bias, old.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(old.running_var, 0.5, 2.0)
    side = old.running_var.sqrt()
    x = torch.stack([old.running_mean - side, old.running_mean + side], 1).reshape(1, 8, 2, 1)
    with torch.no_grad():
        new = GroupNorm.replacing(old, like=x, groups=groups, eps=eps, lead=eps is not None)
    assert torch.allclose(new(x), old(x), atol=1e-12)


def test_ghost_batches_are_batches_of_their_own() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(6, 3, 4, 4), nn.BatchNorm2d(3).train()
    with torch.no_grad():
        ghost = SiteNorm.replacing(nn.BatchNorm2d(3), like=x, ghost=2).train()
    assert torch.allclose(ghost(x), torch.cat([plain(part) for part in x.split(2)]), atol=1e-5)
