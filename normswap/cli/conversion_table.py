"""Printing of what `convert` has done, or with a dry run would do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from normswap.cli.proof_table import proof, verdict
from normswap.cli.tables import cell, counts, facts, few, line, listing, next_step, table
from normswap.plan import AbsorbMode, Body
from normswap.schemes import changed, get

_WORD = 15  # a longer text among a layer's arguments has a letter for each channel


def done(body: Body) -> None:
    """Print what was done, or with a dry run would be done."""
    for step in body["steps"]:
        _print_step(body["source"], step, dry=body["output"] is None)
    for verb, what in (("plan saved to", "plan"), ("written to", "output")):
        if body[what]:
            line(f"{verb} {body[what]}")
    if not body["output"]:
        line("dry run: no network was written")
    else:
        next_step("verify", body["output"], "--data", "IMAGES")


def _verdict(scheme: str, report: Body) -> str:
    """The one line that says what came of it; `unfold`, which is exact, is no scheme that could fit values."""
    return verdict(report, fits=not report["exact"] and get(scheme).fit is not None)


def _print_step(source: str, step: Body, *, dry: bool) -> None:
    options = ", ".join(f"{name} {value}" for name, value in changed(step["scheme"], step["options"]).items())
    layers = Counter(edit["layer"] for edit in step["edits"])
    facts(
        (
            "would convert" if dry else "converted",
            f"{source} to {step['scheme']}" + (f" ({options})" if options else ""),
        ),
        ("result", _verdict(step["scheme"], step["report"]) if step["report"] else ""),
        ("norms", counts(step["outcomes"])),
        ("edits", f"{sum(layers.values())} ({counts(layers)})" if layers else ""),
    )
    if dry:
        table("Plan (--json has all)", ("path", "layer", "arguments", "reads"), map(_edit_row, step["edits"]))
    elif step["alphas"]:
        table("Scalars", ("path", "alpha"), step["alphas"].items(), right=("alpha",))
    listing("note", step["notes"])
    listing("renamed", (f"{old} -> {new}" for old, new in step["renames"]))
    if step["report"]:
        proof(step["report"])


def _edit_row(edit: Body) -> Sequence[str]:
    said = {name: few(value) if isinstance(value, list) else cell(value) for name, value in edit["args"].items()}
    args = [
        f"{name} {text}" for name, text in said.items() if len(text) <= _WORD or isinstance(edit["args"][name], list)
    ]
    args += ["..."] * (len(args) < len(said))
    ways = [_absorbed(one) for one in edit["takes"]] or [""] * len(edit["reads"])
    reads = ", ".join(f"{way} {path}".strip() for way, path in zip(ways, edit["reads"], strict=True))
    return edit["path"], edit["layer"], ", ".join(args), reads


def _absorbed(one: Body) -> str:
    """A way, and the channels it is about: `after 16:32`."""
    part = one["part"]
    return AbsorbMode(one["way"]).value + (f" {part[0]}:{part[1]}" if part else "")
