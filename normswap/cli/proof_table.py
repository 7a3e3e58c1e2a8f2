"""A report of the proof, as `convert`, `verify` and `recalibrate` print it."""

from __future__ import annotations

from normswap.cli.tables import facts, listing, size, small, table
from normswap.plan import Body

_COLUMNS = ("precision", "input", "relative L2", "max", "agreement", "allowed", "verdict")


def proof(body: Body) -> None:
    """The measurements, one row per precision and input size; what approximate ones answer on noise is no news."""
    exact = body["exact"]
    rows = [
        (
            error["precision"], size(error["size"]), small(error["relative_l2"]), small(error["largest"]),
            f"{100 * error['agreement']:.4g} %" if exact and error["agreement"] is not None else None,
            small(body["tolerance"].get(error["precision"])) if exact else None,
            ("ok" if error["within"] else "FAILED") if exact else "not exact",
        )
        for error in body["logits"]
    ]  # fmt: skip
    title = f"Verification on {body['inputs']}: {'the function is kept' if exact else 'the function changes'}"
    table(title, _COLUMNS, rows, right=_COLUMNS[2:6])
    listing("vacuous", body["vacuous"], most=5)
    if body.get("kept"):
        facts(("kept", said_of_kept(body["kept"])))


def said_of_kept(kept: Body) -> str:
    """What held-out images say of an approximate result."""
    answers = "" if kept["agreement"] is None else f"the source's answer on {100 * kept['agreement']:.1f} %"
    bound = "" if kept["least"] is None else f" (at least {100 * kept['least']:.0f} %)"
    right = "" if kept.get("right") is None else f"{100 * kept['right']:.1f} % of its accuracy expected as a classifier"
    said = (answers + bound, right, f"relative L2 {small(kept['relative_l2'])}")
    return f"{', '.join(filter(None, said))}; {kept['count']} held-out {kept['of']}"
