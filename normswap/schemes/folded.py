"""The canonical form, for fast inference: convolutions with bias, activations and sums.

W' = s W, b' = s b + t with s = gamma / sqrt(var + eps), t = beta - mean s
(`folding.canonical_form`). LayerNorms keep their standardization; their scale and shift move into
other layers.
Parallel branches that are summed become one convolution, in which a scale per channel is one tap
(`layers.merged`; Ding et al. 2021, arXiv:2101.03697, section 3.3).
"""

from normswap.folding import branches, norm_affine
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Outcome


def plan(anatomy: Anatomy, *, branches: str = "merge") -> PlanBuilder:
    """Return the plan that folds every norm into the layers beside it.

    Args:
        anatomy: The recorded network.
        branches: `merge` or `keep`. It is not read here. With `merge`, one more step of the
            conversion merges branches that are summed (`plan_merged`).
    """
    builder = fold_norms(anatomy)
    # LayerNorms and RMSNorms stay, but their gamma and beta move into the linear layers after them.
    # A LayerScale moves into the linear layer before it.
    norm_affine.move(builder)
    norm_affine.move_layer_scales(builder)
    return builder


def plan_merged(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that merges parallel branches which are summed into one convolution.

    The plan has no edits if the network has no branches that can be merged (`folding.branches`).
    """
    builder = PlanBuilder(anatomy)
    # The convolution into which each other branch is merged, by that branch's path.
    into: dict[str, str] = {}
    for merge in branches.find(builder):
        _merge(builder, merge)
        into.update(dict.fromkeys(merge.others, merge.main))

    # The user reads what becomes of a norm in its outcome. A convolution has none, so a note names
    # the convolutions that are merged.
    merged = [
        f"{path} (into {main})" for path, main in into.items() if path not in builder.outcomes
    ]
    if merged:
        builder.notes.append(
            f"{len(merged)} convolutions are merged into one beside them, and the number 0 stands"
            f" in their place: {', '.join(merged)}"
        )
    return builder


def _merge(builder: PlanBuilder, merge: branches.Branches) -> None:
    """Plan one convolution for all summed branches, and zeros where the other branches stood.

    A scale and shift that follow the sum go into the convolution, too.

    Args:
        builder: The plan in the making.
        merge: The branches of one sum, with the convolution that stays.
    """
    # The convolution that stays absorbs the other branches, and the layer behind the sum if there
    # is one to absorb.
    reads = list(merge.others)
    takes = [Absorption(AbsorbMode.SUM)] * len(merge.others)

    args: Body = {}
    if merge.after is not None:
        reads = [*reads, merge.after]
        takes = [*takes, Absorption(AbsorbMode.AFTER)]
        # The map s x + t behind the sum also multiplies the terms that are the input itself.
        # `Merged` needs their number to make up for that.
        args["skips"] = merge.skips
        builder.remove(merge.after)

    builder.replacements[merge.main] = Edit(merge.main, "Merged", args, tuple(reads), tuple(takes))
    for path in merge.others:
        builder.replace(path, "Zero")
    merged = Outcome(
        "merged with branches", f"merges into {merge.main}, with the branches beside it"
    )

    # Only norms and other affine layers have outcomes, convolutions have none.
    for path in reads:
        if builder.anatomy.site(path).is_affine:
            builder.settle(path, merged)
