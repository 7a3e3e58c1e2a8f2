"""What the commands say about networks, conversions and schemes: plain JSON-able records, which `cli` lays out."""

from __future__ import annotations

import dataclasses
import inspect as python
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from normswap import schemes
from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.outcomes import counts
from normswap.graph.inspection import Anatomy, Block, Norm
from normswap.layers import affine
from normswap.layers.scalars import Scale
from normswap.plan import Body, Outcome, Step
from normswap.schemes.parts import norm_sites
from normswap.surgery import unfolding
from normswap.surgery.carrying_out import Conversion
from normswap.surgery.network import Network
from normswap.surgery.report import Report

_ROLES = ("stem", "last", "down", "other", "head")


def of_network(network: Network, source: str) -> Body:
    """The anatomy of a network, every residual block (`blocks`) and every norm (`norm_sites`).

    Raises:
        TraceError: the network cannot be traced.
    """
    model, seen, record = network.module, network.anatomy, network.provenance
    folding = undress(seen)
    roles = Counter(norm.role for norm in seen.norms)
    return {
        "source": source,
        "class": type(model).__name__,
        "architecture": record.arch.name if record.arch else None,
        "parameters": parameters(model),
        "input_size": list(network.input_size),
        "plan": [step.scheme for step in record.plan.steps],
        "classifier": seen.classifier,
        "dropout": seen.dropout,
        "norms": dict(Counter(norm.kind for norm in seen.norms)),
        "roles": {role: roles[role] for role in _ROLES},
        "blocks": [_block(block, seen) for block in seen.blocks],
        "sites": _sites(seen, folding),
        "refusals": [{"path": path, "reason": why} for path, why in seen.refusals],
    }


def parameters(model: nn.Module) -> int:
    """Number of trainable values, shared ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def norms(model: nn.Module) -> int:
    """Number of normalization layers."""
    return sum(affine.is_norm(module) for module in model.modules())


def _block(block: Block, seen: Anatomy) -> Body:
    fields = ("path", "stage", "skip", "order", "tail", "norms", "last", "gate", "drop_path")
    tail = seen.traced.modules[block.tail] if block.tail else None
    alpha = tail.alpha.item() if isinstance(tail, Scale) else None
    return {name: getattr(block, name) for name in fields} | {"norms": list(block.norms), "alpha": alpha}


def _site(norm: Norm, seen: Anatomy, folding: Draft) -> Body:
    module = seen.traced.modules[norm.path]
    mean, std = affine.moments(module) if affine.has_moments(module) else norm_sites.kept_moments(seen, norm.path)
    refused = folding.refusals.get(norm.path) or (None if affine.is_affine_norm(module) else affine.refusal(module))
    return {
        "path": norm.path,
        "class": norm.kind,
        "channels": norm.channels,
        "role": norm.role,
        "block": norm.block,
        "mean": _range(mean),
        "std": _range(std),
        "folding": str(folding.outcomes[norm.path]) if norm.path in folding.outcomes else None,
        "refused": refused,
    }


def _sites(seen: Anatomy, folding: Draft) -> list[Body]:
    """Every norm in order of the forward pass; where some are gone, in the order of the modules."""
    there, gone = [_site(norm, seen, folding) for norm in seen.norms], [*_gone(seen)]
    order = list(seen.traced.modules)
    return sorted([*there, *gone], key=lambda site: order.index(site["path"])) if gone else there


def _gone(seen: Anatomy) -> Iterator[Body]:
    """The sites whose norms are gone, with what the network carries of them and the class of what sits there now."""
    there = {norm_sites.site_of(seen, norm.path) for norm in seen.norms}
    for site in norm_sites.sites(seen):
        path = norm_sites.seat_of(seen, site)
        now = seen.traced.modules.get(path)
        if site in there or now is None:
            continue
        mean, std = norm_sites.kept_moments(seen, site)
        yield {
            "path": path,
            "class": type(now).__name__,
            "channels": len(mean) if mean is not None else None,
            "role": None,
            "block": next((b.path for b in reversed(seen.blocks) if path.startswith(f"{b.path}.")), None),
            "mean": _range(mean),
            "std": _range(std),
            "folding": None,
            "refused": None,
        }


def _range(values: Tensor | None) -> list[float] | None:
    return None if values is None or not values.numel() else [values.min().item(), values.max().item()]


def of_step(step: Step, draft: Draft | None = None) -> Body:
    """One step of a plan, not carried out."""
    return {
        "scheme": step.scheme,
        "options": step.options,
        "edits": [dataclasses.asdict(edit) for edit in step.edits],
        **_outcomes(draft.outcomes if draft else {}),
        "alphas": {edit.path: edit.args.get("alpha") for edit in step.edits if edit.layer == "Scale"},
        "notes": list(draft.notes) if draft else [],
        "renames": [],
        "report": None,
    }


def _outcomes(found: Mapping[str, Outcome]) -> Body:
    """What became of each norm, in words, and how many went which way."""
    return {"verdicts": {path: str(one) for path, one in found.items()}, "outcomes": counts(found.values())}


def of_conversion(done: Conversion, scheme: str = "") -> list[Body]:
    """The steps of a conversion, the last with what was found; one without a plan (`unfold`) goes by its name."""
    *before, last = done.plan.steps[-done.steps :] or [Step(scheme, {}, ())]
    body = of_step(last) | {
        **_outcomes(done.outcomes),
        "notes": list(done.notes),
        "renames": [list(pair) for pair in done.renames],
        "report": of_report(done.report),
    }
    return [*(of_step(step) for step in before), body]


def of_report(report: Report) -> Body:
    """A report, with its verdict on each measurement (`within`); what approximate ones answer on noise is no news."""
    body = report.to_dict()
    if report.kept is not None:
        body["kept"]["least"] = report.kept.least
    for error in body["logits"]:
        if not report.exact:
            error["agreement"] = None
        error["within"] = bool(error["relative_l2"] <= report.tolerance.get(error["precision"], math.inf))
    return body


def of_schemes(names: Sequence[str] = ()) -> Iterator[Body]:
    """What schemes are, where they are from, their options: those of these names, or every one.

    Raises:
        OptionError: there is no scheme of a name.
    """
    for name in names or [*schemes.names(), "unfold"]:
        yield _unfold() if name == "unfold" else _scheme(name)


def _scheme(name: str) -> Body:
    scheme = schemes.get(name)
    options = scheme.defaults
    return {
        "name": name,
        "summary": scheme.summary,
        "paper": scheme.paper,
        "options": options,
        "exact_only_with": [option for option in options if not scheme.is_exact({**options, option: "another"})],
        "exact": scheme.is_exact(options),
    }


def _unfold() -> Body:
    first = (python.getdoc(unfolding) or "").split("\n")[0]
    return {"name": "unfold", "summary": first, "paper": "", "options": {}, "exact_only_with": [], "exact": True}


def plain(value: object) -> object:
    """`value` as strict JSON has it: numbers that are not finite become null."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
