"""From any scheme to the network that is exported: folded, and nothing left that an export may take out besides.

`convert --to folded` keeps the features that the classifier reads; an export need not, so there the last norm's scale
moves into the classifier, and the shifts of pre-activation networks into the residual stream (`shift_absorption`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from normswap import schemes
from normswap.errors import TraceError
from normswap.exporting import shift_absorption
from normswap.graph.anatomy import Anatomy
from normswap.layers import affine, reparametrized
from normswap.models.calling import Example, Inputs, named_tensors
from normswap.plan import Step
from normswap.surgery import carrying_out, conversion
from normswap.surgery.network import Network


def fold_for_export(
    model: nn.Module, size: tuple[int, ...], *, features: bool = False, inputs: Inputs = None
) -> nn.Module:
    """A folded copy, verified against `model` as every conversion is; just a copy where there is nothing to fold.

    Args:
        size: (C, H, W) of the inputs to verify on.
        features: keep what the classifier reads as it is.
        inputs: as in `convert`, instead of noise of that size.

    Raises:
        TraceError, RefusedError: there is something to fold, and it cannot be.
        VerificationError: it was folded and computes something else.
    """
    network = Network(model, inputs, size)
    try:
        seen = network.anatomy
    except TraceError:
        if any(affine.is_affine(module) or reparametrized.is_reparametrized(module) for module in model.modules()):
            raise
        return copy.deepcopy(model).eval()
    if not features:
        seen = replace(seen, classifier=None)
    builder = schemes.get("folded").plan(seen)
    if not (builder.replacements or builder.linears or builder.refusals):
        return copy.deepcopy(model).eval()
    step: Step = conversion.plan_step(seen, "folded")[0]
    done = carrying_out.carry_out(network, step)
    merging = schemes.get("merged-branches")
    if merging.plan(seen).replacements:
        edits = merging.plan(done.network.anatomy).edits()
        done = carrying_out.carry_out(done.network, Step(merging.name, {}, edits))
    return done.model.eval()


def streamlined(
    folded: nn.Module, anatomy: Callable[[], Anatomy], source: nn.Module, example: Example, dtype: torch.dtype
) -> nn.Module:
    """The folded network with its shifts absorbed, unless that costs precision in `dtype`.

    A tiny gamma makes a huge shift, under which the stream of a pre-activation network loses digits.

    Args:
        anatomy: of the folded network.
        example: what to measure on.
    """
    twin = copy.deepcopy(folded)
    try:
        if not (shift_absorption.has_shifts(folded) and shift_absorption.absorb(twin, anatomy())):
            return folded
    except TraceError:
        return folded
    expected = _run(source, example, torch.float32)
    off, twin_off = (float((_run(network, example, dtype) - expected).norm()) for network in (folded, twin))
    slack = torch.finfo(dtype).eps * float(expected.norm())
    return twin if twin_off <= 2 * off + slack else folded


@torch.no_grad()
def _run(network: nn.Module, example: Example, dtype: torch.dtype) -> Tensor:
    twin = network if dtype == torch.float32 else copy.deepcopy(network).to(dtype)
    outputs = named_tensors(example.like(twin).map(torch.clone).call(twin))
    return torch.cat([value.float().flatten() for _, value in outputs if value.is_floating_point()])
