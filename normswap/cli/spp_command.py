"""`normswap spp` and `normswap decay`: how the signal propagates, what decays. `cli` imports this file for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from normswap.cli import progress, render
from normswap.cli.app import app
from normswap.cli.options import (
    ArchArgs,
    ArchName,
    BatchSize,
    InChans,
    Json,
    Model,
    NumClasses,
    Split,
    Weights,
    Workers,
)
from normswap.errors import OptionError
from normswap.storage import atomic_write

Body = dict[str, Any]
STATISTICS = ("auto", "batch", "running")


@dataclass(frozen=True)
class Look:
    """What `spp` looks at, and with what.

    Args:
        images: how to load labelled images (`commands.Images`), or None for noise.
        statistics: which statistics BatchNorm uses: `batch`, `running`, or `auto`: `batch` for random weights.
        asleep: leave the branches that a fresh network starts with zeroed.
        bare: show every network without its norms too.
    """

    images: Any
    samples: int
    seed: int
    side: int | None
    statistics: str
    asleep: bool
    bare: bool


@app.command("spp")
def spp(
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", show_default=False, help="As in `inspect`.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", show_default=False, help="Picture: .png, .svg ...")
    ] = None,
    table: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", show_default=False, help="Table, a row per block.")
    ] = None,
    data: Annotated[str, typer.Option(metavar="PATH|noise", help="Images, as in `evaluate`, or N(0, 1).")] = "noise",
    samples: Annotated[int, typer.Option(min=1, metavar="N", help="Take this many images.")] = 16,
    side: Annotated[
        int | None, typer.Option(min=8, metavar="N", show_default=False, help="Noise of N x N [default: the model's].")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the noise, and of random weights.")] = 0,
    statistics: Annotated[
        str,
        typer.Option(metavar="auto|batch|running", help="Of BatchNorm; auto: those of the batch for random weights."),
    ] = "auto",
    asleep: Annotated[
        bool, typer.Option("--asleep", help="With random weights: leave zeroed last gammas and gains at 0.")
    ] = False,
    bare: Annotated[bool, typer.Option("--bare", help="Show the networks without their norms as well.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
    batch_size: BatchSize = 16,
    workers: Workers = 2,
    split: Split = "validation",
    weights: Weights = "pretrained",
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Plot how the signal propagates: mean and variance block by block.

    Squared mean and variance after every residual sum, and the variance of the branch; several networks in one figure.
    For NF networks the analytic variance is drawn with them. With --weights random, branches that timm starts from
    zero are switched on, as in the paper's plots (Brock et al. 2021).

    The keys of --json: curves (by network: block, stage, depth, mean_sq, variance, branch_variance, added_variance),
    expected (analytic variances, by network), inputs (what each network was run on) and files.
    """
    from normswap.cli import commands

    if statistics not in STATISTICS:
        raise OptionError(f"--statistics {statistics!r} is none of {', '.join(STATISTICS)}")
    if output is not None:
        from normswap.analysis.plots import check_format

        check_format(output)
    for file in (output, table):
        if file is not None:
            atomic_write.claim(file, force=force)
    rest = (weights, arch, arch_arg or [], num_classes, in_chans)
    sources = [commands.Source(name, *rest) for name in models]
    images = None if data == "noise" else commands.Images(data, batch_size, workers, samples, split)
    look = Look(images, samples, seed, side, statistics, asleep, bare)
    body = _spp(sources, look, output, table)
    commands.show(body, json, _signal_tables)
    return 0


def _spp(sources: Sequence[Any], look: Look, output: Path | None, table: Path | None) -> Body:
    import torch

    from normswap.analysis import plots
    from normswap.analysis.signal_propagation import Point, awake, expected_nf, signal, unnormalized
    from normswap.graph.inspection import inspect

    curves: dict[str, list[Point]] = {}
    expected: dict[str, list[float]] = {}
    inputs: dict[str, str] = {}
    for source in sources:
        torch.manual_seed(look.seed)
        model, fresh = source.open(), source.weights == "random"
        batches, what = _batches(model, look)
        model = awake(model) if fresh and not look.asleep else model
        batch = look.statistics == "batch" or (look.statistics == "auto" and fresh)
        name = _label(source.name, curves)
        with progress.working(f"measuring {name}"):
            seen = inspect(model)
            curves[name], inputs[name] = signal(model, batches, batch_statistics=batch, seen=seen), what
            if look.bare and seen.norms:
                bare = _label(f"{name}, norms removed", curves)
                curves[bare], inputs[bare] = signal(unnormalized(model), batches), what
        if (known := expected_nf(seen)) is not None:
            expected[name] = known
    overlay = {f"{name}, expected": values for name, values in expected.items()}
    files = [plots.plot(curves, output, expected=overlay)] if output else []
    files += [plots.write_csv(curves, table)] if table else []
    return {**plots.to_json(curves, expected), "inputs": inputs, "files": [str(file) for file in files]}


def _batches(model: Any, look: Look) -> tuple[list[Any], str]:
    import torch

    from normswap.models import network_input

    if look.images is not None:
        loaded = [x for x, _ in look.images.loader(model)]
        return loaded, f"{sum(len(x) for x in loaded)} images of {look.images.data}"
    chans, height, width = network_input.size(model)
    size = (chans, look.side or height, look.side or width)
    x = torch.randn(look.samples, *size, generator=torch.Generator().manual_seed(look.seed))
    return [x], f"{look.samples} x N(0, 1) noise, {size[1]} x {size[2]}, seed {look.seed}"


