"""Every format and dtype against the source: on all test images and on deep networks; nodes beside a plain export.

    python tests/benchmarks/export.py images            # the trained networks on the 10,000 CIFAR-10 test images
    python tests/benchmarks/export.py deep [NAME ...]   # timm's networks with random, lived-in weights, each file alone

The first needs ../shared (images and checkpoints). Prints Markdown tables; export.md holds them.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import timm
import torch
from alone import run_alone
from lived import distance, lived_in, run
from torch import Tensor

import normswap
from normswap import data
from normswap.checkpoint import open_model
from normswap.ship import formats

SHARED = Path(__file__).resolve().parents[3] / "shared"
IMAGES = SHARED / "data" / "cifar10" / "test.tar.xz"
TRAINED = {
    "resnet18_narrow": SHARED / "checkpoints" / "resnet18_narrow",
    "resnetv2_18_narrow": SHARED / "checkpoints" / "resnetv2_18_narrow",
    "demo": Path(normswap.__file__).parent / "demo_data",
}
ENDINGS = {"onnx": "onnx", "pt2": "pt2", "torchscript": "ts", "safetensors": "safetensors"}
DEEP = ("resnet18", "resnet50", "resnetv2_50", "seresnet50", "nf_resnet50", "resnext50_32x4d")
NFNETS = ("eca_nfnet_l0", "dm_nfnet_f0")
SIZE = (3, 64, 64)


class Tally:
    """Sums over the images."""

    def __init__(self) -> None:
        self.same = self.count = 0
        self.off = self.whole = 0.0

    def add(self, expected: Tensor, got: Tensor) -> None:
        self.same += int((expected.argmax(1) == got.argmax(1)).sum())
        self.count += len(got)
        self.off += float((expected - got).double().square().sum())
        self.whole += float(expected.double().square().sum())


def images(name: str) -> Iterator[str]:
    """A row per format and dtype, of one trained network."""
    source = open_model(str(TRAINED[name]))
    with tempfile.TemporaryDirectory() as folder:
        runs, tallies = {}, {}
        for form, ending in ENDINGS.items():
            for dtype in ("fp32", "fp16", "bf16"):
                file = Path(folder) / f"{dtype}.{ending}"
                normswap.export(source, file, dtype=dtype, dynamic_batch=True)
                runs[form, dtype], tallies[form, dtype] = formats.get(form).open(file), Tally()
        with torch.inference_mode():
            for x, _ in data.make_loader(source, str(IMAGES), batch_size=100, workers=0):
                expected = source(x)
                for key, tally in tallies.items():
                    tally.add(expected, runs[key](x))
    for (form, dtype), tally in tallies.items():
        error = (tally.off / tally.whole) ** 0.5
        share = f"{tally.same} of {tally.count} ({100 * tally.same / tally.count:.2f} %)"
        yield f"| `{name}` | {form} | {dtype} | {error:.1e} | {share} |"


def deep(name: str) -> Iterator[str]:
    """A row per format, of one of timm's networks: the error of the file in a process of its own, and its nodes."""
    torch.manual_seed(0)
    x = torch.randn(4, *SIZE)
    source = lived_in(timm.create_model(name), x)
    precise = run(source, x.double())
    stray = distance(precise, run(source.float(), x).double())
    with tempfile.TemporaryDirectory() as folder:
        for form, ending in ENDINGS.items():
            file = Path(folder) / f"net.{ending}"
            done = normswap.export(source, file, input_size=SIZE, images=x, count_plain=True)
            error = distance(run(source, x), run_alone(file, form, x))
            nodes, plain = _nodes(done.nodes), _nodes(done.plain_nodes or {})
            yield f"| `{name}` | {form} | {error:.1e} | {stray:.1e} | {nodes} | {plain} |"


def _nodes(nodes: dict[str, int]) -> str:
    """The total, convolutions and norms (those of weight standardization, too), and what moves or scales values."""
    kinds = Counter({kind.lower(): n for kind, n in nodes.items()})
    conv = sum(n for kind, n in kinds.items() if "conv" in kind)
    norm = sum(n for kind, n in kinds.items() if "norm" in kind)
    return f"{sum(nodes.values())} ({conv} conv, {norm} norm)" if nodes else ""


def main(what: str = "", *names: str) -> None:
    warnings.simplefilter("ignore")
    if what == "images":
        print("| network | format | dtype | relative L2 | same argmax |\n|---|---|---|---|---|")
        for name in names or TRAINED:
            print(*images(name), sep="\n", flush=True)
    elif what == "deep":
        print("| network | format | relative L2 | source against its float64 | nodes | exported plainly |")
        print("|---|---|---|---|---|---|")
        for name in names or (*DEEP, *NFNETS):
            for row in deep(name):
                print(row, flush=True)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(*sys.argv[1:])
