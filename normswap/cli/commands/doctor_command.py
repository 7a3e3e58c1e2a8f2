"""`normswap doctor`: BatchNorm troubles found and named, with the command that mends each."""

import shlex
from dataclasses import replace

from normswap.cli.options import ImageOpening, Images, Json, Model
from normswap.cli.progress import working
from normswap.cli.tables import facts, few, listing, show
from normswap.plan import Body

# The doctor looks at this many images, unless --samples says another number.
_SAMPLES = 256
KEYS = (
    "source, norms (how many), faults (how many), notes, findings (name, paths, evidence,"
    " certainty, cost, mend)"
)
EXAMPLES = ("doctor demo", "doctor demo --data demo")


def run(model: Model, *, images: Images, opening: ImageOpening, json: Json = False) -> int:
    """Find and name BatchNorm troubles, and how to mend them.

    With --data also what images show: whether they are prepared as in training, and whether
    statistics fit them (drift, beside its sampling error).

    Exit code 1 where something is wrong.
    """
    net = opening.open_damaged(model, device=images.device)
    from normswap.diagnosis.doctor import body_of, diagnose

    loader = None
    if images.data is not None:
        chosen = replace(images, samples=images.samples or _SAMPLES)
        loader = chosen.loader(net, labelled=False)

    with working("looking"):
        words = shlex.join(opening.words(model))
        diagnosis = diagnose(net, images=loader, name=words, data=images.data or "IMAGES")
    show(body_of(diagnosis, model), json, _print)
    return int(bool(diagnosis.faults))


def _print(body: Body) -> None:
    """Print the number of faults, then each fault with its evidence and remedy."""
    facts(("network", body["source"]), ("norms", body["norms"]), ("faults", body["faults"]))
    for finding in body["findings"]:
        facts(
            ("fault", finding["name"]),
            ("evidence", finding["evidence"]),
            ("where", few(finding["paths"])),
            ("certainty", finding["certainty"]),
            ("cost", finding["cost"]),
            ("mend", finding["mend"]),
        )
    listing("note", body["notes"])
