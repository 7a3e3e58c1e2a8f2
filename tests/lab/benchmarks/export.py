"""Every format and dtype against the source, and the nodes of a file beside a plain export's.

    python tests/lab/benchmarks/export.py images [NAME ...]
    python tests/lab/benchmarks/export.py plain [NAME ...]
    python tests/lab/benchmarks/export.py deep [NAME ...]
    python tests/lab/benchmarks/export.py nfnets [NAME ...]

`images`: the trained networks on the 10,000 CIFAR-10 test images. `plain`: the same, exported by
`torch.onnx.export` with their BatchNorms. `deep`: timm's networks with
random weights (`lived_in_networks.calm`) at 64 px. `nfnets`: in ONNX Runtime, beside a plain export
of the same network, at 96 px.

The first needs ../shared (images and checkpoints). What was measured is kept, a line each, in
runs/export.jsonl, and not measured again; --fresh forgets it. Prints Markdown tables of all that is
known for the networks asked for; export.md holds them.
"""

import argparse
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import onnxruntime
import timm
import torch
from kept import Kept, Row, markdown_head
from schemes_table import NETWORKS, ROOT, archive, logits, read
from support.lived_in_networks import calm, distance, run
from support.runtime_process import run_alone
from torch import Tensor, nn

import normswap
from normswap.errors import first_line
from normswap.exporting import formats
from normswap.exporting.exported_module import FileContents, Shipped
from normswap.storage.checkpoint import open_model

FORMATS = ("onnx", "pt2")
DTYPES = ("fp32", "fp16", "bf16")
DEEP = ("resnet18", "resnet50", "resnetv2_50", "seresnet50", "nf_resnet50", "resnext50_32x4d")
NFNETS = ("nf_resnet50", "eca_nfnet_l0", "dm_nfnet_f0")


def images(kept: Kept, name: str) -> Iterator[str]:
    """One trained network on all test images: a row per format and dtype."""
    source = open_model(str(NETWORKS[name]))
    for dtype in DTYPES:
        if all(("images", name, form, dtype) in kept.rows for form in FORMATS):
            continue

        with tempfile.TemporaryDirectory() as folder:
            batches = read(source, archive("test"))[0].split(250)
            expected = logits(source, batches)
            for form in FORMATS:
                file = Path(folder) / f"net.{form}"
                normswap.export(source, file, dtype=dtype, dynamic_batch=True)
                answers = logits(formats.get(form).open(file), batches)
                same = int((expected.argmax(1) == answers.argmax(1)).sum())
                error = distance(expected.double(), answers.double())
                kept.add(("images", name, form, dtype), same=same, count=len(expected), error=error)

    for form in FORMATS:
        for dtype in DTYPES:
            row = kept.rows["images", name, form, dtype]
            share = f"{row['same']} of {row['count']} ({100 * row['same'] / row['count']:.2f} %)"
            yield f"| `{name}` | {form} | {dtype} | {row['error']:.1e} | {share} |"


def plain(kept: Kept, name: str) -> Iterator[str]:
    """One trained network on all test images, by torch's own ONNX export, in ONNX Runtime."""

    def measure() -> Row:
        source = open_model(str(NETWORKS[name]))
        batches = read(source, archive("test"))[0].split(250)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "net.onnx"
            torch.onnx.export(
                source,
                (batches[0],),
                file,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                dynamo=True,
                verbose=False,
            )
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            input_name = session.get_inputs()[0].name
            answers = [session.run(None, {input_name: x.numpy()})[0] for x in batches]

        expected = logits(source, batches)
        found = torch.from_numpy(np.concatenate(answers))
        same = int((expected.argmax(1) == found.argmax(1)).sum())
        return {
            "same": same,
            "count": len(expected),
            "error": distance(expected.double(), found.double()),
        }

    row = kept.get(("plain", name), measure)
    share = f"{row['same']} of {row['count']} ({100 * row['same'] / row['count']:.2f} %)"
    yield f"| `{name}` | {row['error']:.1e} | {share} |"


def deep(kept: Kept, name: str) -> Iterator[str]:
    """One of timm's networks: per format the error of the file in a process of its own, and its
    nodes.
    """
    row = kept.get(("deep", name), lambda: _deep(name))
    for form in FORMATS:
        error, nodes, plain = row["forms"][form]
        yield (
            f"| `{name}` | {form} | {error:.1e} | {row['stray']:.1e} | {_said(nodes)} |"
            f" {_said(plain)} |"
        )
    for dtype, error in row["half"].items():
        yield f"| `{name}` | pt2, {dtype} | {error:.1e} | {row['stray']:.1e} | | |"


