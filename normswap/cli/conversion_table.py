"""Printing of what `convert` has done, or with a dry run would do."""

from __future__ import annotations

from collections import Counter

from normswap.cli.proof_table import proof, verdict
from normswap.cli.tables import counts, facts, listing, next_step, table, text
from normswap.plan import Body
from normswap.schemes import changed, get


def print_conversion(body: Body) -> None:
    """Print every step, and where the result is."""
    for step in body["steps"]:
        print_step(body["source"], step, dry=body["output"] is None)
    if body["plan"]:
        print(f"plan saved to {body['plan']}")
    if body["output"]:
        print(f"written to {body['output']}")
        next_step("verify", body["output"], "--data", "IMAGES")
    else:
        print("dry run: no network was written")


def print_step(source: str, step: Body, *, dry: bool) -> None:
    """Print one step; `dry`: it was planned, not carried out."""
    options = ", ".join(f"{name} {value}" for name, value in changed(step["scheme"], step["options"]).items())
    layers = Counter(edit["layer"] for edit in step["edits"])
    report = step["report"]
    facts(
        (
            "would convert" if dry else "converted",
            f"{source} to {step['scheme']}" + (f" ({options})" if options else ""),
        ),
        # `unfold`, which is exact, is no scheme that could fit values.
        ("result", report and verdict(report, fits=not report["exact"] and get(step["scheme"]).fit is not None)),
        ("norms", counts(step["outcomes"])),
        ("edits", f"{sum(layers.values())} ({counts(layers)})" if layers else ""),
    )
    if dry:
        edits = [(edit["path"], edit["layer"], text(edit["args"]), ", ".join(edit["reads"])) for edit in step["edits"]]
        table("Plan (--json has all)", ("path", "layer", "arguments", "reads"), edits)
    elif step["alphas"]:
        table("Scalars", ("path", "alpha"), step["alphas"].items(), right=("alpha",))
    listing("note", step["notes"])
    listing("renamed", (f"{old} -> {new}" for old, new in step["renames"]))
    if report:
        proof(report)
