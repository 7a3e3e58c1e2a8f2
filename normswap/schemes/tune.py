"""Tune mode: frozen statistics, and a live gamma that scales the convolution's weight instead of its output.

W' = gamma / sqrt(var + eps) W and b' = beta + gamma / sqrt(var + eps) (b - mean), made anew at each step. A norm that
no plain 2-D convolution can absorb keeps frozen statistics in its place, and learns gamma and beta there.
"""

from __future__ import annotations

from torch import nn

from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import KEEPS_STATISTICS, PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.layers import affine, reparametrized
from normswap.layers.placeholders import Vacant
from normswap.plan import AbsorbMode, Outcome
from normswap.schemes.norm_insertion import insert_norms


def plan(anatomy: Anatomy) -> PlanBuilder:
    """Plan a live gamma on the weight of every convolution before a norm."""
    builder = insert_norms(anatomy, "EvalNorm", _keep_in_place)
    # what folds back into one plain convolution can scale its weight instead
    for path, conv in _folding(anatomy).items():
        edit = builder.replacements.get(path)
        module = anatomy.traced.linear(conv)
        plain = reparametrized.plain_class(module) is nn.Conv2d and not reparametrized.keeps_input_bias(module)
        if edit is None or not plain or (conv in builder.linears and builder.linears[conv].layer != "Folded"):
            continue
        linear = builder.linear(conv)
        linear.layer, linear.extra = "Tuned", dict(edit.args)
        linear.add(path, AbsorbMode.NORM)
        builder.remove(path)
        builder.settle(path, Outcome("scale a weight", f"scales the weight of {conv}"))
    return builder


def _keep_in_place(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    builder.replace(path, "EvalNorm")
    builder.settle(path, KEEPS_STATISTICS)


def _folding(anatomy: Anatomy) -> dict[str, str]:
    """The convolution into which each norm would fold, or was folded, as the only one after it."""
    modules = anatomy.traced.modules
    absorbed = {}
    for conv, linear in fold_norms(anatomy).linears.items():
        after = [read for read, one in linear.reads if one.way is AbsorbMode.AFTER]
        absorbed[conv] = [read for read in after if affine.is_batchnorm(modules[read])]
    for edit in (edit for step in anatomy.provenance.plan.steps for edit in step.edits):
        after = [read for read, one in edit.absorbed if one.way in (AbsorbMode.AFTER, AbsorbMode.NORM)]
        lost = [read for read in after if isinstance(modules.get(read), Vacant)]
        absorbed.setdefault(edit.path, []).extend(path for path in lost if path not in absorbed.get(edit.path, ()))
    convolutions: dict[str, list[str]] = {}
    for conv, paths in absorbed.items():
        if len(paths) == 1 and conv in modules:
            convolutions.setdefault(paths[0], []).append(conv)
    return {path: convs[0] for path, convs in convolutions.items() if len(convs) == 1}
