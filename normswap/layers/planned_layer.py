"""`PlannedLayer`: the base of the layers that a plan names.

A planned layer builds what stands at a path after the conversion. That may be a class of torch or
timm, a parameter, or a module of normswap: an own layer. Most own layers are planned layers
themselves.
"""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, TypeAlias

from annotated_types import Ge, Le
from torch import Tensor, fx, nn

from normswap.errors import PlanError
from normswap.sites.own_forwards import Linearity as Linearity
from normswap.sites.own_layer import (
    GAMMA as GAMMA,
    BranchScale as BranchScale,
    OwnLayer as OwnLayer,
    scales_branch as scales_branch,
)

# What can stand at a path. A dropout rate is a number, or None.
Held: TypeAlias = nn.Module | nn.Parameter | float | None
# What arguments of an edit may be; an edited plan is held to it (`surgery.edited_plans`).
Count: TypeAlias = Annotated[int, Ge(1)]
NotNegative: TypeAlias = Annotated[float, Ge(0)]
Share: TypeAlias = Annotated[float, Ge(0), Le(1)]


class PlannedLayer:
    """Base of the classes that the `layer` of an `Edit` names.

    `replacing` never branches on the values of tensors, so one plan gives one structure for all
    weights.

    Attributes:
        CASTS: Whether `replacing` returns a float64 layer if `like` is float64, whatever the dtype
            of `old` is.
        NAMES: The (old, new) names of tensors that are renamed while they stay at the path.
        TENSORS: Whether the layer replaces a parameter and not a module.
        KEEPS_NORM: Whether a norm stands at the path afterwards.
        PARTNER: The layer that an edit of the convolution before must place, with the same
            `groups`, as only both together compute what stood there. Empty if there is none.
        OUTCOME: How a report marks the norm that stood there: `gone`, `scalar`, `bias`, `affine` or
            `replaced`.
    """

    CASTS: ClassVar[bool] = False
    NAMES: ClassVar[Mapping[str, str]] = {}
    TENSORS: ClassVar[bool] = False
    KEEPS_NORM: ClassVar[bool] = False
    PARTNER: ClassVar[str] = ""
    OUTCOME: ClassVar[str] = "replaced"

    def __init_subclass__(cls, **options: object) -> None:
        """Register the class under its name, by which the edits of a plan refer to it.

        Raises:
            PlanError: Another class has the same name.
        """
        super().__init_subclass__(**options)
        registered = _BY_NAME.setdefault(cls.__name__, cls)

        # torch.export makes subclasses of the layers that it records, under the same name.
        if registered.__module__ != cls.__module__ and not issubclass(cls, registered):
            raise PlanError(
                f"two layers are called {cls.__name__}", f"one is in {registered.__module__}"
            )

    @classmethod
    def replacing(cls, *args: Any, **kwargs: Any) -> Held:
        """Return what takes the place of `old`: `replacing(old, *reads, like=..., **args)`.

        `args` are the arguments that the edit of the plan states.

        Args:
            old: The module, parameter or number that is replaced.
            reads: The other modules that the edit names. An argument `takes` says how each of
                them is absorbed.
            like: An empty tensor with the model's dtype and device, used where `old` has none.
        """
        raise NotImplementedError

    @classmethod
    def invert(cls, *args: Any, **kwargs: Any) -> None:
        """Set tensors of the source network so that converting it again gives the trained layer.

        `unfold` calls it after training, as `invert(old, now, reads)`. `old` is the layer of the
        source, and `now` the trained layer that took its place. `reads` are the modules of the
        source, such as norms, that `now` has absorbed. The tensors of `old` and of `reads` are set,
        in place.

        Raises:
            RefusedError: No tensor of the source can take up what was learned.
        """


_BY_NAME: dict[str, type[PlannedLayer]] = {}


@functools.cache
def planned_layers() -> dict[str, type[PlannedLayer]]:
    """Return every layer that a plan can name, by its class name.

    A class that is imported later, such as a third party's, joins the same dictionary.
    """
    for file in pkgutil.iter_modules(importlib.import_module("normswap.layers").__path__):
        importlib.import_module(f"normswap.layers.{file.name}")
    return _BY_NAME


def per_channel(value: Tensor, x: Tensor) -> Tensor:
    """Return a value per channel (C,) in the dtype of x and a shape that broadcasts to (N, C, ...).

    Under autocast x is in half precision, and a float32 value would make the result float32.
    """
    return _shaped(value, x)


# A symbolic trace does not know `x.ndim`. So `fx.wrap` makes it record a call of this function
# instead of running the function.
@fx.wrap
def _shaped(value: Tensor, x: Tensor) -> Tensor:
    # The sizes are a list, because TorchScript knows no tuple of unknown length.
    return value.view([1, -1] + [1] * (x.ndim - 2)).to(x.dtype)
