"""On the way from GroupNorm, LayerNorm or InstanceNorm: the BatchNorm that is most like each (`norm_estimate`)."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from normswap.calibration.norm_estimate import fit_norms, fits
from normswap.calibration.sequential_fit import Progress
from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.plan import Outcome, Step
from normswap.schemes import Scheme


def plan(anatomy: Anatomy) -> Draft:
    """An empty norm in the seat of every norm with statistics per sample."""
    draft = Draft(anatomy)
    for norm in anatomy.norms:
        if anatomy.takes_part(norm.path) and fits(anatomy, norm.path):
            draft.seat(norm.path, "EmptyNorm")
            draft.settle(norm.path, Outcome("estimated", "becomes what it does on average"))
    return draft


def fit(
    source: nn.Module, result: nn.Module, step: Step, batches: Iterable[object], *, seed: int, progress: Progress | None
) -> None:
    fit_norms(source, result, batches, progress)


SCHEME = Scheme(
    plan,
    paper="least squares per channel",
    exact=False,
    needs_data=True,
    fit=fit,
)
