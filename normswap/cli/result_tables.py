"""Conversions, proofs and exported files, as several commands print them."""

from collections.abc import Mapping

from normswap.cli.tables import counts, facts, listing, size, small, table, text
from normswap.plan import Body
from normswap.schemes import changed, get

_COLUMNS = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")
TOO_LITTLE = "FAILED: they agree on less than --min-kept asks"
CHECKED_ON_NOISE = "on noise only; give --data IMAGES to check it on photographs"


def print_conversion(body: Body) -> None:
    """Print every step, and where the result is."""
    for step in body["steps"]:
        print_step(body["source"], step, dry=body["output"] is None)
    if body["plan"]:
        print(f"plan saved to {body['plan']}")
    if body["output"]:
        print(f"written to {body['output']}")
    else:
        print("dry run: no network was written")


def print_step(source: str, step: Body, *, dry: bool) -> None:
    """Print one step; `dry`: it was planned, not carried out."""
    options = ", ".join(f"{name} {value}" for name, value in changed(step["scheme"], step["options"]).items())
    report = step["report"]
    facts(
        (
            "would convert" if dry else "converted",
            f"{source} to {step['scheme']}" + (f" ({options})" if options else ""),
        ),
        # `unfold`, which is exact, is no scheme that could fit values.
        ("result", report and verdict(report, fits=not report["exact"] and get(step["scheme"]).fit is not None)),
        ("norms", counts(step["outcomes"]) or counts(step["left"])),
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


def verdict(body: Body, *, fits: bool = False) -> str:
    """Say what the result keeps of its source; `fits`: whether the scheme can fit its values to images."""
    if body["exact"]:
        last = body["logits"][-1]
        measured = f"relative L2 {small(last['relative_l2'])} in {last['precision']}"
        allowed = f"allowed {small(body['tolerance'].get(last['precision']))}"
        is_kept = all(error["within"] for error in body["logits"])
        return f"{'kept exactly' if is_kept else 'FAILED: not the function of the source'}: {measured}, {allowed}"
    if body.get("kept"):
        return f"kept: {body['kept']['said']}"
    if body["unmeasured"]:
        return f"not known: {body['unmeasured']}"
    remedy = ": pass --calibrate IMAGES (25 or more, no labels needed) to fit and measure it"
    return f"not known{remedy if fits else ''}"


def proof(body: Body) -> None:
    """Print the measurements, one row per precision and input size; `verdict` says what they mean."""
    exact = body["exact"]
    rows: list[list[object]] = []
    for error in body["logits"]:
        row = [error["precision"], size(error["size"]), small(error["relative_l2"]), small(error["largest"])]
        if exact:
            same = "" if error["agreement"] is None else f"{100 * error['agreement']:.4g} %"
            outcome = "ok" if error["within"] else "FAILED"
            row += [same, small(body["tolerance"].get(error["precision"])), outcome]
        rows.append(row)
    title = "Verification on {}" if exact else "Distance from the source on {}"
    table(title.format(body["inputs"]), _COLUMNS[: len(rows[0])], rows, right=_COLUMNS[2:6])
    # A classifier's scores, on axis 1, need no word.
    answers = [error["answer"] for error in body["logits"] if error["answer"] and error["axis"] != 1]
    listing("agreement", dict.fromkeys(f"by {answer}" for answer in answers))
    listing("warning", body["vacuous"], most=5)


def same(figures: Body) -> str:
    """How many answers of a file are those of its network."""
    if figures["agreement"] is None:
        return ""
    answers, unit = figures["answers"], figures["unit"]
    of = "" if unit == "images" else f" {unit} of {figures['count']} images"
    return f"{round(figures['agreement'] * answers)} of {answers}{of} ({figures['inputs']})"


def top1(figures: Body) -> str:
    """The accuracies of network and file, on labelled images."""
    if figures["top1"] is None:
        return ""
    source, result = figures["source_top1"], figures["top1"]
    return f"{source:.2f} % -> {result:.2f} % ({result - source:+.2f} points), on {figures['count']} images"


def operators(nodes: Mapping[str, int] | None) -> str:
    """How many there are, and of each kind."""
    if not nodes:
        return ""
    return f"{sum(nodes.values())}: {counts(nodes)}"


def described(body: Body) -> None:
    """A file in a few lines, and what its sidecar says of what it takes and gives."""
    noted, sidecar = body["metadata"], body["sidecar"]
    if isinstance(figures := sidecar.get("checked"), dict):
        distance = f"relative L2 {small(figures['relative_l2'])}, allowed {small(figures['tolerance'])}"
        checked = f"{distance}; {figures['count']} samples, {figures['inputs']}"
        sidecar = {**sidecar, "checked": checked, "agreement": same(figures), "top-1": top1(figures)}
    missing = "`normswap export` did not write it: nothing says how images are prepared for it"
    facts(
        ("file", f"{body['source']} ({body['bytes'] / 1e6:.1f} MB)"),
        ("format", body["format"]),
        ("operators", operators(body["nodes"])),
        ("made from", " ".join(dict.fromkeys(noted[key] for key in ("architecture", "source") if noted.get(key)))),
        *((name, text(value)) for name, value in sidecar.items()),
        ("note", None if sidecar else missing),
    )
