"""Parallel branches of convolutions, and of scales per channel, that are summed become one convolution.

W' = sum of W_i at their taps, b' = sum of b_i; a scale per channel is one tap (Ding et al. 2021, arXiv:2101.03697,
section 3.3), an average pooling is equal ones (arXiv:2103.13425, section 3.2). It follows `folded`, which has left
convolutions, scales and shifts.
"""

from __future__ import annotations

from typing import cast

from torch import nn

from normswap.folding import branches
from normswap.folding.branches import Branches
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine
from normswap.layers.merged import pool_offsets
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Outcome


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan one convolution in place of branches whose sum one computes."""
    builder = PlanBuilder(anatomy)
    for merge in branches.find(builder):
        _merge(builder, merge)
    return builder


def _merge(builder: PlanBuilder, merge: Branches) -> None:
    reads, takes = list(merge.others), [Absorption(AbsorbMode.SUM)] * len(merge.others)
    if merge.after is not None:
        reads, takes = [*reads, merge.after], [*takes, Absorption(AbsorbMode.AFTER)]
        builder.remove(merge.after)
    args: Body = {"skips": merge.skips} if merge.after is not None and merge.skips else {}
    modules = builder.anatomy.traced.modules
    if merge.pools:
        pools = {str(merge.others.index(path)): cast(nn.AvgPool2d, modules[at]) for path, at in merge.pools.items()}
        args["pools"] = {number: [[*side] for side in pool_offsets(pool)] for number, pool in pools.items()}
    builder.replacements[merge.main] = Edit(merge.main, "Merged", args, tuple(reads), tuple(takes))
    for path in {*merge.others, *merge.pools.values()}:
        builder.replace(path, "Zero")
    merged = Outcome("merged with branches", f"merges into {merge.main}, with the branches beside it")
    for path in reads:
        if affine.is_affine(modules[path]):
            builder.settle(path, merged)
