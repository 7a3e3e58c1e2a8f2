"""The layers that a plan can name: each says by itself how it is built, and how `unfold` goes back over it."""

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from torch import nn

from normswap.errors import PlanError

Linearity: TypeAlias = nn.Linear | nn.modules.conv._ConvNd
# What can be at a path; a dropout rate is a number, or None.
Held: TypeAlias = nn.Module | nn.Parameter | float | None


class PlannedLayer:
    """Base of what the `layer` of an `Edit` names.

    `replacing` never branches on the values of tensors: the same plan gives the same structure on any weights.

    CASTS: makes float64 from any dtype by itself, if `like` asks for it.
    NAMES: (old, new) names of the tensors that get another name at the same path.
    TENSORS: stands in the place of a parameter.
    KEEPS_NORM: a norm stands there afterwards.
    OUTCOME: how a report marks the norm that stood there: `gone`, `scalar`, `bias`, `affine` or `replaced`.
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
            raise PlanError(f"two layers are called {cls.__name__}", f"one is in {registered.__module__}")

    @classmethod
    def replacing(cls, *args: Any, **kwargs: Any) -> Held:
        """`replacing(old, *reads, like, **args)`: the replacement, built from what it replaces.

        Args:
            old: what it replaces: a module, a parameter or a number.
            reads: the modules that the edit names beside it; an argument `takes` says how each is absorbed.
            like: an empty tensor of the model's dtype and device, where `old` has none.
        """
        raise NotImplementedError

    @classmethod
    def invert(cls, *args: Any, **kwargs: Any) -> None:
        """`invert(old, now, reads, **args)` sets tensors of `old` and norms in `reads`: `replacing` then gives `now`.

        Raises RefusedError: the source has no place for what was learned.
        """


_BY_NAME: dict[str, type[PlannedLayer]] = {}


@functools.cache
def planned_layers() -> dict[str, type[PlannedLayer]]:
    """Every layer that a plan can name, by name; classes that are imported later are added to the same dict."""
    for file in pkgutil.iter_modules(importlib.import_module("normswap.layers").__path__):
        importlib.import_module(f"normswap.layers.{file.name}")
    return _BY_NAME
