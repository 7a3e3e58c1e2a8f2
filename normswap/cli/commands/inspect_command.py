"""`normswap inspect`: the residual blocks and norms of a network."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from normswap.cli import tables
from normswap.cli.options import Json, ModelOfAnyKind, Opening, exported_file
from normswap.cli.progress import working
from normswap.cli.tables import print_network, show, span, table
from normswap.plan import Body

KEYS = (
    "source, class, architecture, parameters, input_size, plan, classifier, dropout, norms (counts"
    " by class), roles (counts), blocks, sites (one per norm), refusals (path, reason); of an"
    " exported file: source, format, bytes, nodes (operators by kind), metadata (noted inside it),"
    " sidecar (FILE.preprocess.json)"
)
EXAMPLES = ("inspect demo", "inspect mine.pth --arch resnet18 --num-classes 10")
_BLOCKS = ("blocks", "x", "skip", "order", "norms", "last", "gate", "drop path", "alpha")
_NORM_COLUMNS = (
    "path",
    "class",
    "channels",
    "role",
    "beta",
    "|gamma|",
    "eps",
    "removes",
    "folding",
)


def run(model: ModelOfAnyKind, *, opening: Opening, json: Json = False) -> int:
    """Show the residual blocks and norms of a network.

    For every norm, what folding would do with it, or why it cannot be folded. For a GroupNorm in
    the place of a BatchNorm, which share of variance + eps is eps, and which share of a small
    difference in a sample's deviation it removes.
    """
    with working("inspecting"):
        file = exported_file(model)
        described = None if file is None else file.described()
    if described is not None:
        show(described, json, tables.print_file)
        return 0

    net = opening.open(model)
    from normswap.analysis import summary
    from normswap.surgery.network import Network

    with working("inspecting"):
        body = summary.of_network(Network(net), model)
    show(body, json, _print, "advise", *opening.words(model))
    return 0


def _print(body: Body) -> None:
    """Print a network, then tables of its residual blocks, norms, and refusals."""
    print_network(body)
    if body["blocks"]:
        table("Residual blocks", _BLOCKS, _block_rows(body["blocks"]), right=("x", "norms"))
    if body["sites"]:
        right = ("channels", "beta", "|gamma|", "eps", "removes")
        table("Norms", _NORM_COLUMNS, _norm_rows(body["sites"]), right=right)
    if body["refusals"]:
        refused = [(refusal["path"], refusal["reason"]) for refusal in body["refusals"]]
        table("Not looked into", ("path", "reason"), refused)


def _block_rows(blocks: Sequence[Body]) -> Iterator[Sequence[object]]:
    """Yield the rows of the table of residual blocks, as printed.

    Blocks of one stage that follow one another and look alike make one row.

    Args:
        blocks: The record of each block, in order of the forward pass.
    """
    # The stage, which is not shown, keeps blocks of two stages in rows of their own.
    for (_, skip, order, norms, *inside), group in groupby(blocks, _looks):
        alike: list[Body] = list(group)
        name = alike[0]["path"]
        if len(alike) > 1:
            name += f" .. {alike[-1]['path']}"

        alphas = [block["alpha"] for block in alike if block["alpha"] is not None]
        alpha = span((min(alphas), max(alphas))) if alphas else None
        yield (name, len(alike), skip, order, norms, *inside, alpha)


def _looks(block: Body) -> tuple[object, ...]:
    """Return what must be equal in two blocks that share a row: their stage, skip, norms and more.

    Name and alpha may differ.
    """
    # A module with several residual sums has the blocks `layer1.0`, `layer1.0+2`, ... The paths of
    # the layers inside are shown without that of the module.
    home = block["path"].partition("+")[0]
    # `last` is the path of the residual branch's last norm. `gate` is the path of the module that
    # multiplies the branch, and `drop_path` of the module that drops it at random in training.
    inside = []
    for name in ("last", "gate", "drop_path"):
        inside.append((block[name] or "").removeprefix(f"{home}."))
    return block["stage"], block["skip"], block["order"], len(block["norms"]), *inside


def _norm_rows(norms: Sequence[Body]) -> Iterator[Sequence[object]]:
    """Yield the rows of the table of norms, as printed: one for each norm.

    Args:
        norms: The record of each norm.
    """
    # Mean and deviation of a norm's output are beta and |gamma|.
    for norm in norms:
        folding = norm["folding"]
        if norm["refused"]:
            folding = f"refused: {norm['refused']}"
        yield (
            norm["path"],
            norm["class"],
            norm["channels"],
            norm["role"],
            span(norm["mean"]),
            span(norm["std"]),
            *(_percent(norm[share]) for share in ("constant", "removed")),
            folding,
        )


def _percent(share: float | None) -> str:
    """Return a share as a percentage, or nothing where there is none."""
    return "" if share is None else f"{share:.0%}"
