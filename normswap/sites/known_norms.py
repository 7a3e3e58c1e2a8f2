"""The known norms: one table, with a record for each class. This file alone decides a norm's kind.

`normswap.register_norm` and the entry points `normswap.norms` add rows for other people's classes.
A subclass counts as its nearest class in the table. It is believed if its `forward` is that
class's.

Many libraries write their own frozen BatchNorm (torchvision, detectron2, DETR), or a BatchNorm
whose forward only adds casts. A module without children that owns weight, bias, running_mean and
running_var, each of one number per channel, is believed to be a BatchNorm if in eval mode, in
float64, it computes y = weight (x - mean) / sqrt(var + eps) + bias with its own eps or a usual one.
One that owns four such tensors under other names is tried with each of them in each role.

A module whose only tensors are the parameters `weight` and `bias`, or `weight`, each of one number
per channel, is tried as a LayerNorm and as an RMSNorm.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from timm import layers as timm_layers
from timm.layers import norm as timm_norm, norm_act, split_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap import copying, plugins
from normswap.errors import OptionError
from normswap.sites.own_layer import OwnLayer

Pair: TypeAlias = tuple[Tensor, Tensor]
# Reads two tensors off a module of the registered class.
ReadPair: TypeAlias = Callable[[Any], Pair]
NormClass = TypeVar("NormClass", bound=type[nn.Module])


class BatchNorm(Protocol):
    """A norm that has the attributes of torch's BatchNorm. Each tensor is (C,).

    `weight` is gamma and `bias` is beta. A norm that has none holds None.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor
    running_var: Tensor


class Statistics(Enum):
    """The values whose mean and variance normalize the input of a norm.

    A norm may have one member for eval mode and another for training. `NONE` is for a norm that a
    user registered with a scale and shift, and without a mean and variance.
    """

    POPULATION = "kept from training"
    BATCH = "of each batch"
    SAMPLE = "of each sample"
    POSITION = "of the channels at each position"
    NONE = "none"


@dataclass(frozen=True)
class NormKind:
    """What is known of a class of norms.

    Args:
        statistics: Where the norm takes its statistics from in eval mode.
        dim: The dimension of the channels: 1 or -1, or None where it is not known.
        centres: Whether the norm subtracts the mean.
        activation: Whether the norm applies its `drop` and `act` to the result.
        states_dim: Whether each norm says by its attribute `dim` where its channels are.
        single: Whether the norm computes in float32 whatever the network's precision is.
        affine: Returns s and t, each (C,), of y = s * x + t in eval mode. With None the norm is
            read as its class says.
        moments: Returns mean and variance per channel, each (C,), of the norm's input. With None
            they are its running statistics.
        training: Where the norm takes its statistics from in training mode. None means the same as
            in eval mode.
        eps: The value of the epsilon, if it was measured. With None the norm states it as `eps`.
    """

    statistics: Statistics
    dim: int | None = 1
    centres: bool = True
    activation: bool = False
    states_dim: bool = False
    single: bool = False
    affine: ReadPair | None = None
    moments: ReadPair | None = None
    training: Statistics | None = None
    eps: float | None = None


