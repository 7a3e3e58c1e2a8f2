"""A report of the proof, as `convert`, `verify` and `recalibrate` print it."""

from __future__ import annotations

from normswap.cli.tables import listing, size, small, table
from normswap.plan import Body

_COLUMNS = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")


def verdict(body: Body, *, fits: bool = False) -> str:
    """Say in a sentence what the result keeps of its source.

    Args:
        body: a report, as `summary.of_report` has it.
        fits: whether the scheme can fit its values to images.
    """
    if body["exact"]:
        last = body["logits"][-1]
        measured = f"relative L2 {small(last['relative_l2'])} in {last['precision']}"
        allowed = f"allowed {small(body['tolerance'].get(last['precision']))}"
        kept = all(error["within"] for error in body["logits"])
        return f"{'kept exactly' if kept else 'FAILED: not the function of the source'}: {measured}, {allowed}"
    if body.get("kept"):
        return f"kept: {said_of_kept(body['kept'])}"
    if body["unmeasured"]:
        return f"not known: {body['unmeasured']}"
    remedy = ": pass --calibrate IMAGES (25 or more, no labels needed) to fit and measure it"
    return f"not known{remedy if fits else ''}"


def proof(body: Body) -> None:
    """Print the measurements, one row per precision and input size; `verdict` says what they mean."""
    exact = body["exact"]
    rows = [
        (
            error["precision"], size(error["size"]), small(error["relative_l2"]), small(error["largest"]),
            f"{100 * error['agreement']:.4g} %" if exact and error["agreement"] is not None else None,
            small(body["tolerance"].get(error["precision"])) if exact else None,
            ("ok" if error["within"] else "FAILED") if exact else None,
        )
        for error in body["logits"]
    ]  # fmt: skip
    title = "Verification on {}: the function is kept" if exact else "Distance from the source on {}"
    table(title.format(body["inputs"]), _COLUMNS, rows, right=_COLUMNS[2:6])
    listing("vacuous", body["vacuous"], most=5)


def said_of_kept(kept: Body) -> str:
    """The finding of held-out images on an approximate result."""
    answers = "" if kept["agreement"] is None else f"the source's answer on {100 * kept['agreement']:.1f} %"
    bound = "" if kept["least"] is None else f" (at least {100 * kept['least']:.0f} %)"
    parts = filter(None, (answers + bound, f"relative L2 {small(kept['relative_l2'])}"))
    return f"{', '.join(parts)}; {kept['count']} held-out calibration images"
