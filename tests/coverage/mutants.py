"""The walk's own checker, tested: one channel of one BatchNorm is shifted by 1 %, and folding must be found wrong."""

from __future__ import annotations

import copy
import random
import warnings
from typing import Any

import torch
from lived import BATCHNORMS, distance
from network import EXACT, fold, living, outputs
from torch import nn

TRIALS = 5


def shift(model: nn.Module, dice: random.Random) -> tuple[nn.Module, str]:
    """A copy whose output at one channel of one norm is off by 1 % of its deviation (or, if constant, of 1)."""
    mutant = copy.deepcopy(model)
    norms = [(path, m) for path, m in mutant.named_modules() if isinstance(m, BATCHNORMS) and m.weight is not None]
    path, norm = dice.choice(norms)
    channel = dice.randrange(len(norm.bias))
    size = abs(float(norm.weight[channel])) or 1.0
    with torch.no_grad():
        norm.bias[channel] += 0.01 * size
    return mutant, f"{path}[{channel}]"


def check(name: str) -> dict[str, Any]:
    """How many of a network's mutants the comparison with the unmutated network notices, once they are folded."""
    warnings.simplefilter("ignore")
    dice = random.Random(name)
    model, x, _ = living(name)
    reference = outputs(model, x)
    missed, errors = [], []
    for _ in range(TRIALS):
        mutant, where = shift(model, dice)
        result, row = fold(mutant)
        if result is None:
            return {"status": "refused", "why": row["why"]}
        error = distance(reference, outputs(result, x))
        errors.append(error)
        if error <= EXACT:
            missed.append(f"{where}: {error:.0e}")
    return {"status": "mutants", "trials": TRIALS, "detected": TRIALS - len(missed), "missed": missed,
            "smallest": min(errors)}  # fmt: skip
