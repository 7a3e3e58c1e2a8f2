"""Count the norms that fold beside Yvinec et al. 2022, "To Fold or Not to Fold" (arXiv:2203.14646).

    python tests/lab/coverage/yvinec.py -o tests/lab/coverage/yvinec.md

Their counts are those that the README of their package, tensorflow-batchnorm-folding, prints for
Keras' networks. A network is compared with the one of timm that has as many norms.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "benchmarks"), str(HERE.parents[1])]

import kept  # noqa: E402
import network  # noqa: E402

# Their network, timm's of the same norms, and the norms that they fold and leave.
NETWORKS = (
    ("ResNet 50", "resnet50", 53, 0),
    ("MobileNet V2", "mobilenetv2_100", 52, 0),
    ("MobileNet V3 (small)", "mobilenetv3_small_100", 34, 0),
    ("EfficientNet B0", "efficientnet_b0", 49, 0),
    ("Inception V3", "inception_v3", 94, 0),
    ("Inception ResNet V2", "inception_resnet_v2", 204, 0),
    ("DenseNet 121", "densenet121", 59, 62),
)
COLUMNS = (
    "network",
    "norms",
    "folded by Yvinec et al.",
    "folded here",
    "scale moved, shift left",
    "scale and shift left",
    "norms left by torch.fx",
    "relative L2 in float64",
)


def row(theirs: str, name: str, folded: int, left: int) -> str:
    """Return the row of one network."""
    found = network.check(name)
    norms = found["norms"]
    assert norms == folded + left, f"{name} is another network than {theirs}"
    assert found["status"] == "exact", found

    here = found.get("back", 0) + found.get("forward", 0)
    return kept.markdown_row(
        f"{theirs}, timm's `{name}`",
        norms,
        f"{folded} ({folded / norms:.0%})",
        f"{here} ({here / norms:.0%})",
        found.get("moved", 0),
        found.get("affine", 0),
        found["fuse"]["left"],
        f"{found['error']:.0e}",
    )


def main() -> None:
    """Write the table."""
    args = kept.arguments(__doc__).parse_args()
    rows = [row(*each) for each in NETWORKS]
    lines = [
        "Random weights, lived-in statistics. No norm with statistics is left by us in any of them:"
        " one that cannot fold becomes a scale and a shift per channel, or a shift alone.",
        "Theirs: the README of their package tensorflow-batchnorm-folding.",
        "",
        kept.markdown_head(*COLUMNS),
        *rows,
    ]
    command = f"coverage/yvinec.py -o {args.output}"
    title = "Norms that fold, beside Yvinec et al. 2022"
    kept.write_table(args.output, title, command, lines)


if __name__ == "__main__":
    main()
