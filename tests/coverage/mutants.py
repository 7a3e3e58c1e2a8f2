"""The walk's own checker, tested: one channel of one BatchNorm is off by 1 %, and folding must be found wrong."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lived import BATCHNORMS, distance
from network import EXACT, fold, living, outputs
from torch import nn

TRIALS = 5


@contextmanager
def shifted(model: nn.Module, dice: random.Random) -> Iterator[str]:
    """For a while, the output at one channel of one norm is 1 % larger, and off by 1 % of its deviation.

    A shift alone would be no error at all at the keys of an attention: softmax does not see it.
    """
    norms = [(path, m) for path, m in model.named_modules() if isinstance(m, BATCHNORMS) and m.weight is not None]
    path, norm = dice.choice(norms)
    channel = dice.randrange(len(norm.bias))
    scale, shift = float(norm.weight[channel]), float(norm.bias[channel])
    with torch.no_grad():
        norm.weight[channel], norm.bias[channel] = 1.01 * scale, 1.01 * shift + 0.01 * abs(scale)
        yield f"{path}[{channel}]"
        norm.weight[channel], norm.bias[channel] = scale, shift


def enliven(model: nn.Module) -> None:
    """No gamma is zero here: what is behind one moves nothing, whatever becomes of it."""
    for norm in model.modules():
        if isinstance(norm, BATCHNORMS) and norm.weight is not None:
            with torch.no_grad():
                norm.weight[norm.weight == 0] = 0.5


def check(name: str) -> dict[str, Any]:
    """How many of a network's mutants the comparison with the unmutated network notices, once they are folded."""
    warnings.simplefilter("ignore")
    dice = random.Random(name)
    model, x, _ = living(name)
    enliven(model)
    reference = outputs(model, x)
    missed, errors = [], []
    for _ in range(TRIALS):
        with shifted(model, dice) as where:
            result, row = fold(model)
        if result is None:
            return {"status": "refused", "why": row["why"]}
        errors.append(distance(reference, outputs(result, x)))
        if errors[-1] <= EXACT:
            missed.append(f"{where}: {errors[-1]:.0e}")
    return {"status": "mutants", "trials": TRIALS, "detected": TRIALS - len(missed), "missed": missed,
            "smallest": min(errors)}  # fmt: skip
