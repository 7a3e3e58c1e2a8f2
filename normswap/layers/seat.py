"""What a plan can seat: each such layer says by itself how it is built, and how `unfold` goes back over it."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from torch import nn

from normswap.errors import PlanError

Linearity: TypeAlias = nn.Linear | nn.modules.conv._ConvNd


class Seat:
    """Base of what the `layer` of an `Edit` names. `replacing` never branches on the values of tensors: the same plan
    gives the same structure on any weights.

    CASTS: makes float64 from any dtype by itself, if `like` asks for it.
    NAMES: (old, new) names of tensors that live on under another name in the same seat.
    TENSORS: sits in the seat of a parameter.
    KEEPS_NORM: a norm stands in the seat afterwards.
    FATE: how a report marks the norm that stood there: `gone`, `scalar`, `bias`, `affine` or `replaced`.
    """

    CASTS: ClassVar[bool] = False
    NAMES: ClassVar[Mapping[str, str]] = {}
    TENSORS: ClassVar[bool] = False
    KEEPS_NORM: ClassVar[bool] = False
    FATE: ClassVar[str] = "replaced"

    def __init_subclass__(cls, **rest: object) -> None:
        super().__init_subclass__(**rest)
        if _SEATED.setdefault(cls.__name__, cls).__module__ != cls.__module__:
            raise PlanError(f"two layers are called {cls.__name__}", f"one is in {_SEATED[cls.__name__].__module__}")

    @classmethod
    def replacing(cls, *args: Any, **kwargs: Any) -> Any:
        """`replacing(old, *reads, like, **args)`: the newcomer, built from what it replaces.

        Args:
            old: what sits in the seat: a module, a parameter or a number.
            reads: the modules that the edit names beside it; with an argument `takes`, how each is taken in.
            like: an empty tensor of the model's dtype and device, for what replaces nothing with a dtype of its own.
        """
        raise NotImplementedError

    @classmethod
    def invert(cls, *args: Any, **kwargs: Any) -> None:
        """`invert(old, now, reads, **args)`: set the tensors of `old`, and of the norms among `reads`, so that
        `replacing` would give `now`.

        What sits in the seat without tensors of the source's leaves nothing to do.

        Raises:
            RefusedError: the source has no place for what was learned.
        """


_SEATED: dict[str, type[Seat]] = {}


def seated() -> dict[str, type[Seat]]:
    """Every layer that a plan can name, those of third parties too once they are imported."""
    _import_own()
    return _SEATED


@functools.cache
def _import_own() -> None:
    for file in pkgutil.iter_modules(importlib.import_module("normswap.layers").__path__):
        importlib.import_module(f"normswap.layers.{file.name}")
