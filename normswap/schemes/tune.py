"""Tune mode: frozen statistics, and a live gamma that scales the convolution's weight instead of its output.

W' = gamma / sqrt(var + eps) W and b' = beta + gamma / sqrt(var + eps) (b - mean), made anew at each step: training as
stable as with BatchNorm in eval mode, nearly as cheap as folded. A norm that no plain 2-D convolution can take in keeps
frozen statistics in its seat, and learns gamma and beta there. What is lost: the statistics no longer follow the data.
"""

from __future__ import annotations

from torch import nn

from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.outcomes import KEEPS_STATISTICS
from normswap.graph.inspection import Anatomy
from normswap.layers import affine, reparametrized
from normswap.layers.placeholders import Vacant
from normswap.plan import Outcome, Way
from normswap.schemes import Scheme
from normswap.schemes.parts.norm_sites import dress_in_norms


def plan(anatomy: Anatomy) -> Draft:
    draft = dress_in_norms(anatomy, "EvalNorm", _keep_in_its_seat)
    modules = anatomy.traced.modules
    # what folds back into one plain convolution can scale its weight instead
    for path, conv in _folding(anatomy).items():
        seat = draft.seats.get(path)
        plain = reparametrized.plain_class(modules[conv]) is nn.Conv2d and not reparametrized.is_stuck(modules[conv])
        if seat is None or not plain or (conv in draft.takes and draft.takes[conv].layer != "Folded"):
            continue
        take = draft.take(conv)
        take.layer, take.extra = "Tuned", dict(seat.args)
        take.add(path, Way.NORM)
        draft.vacate(path)
        draft.settle(path, Outcome("scale a weight", f"scales the weight of {conv}"))
    return draft


def _keep_in_its_seat(draft: Draft, path: str, module: nn.Module) -> None:
    draft.seat(path, "EvalNorm")
    draft.settle(path, KEEPS_STATISTICS)


def _folding(anatomy: Anatomy) -> dict[str, str]:
    """The convolution into which each norm would fold, or was folded, as the only one after it."""
    modules = anatomy.traced.modules
    taken = {conv: [read for read, one in take.reads if one.way is Way.AFTER and affine.is_batchnorm(modules[read])]
             for conv, take in undress(anatomy).takes.items()}  # fmt: skip
    for edit in (edit for step in anatomy.provenance.plan.steps for edit in step.edits):
        after = [read for read, one in edit.taken if one.way in (Way.AFTER, Way.NORM)]
        lost = [read for read in after if isinstance(modules.get(read), Vacant)]
        taken.setdefault(edit.path, []).extend(path for path in lost if path not in taken.get(edit.path, ()))
    found: dict[str, list[str]] = {}
    for conv, paths in taken.items():
        if len(paths) == 1 and conv in modules:
            found.setdefault(paths[0], []).append(conv)
    return {path: convs[0] for path, convs in found.items() if len(convs) == 1}


SCHEME = Scheme(
    plan,
    paper="You et al. 2023, Efficient ConvBN Blocks, arXiv:2305.11624, section 3.3",
)