_BATCH = NormKind(Statistics.POPULATION, training=Statistics.BATCH)
_BATCH_ACT = NormKind(Statistics.POPULATION, activation=True, training=Statistics.BATCH)
# An InstanceNorm that keeps running statistics: in eval mode it computes what BatchNorm computes.
_TRACKED = NormKind(Statistics.POPULATION, training=Statistics.SAMPLE)
_SAMPLE = NormKind(Statistics.SAMPLE)
_SAMPLE_ACT = NormKind(Statistics.SAMPLE, activation=True)
# These also keep the variance of a batch. They are no affine map in any mode.
_EVO_BATCH = (timm_layers.EvoNorm2dB0, timm_layers.EvoNorm2dB1, timm_layers.EvoNorm2dB2)
_EVO_SAMPLE = (timm_layers.EvoNorm2dS0, timm_layers.EvoNorm2dS1, timm_layers.EvoNorm2dS2)
# Makes the record of a LayerNorm whose channels are in the given dimension, or, with
# `centres=False`, of an RMSNorm.
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
    **dict.fromkeys(_EVO_BATCH, NormKind(Statistics.SAMPLE, dim=None, training=Statistics.BATCH)),
    **dict.fromkeys(_EVO_SAMPLE, NormKind(Statistics.SAMPLE, dim=None)),
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
# The names of a BatchNorm's tensors: gamma, beta, mean and variance.
_NAMES = ("weight", "bias", "running_mean", "running_var")
# The names of the tensors of a LayerNorm and of an RMSNorm, which may have either set.
_NAMES_AT_EACH_POSITION = ({"weight", "bias"}, {"weight"})
_EPS_NAMES = ("eps", "epsilon", "variance_epsilon")
_USUAL_EPS = (1e-5, 1e-3, 1e-6, 1e-4, 1e-12, 0.0)
# A norm is tried on maps, series and volumes of these sizes, after (N, C).
_PROBE_SIZES = ((3, 4), (5,), (3, 2, 4))
# Layers are tried on values of both scales: a clamp bends large ones only.
SCALES = (1, 1000)


def register_norm(
    kind: NormClass,
    *,
    affine: ReadPair | None = None,
    statistics: ReadPair | None = None,
    per_sample: bool = False,
) -> NormClass:
    """Vouch for a norm class of your own. The function can decorate the class.

    Without an option, `kind` is a subclass of BatchNorm whose forward computes, in eval mode, what
    BatchNorm computes.

    Args:
        kind: The class itself. Its subclasses are not registered with it.
        affine: A function of a module of this class that returns s and t, each (C,), of
            y = s * x + t per channel, which the module computes in eval mode.
        statistics: A function of a module of this class that returns mean and variance per channel,
            each (C,), of the module's input during training. With these statistics another norm
            can take the module's place. A subclass of BatchNorm keeps them by itself.
        per_sample: Whether the class normalizes each sample by its own statistics, over channels in
            dimension 1.

    Returns:
        The class itself, unchanged.

    Raises:
        OptionError: `kind` is no class of modules, two options exclude each other, or `kind` is no
            BatchNorm and no option says how to read it.
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

    # Where the class takes its statistics from in eval mode, and then in training.
    in_eval_mode = Statistics.SAMPLE if per_sample else Statistics.NONE
    if statistics is not None or issubclass(kind, _BatchNorm):
        in_eval_mode = Statistics.POPULATION
    in_training = Statistics.BATCH if in_eval_mode is Statistics.POPULATION else None
    _REGISTERED[kind] = NormKind(
        in_eval_mode, affine=affine, moments=statistics, training=in_training
    )
    return kind


def kind_of(module: nn.Module) -> NormKind | None:
    """Return the `NormKind` that says what a norm computes, or None if the module is no norm."""
    registered = _registered(module)
    if registered is not None:
        return registered

    # The nearest class in the table decides. An InstanceNorm has a record of its own if it keeps
    # running statistics, because it uses them in eval mode.
    nearest = _nearest_class(type(module))
    if nearest is _InstanceNorm and _keeps_statistics(module):
        return _TRACKED
    if nearest is not None:
        return KINDS[nearest]
    # normswap's own layers are known, so they are not measured.
    if isinstance(module, OwnLayer):
        return None

    # A class outside the table is judged by its tensors. What a module with a BatchNorm's tensors
    # computes is asked later (`affine.refusal`). All others are measured here.
    if has_the_tensors(module):
        return _BATCH
    roles = measured_roles(module)
    if roles is None:
        return measured_at_each_position(module)
    return NormKind(
        Statistics.POPULATION,
        affine=roles.scale_and_shift,
        moments=roles.mean_and_variance,
        training=Statistics.BATCH,
    )


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether an InstanceNorm keeps running statistics, with which it computes in eval mode."""
    is_tracking = getattr(module, "track_running_stats", False)
    return bool(is_tracking) and getattr(module, "running_mean", None) is not None


