"""`OwnLayer`: the base of normswap's own modules, each of which says itself what it computes."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, TypeGuard

from torch import Tensor, nn

# The entry in ROLES of a parameter that inherits the role of the norm that stood there.
GAMMA = "gamma"


class OwnLayer(nn.Module):
    """Base of the classes of normswap whose modules a conversion leaves in a network.

    Attributes:
        AFFINE: Whether the layer computes act(s * x + t). Then `as_affine` returns s and t.
        PER_CHANNEL: Whether s and t may differ between channels, so that the layer can take the
            place of a norm.
        SCALES: Whether s may be a number other than 1 or -1.
        HOLDS_STATISTICS: Whether the layer keeps the mean and variance of a norm.
        NORMALIZES: Whether the layer computes act(weight * normalized(x) + bias), which is not
            affine.
        SCALES_BRANCH: Whether the layer ends a residual branch with one number (`BranchScale`).
        ROLES: The role of each parameter for weight decay, by the parameter's name.
        act: The activation that is applied last, or None.
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
        """Return act(y), or y where the layer has no activation."""
        if self.act is not None:
            y = self.act(y)
        return y

    def as_affine(self) -> tuple[Tensor, Tensor]:
        """Return s and t of y = act(s * x + t), each of shape (C,) or (1,), in float64."""
        raise NotImplementedError

    def ghost_sizes(self, count: int) -> list[int]:
        """Return the sizes of the batches into which a norm splits `count` samples in training."""
        return [count]

    def normalized(self, x: Tensor) -> Tensor:
        """Return the values (N, C, ...) that the layer multiplies by its weight."""
        raise NotImplementedError


class BranchScale(Protocol):
    """A layer that ends a residual branch with one number: y = alpha x, or alpha x + bias."""

    alpha: Tensor
    bias: nn.Parameter | None

    @property
    def learns(self) -> bool:
        """Whether alpha, the number that multiplies the input, is a parameter that learns."""


def scales_branch(module: object) -> TypeGuard[BranchScale]:
    """Whether a module ends a residual branch with one number."""
    return isinstance(module, OwnLayer) and module.SCALES_BRANCH