def _label(name: str, taken: dict[str, Any]) -> str:
    path = Path(name)
    short = path.resolve().name if path.exists() else name.rsplit("/", 1)[-1]
    return (
        short if short not in taken else next(f"{short} ({i})" for i in range(2, 1000) if f"{short} ({i})" not in taken)
    )


@app.command("decay")
def decay(
    model: Model,
    policy: Annotated[str, typer.Option(metavar="kim2022|timm|all|weights-only", help="Who decays.")] = "kim2022",
    weight_decay: Annotated[float, typer.Option("--weight-decay", metavar="X", help="Of those who do.")] = 1e-4,
    layer_decay: Annotated[
        float | None, typer.Option(metavar="X", show_default=False, help="Learning rate factor per layer, in (0, 1].")
    ] = None,
    each: Annotated[bool, typer.Option("--each", help="List every parameter.")] = False,
    weights: Annotated[
        str | None,
        typer.Option(metavar="pretrained|random", show_default=False, help="[default: random, unless MODEL is a path]"),
    ] = None,
    arch: ArchName = None,
    arch_arg: ArchArgs = None,
    num_classes: NumClasses = None,
    in_chans: InChans = None,
    json: Json = False,
) -> int:
    """Show which parameters weight decay applies to, and why.

    The groups are those of `normswap.param_groups`; kim2022 sorts the gammas by their place in the network (Kim et al.
    2022), timm spares whatever is 1-D.

    The keys of --json: source, policy, groups (name, weight_decay, lr_scale, tensors, values), roles (role, decay,
    reason, tensors, values), parameters (path, role, decay, reason) and frozen (how many tensors).
    """
    from normswap.cli import commands

    weights = weights or ("pretrained" if Path(model.removeprefix("local-dir:")).exists() else "random")
    source = commands.Source(model, weights, arch, arch_arg or [], num_classes, in_chans)
    body = _decay(source, policy, weight_decay, layer_decay)
    commands.show(body if json else {**body, "each": each}, json, _decay_tables)
    return 0


def _decay(source: Any, policy: str, weight_decay: float, layer_decay: float | None) -> Body:
    from normswap.analysis.weight_decay import POLICIES, ROLES, param_groups, roles

    if policy not in POLICIES:
        raise OptionError(f"--policy {policy!r} is none of {', '.join(POLICIES)}")
    model = source.open()
    groups = param_groups(model, weight_decay, policy, layer_decay=layer_decay)
    sizes = {path: parameter.numel() for path, parameter in model.named_parameters()}
    rows: dict[tuple[str, bool], Body] = {}
    assigned = roles(model, policy)
    for one in assigned:
        new: Body = {"role": one.role, "decay": one.decay, "reason": one.reason, "tensors": 0, "values": 0}
        row = rows.setdefault((one.role, one.decay), new)
        row["tensors"] += 1
        row["values"] += sizes[one.path]
    return {
        "source": source.name,
        "policy": policy,
        "groups": [
            {
                **{key: group[key] for key in ("name", "weight_decay")},
                "lr_scale": group.get("lr_scale", 1.0),
                "tensors": len(group["params"]),
                "values": sum(parameter.numel() for parameter in group["params"]),
            }
            for group in groups
        ],
        "roles": sorted(rows.values(), key=lambda row: ROLES.index(row["role"])),
        "parameters": [asdict(one) for one in assigned],
        "frozen": sum(not parameter.requires_grad for parameter in model.parameters()),
    }


def _decay_tables(body: Body) -> None:
    """Which parameters decay, by role, or one by one."""
    out = render._out()
    facts = (("network", body["source"]), ("policy", body["policy"]), ("frozen tensors", body["frozen"] or None))
    out.print(render._facts(facts))
    groups = [(g["name"], g["tensors"], f"{g['values']:,}", f"{g['weight_decay']:g}", g["lr_scale"])
              for g in body["groups"]]  # fmt: skip
    columns = ("group", "tensors", "values", "weight decay", "lr scale")
    out.print(render._table("Groups", columns, groups, right=",".join(columns[1:])))
    roles = [(r["role"], r["tensors"], f"{r['values']:,}", "yes" if r["decay"] else "no", r["reason"])
             for r in body["roles"]]  # fmt: skip
    out.print(render._table("Roles", ("role", "tensors", "values", "decays", "why"), roles, right="tensors,values"))
    if body["each"]:
        each = [(one["path"], one["role"], "yes" if one["decay"] else "no") for one in body["parameters"]]
        out.print(render._table("Parameters", ("parameter", "role", "decays"), each))


def _signal_tables(body: Body) -> None:
    """The signal at every residual block, one table per network."""
    out = render._out()
    columns = ("block", "squared mean", "variance", "expected", "branch variance", "added variance")
    for name, points in body["curves"].items():
        expected = body["expected"].get(name) or [None] * len(points)
        rows = [(p["block"], p["mean_sq"], p["variance"], value, p["branch_variance"], p["added_variance"])
                for p, value in zip(points, expected, strict=True)]  # fmt: skip
        out.print(render._table(f"{name}, on {body['inputs'][name]}", columns, rows, right=",".join(columns[1:])))
    for file in body["files"]:
        render._line(out, f"written to {file}")
