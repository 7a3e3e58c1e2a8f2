"""The known norms: one table, with a record for each class. This file alone decides the kind of a
norm.

`normswap.register_norm` and the entry points `normswap.norms` add rows for other people's classes.
A subclass counts as its nearest class in the table; it is believed if its `forward` is that
class's.

Many libraries write their own frozen BatchNorm (torchvision, detectron2, DETR), or a forward that
only casts. A module without children that owns weight, bias, running_mean and running_var, each of
one number per channel, is believed to be a BatchNorm if in eval mode, in float64, it computes y =
weight (x - mean) / sqrt(var + eps) + bias with its own eps or a usual one.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from timm import layers as timm_layers
from timm.layers import norm as timm_norm, norm_act, split_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap import plugins
from normswap.errors import OptionError
from normswap.layers.planned_layer import OwnLayer

Pair: TypeAlias = tuple[Tensor, Tensor]
# A function of a module of the registered class.
Read: TypeAlias = Callable[[Any], Pair]
NormClass = TypeVar("NormClass", bound=type[nn.Module])


class BatchNorm(Protocol):
    """The tensors of a norm with population statistics."""

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor


class Statistics(Enum):
    """Where a norm takes its statistics from in eval mode."""

    POPULATION = "kept from training"
    SAMPLE = "of each sample"
    POSITION = "of the channels at each position"
    NONE = "none"


@dataclass(frozen=True)
class NormKind:
    """What is known of a class of norms.

    Args:
        statistics: their source in eval mode.
        dim: the dimension of its channels: 1, or -1; None where it is not known.
        centres: it subtracts the mean.
        activation: it applies its `drop` and `act` to the result.
        single: it computes in float32 whatever the network's precision is.
        affine: s and t of y = s * x + t per channel in eval mode, each (C,); None: as its class
            says.
        moments: mean and variance per channel, (C,), of its input; None: its running statistics.
    """

    statistics: Statistics
    dim: int | None = 1
    centres: bool = True
    activation: bool = False
    single: bool = False
    affine: Read | None = None
    moments: Read | None = None


_BATCH = NormKind(Statistics.POPULATION)
_BATCH_ACT = NormKind(Statistics.POPULATION, activation=True)
_SAMPLE = NormKind(Statistics.SAMPLE)
_SAMPLE_ACT = NormKind(Statistics.SAMPLE, activation=True)
# The record of a LayerNorm over the channels in a dimension, or (`centres=False`) of an RMSNorm.
at_each_position = partial(NormKind, Statistics.POSITION)
KINDS: dict[type[nn.Module], NormKind] = {
    _BatchNorm: _BATCH,
    nn.SyncBatchNorm: _BATCH,
    FrozenBatchNorm2d: _BATCH,
    norm_act.BatchNormAct2d: _BATCH_ACT,
    norm_act.SyncBatchNormAct: _BATCH_ACT,
    norm_act.FrozenBatchNormAct2d: _BATCH_ACT,
    split_batchnorm.SplitBatchNorm2d: _BATCH,
    nn.GroupNorm: _SAMPLE,
    _InstanceNorm: _SAMPLE,
    timm_norm.GroupNorm: _SAMPLE,
    timm_norm.GroupNorm1: _SAMPLE,
    norm_act.GroupNormAct: _SAMPLE_ACT,
    norm_act.GroupNorm1Act: _SAMPLE_ACT,
    nn.LocalResponseNorm: NormKind(Statistics.SAMPLE, dim=None),
    nn.LayerNorm: at_each_position(-1),
    timm_layers.LayerNorm: at_each_position(-1),
    timm_layers.LayerNorm2d: at_each_position(1),
    timm_layers.LayerNormFp32: at_each_position(-1, single=True),
    timm_layers.LayerNorm2dFp32: at_each_position(1, single=True),
    norm_act.LayerNormAct: at_each_position(-1, activation=True),
    norm_act.LayerNormAct2d: at_each_position(1, activation=True),
    nn.RMSNorm: at_each_position(-1, centres=False),
    timm_layers.RmsNorm: at_each_position(-1, centres=False),
    timm_layers.RmsNorm2d: at_each_position(1, centres=False),
    timm_norm.RmsNormFp32: at_each_position(-1, centres=False, single=True),
    timm_norm.RmsNorm2dFp32: at_each_position(1, centres=False, single=True),
    norm_act.RmsNormAct: at_each_position(-1, centres=False, activation=True),
    norm_act.RmsNormAct2d: at_each_position(1, centres=False, activation=True),
    timm_norm.SimpleNorm: at_each_position(-1, centres=False),
    timm_norm.SimpleNorm2d: at_each_position(1, centres=False),
}
_REGISTERED: dict[type[nn.Module], NormKind] = {}
_TENSORS = {"weight", "bias", "running_mean", "running_var"}
_USUAL = (1e-5, 1e-3, 1e-6, 1e-4, 1e-12, 0.0)
# A norm is tried on maps, series and volumes.
_SHAPES = ((2, 3, 4), (3, 5), (2, 3, 2, 4))
# Layers are tried on values of both scales: a clamp bends large ones only.
SCALES = (1, 1000)


def register_norm(
    kind: NormClass,
    *,
    affine: Read | None = None,
    statistics: Read | None = None,
    per_sample: bool = False,
) -> NormClass:
    """Vouch for a class of norms of your own. Returns the class, so that this can decorate it.

    Without an option, `kind` is a subclass of BatchNorm whose forward computes, in eval mode, what
    BatchNorm computes.

    Args:
        kind: the class itself; a subclass of it is not meant.
        affine: it computes y = s * x + t per channel in eval mode, and `affine(module)` gives s and
            t, each (C,).
        statistics: `statistics(module)` gives mean and variance per channel of what it reads, each
            (C,), as they were in training; another norm can then take its place. A subclass of
            BatchNorm has them.
        per_sample: it normalizes by statistics of each sample, over channels in dimension 1.

    Raises OptionError: options that exclude each other, or none for a class that is no BatchNorm.
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise OptionError(f"a class of norms is wanted, not {kind!r:.80}")
    if per_sample and (affine is not None or statistics is not None):
        raise OptionError(
            f"{kind.__name__} is either affine or takes statistics per sample", "not both"
        )
    if affine is None and not per_sample and not issubclass(kind, _BatchNorm):
        remedy = "Say how it reads: affine=lambda module: (scale, shift), or per_sample=True"
        raise OptionError(f"{kind.__name__} is no BatchNorm", remedy=remedy)
    source = Statistics.SAMPLE if per_sample else Statistics.NONE
    if statistics is not None or issubclass(kind, _BatchNorm):
        source = Statistics.POPULATION
    _REGISTERED[kind] = NormKind(source, affine=affine, moments=statistics)
    return kind


