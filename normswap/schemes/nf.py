"""Normalizer-free: y = skip + beta f(x), every convolution with standardized weights, gain and bias; no norm.

Convolutions become timm's `ScaledStdConv2d`, which computes any filter that sums to zero exactly. The price is each
filter's mean. `--mean fit` scales channels so that little is lost (`zero_sum_rescaling`), and finds the zero-sum
filters that come nearest to the source (`sequential_fit`); `--mean keep` keeps the means as one more parameter per
filter, and with it the function.
"""

from __future__ import annotations

from dataclasses import replace

from timm.layers import Conv2dSame
from torch import nn

from normswap.calibration.zero_sum_rescaling import fit_zero_sum
from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear
from normswap.graph.inspection import Anatomy
from normswap.layers import own_forwards, reparametrized
from normswap.schemes.scheme import FitTask
from normswap.schemes.skipinit import scale_branches


def plan(anatomy: Anatomy, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Plan standardized filters, and a scalar on each residual branch."""
    builder = scale_branches(anatomy, None) if anatomy.blocks else fold_norms(anatomy)
    return standardize(builder, mean=mean, stem=stem, depthwise=depthwise)


def plan_centered_weightnorm(anatomy: Anatomy, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Plan standardized filters for every convolution, which is centered weight normalization.

    W = g (v - mean v) / |v - mean v| per filter is timm's `ScaledStdConv2d` up to sqrt(fan-in) in g.
    """
    return standardize(fold_norms(anatomy), mean=mean, stem=stem, depthwise=depthwise)


def standardize(builder: PlanBuilder, *, mean: str, stem: str, depthwise: str) -> PlanBuilder:
    """Let every convolution of the builder, but those of gates and the classifier, have standardized filters.

    Args:
        mean: `keep` or `fit` the filters' means.
        stem: those of the convolution that reads the image; its filters' means see the image's brightness and colour.
        depthwise: those of filters that read one channel: one that sums to zero passes nothing of its channel's level,
            and there is no other channel that it could be had from.
    """
    kept = 0
    traced = builder.anatomy.traced
    plain = tuple(f"{block.gate}." for block in builder.anatomy.blocks if block.gate)
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
        if not builder.anatomy.takes_part(path):
            continue
        if path.startswith(plain) or path == builder.anatomy.classifier:
            continue
        try:
            padding = _padding(builder, path, module)
        except NotFoldable as why:
            builder.notes.append(f"{path} is not standardized: {why}")
            continue
        linear = builder.linear(path)
        linear.layer, linear.extra = "StandardizedConv", {"mean": keep}
        if padding != module.padding:
            linear.extra["padding"] = list(padding)
        kept += alone and mean == "fit" and keep
    if not any(linear.layer == "StandardizedConv" for linear in builder.linears.values()):
        only = "gates, the classifier and filters of one number are left alone"
        raise RefusedError("no convolution to standardize", only, f"`{spelled('to', 'folded')}` works on any network")
    if kept:
        builder.notes.append(f"{kept} depthwise convolutions keep their filters' means: nothing else tells their level")
    return builder


def _padding(builder: PlanBuilder, path: str, conv: nn.modules.conv._ConvNd) -> str | tuple[int, ...]:
    """How the standardized convolution in the place of `conv` pads."""
    check_linear(builder, path, conv)
    if reparametrized.keeps_input_bias(conv):
        raise NotFoldable("its scalar input bias cannot pass the padding")
    if conv.weight[0].numel() < 2 or conv.padding_mode != "zeros":
        raise NotFoldable("filters of one number, or padding that is not zeros")
    same = issubclass(reparametrized.plain_class(conv), Conv2dSame)
    padding = conv.padding if same else own_forwards.even_padding(conv)
    if padding is None:
        raise NotFoldable("it pads one end more than the other")
    return padding


def fit(task: FitTask) -> None:
    """Fit the filters without a mean to the network with every mean, which computes what the source does."""
    assert task.batches is not None
    edits = task.step.edits
    edits = tuple(replace(edit, args={**edit.args, "mean": True}) if "mean" in edit.args else edit for edit in edits)
    target = task.after(replace(task.step, edits=edits))
    fit_zero_sum(target, task.result, task.batches, seed=task.seed, progress=task.progress)
