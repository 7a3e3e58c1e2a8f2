"""From any scheme to the network that is exported: folded, and nothing left that only an export may take out."""

from __future__ import annotations

import copy

from torch import nn

from normswap import affine, anatomy, baking, conversion, schemes
from normswap.errors import TraceError
from normswap.plan import Step


def undressed(model: nn.Module, size: tuple[int, int, int]) -> nn.Module:
    """A folded copy, verified against `model` as every conversion is; just a copy where there is nothing to fold.

    Args:
        size: (C, H, W) of the inputs to verify on.

    Raises:
        TraceError, RefusedError: there is something to fold, and it cannot be.
        VerificationError: it was folded and computes something else.
    """
    try:
        seen = anatomy.inspect(model)
    except TraceError:
        if any(affine.is_affine(module) or baking.is_dressed(module) for module in model.modules()):
            raise
        return copy.deepcopy(model).eval()
    sketch = schemes.get("folded").plan(seen)
    if not (sketch.seats or sketch.takes or sketch.refusals):
        return copy.deepcopy(model).eval()
    step: Step = conversion.draft(seen, "folded")[0]
    return conversion.carry_out(model, step, seen, size=size).model.eval()