def kind_of(module: nn.Module) -> NormKind | None:
    """The record of the norm that `module` is; None if it is no norm."""
    registered = _registered(module)
    if registered is not None:
        return registered
    nearest = _nearest(type(module))
    if nearest is not None:
        return KINDS[nearest]
    if isinstance(module, OwnLayer) or not has_the_tensors(module):
        return None
    return _BATCH


def is_believed(module: nn.Module) -> bool:
    """Whether a norm computes what its record says: its forward is one that a person has read."""
    if "forward" in vars(module):
        return False
    nearest = _nearest(type(module))
    read = nearest is not None and type(module).forward is nearest.forward
    return read or isinstance(module, OwnLayer) or _registered(module) is not None


def _registered(module: nn.Module) -> NormKind | None:
    plugins.load("normswap.norms")
    if "forward" in vars(module):
        return None
    return _REGISTERED.get(type(module))


def _nearest(kind: type[nn.Module]) -> type[nn.Module] | None:
    classes: Sequence[type] = kind.__mro__
    return next((base for base in classes if base in KINDS), None)


def has_the_tensors(module: nn.Module) -> bool:
    """Whether the module looks like a BatchNorm, by what it owns."""
    if isinstance(module, torch.jit.ScriptModule) or module._modules:
        return False
    if not module._buffers.keys() >= {"running_mean", "running_var"}:
        return False
    tensors = {**module._parameters, **module._buffers}
    shapes = {getattr(tensors.get(name), "shape", ()) for name in _TENSORS}
    return len(shapes) == 1 and all(len(shape) == 1 for shape in shapes)


@torch.no_grad()
def measured_eps(module: nn.Module) -> float | None:
    """The eps with which the module computes what its tensors say; None where it computes anything
    else.
    """
    if not has_the_tensors(module):
        return None
    try:
        norm: Any = copy.deepcopy(module).double().eval()
    except Exception:
        return None
    named = (getattr(module, name, None) for name in ("eps", "epsilon", "variance_epsilon"))
    tried = dict.fromkeys([*(value for value in named if isinstance(value, float)), *_USUAL])
    generator = torch.Generator().manual_seed(0)
    for positions in _SHAPES:
        x = torch.randn(
            2, norm.weight.numel(), *positions[1:], generator=generator, dtype=torch.float64
        )
        try:
            pairs = [(scale * x, norm(scale * x)) for scale in SCALES]
        except Exception:
            continue
        return next(
            (value for value in tried if all(_computes(norm, *pair, value) for pair in pairs)), None
        )
    return None


def _computes(norm: Any, x: Tensor, y: object, eps: float) -> bool:
    per = (1, -1, *(1,) * (x.ndim - 2))
    scale = norm.weight * torch.rsqrt(norm.running_var + eps)
    expected = x * scale.view(per) + (norm.bias - norm.running_mean * scale).view(per)
    return is_near(y, expected)


def is_near(y: object, expected: Tensor) -> bool:
    """Whether a layer's output is a tensor with these values, in float64."""
    return (
        isinstance(y, Tensor)
        and y.shape == expected.shape
        and bool((y - expected).norm() <= 1e-9 * expected.norm())
    )
