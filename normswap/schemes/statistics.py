"""Two steps that set statistics: BatchNorms for norms with statistics per sample, and BatchNorm's statistics anew."""

from __future__ import annotations

from normswap.calibration.fit_task import FitTask
from normswap.calibration.norm_estimate import fit_norms
from normswap.calibration.population import estimate_population
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import Outcome


def plan_estimate(anatomy: Anatomy) -> PlanBuilder:
    """An empty BatchNorm in place of every GroupNorm, LayerNorm or InstanceNorm (`norm_estimate`)."""
    builder = PlanBuilder(anatomy)
    for norm in anatomy.norms:
        if norm.averages and anatomy.takes_part(norm.path):
            builder.replace(norm.path, "EmptyNorm")
            builder.settle(norm.path, Outcome("estimated", "becomes what it does on average"))
    return builder


def fit_estimate(task: FitTask) -> None:
    """Estimate each BatchNorm from what its norm does on average."""
    assert task.batches is not None
    fit_norms(task.source, task.result, task.batches, task.progress)


def plan_recalibrate(anatomy: Anatomy, **record: object) -> PlanBuilder:
    """No edit: statistics alone are set; or, without BatchNorms, values of layers (`surgery/recalibration.py`).

    Args:
        record: what the plan shall remember of the data.
    """
    return PlanBuilder(anatomy)


def fit_recalibrate(task: FitTask) -> tuple[str, ...]:
    """Estimate the population statistics anew."""
    assert task.batches is not None
    return (estimate_population(task.result, task.batches, task.progress),)
