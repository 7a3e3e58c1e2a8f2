"""On the way from GroupNorm, LayerNorm or InstanceNorm: the BatchNorm that is most like each (`norm_estimate`)."""

from __future__ import annotations

from normswap.calibration.fit_task import FitTask
from normswap.calibration.norm_estimate import fit_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import Outcome
from normswap.schemes import Scheme


def plan(anatomy: Anatomy) -> PlanBuilder:
    """An empty norm in place of every norm with statistics per sample."""
    builder = PlanBuilder(anatomy)
    for norm in anatomy.norms:
        if norm.averages and anatomy.takes_part(norm.path):
            builder.replace(norm.path, "EmptyNorm")
            builder.settle(norm.path, Outcome("estimated", "becomes what it does on average"))
    return builder


def fit(task: FitTask) -> None:
    """Estimate each BatchNorm from what its norm does on average."""
    assert task.batches is not None
    fit_norms(task.source, task.result, task.batches, task.progress)


SCHEME = Scheme(
    plan,
    paper="least squares per channel",
    exact=False,
    needs_data=True,
    fit=fit,
)
