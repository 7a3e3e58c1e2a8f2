"""Networks and conversions as JSON-able records, which the commands print."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import cast

from torch import Tensor, nn

from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder, counts
from normswap.graph.inspection import Anatomy, Block, Norm
from normswap.plan import Body, Edit, Plan, Step
from normswap.proof.verdict import Report
from normswap.sites.own_layer import scales_branch
from normswap.sites.site import sites_of
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network

_ROLES = ("stem", "last", "down", "other", "head")
_BLOCK_FIELDS = ("path", "stage", "skip", "order", "tail", "norms", "last", "gate", "drop_path")


def of_network(network: Network, source: str) -> Body:
    """Return a dict that describes a network for `normswap inspect --json`.

    It has an entry for every residual block (`blocks`) and for every norm (`sites`).

    Args:
        network: The network.
        source: The name of the network, as the user gave it.
    """
    model = network.module
    anatomy = network.anatomy
    record = network.provenance
    # This plan would fold every norm. It is made to say what folding would do to each.
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
    """Return how many numbers all parameters of a network have. A shared tensor counts once."""
    return sum(parameter.numel() for parameter in nn.Module.parameters(model))


def _norm_classes(model: nn.Module) -> Counter[str]:
    """Return how many norms of each class a network has, by the name of the class."""
    return Counter(site.kind for site in sites_of(model) if site.is_norm)


def sizes(model: nn.Module) -> dict[str, int]:
    """Return a dict with two counts of a network.

    `norms` is the number of its norms, and `parameters` how many numbers all its parameters have.
    """
    return {"norms": _norm_classes(model).total(), "parameters": parameters(model)}


def _block(block: Block, anatomy: Anatomy) -> Body:
    """Return a dict that describes a residual block for `normswap inspect --json`.

    It has the fields of `Block` without the graph nodes. `alpha` is added: the value of the scalar
    on the branch, or None if the branch has none.

    Args:
        block: The block.
        anatomy: The recorded network that the block is in.
    """
    body: Body = {name: getattr(block, name) for name in _BLOCK_FIELDS}
    body["norms"] = list(block.norms)
    body["alpha"] = None
    if block.tail:
        tail = anatomy.traced.modules[block.tail]
        if scales_branch(tail):
            body["alpha"] = tail.alpha.item()
    return body


def _norm(norm: Norm, anatomy: Anatomy, folding: PlanBuilder) -> Body:
    """Return a dict that describes a norm for `normswap inspect --json`.

    Args:
        norm: The norm.
        anatomy: The recorded network.
        folding: The plan that folds every norm, which says what would become of this one.

    Returns:
        The norm's kind and place, and these values. `mean` and `std` are the mean and deviation of
        the norm's output, each as its smallest and largest value over the channels. `constant` is
        the share of variance + eps that is the same for every sample (`constant_share`), and
        `removed` is 1 - constant. `folding` says what folding would do to the norm, and `refused`
        why the norm cannot be folded. A value that is not known or does not apply is None.
    """
    # The moments of the norm's output, or those of the BatchNorm that once stood there.
    site = norm.site
    mean: Tensor | None = None
    std: Tensor | None = None
    if site.has_moments:
        mean, std = site.output_moments
    else:
        kept = anatomy.kept_moments(norm.path)
        if kept:
            mean, std = kept

    # Folding looks only at norms that are s x + t per channel in eval mode. For any other norm, the
    # record of the module (its site) says why it cannot be folded.
    refused = folding.refusals.get(norm.path)
    if not site.is_affine_norm:
        refused = refused or site.refusal
    outcome = folding.outcomes.get(norm.path)
    # How much of variance + eps is the same for every sample. The norm removes the rest.
    constant = constant_share(norm, anatomy)
    return {
        "path": norm.path,
        "class": norm.kind,
        "channels": norm.channels,
        "role": norm.role,
        "block": norm.block,
        "mean": _range(mean),
        "std": _range(std),
        "constant": constant,
        "removed": None if constant is None else 1 - constant,
        "folding": outcome and str(outcome),
        "refused": refused,
    }


def constant_share(norm: Norm, anatomy: Anatomy) -> float | None:
    """Return the share eps / (variance + eps) for a GroupNorm that replaced a BatchNorm.

    The variance is the one within a group of a sample that has the BatchNorm's running statistics,
    averaged over the groups. The share says how much of a sample's scale gets through the norm: if
    the deviation of the input grows by 1 %, that of the output grows by this share of 1 %.

    Args:
        norm: The norm.
        anatomy: The recorded network, with the statistics of the norms that were replaced.

    Returns:
        The share, or None unless the norm is a GroupNorm in the place of a BatchNorm.
    """
    # The running statistics of the BatchNorm, and the edit of the plan that replaced it.
    original = anatomy.original_path(norm.path)
    record = anatomy.provenance
    mean, var = (record.norms.get(f"{original}.running_{name}") for name in ("mean", "var"))
    placed = _group_norm_edit(record.plan, original)
    if placed is None or not norm.site.averages or mean is None or var is None:
        return None

    variance = var.double().mean()
    # Where the GroupNorm was given an eps, its input is shifted so that each channel has mean 0.
    # Elsewhere the channels' means differ, which adds to the variance of a group.
    if "eps" not in placed.args:
        means = mean.double().view(placed.args["groups"], -1)
        variance = variance + means.var(1, correction=0).mean()

    eps = cast(float, norm.site.module.eps)
    return eps / (eps + float(variance))


def _group_norm_edit(plan: Plan, path: str) -> Edit | None:
    """Return the last edit of a plan that put a GroupNorm at a path, or None if there is none.

    Args:
        plan: The plan of all conversions of a network.
        path: The dotted path at which the replaced norm stood.
    """
    last_edit = None
    for step in plan.steps:
        for edit in step.edits:
            if edit.path == path and edit.layer == "GroupNorm":
                last_edit = edit
    return last_edit


def _range(values: Tensor | None) -> list[float] | None:
    """Return [smallest value, largest value] of a tensor, or None if there is no tensor."""
    if values is None or not values.numel():
        return None
    return [values.min().item(), values.max().item()]


def alphas_of(step: Step) -> dict[str, float | None]:
    """Return the values with which a step places learned scalars, by the paths that they stand at.

    A scalar may be placed behind the layer that replaces a module. A value is None if the plan
    states no number.
    """
    alphas: dict[str, float | None] = {}
    for edit in step.edits:
        placed = [(edit.layer, edit.args), *((then.layer, then.args) for then in edit.then)]
        for layer, args in placed:
            if layer == "Scale":
                alphas[edit.path] = args.get("alpha")
    return alphas


def of_step(step: Step, builder: PlanBuilder | None = None) -> Body:
    """Return a dict that describes a step of a plan.

    `left` (the norms that stay), `renames` and `report` are empty here. `of_conversion` fills them
    in.

    Args:
        step: The step.
        builder: What planned the step, which has the outcome for each norm, and notes. None if the
            step was planned earlier.
    """
    # Without a builder there are no outcomes and no notes.
    outcomes = getattr(builder, "outcomes", {})
    return {
        "scheme": step.scheme,
        "options": step.options,
        "edits": [dataclasses.asdict(edit) for edit in step.edits],
        "verdicts": {path: str(outcome) for path, outcome in outcomes.items()},
        "outcomes": counts(outcomes.values()),
        "left": {},
        "alphas": alphas_of(step),
        "notes": list(getattr(builder, "notes", ())),
        "renames": [],
        "report": None,
    }


def of_conversion(conversion: Conversion, scheme: str = "") -> list[Body]:
    """Return a dict for each step of a conversion. The last dict also has what was measured.

    Args:
        conversion: The conversion.
        scheme: The name of a conversion that has no step, such as `unfold`.
    """
    # The plan holds the steps of all conversions since the original architecture. The last
    # `conversion.steps` of them are this conversion's.
    new_steps = conversion.plan.steps[-conversion.steps :]
    if not new_steps:
        new_steps = (Step(scheme, {}, ()),)

    bodies = [of_step(step) for step in new_steps]
    norms_left = _norm_classes(conversion.model)
    bodies[-1] |= {
        "verdicts": {path: str(outcome) for path, outcome in conversion.outcomes.items()},
        "outcomes": counts(conversion.outcomes.values()),
        "left": {f"{kind} that stay": count for kind, count in norms_left.items()},
        "notes": list(conversion.notes),
        "renames": [list(pair) for pair in conversion.renames],
        "report": of_report(conversion.report),
    }
    return bodies


def of_report(report: Report) -> Body:
    """Return the report of a conversion, with the errors that were measured, as a dict.

    `within` is added to each error at the outputs: whether it is within the tolerance.

    Args:
        report: The report of a conversion. `kept` was measured on images, everything else on noise.
    """
    body = dataclasses.asdict(report) | {"verdict": report.verdict}
    if report.kept is not None:
        body["kept"] |= {"least": report.kept.least, "said": str(report.kept)}

    for error in body["logits"]:
        # How often an approximate result gives the same answer to noise says nothing of images.
        if not report.exact:
            error |= {"agreement": None, "answer": "", "axis": None}
        allowed = report.tolerance.get(error["precision"], math.inf)
        error["within"] = bool(error["relative_l2"] <= allowed)
    return body
