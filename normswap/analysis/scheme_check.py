"""Walk a scheme over small networks of several kinds: to it, from there to every other target and back; distances.

For whoever adds a scheme: it must keep what it says it keeps, and every target must take its results or say why not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import timm
import torch
from torch import nn

from normswap import schemes
from normswap.errors import NormswapError, VerificationError, first_line
from normswap.surgery import conversion
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_create = partial(timm.create_model, num_classes=10)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "ResNet": partial(_create, "resnet18", channels=(8, 16, 24, 32)),
    "pre-activation": partial(_create, "resnetv2_50", layers=(1, 1, 1, 1), channels=(32, 64, 96, 128), stem_chs=16),
    "depthwise": partial(_create, "mobilenetv2_035"),
    "gates": partial(_create, "regnety_002"),
    "dense": partial(_create, "densenet121", growth_rate=8, block_config=(2, 2)),
}
SIZE = (3, 64, 64)


@dataclass(frozen=True)
class Walked:
    """One conversion of the walk.

    Args:
        network: what kind of network it began with.
        path: the targets, one after the other.
        exact: whether the last one claims to keep the function; None where there is no result.
        distance: relative L2 of the last one's logits to those before it; in float64 where it is exact.
        why: why there is no result.
        wrong: the result is wrong, or an error was raised that is no refusal.
    """

    network: str
    path: tuple[str, ...]
    exact: bool | None = None
    distance: float | None = None
    why: str = ""
    wrong: bool = False


def walk(scheme: str, **options: object) -> Iterator[Walked]:
    """Convert each of `NETWORKS` to the scheme, and the result to every target, and back by `unfold`.

    Raises:
        OptionError: there is no such scheme, or option of it.
    """
    schemes.chosen(scheme, options)
    for kind, create in NETWORKS.items():
        first, done = _tried(Network(lived_in(create()), size=SIZE), kind, (scheme,), options)
        yield first
        if done is not None:
            for target in [*schemes.names(), "unfold"]:
                yield _tried(Network(done.model, size=SIZE), kind, (scheme, target), {})[0]


def _tried(
    network: Network, kind: str, path: tuple[str, ...], options: schemes.Options
) -> tuple[Walked, Conversion | None]:
    try:
        done = conversion.convert(network, path[-1], **options)
    except VerificationError as error:
        return Walked(kind, path, why=str(error), wrong=True), None
    except NormswapError as error:
        return Walked(kind, path, why=str(error)), None
    except Exception as error:  # whatever a new scheme raises
        return Walked(kind, path, why=f"{type(error).__name__}: {first_line(error)}", wrong=True), None
    precise = [error.relative_l2 for error in done.report.logits if error.precision == "float64"]
    distance = precise[0] if precise else done.report.worst.relative_l2
    return Walked(kind, path, done.report.exact, distance), done


@torch.no_grad()
def lived_in(model: nn.Module, seed: int = 0) -> nn.Module:
    """`model` itself in eval mode, its BatchNorms' tensors drawn at random, so that none is 0 or 1 by accident."""
    generator = torch.Generator().manual_seed(seed)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            for name, tensor in norm.state_dict().items():
                if name in ("weight", "running_var"):
                    tensor.copy_(0.5 + torch.rand(tensor.shape, generator=generator))
                elif name in ("bias", "running_mean"):
                    tensor.copy_(0.2 * torch.randn(tensor.shape, generator=generator))
    return model.eval()