def _deep(name: str) -> Row:
    source, x, stray = _made(name, 64)
    found: dict[str, Any] = {}

    half: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for form in FORMATS:
            file = Path(folder) / f"net.{form}"
            done = normswap.export(source, file, input_size=x.shape[1:], images=x)
            plain = Path(folder) / f"plain.{form}"
            formats.get(form).write(
                FileContents(Shipped(source), (torch.zeros(1, *x.shape[1:]),)), plain
            )
            plain_nodes = formats.get(form).functions.nodes(plain)
            found[form] = (
                distance(run(source, x), run_alone(file, form, x)),
                done.nodes,
                plain_nodes,
            )

        for dtype in DTYPES[1:]:
            done = normswap.export(
                source, Path(folder) / f"{dtype}.pt2", input_size=x.shape[1:], images=x, dtype=dtype
            )
            half[dtype] = done.figures.relative_l2

    return {"stray": stray, "forms": found, "half": half}


def _made(name: str, side: int) -> tuple[nn.Module, Tensor, float]:
    """The network in float32, four images, and how far it is there from its own float64 values."""
    torch.manual_seed(0)
    x = torch.randn(8, 3, side, side)
    source = calm(timm.create_model(name), x)
    x = x[:4]
    precise = run(source, x.double())
    return source, x, distance(precise, run(source.float(), x).double())


def _said(nodes: dict[str, int] | None) -> str:
    """The total, convolutions, and norms (those of weight standardization, too)."""
    kinds = Counter({kind.lower(): n for kind, n in (nodes or {}).items()})
    conv = sum(n for kind, n in kinds.items() if "conv" in kind)
    norm = sum(n for kind, n in kinds.items() if "norm" in kind)
    return f"{sum(kinds.values())} ({conv} conv, {norm} norm)" if kinds else ""


def nfnets(kept: Kept, name: str) -> Iterator[str]:
    """A network with weight standardization in ONNX Runtime: ours and a plain export, at batch 1
    and 8.
    """
    row = kept.get(("nfnets", name), lambda: _nfnet(name))
    for which in ("exported plainly", "ours"):
        nodes, one, eight = row[which]
        yield f"| `{name}` | {which} | {_said(nodes)} | {one} | {eight} | {row['stray']:.1e} |"


def _nfnet(name: str) -> Row:
    source, x, stray = _made(name, 96)
    x = torch.cat([x, x.flip(3)])
    row: Row = {"stray": stray}

    onnx = formats.get("onnx")
    with tempfile.TemporaryDirectory() as folder:
        plain, ours = (Path(folder) / f"{which}.onnx" for which in ("plain", "ours"))
        onnx.write(
            FileContents(Shipped(source), (torch.zeros(2, *x.shape[1:]),), dynamic=True), plain
        )
        normswap.export(source, ours, input_size=x.shape[1:], images=x, dynamic_batch=True)
        for which, file in (("exported plainly", plain), ("ours", ours)):
            row[which] = (
                onnx.functions.nodes(file),
                *(_error(source, file, x, batch) for batch in (1, 8)),
            )

    return row


def _error(source: nn.Module, file: Path, x: Tensor, batch: int) -> str:
    try:
        runs = formats.get("onnx").open(file)
        got = torch.cat([runs(part) for part in x.split(batch)])
    except Exception as error:  # ONNX Runtime's own derive from nothing else
        return first_line(error)
    return f"{distance(run(source, x), got):.1e}"


WAYS = {
    "plain": (plain, tuple(NETWORKS), ("network", "relative L2", "same argmax by torch's export")),
    "images": (
        images,
        tuple(NETWORKS),
        ("network", "format", "dtype", "relative L2", "same argmax"),
    ),
    "deep": (
        deep,
        DEEP + NFNETS[1:],
        (
            "network",
            "format",
            "relative L2",
            "source against its float64",
            "nodes",
            "exported plainly",
        ),
    ),
    "nfnets": (
        nfnets,
        NFNETS,
        (
            "network",
            "file",
            "nodes",
            "relative L2, batch 1",
            "batch 8",
            "source against its float64",
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=WAYS)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--fresh", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    kept = Kept(ROOT / "runs" / "export.jsonl", fresh=args.fresh)
    measure, names, head = WAYS[args.what]
    print(markdown_head(*head))

    for name in args.names or names:
        for row in measure(kept, name):
            print(row, flush=True)


if __name__ == "__main__":
    main()
