"""On the way from GroupNorm, LayerNorm or InstanceNorm: the BatchNorm that is most like each (`norm_estimate`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from normswap.calibration.norm_estimate import fit_norms, plan_estimates
from normswap.calibration.sequential_fit import Progress
from normswap.folding.draft import Draft
from normswap.graph.inspection import Anatomy
from normswap.plan import Step

PAPER = "least squares per channel"


def exact(options: dict[str, Any]) -> bool:
    return False


def needs_data(options: dict[str, Any]) -> bool:
    return True


def plan(anatomy: Anatomy) -> Draft:
    return plan_estimates(anatomy)


def fit(
    source: nn.Module, result: nn.Module, step: Step, batches: Iterable[Any], *, seed: int, progress: Progress | None
) -> None:
    fit_norms(source, result, batches, progress)
