"""How long a fit to images takes, told before it begins by what the network takes for a few of them."""

from __future__ import annotations

import time

import torch
from torch import nn

from normswap.calibration.lockstep import MIRRORED
from normswap.models.calling import Example
from normswap.models.modes import evaluating

FEW = 4  # images to try
FORWARDS = 3  # over all images: to choose the rescaling, and to measure on those that are held out and on others
FITTING = 9  # forwards' time that source, result, rows and products take for each image that is fitted to
LONG = 20.0  # seconds, from which on it is worth saying


@torch.no_grad()
def expected_seconds(model: nn.Module, few: Example, count: int) -> float:
    """Of a fit to `count` images like these few, on the processor; right within a factor of two or so."""
    with evaluating(model):
        few.call(model)  # the first run is slower
        start = time.perf_counter()
        few.call(model)
        each = (time.perf_counter() - start) / few.count
    shown = 2 * count if count <= MIRRORED else count
    return each * (FORWARDS * count + FITTING * shown)
