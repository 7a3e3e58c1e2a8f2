"""BatchNorm: a norm wherever one stood; `--ghost-batch N` takes training statistics over N samples at a time.

A network that has BatchNorm keeps it. One that was converted from such a network gets it back, from the statistics it
carries: mean = beta, std = |gamma|, and gamma, beta so that the norm computes what stands there now. In eval mode
nothing changes; in training mode batch statistics are used again. Unlike `unfold` it needs no source architecture, and
the convolutions keep their values. A network that never had any gets some after its convolutions, with statistics
measured on the images of `--calibrate` (`steps/measured_batchnorm.py`). Ghost batches: Hoffer et al. 2017,
arXiv:1705.08741, algorithm 1.
"""

from __future__ import annotations

from torch import nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.layers.site_norm import SiteNorm
from normswap.plan import Outcome
from normswap.schemes.parts.norm_insertion import insert_norms


def plan(anatomy: Anatomy, *, where: str, like: str, ghost_batch: int) -> PlanBuilder:
    """Plan a BatchNorm wherever a norm stands or stood; what `where` and `like` ask for is done elsewhere."""
    ghost = {"ghost": ghost_batch} if ghost_batch else {}

    def keep(builder: PlanBuilder, path: str, module: nn.Module) -> None:
        same = module.ghost == ghost_batch if isinstance(module, SiteNorm) else not ghost_batch
        if same and not affine.is_frozen(module) and not affine.is_registered(module):
            builder.settle(path, Outcome("kept", "kept"))
        else:
            builder.replace(path, "SiteNorm", **ghost)
            sentence = f"statistics over {ghost_batch or 'all'} samples"
            builder.settle(path, Outcome("statistics over some samples", sentence))

    return insert_norms(anatomy, "SiteNorm", keep, **ghost)
