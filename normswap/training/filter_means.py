"""`anneal.means`: the filter means that `nf --mean keep` kept go to zero while training compensates.

The means are not trained: update u of n has them at 1 - u / (share n) of what they were, until they are zero. Then
the layers compute what timm's ScaledStdConv2d computes, and become that.
"""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from torch import nn

from normswap import provenance
from normswap.errors import OptionError
from normswap.layers.reparametrized import Standardized
from normswap.plan import Plan
from normswap.training.recipe import Anneal


class Means:
    """The means of a network on their way to zero.

    Args:
        model: with convolutions that keep their filters' means, which stop learning.
        part: `anneal` of the recipe.
        updates: in all.

    Raises:
        OptionError: the network keeps no means.
    """

    def __init__(self, model: nn.Module, part: Anneal, updates: int) -> None:
        self.means = _means(model)
        if not self.means:
            raise OptionError("anneal.means: the network keeps no filter means", remedy="Convert with nf, mean: keep")
        for mean in self.means:
            mean.requires_grad_(False)
        self.over = max(round(part.means * updates), 1)

    @torch.no_grad()
    def step(self, update: int, ema: nn.Module | None) -> None:
        """After update `update` (from 0): one step nearer to zero, the averaged network's means as well."""
        left = max(self.over - update, 1)
        for mean in self.means:
            mean.mul_((left - 1) / left)
        if ema is not None:
            for average, mean in zip(_means(ema), self.means, strict=True):
                average.copy_(mean)


def kept(model: nn.Module) -> list[Standardized]:
    """List the convolutions of `model` that keep their filters' means."""
    return [module for module in model.modules() if isinstance(module, Standardized) and module.mean is not None]


def _means(model: nn.Module) -> list[nn.Parameter]:
    return [layer.mean for layer in kept(model) if layer.mean is not None]


@torch.no_grad()
def drop(model: nn.Module) -> nn.Module:
    """If all means are zero, make the layers timm's own, in place, and say so in the plan; returns the model."""
    layers = kept(model)
    record = provenance.of(model)
    if record is None or not layers or any(mean.any() for mean in _means(model)):
        return model
    for layer in layers:
        layer.drop_mean()
    body = json.loads(record.plan.to_json())
    for step in body["steps"]:
        standardizes = False
        for edit in step["edits"]:
            if edit["layer"] == "StandardizedConv":
                edit["args"]["mean"], standardizes = False, True
        if standardizes:
            step["options"].update(mean="fit", stem="fit", depthwise="fit")
    body.pop("digest")
    return provenance.attach(model, replace(record, plan=Plan.from_json(json.dumps(body))))
