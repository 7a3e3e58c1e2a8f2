"""GroupNorms become constants: a U-Net trained with the plain GroupNorm, `convert --to folded --calibrate IMAGES`.

    python tests/lab/benchmarks/calibrated_affine.py -o tests/lab/benchmarks/calibrated_affine.md

What is measured is kept, a line each, in runs/calibrated_affine.jsonl.
"""

import tempfile
from pathlib import Path

import torch
from kept import Kept, Row, arguments
from layer_norms import in_format
from schemes_table import ROOT
from torch import Tensor, nn
from unlabelled import distance, outputs, recovered, unet, written

import normswap
from normswap.images.datasets import make_loader

KEYS: dict[str, tuple[str, ...]] = {"one group": (), "groups of 4 channels": ("convert.options.group_size=4",)}
COUNTS, RUNTIMES, SIDE, LARGE = (100, 1000), ("onnx", "openvino"), 128, 256
HOW = f"""
The zoo's U-Net, trained with the plain GroupNorm as in `unlabelled.py`; folded after a fit to so many of its images.
Mean IoU, relative L2 to the network with GroupNorms, and the share of pixels that keep their class, on 1,500 test
pictures of 32 px. Tile: the middle of a mosaic of {SIDE} px, computed from the whole and from a tile with 16 px less on
each side, relative L2. Runtimes: operators, and the least of 40 times for a mosaic of {LARGE} px on one thread.
"""


def mosaics(pictures: Tensor, side: int) -> Tensor:
    """Pictures (N, 3, h, h) beside each other, (M, 3, side, side)."""
    across = side // pictures.shape[-1]
    rows = pictures[: len(pictures) // across**2 * across**2].split(across)
    strips = torch.stack([torch.cat([*row], -1) for row in rows])
    return torch.stack([torch.cat([*part], -2) for part in strips.split(across)])


def tile_off(network: nn.Module, whole: Tensor) -> float:
    """How far the middle of a tile is from that of the whole."""
    (of_whole,), (of_tile,) = outputs(network, whole), outputs(network, whole[..., 16:-16, 16:-16])
    return distance([of_tile[..., 16:-16, 16:-16]], [of_whole[..., 32:-32, 32:-32]])


def measured(keys: tuple[str, ...]) -> Row:
    """The network with GroupNorms, and folded after a fit to each number of images."""
    kind = unet()
    with tempfile.TemporaryDirectory() as folder:
        images = written(kind, Path(folder))
        networks = {0: recovered(kind, images, *keys).model}
        for count in COUNTS:
            loader = make_loader(networks[0], images, samples=count, labelled=False, workers=0)
            networks[count] = normswap.convert(networks[0], "folded", calibrate=loader).model
    whole, large, rows = mosaics(kind.tested, SIDE), mosaics(kind.tested, LARGE)[:1], {}
    theirs = outputs(networks[0], kind.tested)
    for count, network in networks.items():
        ours = outputs(network, kind.tested)
        alike = 100 * float((ours[0].argmax(1) == theirs[0].argmax(1)).double().mean())
        rows[count] = [kind.measure(network), distance(ours, theirs), alike, tile_off(network, whole)]
    return {"rows": rows, "runtimes": {name: in_format(name, networks.values(), large) for name in RUNTIMES}}


def lines(name: str, row: Row) -> list[str]:
    """A row for each network."""
    found = []
    for at, (count, (iou, off, alike, tile)) in enumerate(row["rows"].items()):
        norms = f"folded, {count} images" if int(count) else "GroupNorm"
        cells = [name, norms, f"{iou:.1f}", f"{off:.3f}", f"{alike:.1f} %", f"{tile:.2g}"]
        cells += [f"{of['operators'][at][0]}, {of['times'][at]:.1f} ms" for of in row["runtimes"].values()]
        found.append(f"| {' | '.join(cells)} |")
    return found


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "calibrated_affine.jsonl", fresh=given.fresh)
    table = [
        "| U-Net | norms | mean IoU | distance | same pixels | tile off | ONNX Runtime | OpenVINO |",
        "|---" * 8 + "|",
    ]
    for name, keys in KEYS.items():
        table += lines(name, kept.get((name,), lambda keys=keys: measured(keys)))
    kept.write(given.output, "GroupNorm to a calibrated affine", [HOW, *table])


if __name__ == "__main__":
    main()
