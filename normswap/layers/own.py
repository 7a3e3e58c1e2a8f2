"""The base of every module that a conversion leaves in a network: its affine map, the roles of its parameters."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeGuard

from torch import Tensor, fx, nn

# In ROLES: the role of the norm that stood there.
GAMMA = "gamma"


class OwnLayer(nn.Module):
    """A module that a conversion leaves in a network. An activation that it applies last is called `act`.

    AFFINE: it computes act(s * x + t), and `as_affine` says s and t.
    PER_CHANNEL: s and t may differ from channel to channel, so that it can stand for a norm that is gone.
    SCALES: s may be another number than 1 or -1.
    HOLDS_STATISTICS: it has a norm's statistics.
    NORMALIZES: it computes act(weight * normalized(x) + bias) per channel, not affine.
    SCALES_BRANCH: it ends a residual branch with one number, a `BranchScale`.
    ROLES: what its parameters are to weight decay, by name.
    """

    AFFINE: ClassVar[bool] = False
    PER_CHANNEL: ClassVar[bool] = False
    SCALES: ClassVar[bool] = False
    HOLDS_STATISTICS: ClassVar[bool] = False
    NORMALIZES: ClassVar[bool] = False
    SCALES_BRANCH: ClassVar[bool] = False
    ROLES: ClassVar[Mapping[str, str]] = {}
    act: nn.Module | None

    def activated(self, y: Tensor) -> Tensor:
        if self.act is not None:
            y = self.act(y)
        return y

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """s and t of y = act(s * x + t), each of shape (C,) or (1,), float64."""
        raise NotImplementedError

    def normalized(self, x: Tensor) -> Tensor:
        """The values that are multiplied by the weight, (N, C, ...)."""
        raise NotImplementedError


class BranchScale(Protocol):
    """A layer that ends a residual branch with one number: y = alpha x, or alpha x + bias."""

    alpha: Tensor
    bias: nn.Parameter | None

    @property
    def learns(self) -> bool:
        """Whether training changes alpha."""


def scales_branch(module: object) -> TypeGuard[BranchScale]:
    """Whether `module` ends a residual branch with one number."""
    return isinstance(module, OwnLayer) and module.SCALES_BRANCH


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """(C,) broadcastable to x (N, C, ...), in the dtype of x: under autocast, float32 would make the result float32."""
    return _shaped(value, x)


# A symbolic trace does not know the number of dimensions of a value, so it must not look inside.
@fx.wrap
def _shaped(value: Tensor, x: Tensor) -> Tensor:
    return value.view(1, -1, *(1,) * (x.ndim - 2)).to(x.dtype)
