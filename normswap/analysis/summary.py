"""What commands print of networks and conversions, as JSON-able records; `cli` lays them out."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter

from torch import Tensor, nn

from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder, counts
from normswap.graph.inspection import Anatomy, Block, Norm
from normswap.layers import affine
from normswap.layers.planned_layer import scales_branch
from normswap.plan import Body, Step
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network
from normswap.surgery.report import Report

_ROLES = ("stem", "last", "down", "other", "head")


def of_network(network: Network, source: str) -> Body:
    """Describe a network, every residual block (`blocks`) and every norm (`sites`)."""
    model = network.module
    anatomy = network.anatomy
    record = network.provenance
    folding = fold_norms(anatomy)
    roles = Counter(norm.role for norm in anatomy.norms)
    return {
        "source": source,
        "class": type(model).__name__,
        "architecture": record.arch and record.arch.name,
        "parameters": parameters(model),
        "input_size": list(network.input_size),
        "plan": [step.scheme for step in record.plan.steps],
        "classifier": anatomy.classifier,
        "dropout": anatomy.dropout,
        "norms": dict(Counter(norm.kind for norm in anatomy.norms)),
        "roles": {role: roles[role] for role in _ROLES},
        "blocks": [_block(block, anatomy) for block in anatomy.blocks],
        "sites": [_norm(norm, anatomy, folding) for norm in anatomy.norms],
        "refusals": [{"path": path, "reason": why} for path, why in anatomy.refusals],
    }


def parameters(model: nn.Module) -> int:
    """Count the trainable values, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _kinds(model: nn.Module) -> Counter[str]:
    return Counter(type(module).__name__ for module in model.modules() if affine.is_norm(module))


def sizes(model: nn.Module) -> dict[str, int]:
    """Count the normalization layers, and the trainable values."""
    return {"norms": _kinds(model).total(), "parameters": parameters(model)}


def _block(block: Block, anatomy: Anatomy) -> Body:
    fields = ("path", "stage", "skip", "order", "tail", "norms", "last", "gate", "drop_path")
    alpha = None
    if block.tail and scales_branch(tail := anatomy.traced.modules[block.tail]):
        alpha = tail.alpha.item()
    return {name: getattr(block, name) for name in fields} | {
        "norms": list(block.norms),
        "alpha": alpha,
    }


def _norm(norm: Norm, anatomy: Anatomy, folding: PlanBuilder) -> Body:
    module = anatomy.traced.modules[norm.path]
    mean, std = anatomy.kept_moments(norm.path) or (None, None)
    if affine.has_moments(module):
        mean, std = affine.moments(module)
    refused = folding.refusals.get(norm.path)
    if not affine.is_affine_norm(module):
        refused = refused or affine.refusal(module)
    return {
        "path": norm.path,
        "class": norm.kind,
        "channels": norm.channels,
        "role": norm.role,
        "block": norm.block,
        "mean": _range(mean),
        "std": _range(std),
        "folding": folding.outcomes.get(norm.path) and str(folding.outcomes[norm.path]),
        "refused": refused,
    }


def _range(values: Tensor | None) -> list[float] | None:
    if values is None or not values.numel():
        return None
    return [values.min().item(), values.max().item()]


def of_step(step: Step, builder: PlanBuilder | None = None) -> Body:
    """Describe a step of a plan."""
    outcomes = getattr(builder, "outcomes", {})
    return {
        "scheme": step.scheme,
        "options": step.options,
        "edits": [dataclasses.asdict(edit) for edit in step.edits],
        "verdicts": {path: str(outcome) for path, outcome in outcomes.items()},
        "outcomes": counts(outcomes.values()),
        "left": {},
        "alphas": {
            edit.path: edit.args.get("alpha") for edit in step.edits if edit.layer == "Scale"
        },
        "notes": list(getattr(builder, "notes", ())),
        "renames": [],
        "report": None,
    }


def of_conversion(conversion: Conversion, scheme: str = "") -> list[Body]:
    """Describe the steps of a conversion, with measurements of the last; `scheme` names `unfold`,
    which has no step.
    """
    steps = [
        of_step(step)
        for step in conversion.plan.steps[-conversion.steps :] or [Step(scheme, {}, ())]
    ]
    steps[-1] |= {
        "verdicts": {path: str(outcome) for path, outcome in conversion.outcomes.items()},
        "outcomes": counts(conversion.outcomes.values()),
        "left": {f"{kind} that stay": n for kind, n in _kinds(conversion.model).items()},
        "notes": list(conversion.notes),
        "renames": [list(pair) for pair in conversion.renames],
        "report": of_report(conversion.report),
    }
    return steps


def of_report(report: Report) -> Body:
    """Describe a report, and which errors are within tolerance; without agreement on noise of
    approximate results.
    """
    body = dataclasses.asdict(report)
    if report.kept is not None:
        body["kept"] |= {"least": report.kept.least, "said": str(report.kept)}
    for error in body["logits"]:
        if not report.exact:
            error |= {"agreement": None, "answer": "", "axis": None}
        error["within"] = bool(
            error["relative_l2"] <= report.tolerance.get(error["precision"], math.inf)
        )
    return body
