"""`distill.teacher`: the network that the learning one came from, or another one."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from normswap import provenance
from normswap.errors import NormswapError, SourceError
from normswap.storage import checkpoint
from normswap.surgery import reverification
from normswap.training.recipe import Distill

_REMEDY = "Name the teacher: distill.teacher=MODEL"


def find(part: Distill, model: nn.Module, before: nn.Module | None) -> nn.Module:
    """The teacher.

    Args:
        part: `distill` of the recipe.
        model: the network as training begins; unconverted, it is its own teacher.
        before: what the recipe's own `convert` converted.

    Raises:
        SourceError: it cannot be had, or is no longer what the network was made from.
    """
    if part.teacher != "source":
        return checkpoint.open_model(part.teacher, named=False)
    record = provenance.of(model)
    if before is not None or record is None or not record.plan.steps:
        return copy.deepcopy(before or model)
    try:
        source = checkpoint.open_model(reverification.recorded(model, Path("the network")), **reverification.how(model))
    except NormswapError as error:
        raise SourceError("the teacher, the network's source, cannot be had", error.what, _REMEDY) from None
    if reverification.unchanged(source, model) is False:
        raise SourceError(f"the teacher {record.source} is not what the network was made from", remedy=_REMEDY)
    return source
