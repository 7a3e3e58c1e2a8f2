"""BatchNorms with frozen statistics: all four tensors constant, or gamma and beta learning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from timm.layers import FrozenBatchNormAct2d
from torch import Tensor, nn
from torchvision.ops.misc import FrozenBatchNorm2d

from normswap.layers.planned_layer import GAMMA, OwnLayer, PlannedLayer
from normswap.layers.site_norm import KnownMoments, SiteNorm, copy_tensors
from normswap.sites.known_norms import KINDS

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _mark_for_timm(norm: Any, num_features: int) -> None:
    """Set the attributes that timm's `unfreeze_batch_norm_2d` reads from a frozen norm.

    timm's `freeze_batch_norm_2d` sets them in the same way.
    """
    norm.num_features = num_features
    norm.affine = True


class FrozenBatchNorm(FrozenBatchNorm2d):  # type: ignore[misc]
    """torchvision's frozen BatchNorm, for any number of dimensions, by torch's own `batch_norm`.

    Under autocast it computes in the input's dtype.
    """

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__(num_features, eps)
        _mark_for_timm(self, num_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )


KINDS[FrozenBatchNorm] = KINDS[FrozenBatchNorm2d]


class FrozenNorm(PlannedLayer):
    """A BatchNorm whose statistics, gamma and beta are constants.

    It is a `FrozenBatchNorm`, or timm's class where the norm has an activation.
    """

    KEEPS_NORM = True

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, **measured: Unpack[KnownMoments]
    ) -> nn.Module:
        """Return the frozen norm that computes what `old` does in eval mode.

        Args:
            old: The norm, or the layer that took its place.
            like: An empty tensor with the model's dtype and device.
            measured: The known statistics of a norm that is put back, as `SiteNorm.replacing` takes
                them.
        """
        batchnorm = SiteNorm.of_any_size(old, like=like, **measured)
        if batchnorm.act is None:
            new: nn.Module = FrozenBatchNorm(batchnorm.num_features, batchnorm.eps)
        else:
            new = FrozenBatchNormAct2d(batchnorm.num_features, batchnorm.eps)
            new.act = batchnorm.act
            _mark_for_timm(new, batchnorm.num_features)

        new.to(batchnorm.weight)
        copy_tensors(batchnorm, new)
        return new


class EvalNorm(PlannedLayer, OwnLayer):
    """A BatchNorm with frozen statistics, whose gamma and beta learn.

    y = act(gamma (x - mean) / sqrt(var + eps) + beta).
    """

    AFFINE = PER_CHANNEL = SCALES = HOLDS_STATISTICS = True
    ROLES = {"weight": GAMMA, "bias": "beta"}
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, batchnorm: SiteNorm) -> None:
        super().__init__()
        self.weight = batchnorm.weight
        self.bias = batchnorm.bias
        self.act = batchnorm.act
        self.eps = batchnorm.eps
        self.register_buffer("running_mean", batchnorm.running_mean)
        self.register_buffer("running_var", batchnorm.running_var)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        return self.activated(x)

    def as_affine(self) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(self.running_var.double() + self.eps) * self.weight.detach().double()
        return scale, self.bias.detach().double() - self.running_mean.double() * scale

    @classmethod
    def replacing(
        cls, old: nn.Module, *, like: Tensor, **measured: Unpack[KnownMoments]
    ) -> EvalNorm:
        """Return the norm that computes what `old` does in eval mode, in training mode too.

        Args:
            old: The norm, or the layer that took its place.
            like: An empty tensor with the model's dtype and device.
            measured: The known statistics of a norm that is put back, as `SiteNorm.replacing` takes
                them.
        """
        return cls(SiteNorm.of_any_size(old, like=like, **measured))
