"""The bases of the layers: what a plan can name, and every module that a conversion leaves in a
network.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol, TypeAlias, TypeGuard

from torch import Tensor, fx, nn

from normswap.errors import PlanError

Linearity: TypeAlias = nn.Linear | nn.modules.conv._ConvNd
# What can be at a path; a dropout rate is a number, or None.
Held: TypeAlias = nn.Module | nn.Parameter | float | None
# In ROLES: the role of the norm that stood there.
GAMMA = "gamma"


class PlannedLayer:
    """Base of what the `layer` of an `Edit` names.

    `replacing` never branches on the values of tensors: the same plan gives the same structure on
    any weights.

    CASTS: makes float64 from any dtype by itself, if `like` asks for it.
    NAMES: (old, new) names of the tensors that get another name at the same path.
    TENSORS: stands in the place of a parameter.
    KEEPS_NORM: a norm stands there afterwards.
    OUTCOME: how a report marks the norm that stood there: `gone`, `scalar`, `bias`, `affine` or
    `replaced`.
    """

    CASTS: ClassVar[bool] = False
    NAMES: ClassVar[Mapping[str, str]] = {}
    TENSORS: ClassVar[bool] = False
    KEEPS_NORM: ClassVar[bool] = False
    OUTCOME: ClassVar[str] = "replaced"

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        registered = _BY_NAME.setdefault(cls.__name__, cls)
        # torch.export makes subclasses of what it records.
        if registered.__module__ != cls.__module__ and not issubclass(cls, registered):
            raise PlanError(
                f"two layers are called {cls.__name__}", f"one is in {registered.__module__}"
            )

    @classmethod
    def replacing(cls, *args: Any, **kwargs: Any) -> Held:
        """`replacing(old, *reads, like, **args)`: the replacement, built from what it replaces.

        Args:
            old: what it replaces: a module, a parameter or a number.
            reads: the modules that the edit names beside it; an argument `takes` says how each is
                absorbed.
            like: an empty tensor of the model's dtype and device, where `old` has none.
        """
        raise NotImplementedError

    @classmethod
    def invert(cls, *args: Any, **kwargs: Any) -> None:
        """`invert(old, now, reads, **args)` sets tensors of `old` and norms in `reads`: `replacing`
        then gives `now`.

        Raises RefusedError: the source has no place for what was learned.
        """


_BY_NAME: dict[str, type[PlannedLayer]] = {}


@functools.cache
def planned_layers() -> dict[str, type[PlannedLayer]]:
    """Every layer that a plan can name, by name; classes that are imported later are added to the
    same dict.
    """
    for file in pkgutil.iter_modules(importlib.import_module("normswap.layers").__path__):
        importlib.import_module(f"normswap.layers.{file.name}")
    return _BY_NAME


class OwnLayer(nn.Module):
    """A module that a conversion leaves in a network. An activation that it applies last is called
    `act`.

    AFFINE: it computes act(s * x + t), and `as_affine` says s and t.
    PER_CHANNEL: s and t may differ from channel to channel, so that it can stand for a norm that is
    gone.
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
    """(C,) broadcastable to x (N, C, ...), in the dtype of x: under autocast, float32 would make
    the result float32.
    """
    return _shaped(value, x)


# A symbolic trace does not know the number of dimensions of a value, so it must not look inside.
@fx.wrap
def _shaped(value: Tensor, x: Tensor) -> Tensor:
    return value.view(1, -1, *(1,) * (x.ndim - 2)).to(x.dtype)
