"""LayerScale: one gamma per channel, y = gamma x, and nothing else (Touvron et al. 2021, arXiv:2103.17239, section 2).

timm's are known by their forward. Other libraries write their own (transformers' DINOv2 and its heirs): a module
without children, whose only tensor is one number per channel, is one if it is measured to multiply by that.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from weakref import WeakKeyDictionary

import torch
from timm import layers as timm_layers
from torch import Tensor, nn

from normswap.layers.channel_norm import probe
from normswap.layers.own import OwnLayer

_READ = {timm_layers.LayerScale.forward: -1, timm_layers.LayerScale2d.forward: 1}
_SEEN: WeakKeyDictionary[nn.Module, int | None] = WeakKeyDictionary()  # what was measured


def scaled_dim(module: nn.Module) -> int | None:
    """Along which dimension a LayerScale has its channels: -1 or 1; None for any other module."""
    if isinstance(module, OwnLayer) or "forward" in vars(module) or module._modules or module._buffers:
        return None
    parameters = list(module._parameters.values())
    if len(parameters) != 1 or parameters[0] is None or parameters[0].ndim != 1 or parameters[0].numel() < 2:
        return None
    known = _READ.get(type(module).forward)
    return _measured(module) if known is None else known


def gamma(module: nn.Module) -> Tensor:
    """The gamma (C,) of a LayerScale, in float64."""
    (parameter,) = module.parameters()
    return parameter.detach().double()


@torch.no_grad()
def _measured(module: nn.Module) -> int | None:
    """The dimension along which the module multiplies by its parameter, in float64, whatever the parameter is."""
    if module not in _SEEN:
        _SEEN[module] = None
        with suppress(Exception):  # it cannot be copied
            twin = copy.deepcopy(module).double().eval()
            (gamma,) = twin.parameters()
            gamma.copy_(torch.randn(gamma.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64))
            for dim in (-1, 1):
                x = probe(gamma.numel(), dim)
                expected = (x.movedim(dim, -1) * gamma).movedim(-1, dim)
                with suppress(Exception):  # it takes no input of this shape
                    if torch.allclose(twin(x.clone()), expected, rtol=1e-12, atol=0):
                        _SEEN[module] = dim
    return _SEEN[module]
