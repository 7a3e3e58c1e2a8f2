"""Norms of other people's that somebody vouches for: `normswap.register_norm`, and the entry points `normswap.norms`.

A class that nobody vouches for is refused by path: a norm with a forward of its own may compute anything.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap import plugins
from normswap.errors import OptionError

Read: TypeAlias = Callable[[Any], tuple[Tensor, Tensor]]
Kind = TypeVar("Kind", bound=type[nn.Module])


@dataclass(frozen=True)
class Known:
    """What is vouched for.

    Args:
        read: s and t of y = s * x + t per channel in eval mode, each (C,); None where the class computes what
            BatchNorm computes, or takes its statistics per sample.
        per_sample: its statistics are each sample's own, over channels in dimension 1.
    """

    read: Read | None = None
    per_sample: bool = False


_KNOWN: dict[type[nn.Module], Known] = {}


def register_norm(kind: Kind, *, affine: Read | None = None, per_sample: bool = False) -> Kind:
    """Vouch for a class of norms of your own.

    Without an option, `kind` is a subclass of BatchNorm whose forward computes, in eval mode, what BatchNorm computes.

    Args:
        kind: the class itself; a subclass of it is not meant.
        affine: it computes y = s * x + t per channel in eval mode, and `affine(module)` gives s and t, each (C,).
        per_sample: it normalizes by statistics of each sample, over channels in dimension 1.

    Returns:
        `kind`, so that this can decorate a class.

    Raises:
        OptionError: both options, or neither for a class that is no BatchNorm.
    """
    if affine is not None and per_sample:
        raise OptionError(f"{kind.__name__} is either affine or takes statistics per sample", "not both")
    if affine is None and not per_sample and not issubclass(kind, _BatchNorm):
        remedy = "Say how it reads: affine=lambda module: (scale, shift), or per_sample=True"
        raise OptionError(f"{kind.__name__} is no BatchNorm", remedy=remedy)
    _KNOWN[kind] = Known(affine, per_sample)
    return kind


def known(module: nn.Module) -> Known | None:
    """What is vouched for about the class of `module`, if its forward is still that of the class."""
    plugins.load("normswap.norms")
    return None if "forward" in vars(module) else _KNOWN.get(type(module))
