"""Frozen BatchNorm: statistics, gamma and beta become constants, as in detection and small-batch fine-tuning.

y = gamma (x - mean) / sqrt(var + eps) + beta in training mode too, with torchvision's `FrozenBatchNorm2d`
(timm's `FrozenBatchNormAct2d` where the norm carries an activation). A network without BatchNorm, converted from one,
gets frozen norms back from the statistics it carries. The price: the norms no longer learn.
"""

from __future__ import annotations

from torch import nn

from normswap.errors import spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.plan import Outcome
from normswap.schemes.parts.norm_insertion import insert_norms


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a frozen norm wherever a norm stands or stood."""
    return insert_norms(anatomy, "FrozenNorm", _freeze)


def _freeze(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    if affine.is_frozen(module):
        builder.settle(path, Outcome("frozen", "frozen already"))
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm3d):
        builder.refusals[path] = (
            f"there is no frozen {type(module).__name__}; `{spelled('to', 'tune')}` keeps its statistics"
        )
    else:
        builder.replace(path, "FrozenNorm")
        builder.settle(path, Outcome("frozen", "frozen"))
