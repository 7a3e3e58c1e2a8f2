"""Filters that sum to zero, found by regression on the converted network's own inputs.

The target is the same conversion with every mean kept, which computes what the source computes, with the rescaling of
the result: so the two go by the same paths and the same units.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.calibration.fit_task import FitTask
from normswap.calibration.sequential_fit import refit
from normswap.calibration.zero_sum_rescaling import rescale
from normswap.layers import reparametrized
from normswap.layers.standardized import STANDARDIZED


def fit_zero_sum(task: FitTask) -> None:
    """Rescale channels and fit the filters of the result, in place; its source has every mean.

    Raises:
        SourceError: unusable or too few images.
    """
    assert task.batches is not None
    factors = rescale(task.source, task.result, task.batches, _must)

    def zero_sum(path: str, module: nn.Module) -> Tensor | None:
        if not isinstance(module, reparametrized.CONVOLUTIONS) or not _must(path, module):
            return None
        return factors.get(path, torch.ones(module.weight.shape[1] * module.groups))

    refit(task.source, task.result, task.batches, zero_sum=zero_sum, seed=task.seed, progress=task.progress)


def _must(path: str, module: nn.Module) -> bool:
    return isinstance(module, STANDARDIZED) and not reparametrized.keeps_mean(module)
