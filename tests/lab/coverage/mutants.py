"""A test of the walk's checker: one channel of a BatchNorm is off by 1 %, which it must find."""

import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from network import EXACT, fold, living, outputs
from support.lived_in_networks import BATCHNORMS, distance
from torch import nn

TRIALS = 5
MOST = 20


@contextmanager
def shifted(model: nn.Module, dice: random.Random) -> Iterator[str]:
    """Inside the context, one channel of one norm is 1 % larger, and off by 1 % of its deviation.

    Yields the path of the norm and the channel. A shift alone would be no error at the keys of an
    attention: softmax does not see it.
    """
    norms = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, BATCHNORMS) and module.weight is not None
    ]
    path, norm = dice.choice(norms)
    channel = dice.randrange(len(norm.bias))
    scale = float(norm.weight[channel])

    shift = float(norm.bias[channel])
    with torch.no_grad():
        norm.weight[channel] = 1.01 * scale
        norm.bias[channel] = 1.01 * shift + 0.01 * abs(scale)
        yield f"{path}[{channel}]"
        norm.weight[channel] = scale
        norm.bias[channel] = shift


def check(name: str) -> dict[str, Any]:
    """How many mutants of a network are noticed, folded, beside the unmutated network.

    A mutant that computes, unfolded, what the network computes is drawn again (`unseen`): its
    channel is dead on these images, behind a gamma of zero, or below a ReLU on a map of one pixel.
    """
    warnings.simplefilter("ignore")
    dice = random.Random(name)
    model, x, noise = living(name)
    reference = outputs(model, x)
    missed: list[str] = []
    errors: list[float] = []

    unseen = 0
    while len(errors) < TRIALS and unseen < MOST:
        with shifted(model, dice) as where:
            if distance(reference, outputs(model, x)) <= 10 * max(noise, 1e-14):
                unseen += 1
                continue
            result, row = fold(model)
        if result is None:
            return {"status": "refused", "why": row["why"]}
        errors.append(distance(reference, outputs(result, x)))
        if errors[-1] <= EXACT:
            missed.append(f"{where}: {errors[-1]:.0e}")

    return {
        "status": "mutants",
        "trials": len(errors),
        "detected": len(errors) - len(missed),
        "missed": missed,
        "unseen": unseen,
        "smallest": min(errors),
    }