def is_believed(module: nn.Module) -> bool:
    """Whether a norm's class tells what the norm computes, so that no trial run is needed.

    The class tells it if its forward is that of a class in `KINDS`, or if the class is normswap's
    own or was registered by the user. An instance with a `forward` of its own is never believed.
    """
    if "forward" in vars(module):
        return False
    nearest = _nearest_class(type(module))
    has_known_forward = nearest is not None and type(module).forward is nearest.forward
    return has_known_forward or isinstance(module, OwnLayer) or _registered(module) is not None


def _registered(module: nn.Module) -> NormKind | None:
    """Return the `NormKind` that `register_norm` recorded for a module's class, or None.

    A module with a `forward` of its own has none.
    """
    plugins.load("normswap.norms")
    if "forward" in vars(module):
        return None
    return _REGISTERED.get(type(module))


def _nearest_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the first class among a class and its bases that is in `KINDS`, or None."""
    classes: Sequence[type] = kind.__mro__
    return next((base for base in classes if base in KINDS), None)


def has_the_tensors(module: nn.Module) -> bool:
    """Whether a module owns a BatchNorm's four tensors, each of one number per channel."""
    if isinstance(module, torch.jit.ScriptModule) or module._modules:
        return False
    if not module._buffers.keys() >= {"running_mean", "running_var"}:
        return False

    tensors = {**module._parameters, **module._buffers}
    shapes = {getattr(tensors.get(name), "shape", ()) for name in _NAMES}
    return len(shapes) == 1 and all(len(shape) == 1 for shape in shapes)


@dataclass(frozen=True)
class Roles:
    """The names under which a module keeps a BatchNorm's four tensors, and its eps.

    Args:
        weight: The name of gamma.
        bias: The name of beta.
        mean: The name of the running mean.
        variance: The name of the running variance.
        eps: The value of the epsilon.
    """

    weight: str
    bias: str
    mean: str
    variance: str
    eps: float

    def mean_and_variance(self, module: nn.Module) -> Pair:
        """Return the running mean and variance that a module keeps under these names, each (C,)."""
        tensors = _owned(module)
        return tensors[self.mean], tensors[self.variance]

    def scale_and_shift(self, module: nn.Module) -> Pair:
        """Return s and t of y = s * x + t in eval mode, each (C,), in float64.

        Args:
            module: A module that keeps a BatchNorm's tensors under these names.
        """
        mean, variance = self.mean_and_variance(module)
        tensors = _owned(module)
        scale = tensors[self.weight].double() * torch.rsqrt(variance.double() + self.eps)
        return scale, tensors[self.bias].double() - mean.double() * scale


# What was measured of a module, behind the versions that its tensors had then.
_MeasuredRoles: TypeAlias = tuple[tuple[int, ...], Roles | None]
_measured: WeakKeyDictionary[nn.Module, _MeasuredRoles] = WeakKeyDictionary()


