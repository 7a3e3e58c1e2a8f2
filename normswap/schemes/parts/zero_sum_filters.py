"""Filters that sum to zero, found by regression: what `nf` and `centered-weightnorm` share.

The pattern is the same conversion with every mean kept, which computes what the source computes, in the gauge of the
result: so the two go by the same paths and the same units.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normswap.calibration.sequential_fit import Progress, refit
from normswap.errors import RefusedError
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear
from normswap.layers import reparametrized
from normswap.layers.standardized import STANDARDIZED
from normswap.plan import Step
from normswap.schemes.parts.zero_sum_gauge import rescale


def standardize(draft: Draft, *, mean: str, stem: str, depthwise: str) -> Draft:
    """Let every convolution of the draft, but those of gates and the classifier, have standardized filters.

    Args:
        mean: `keep` or `fit` the filters' means.
        stem: those of the convolution that reads the image; its filters' means see the image's brightness and colour.
        depthwise: those of filters that read one channel: one that sums to zero passes nothing of its channel's level,
            and there is no other channel that it could be had from.

    Raises:
        RefusedError: there is nothing to standardize.
    """
    kept = 0
    traced = draft.anatomy.traced
    plain = tuple(f"{block.gate}." for block in draft.anatomy.blocks if block.gate)
    first = True
    seen: set[int] = set()
    for node in traced.nodes:
        module = traced.module(node)
        if not isinstance(module, reparametrized.CONVOLUTIONS) or id(module) in seen:
            continue
        seen.add(id(module))
        path, alone = str(node.target), module.groups > 1 and module.weight.shape[1] == 1
        keep = "keep" in (mean, stem if first else "", depthwise if alone else "")
        first = False
        if not draft.anatomy.takes_part(path):
            continue
        if path.startswith(plain) or path == draft.anatomy.classifier:
            continue
        try:
            check_linear(draft, path, module)
        except Blocked as why:
            draft.notes.append(f"{path} is not standardized: {why}")
            continue
        if reparametrized.is_stuck(module):
            draft.notes.append(f"{path} is not standardized: its scalar input bias cannot pass the padding")
            continue
        if module.weight[0].numel() < 2 or module.padding_mode != "zeros":
            draft.notes.append(f"{path} is not standardized: filters of one number, or padding that is not zeros")
            continue
        take = draft.take(path)
        take.layer, take.extra = "StandardizedConv", {"mean": keep}
        kept += alone and mean == "fit" and keep
    if not any(take.layer == "StandardizedConv" for take in draft.takes.values()):
        only = "gates, the classifier and filters of one number are left alone"
        raise RefusedError("no convolution to standardize", only, "`--to folded` works on any network")
    if kept:
        draft.notes.append(f"{kept} depthwise convolutions keep their filters' means: nothing else tells their level")
    return draft


def kept(step: Step) -> Step:
    """The same step with every mean kept."""
    edits = (replace(edit, args={**edit.args, "mean": True}) if "mean" in edit.args else edit for edit in step.edits)
    return replace(step, edits=tuple(edits))


def fit_zero_sum(
    pattern: nn.Module, result: nn.Module, step: Step, batches: Iterable[Any], *, seed: int, progress: Progress | None
) -> None:
    """Fit `result`, which came of `step`, in place, to `pattern`, which came of `kept(step)`.

    Args:
        batches: read twice.

    Raises:
        SourceError: unusable or too few images.
    """
    factors = rescale(pattern, result, batches, _must)

    def zero_sum(path: str, module: Any) -> Tensor | None:
        return factors.get(path, torch.ones(module.weight.shape[1] * module.groups)) if _must(path, module) else None

    refit(pattern, result, batches, zero_sum=zero_sum, seed=seed, progress=progress)


def _must(path: str, module: nn.Module) -> bool:
    return isinstance(module, STANDARDIZED) and not reparametrized.keeps_mean(module)
