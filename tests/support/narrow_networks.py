"""Narrow networks of timm that look as if they had been trained."""

import functools
from typing import Any

import timm
import torch
from timm.layers import ScaledStdConv2d, StdConv2d
from timm.layers.std_conv import ScaledStdConv2dSame, StdConv2dSame
from torch import Tensor, nn

from normswap.plan import Step
from normswap.surgery import carrying_out
from normswap.surgery.network import Network
from support.lived_in_networks import lived_in, run, shared
from support.model_sources import SMALL_IMAGES

RESNETS: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 16, 24, 32), "layers": (1, 1, 2, 1)},
    "resnet26d": {"channels": (8, 16, 24, 32), "stem_width": 8, "layers": (1, 2, 1, 1)},
    "resnetv2_18": {"channels": (8, 16, 24, 32), "stem_chs": 8, "layers": (1, 1, 2, 1)},
    "resnetv2_50d": {"channels": (32, 32, 64, 96), "stem_chs": 8, "layers": (1, 2, 1, 1)},
    "seresnet18": {"channels": (8, 16, 24, 32), "layers": (1, 1, 2, 1)},
    "ecaresnet50t": {"channels": (8, 16, 24, 32), "layers": (1, 2, 1, 1)},
}
_SMALL = {
    "channels": (64, 64, 128, 128),
    "depths": (1, 2, 1, 1),
    "group_size": 16,
    "stem_chs": 32,
    "num_features": 0,
}
NORM_FREE: dict[str, dict[str, Any]] = {
    "nf_resnet26": {"width_factor": 0.25, "depths": (1, 2, 1, 1)},
    "nf_regnet_b0": {"width_factor": 0.5, "depths": (1, 2, 1, 1)},
    "nf_seresnet26": {"width_factor": 0.25, "depths": (1, 2, 1, 1)},
    "nf_ecaresnet26": {"width_factor": 0.25, "depths": (1, 2, 1, 1)},
    "nfnet_l0": _SMALL,
    "eca_nfnet_l0": _SMALL,
    "dm_nfnet_f0": _SMALL,
    "nfnet_f0": _SMALL,
}


def skeleton(arch: str, **kwargs: Any) -> nn.Module:
    options = {"pretrained_cfg_overlay": SMALL_IMAGES, **RESNETS[arch], **kwargs}
    return timm.create_model(arch, num_classes=10, **options).double().eval()


@functools.cache
def source(arch: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A lived-in network, images for it, and its logits for them; nobody may change them."""
    torch.manual_seed(0)
    seen, x = torch.randn(2, 3, 3, 33, 33, dtype=torch.float64)
    model = shared(lived_in(skeleton(arch), seen))
    return model, x, run(model, x)


def applied(model: nn.Module, planned: Step) -> nn.Module:
    """The network after a step, which knows where it is from."""
    return carrying_out.applied(Network(model), planned)


STANDARDIZED = (StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame)


def randomized(model: nn.Module, skipinit: float = 0.4) -> nn.Module:
    """The network with gains and biases as if trained; in a fresh one every branch is 0."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("skipinit_gain"):
                parameter.fill_(skipinit)
            elif name.endswith(("gain", "bias")):
                noise = torch.randn(parameter.shape, generator=generator)
                is_gain = name.endswith("gain")
                parameter.copy_(noise.abs() + 0.3 if is_gain else 0.2 * noise)
            elif name.endswith("fc.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))

    return model.double().eval()


def norm_free(arch: str, **kwargs: Any) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = randomized(timm.create_model(arch, num_classes=10, **NORM_FREE.get(arch, {}), **kwargs))
    return model, torch.randn(3, 3, 64, 64, dtype=torch.float64)