def _owned(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own tensors by name, parameters first."""
    owned = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in owned.items() if tensor is not None}


def _vectors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's own vectors of floating-point numbers, by name, parameters first."""
    owned = _owned(module)
    return {
        name: tensor
        for name, tensor in owned.items()
        if tensor.ndim == 1 and tensor.is_floating_point()
    }


def measured_eps(module: nn.Module) -> float | None:
    """Return the eps with which a module equals the BatchNorm that has its four tensors.

    The module's own eps and the usual ones are tried. None says that the module does not equal the
    BatchNorm with any of them.
    """
    if not has_the_tensors(module):
        return None
    roles = _measure_roles(module, [_NAMES])
    return None if roles is None else roles.eps


def measured_roles(module: nn.Module) -> Roles | None:
    """Return under which names a module keeps a BatchNorm's tensors, or None if it is no BatchNorm.

    If a module without children owns four vectors of one length, it is run in eval mode, in
    float64. Each vector is tried in each role (gamma, beta, mean, variance), until the BatchNorm
    with these tensors gives the same output. Parameters are tried as gamma and beta first.
    """
    if isinstance(module, torch.jit.ScriptModule) or module._modules:
        return None
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    tensors = _vectors(module)
    has_four_alike = len(tensors) == 4 and len({len(tensor) for tensor in tensors.values()}) == 1
    # Tensors on "meta" have no values that could be measured.
    if not has_four_alike or any(tensor.is_meta for tensor in tensors.values()):
        return None

    # torch counts up a tensor's version when it is written to. Then the module is measured again.
    versions = tuple(tensor._version for tensor in tensors.values())
    known = _measured.get(module)
    if known is None or known[0] != versions:
        known = (versions, _measure_roles(module, itertools.permutations(tensors)))
        _measured[module] = known
    return known[1]


@torch.no_grad()
def _measure_roles(module: nn.Module, orders: Iterable[Sequence[str]]) -> Roles | None:
    """Return which tensor of a module is gamma, beta, mean and variance of a BatchNorm.

    A copy of the module is run in eval mode, in float64. The result is None if no choice of the
    four gives a BatchNorm that computes what the copy does.

    Args:
        module: The module.
        orders: The names of gamma, beta, mean and variance, in every order that is tried.
    """
    # A foreign class may refuse to be copied.
    try:
        norm = copying.duplicate(module, {}).double().eval()
    except Exception:
        return None

    # All four tensors have one number per channel.
    orders = list(orders)
    channels = _owned(norm)[orders[0][0]].numel()
    generator = torch.Generator().manual_seed(0)
    # The first size that the norm accepts decides.
    for sizes in _PROBE_SIZES:
        x = torch.randn(2, channels, *sizes, generator=generator, dtype=torch.float64)
        # A norm may refuse inputs with another number of dimensions than its own.
        try:
            probes = [(scale * x, norm(scale * x)) for scale in SCALES]
        except Exception:
            continue

        return _fitting_roles(norm, probes, orders, _eps_candidates(module))
    return None


def _fitting_roles(
    norm: nn.Module,
    probes: Sequence[tuple[Tensor, object]],
    orders: Iterable[Sequence[str]],
    eps_candidates: Sequence[float],
) -> Roles | None:
    """Return the first roles whose BatchNorm gives the outputs of a module, or None if none does.

    Roles say which tensor of the module is gamma, beta, mean and variance.

    Args:
        norm: The module, in float64.
        probes: Inputs (N, C, ...) of the module, each with the module's output.
        orders: The names of gamma, beta, mean and variance, in every order that is tried.
        eps_candidates: Every epsilon that is tried.
    """
    x, _ = probes[0]
    shape = (1, -1, *(1,) * (x.ndim - 2))
    for weight, bias, mean, variance in orders:
        for eps in eps_candidates:
            roles = Roles(weight, bias, mean, variance, eps)
            scale, shift = (value.view(shape) for value in roles.scale_and_shift(norm))
            if all(is_near(y, x * scale + shift) for x, y in probes):
                return roles
    return None


# What `measured_at_each_position` found out, by module.
_measured_at_each_position: WeakKeyDictionary[nn.Module, NormKind | None] = WeakKeyDictionary()


def measured_at_each_position(module: nn.Module) -> NormKind | None:
    """Return the kind of a LayerNorm or RMSNorm of an unknown class, or None for any other module.

    A module is measured only if its tensors have the names and shapes of such a norm's. It is
    measured once, because the values of its tensors do not matter.
    """
    if isinstance(module, torch.jit.ScriptModule) or module._modules or module._buffers:
        return None
    if "forward" in vars(module) or module._forward_hooks or module._forward_pre_hooks:
        return None
    # All tensors must be vectors of one length, called weight and bias, or weight alone.
    vectors = _vectors(module)
    if _owned(module).keys() != vectors.keys() or vectors.keys() not in _NAMES_AT_EACH_POSITION:
        return None
    if len({len(vector) for vector in vectors.values()}) != 1:
        return None
    # Tensors on "meta" have no values that could be measured. They may get some later.
    if any(vector.is_meta for vector in vectors.values()):
        return None

    if module not in _measured_at_each_position:
        _measured_at_each_position[module] = _measure_at_each_position(module)
    return _measured_at_each_position[module]


@torch.no_grad()
def _measure_at_each_position(module: nn.Module) -> NormKind | None:
    """Run a module, and return the kind of LayerNorm or RMSNorm that it computes, or None if none.

    A copy of the module with random tensors is run in float64, in eval mode and in training. A
    module that normalizes either dimension, whichever has as many numbers as its tensors, is none:
    what it computes depends on the size of its input.

    Args:
        module: A module with the tensors `weight` and perhaps `bias`, each of one length.
    """
    # A foreign class may refuse to be copied, and a copy on "meta" has no values.
    try:
        norm = copying.duplicate(module, {}).double().cpu()
    except Exception:
        return None

    # Each vector has one number per channel.
    generator = torch.Generator().manual_seed(0)
    vectors = _vectors(norm)
    channels = len(vectors["weight"])
    for vector in vectors.values():
        vector.copy_(torch.randn(channels, generator=generator, dtype=torch.float64))

    kinds: list[NormKind] = []
    for dim in (1, -1):
        noise = torch.randn(2, 3, 5, channels, generator=generator, dtype=torch.float64)
        kind = _kind_along(norm, dim, noise.movedim(-1, dim), _eps_candidates(module))
        if kind is not None:
            kinds.append(kind)
    return kinds[0] if len(kinds) == 1 else None


def _kind_along(
    norm: nn.Module, dim: int, noise: Tensor, eps_candidates: list[float]
) -> NormKind | None:
    """Return the kind of LayerNorm or RMSNorm that a module computes over one dimension, or None.

    Args:
        norm: The module, in float64.
        dim: The dimension.
        noise: An input whose channels are in that dimension.
        eps_candidates: The values that eps may have.
    """
    probes: list[tuple[Tensor, object]] = []
    # A norm may refuse maps whose channels are in another dimension than its own expects.
    try:
        for training, scale in itertools.product((False, True), SCALES):
            x = scale * noise
            probes.append((x, norm.train(training)(x)))
    except Exception:
        return None

    for eps, centres in itertools.product(eps_candidates, (True, False)):
        kind = at_each_position(dim, centres=centres, eps=eps)
        if all(is_near(y, _normalized(x, dim, kind, _vectors(norm))) for x, y in probes):
            return kind
    return None


def _normalized(x: Tensor, dim: int, kind: NormKind, vectors: Mapping[str, Tensor]) -> Tensor:
    """Return what a LayerNorm or RMSNorm computes for x (N, C, H, W) or (N, H, W, C).

    Args:
        x: The input of the norm.
        dim: The dimension of the channels.
        kind: Gives the eps, and whether the mean is subtracted.
        vectors: `weight`, which is gamma, and perhaps `bias`, which is beta, each (C,).
    """
    channels_last = x.movedim(dim, -1)
    if kind.centres:
        channels_last = channels_last - channels_last.mean(-1, keepdim=True)

    # The root mean square of centred values is their standard deviation. So RMSNorm's formula gives
    # a LayerNorm, too.
    gamma = vectors["weight"]
    y = F.rms_norm(channels_last, gamma.shape, gamma, kind.eps)
    if "bias" in vectors:
        y = y + vectors["bias"]
    return y.movedim(-1, dim)


def _eps_candidates(module: nn.Module) -> list[float]:
    """Return the eps that a module states under a usual name, then the usual values."""
    stated = [getattr(module, name, None) for name in _EPS_NAMES]
    own = [value for value in stated if isinstance(value, float)]
    return list(dict.fromkeys([*own, *_USUAL_EPS]))


def is_near(y: object, expected: Tensor) -> bool:
    """Whether a layer's output is a tensor that equals `expected`, in float64, but for rounding."""
    if not isinstance(y, Tensor) or y.shape != expected.shape:
        return False
    return bool((y - expected).norm() <= 1e-9 * expected.norm())
