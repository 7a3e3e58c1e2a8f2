"""`normswap decay`: which parameters weight decay applies to."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from normswap.cli.options import Json, Model, Opening
from normswap.cli.tables import facts, show, table
from normswap.plan import Body

KEYS = "source, policy, roles, parameters (path, role, decay, reason), frozen (how many tensors)"
EXAMPLES = ("decay resnet50", "decay demo --policy timm", "decay demo --policy weight,gamma_last")


def run(
    model: Model,
    *,
    policy: Annotated[
        str, typer.Option(metavar="kim2022|timm|all|weights-only|ROLES", help="Who decays.")
    ] = "kim2022",
    opening: Opening,
    json: Json = False,
) -> int:
    """Show which parameters weight decay applies to, and why.

    `normswap.param_groups` makes the groups for an optimizer; kim2022 sorts the gammas by their
    place in the network (Kim et al. 2022), timm spares whatever is 1-D. --json lists every
    parameter. A MODEL given by name is built with random weights, as their values do not matter.
    """
    # Nothing is downloaded, as only names and shapes count.
    is_path = Path(model.removeprefix("local-dir:")).exists()
    without_weights = opening
    if opening.weights == "pretrained" and not is_path:
        without_weights = replace(opening, weights="random")
    net = without_weights.open(model)

    from torch import nn

    from normswap.analysis.weight_decay import POLICIES, by_role, roles

    # A policy that is no name lists roles whose parameters decay, as in weight,gamma_last.
    assignments = roles(net, policy if policy in POLICIES else policy.split(","))
    # A class may have a method `parameters` of its own, so torch's is called.
    body = {
        "source": model,
        "policy": policy,
        "roles": by_role(net, assignments),
        "parameters": [asdict(assignment) for assignment in assignments],
        "frozen": sum(not parameter.requires_grad for parameter in nn.Module.parameters(net)),
    }
    # The next step that is printed: a training with this policy.
    words = opening.words(model)
    show(body, json, _print, "finetune", *words, "--recipe", "RECIPE", "--data", "IMAGES")
    return 0


def _print(body: Body) -> None:
    """Print the policy of weight decay, and a table of the roles of parameters."""
    facts(
        ("network", body["source"]),
        ("policy", body["policy"]),
        ("frozen tensors", body["frozen"] or None),
    )

    columns = ("role", "decay", "tensors", "values", "reason")
    rows = []
    for row in body["roles"]:
        shown = {**row, "decay": "yes" if row["decay"] else "no"}
        rows.append([shown[column] for column in columns])
    table("Roles", columns, rows, right=columns[2:4])
