"""Norms whose means are linear layers compute what torch's and timm's own do, in float64."""

from __future__ import annotations

import pytest
import torch
from lived import distance, run
from timm import layers as timm_layers
from torch import nn

from normswap.exporting.position_means import with_linear_means
from normswap.layers.channel_norm import ShiftedRMSNorm


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(6, eps=0.3),
        nn.LayerNorm(6, bias=False),
        nn.LayerNorm(6, elementwise_affine=False),
        timm_layers.LayerNorm(6),
        nn.RMSNorm(6),
        nn.RMSNorm(6, eps=0.3),
        timm_layers.RmsNorm(6),
        ShiftedRMSNorm(6, eps=0.3, scale=True, shift=True, dim=-1),
    ],
    ids=["eps", "no beta", "bare", "timm's", "torch's own eps", "rms", "timm's rms", "rms and beta"],
)
def test_the_same_norm(norm: nn.Module) -> None:
    torch.manual_seed(0)
    network, x = nn.Sequential(norm, nn.Linear(6, 3)).double().eval(), torch.randn(2, 5, 6).double() + 0.5
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    twin = with_linear_means(network)
    assert not [module for module in twin.modules() if isinstance(module, type(norm))]
    assert network[0] is norm
    assert distance(run(network, x), run(twin, x)) < 1e-14


def hooked() -> nn.Module:
    norm = nn.LayerNorm(6)
    norm.register_forward_hook(lambda _module, _args, output: 2 * output)
    return norm


@pytest.mark.parametrize(
    "norm",
    [nn.LayerNorm((5, 6)), timm_layers.LayerNorm2d(5), timm_layers.LayerNormFp32(6), nn.BatchNorm1d(5), hooked()],
    ids=["two dimensions", "the second", "in float32", "BatchNorm", "hooked"],
)
def test_other_norms_stay(norm: nn.Module) -> None:
    assert type(with_linear_means(nn.Sequential(norm))[0]) is type(norm)


@pytest.mark.parametrize("dim", [-1, 1])
def test_dimensions_move_only_where_channels_are_not_last(dim: int) -> None:
    """Core ML does not know the operator; it stood in the graph also where it moved nothing."""
    norm = ShiftedRMSNorm(6, eps=0.3, scale=True, shift=True, dim=dim)
    shape = (2, 5, 6) if dim == -1 else (2, 6, 5)
    graph = torch.export.export(norm, (torch.randn(shape),)).graph
    assert any("movedim" in str(node.target) for node in graph.nodes) == (dim == 1)
