"""`normswap decay`: which parameters weight decay applies to."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normswap.analysis import decay_settings
from normswap.cli.options import Json, Model, Opening
from normswap.cli.tables import facts, next_step, show, table
from normswap.plan import Body

if TYPE_CHECKING:  # torch takes a second to import, and --help needs none of it
    from torch import nn

KEYS = (
    "source, policy, groups (name, weight_decay, lr_scale, tensors, values), roles (role, decay, reason, tensors, "
    "values), parameters (path, role, decay, reason), frozen (how many tensors)"
)
EXAMPLES = (
    "decay resnet50",
    "decay demo --policy timm --each",
)
_COLUMNS = ("group", "tensors", "values", "weight decay", "lr scale")


@dataclass(frozen=True)
class ByStructure(Opening):
    """Weights do not matter here."""

    weights: Annotated[
        str,
        typer.Option(metavar="pretrained|random", show_default=False, help="[default: random, unless MODEL is a path]"),
    ] = ""

    def open(self, name: str, *, runs: bool = False) -> nn.Module:
        there = Path(name.removeprefix("local-dir:")).exists()
        weights = self.weights or ("pretrained" if there else "random")
        return Opening.open(replace(self, weights=weights), name, runs=runs)


def run(
    model: Model,
    *,
    policy: Annotated[str, typer.Option(metavar="kim2022|timm|all|weights-only", help="Who decays.")] = "kim2022",
    weight_decay: Annotated[float, typer.Option("--weight-decay", metavar="X", help="Of those who do.")] = 1e-4,
    layer_decay: Annotated[
        float | None, typer.Option(metavar="X", show_default=False, help="Learning rate factor per layer, in (0, 1].")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List every parameter.")] = False,
    opening: ByStructure,
    json: Json = False,
) -> int:
    """Show which parameters weight decay applies to, and why.

    The groups are those of `normswap.param_groups`; kim2022 sorts the gammas by their place in the network (Kim et al.
    2022), timm spares whatever is 1-D.
    """
    decay_settings.check(policy, layer_decay=layer_decay, weight_decay=weight_decay)
    net = opening.open(model)
    from normswap.analysis.weight_decay import param_groups, roles

    assigned = [asdict(one) for one in roles(net, policy)]
    body = {
        "source": model,
        "policy": policy,
        "groups": [
            {
                "name": group["name"],
                "weight_decay": group["weight_decay"],
                "lr_scale": group.get("lr_scale", 1.0),
                "tensors": len(group["params"]),
                "values": sum(parameter.numel() for parameter in group["params"]),
            }
            for group in param_groups(net, weight_decay, policy, layer_decay=layer_decay)
        ],
        "roles": _by_role(net, assigned),
        "parameters": assigned,
        "frozen": sum(not parameter.requires_grad for parameter in net.parameters()),
    }
    show(body, json, lambda found: _print(found, each=each))
    return 0


def _by_role(model: nn.Module, assigned: list[Body]) -> list[Body]:
    from normswap.analysis.weight_decay import ROLES

    rows: dict[str, Body] = {}
    for one in sorted(assigned, key=lambda one: ROLES.index(one["role"])):
        new = {name: one[name] for name in ("role", "decay", "reason")} | {"tensors": 0, "values": 0}
        row = rows.setdefault(f"{one['role']} {one['decay']}", new)
        row["tensors"] += 1
        row["values"] += model.get_parameter(one["path"]).numel()
    return [*rows.values()]


def _print(body: Body, *, each: bool) -> None:
    """Which parameters decay, by role, or one by one."""
    facts(("network", body["source"]), ("policy", body["policy"]), ("frozen tensors", body["frozen"] or None))
    groups = [(g["name"], g["tensors"], f"{g['values']:,}", f"{g['weight_decay']:g}", g["lr_scale"])
              for g in body["groups"]]  # fmt: skip
    table("Groups", _COLUMNS, groups, right=_COLUMNS[1:])
    roles = [(r["role"], r["tensors"], f"{r['values']:,}", _yes(r), r["reason"]) for r in body["roles"]]
    table("Roles", ("role", "tensors", "values", "decays", "why"), roles, right=("tensors", "values"))
    if each:
        rows = [(one["path"], one["role"], _yes(one)) for one in body["parameters"]]
        table("Parameters", ("parameter", "role", "decays"), rows)
    next_step("finetune", body["source"], "--recipe", "RECIPE", "--data", "IMAGES")


def _yes(one: Body) -> str:
    return "yes" if one["decay"] else "no"
