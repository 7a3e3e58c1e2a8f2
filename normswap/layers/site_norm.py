"""The BatchNorm that normswap places: kept, put back where a norm was, or with ghost batches.

If torch's own BatchNorm computes the same, torch's class is placed, because other programs know no
other. For example, torch.fx keeps a module of torch's as one layer, which can go to eval mode, and
traces into the forward of any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypedDict

import torch
import typing_extensions
from annotated_types import Ge
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.layers.planned_layer import NotNegative, OwnLayer, PlannedLayer
from normswap.plan import Body
from normswap.sites import affine

Floats: TypeAlias = Sequence[float] | None
Deviations: TypeAlias = Sequence[NotNegative] | None


# Before Python 3.12 pydantic, which checks the arguments of an edit, refuses typing's own class for
# a dictionary that is an argument.
class Record(typing_extensions.TypedDict, total=False):
    """The settings of a norm that stood there before, as far as they are known.

    Args:
        eps: The eps of the norm.
        momentum: The momentum of the norm. None stands for the mean over all batches.
        num_batches_tracked: The number of batches that its statistics were made from.
    """

    eps: NotNegative
    momentum: float | None
    num_batches_tracked: float


class KnownMoments(TypedDict, total=False):
    """Keyword arguments of `SiteNorm.replacing`: what is known of a norm that is put back.

    Args:
        mean: The mean of each channel.
        std: The standard deviation of each channel.
        settings: The settings of the norm that stood there before.
    """

    mean: Floats
    std: Deviations
    settings: Record | None


# torch's own BatchNorm, by the number of dimensions of its input (N, C, ...).
OF_TORCH: dict[int, type[_BatchNorm]] = {
    2: nn.BatchNorm1d,
    3: nn.BatchNorm1d,
    4: nn.BatchNorm2d,
    5: nn.BatchNorm3d,
}
_COPIED = ("weight", "bias", "running_mean", "running_var")


class SiteNorm(PlannedLayer, OwnLayer, _BatchNorm):
    """BatchNorm of any dimension, with the old norm's activation, and perhaps ghost batches.

    Ghost batch norm (Hoffer et al. 2017, arXiv:1705.08741, algorithm 1): in training each `ghost`
    samples are normalized as a batch of their own, and update the running statistics in turn. A
    smaller rest joins the last batch.
    """

    KEEPS_NORM = True
    weight: nn.Parameter
    bias: nn.Parameter
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        features: int,
        *,
        eps: float,
        momentum: float | None,
        ghost: int,
        act: nn.Module | None,
    ) -> None:
        super().__init__(features, eps=eps, momentum=momentum)
        # In training, each `ghost` samples are normalized together. 0 stands for all of a batch.
        # `act` is the activation that is applied last, or None.
        self.ghost = ghost
        self.act = act

    def _check_input_dim(self, input: Tensor) -> None:
        if not isinstance(input, fx.Proxy) and input.ndim < 2:
            raise ValueError(f"expected (N, C, ...), not {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Map (N, C, ...) to the same shape, in training one ghost batch after the other."""
        if self.training and self.ghost:
            batches = input.split(self.ghost_sizes(len(input)))
            x = torch.cat([_BatchNorm.forward(self, batch) for batch in batches])
        else:
            x = _BatchNorm.forward(self, input)
        return self.activated(x)

    def ghost_sizes(self, count: int) -> list[int]:
        """Return the sizes of the batches into which `count` samples are split in training."""
        if not self.ghost:
            return [count]
        # The samples that fill no ghost batch of their own join the last one.
        batches_before_last = max(count // self.ghost, 1) - 1
        return [self.ghost] * batches_before_last + [count - self.ghost * batches_before_last]

    def extra_repr(self) -> str:
        return f"{_BatchNorm.extra_repr(self)}, ghost={self.ghost}"

    @classmethod
    def replacing(
        cls,
        old: nn.Module,
        *,
        like: Tensor,
        ghost: Annotated[int, Ge(0)] = 0,
        mean: Floats = None,
        std: Deviations = None,
        settings: Record | None = None,
        dims: Annotated[int, Ge(0)] = 0,
    ) -> _BatchNorm:
        """Return the BatchNorm that computes what `old` does.

        It is of torch's own class if it has neither an activation nor ghost batches.

        Args:
            old: The norm, or the layer that stands where a norm was.
            like: An empty tensor with the model's dtype and device, used if `old` has no tensor.
            ghost: The number of samples that share their statistics in training. 0 means all.
            mean: The measured mean of the norm's input, per channel.
            std: The measured deviation of the norm's input, per channel.
            settings: Eps, momentum and number of batches that the norm had before.
            dims: The number of dimensions of the norm's input. 0 means that it is not known, as in
                older plans: then the norm is no class of torch's own.
        """
        new = cls.of_any_size(old, like=like, ghost=ghost, mean=mean, std=std, settings=settings)
        return torchs_own(new, dims)

    @classmethod
    def of_any_size(
        cls,
        old: nn.Module,
        *,
        like: Tensor,
        ghost: Annotated[int, Ge(0)] = 0,
        mean: Floats = None,
        std: Deviations = None,
        settings: Record | None = None,
    ) -> SiteNorm:
        """Return a `SiteNorm` that computes what `old` does, for any number of dimensions.

        Without `mean` and `std`, `old` is a norm and its tensors are kept. With `mean` and `std`,
        `old` is y = s x + t: the identity, or a ChannelBias or ChannelAffine. A norm with any mean
        and variance computes s x + t if gamma = s sqrt(var + eps) and beta = t + s mean (Ioffe &
        Szegedy, section 3).

        Args:
            old: The norm, or the layer that stands where a norm was.
            like: An empty tensor with the model's dtype and device, used if `old` has no tensor.
            ghost: The number of samples that share their statistics in training. 0 means all.
            mean: The measured mean of the norm's input, per channel.
            std: The measured deviation of the norm's input, per channel.
            settings: Eps, momentum and number of batches that the norm had before.
        """
        # The settings of the norm that stood there before, or torch's defaults where none is known.
        recorded: Body = {
            "eps": 1e-5,
            "momentum": 0.1,
            "num_batches_tracked": 0,
            **(settings or {}),
        }
        eps = recorded["eps"]
        momentum = recorded["momentum"]
        # Known statistics come in the arguments if the norm is gone, and else from the norm itself.
        is_measured = mean is not None and std is not None
        if is_measured:
            moments = torch.tensor((mean, std), dtype=torch.float64)
            input_mean = moments[0]
            input_var = moments[1].square()
        else:
            input_mean, input_var = affine.statistics(old)
            eps = affine.epsilon(old)
            momentum = getattr(old, "momentum", momentum)

        act = affine.copied_activation(old)
        new = cls(len(input_mean), eps=eps, momentum=momentum, ghost=ghost, act=act)
        new.to(empty_like_norm(old, like))
        new.num_batches_tracked.fill_(recorded["num_batches_tracked"])
        # A norm that is kept has a BatchNorm's tensors, unless a user registered it as a norm.
        if not is_measured and not affine.is_registered(old):
            copy_tensors(old, new)
            return new

        # The norm is to compute s x + t: the identity, unless `old` has a map of its own.
        scale = torch.ones_like(new.weight)
        shift = torch.zeros_like(new.weight)
        has_map = isinstance(old, OwnLayer) and old.PER_CHANNEL
        if has_map or not is_measured:
            scale, shift = affine.read_map(old)

        # The stored statistics are rounded, so they are read back for an exact gamma and beta.
        new.running_mean.copy_(input_mean)
        new.running_var.copy_(input_var)
        new.weight.copy_(scale * (new.running_var.double() + new.eps).sqrt())
        new.bias.copy_(shift + scale * new.running_mean.double())
        return new


def torchs_own(norm: SiteNorm, dims: int) -> _BatchNorm:
    """Return torch's own BatchNorm with the tensors of a norm, or the norm itself.

    The norm itself is returned if it has an activation or ghost batches, or if torch has no
    BatchNorm of so many dimensions.

    Args:
        norm: The norm, which is given up: its tensors are taken over.
        dims: The number of dimensions of its input.
    """
    kind = OF_TORCH.get(dims)
    if kind is None or norm.ghost or norm.act is not None:
        return norm

    new = kind(norm.num_features, eps=norm.eps, momentum=norm.momentum)
    new._parameters.update(norm._parameters)
    new._buffers.update(norm._buffers)
    return new.train(norm.training)


class EmptyNorm(PlannedLayer):
    """A BatchNorm in place of a norm that takes statistics of each sample or position.

    Its running mean is 0 and its variance 1, until `sequential_fit` sets its tensors.
    """

    KEEPS_NORM = True

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, dims: Annotated[int, Ge(0)] = 0
    ) -> _BatchNorm:
        """Return a BatchNorm with gamma and beta of `old` and with statistics of 0 and 1.

        Args:
            old: The norm with statistics per sample.
            like: An empty tensor of the model's dtype and device.
            dims: The number of dimensions of its input, as in `SiteNorm.replacing`.
        """
        act = affine.copied_activation(old)
        eps = getattr(old, "eps", 1e-5)
        new = SiteNorm(affine.channels(old), eps=eps, momentum=0.1, ghost=0, act=act)
        new.to(empty_like_norm(old, like))

        for name in ("weight", "bias"):
            value = getattr(old, name, None)
            if value is not None:
                getattr(new, name).copy_(value)
        return torchs_own(new, dims)


def empty_like_norm(norm: nn.Module, like: Tensor) -> Tensor:
    """Return an empty tensor with the dtype and device of a norm, or of `like`.

    A frozen norm may be in float32 in a network in half precision, so the norm decides. `like`
    decides if the norm has no tensor, or if `like` is float64, as the conversion is then done in
    float64 throughout.
    """
    if like.dtype == torch.float64:
        return like
    for tensor in (*nn.Module.parameters(norm), *nn.Module.buffers(norm)):
        if tensor.is_floating_point():
            return tensor.detach().flatten()[:0]
    return like.detach().flatten()[:0]


def copy_tensors(old: nn.Module, new: nn.Module) -> None:
    """Copy gamma, beta and statistics from one norm to another, in place.

    A norm without gamma and beta multiplies by 1 and adds 0.

    Args:
        old: The norm that is read.
        new: The norm that is written to.
    """
    for name in _COPIED:
        value = getattr(old, name, None)
        if value is None:
            value = torch.tensor(1.0 if name == "weight" else 0.0)
        getattr(new, name).copy_(value)

    batches = getattr(old, "num_batches_tracked", None)
    new_batches = getattr(new, "num_batches_tracked", None)
    if batches is not None and new_batches is not None:
        new_batches.copy_(batches)
