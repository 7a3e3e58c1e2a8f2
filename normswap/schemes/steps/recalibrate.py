"""BatchNorm's population statistics, estimated anew on other images: a new domain. Weights, gamma and beta stay."""

from __future__ import annotations

from normswap.calibration.fit_task import FitTask
from normswap.calibration.population import estimate_population
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme


def plan(
    anatomy: Anatomy,
    *,
    data: str = "",
    samples: int | None = None,
    batch_size: int = 64,
    against: int = 0,
    scales: bool = True,
) -> PlanBuilder:
    """Plan no edit: statistics alone are set; or, without BatchNorms, values of layers (`surgery/recalibration.py`).

    Args:
        data, samples, batch_size, against, scales: for the record.
    """
    return PlanBuilder(anatomy)


def fit(task: FitTask) -> tuple[str, ...]:
    """Estimate the population statistics anew."""
    assert task.batches is not None
    seen = estimate_population(task.result, task.batches, task.progress)
    note = f"{seen.norms} norms, {seen.images} images in {seen.batches} batches"
    return (note + (f"; a last batch of {seen.left_out} is left out" if seen.left_out else ""),)


SCHEME = Scheme(
    plan,
    paper="Ioffe & Szegedy 2015, arXiv:1502.03167, algorithm 2",
    exact=False,
    needs_data=True,
    fit=fit,
)
