"""SkipInit whose scalars start from a share of what keeps the function."""

import normswap
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.schemes.skipinit import scale_branches


def plan(anatomy: Anatomy, *, share: float = 0.5) -> PlanBuilder:
    """A share of the matched scalars at the end of every residual branch.

    Args:
        share: what the matched scalars are multiplied by.
    """
    builder = scale_branches(anatomy, None)
    for path, edit in builder.replacements.items():
        if "alpha" in edit.args:
            builder.replace(path, edit.layer, **{**edit.args, "alpha": share * edit.args["alpha"]})
    return builder


normswap.register_scheme(
    "halved-skipinit",
    normswap.Scheme(
        plan, paper="an example", exact=lambda options: options["share"] == 1, on_branches=True
    ),
)
