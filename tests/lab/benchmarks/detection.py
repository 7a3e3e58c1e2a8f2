"""torchvision's Faster R-CNN with two images per update: FrozenBatchNorm2d, folded, exported to ONNX.

    python tests/lab/benchmarks/detection.py -o tests/lab/benchmarks/detection.md

The backbone is the timm ResNet of `resnet18_narrow`, trained on CIFAR-10, under a fresh feature pyramid and heads.
Pictures: `canvases.py`. Learning rates are chosen on held-out training pictures, after fewer updates; test pictures
choose nothing. What is measured is kept, a line each, in runs/detection.jsonl.
"""

import functools
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
import torchvision
from canvases import CLASSES, NETWORK, SIDE, Canvases, canvases
from kept import Kept, Row, arguments
from schemes_table import NETWORKS, ROOT
from torch import Tensor, nn
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.rpn import AnchorGenerator
from torchvision.ops import box_iou
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool
from tuning import Tuning

import normswap
from normswap.storage.checkpoint import open_model

TRAINED, HELD_OUT, TESTED = 600, 100, 300
BATCH, CLIP, RATES, TRIAL, UPDATES, SEEDS = 2, 1.0, (3e-4, 1e-3, 3e-3), 100, 300, (0, 1)
FROZEN, FOLDED = "FrozenBatchNorm2d", "the same, folded"
WAYS = ("BatchNorm2d", FROZEN, FOLDED)
EXPORTED, ROUNDS = 100, 20
TUNING = Tuning(RATES, SEEDS, "found")
HOW = f"""
`FasterRCNN` of torchvision on the ResNet of `{NETWORK}`: {TRAINED} training pictures of {SIDE} px with two CIFAR-10
objects each ({" or ".join(CLASSES[1:])}); {UPDATES} updates of {BATCH} images, AdamW, one cycle,
gradients clipped to norm {CLIP:g}. Learning rate: of {", ".join(f"{rate:g}" for rate in RATES)} the best for that way
after {TRIAL} updates, on {HELD_OUT} held-out training pictures (seed {SEEDS[0]}). Found: of the objects in {TESTED}
test pictures the share that has the right class and an overlap of 0.5 among the two best detections of its picture, in
percent, mean of {len(SEEDS)} seeds (each in brackets). Loss: mean of the first and of the last 100 updates.
"""
Detections = tuple[Tensor, Tensor, Tensor]


def detector(said: str, seed: int) -> nn.Module:
    body = open_model(str(NETWORKS[NETWORK])).eval()
    if said != WAYS[0]:
        body = normswap.convert(body, "frozen-bn").model
    torch.manual_seed(seed)
    layers = {f"layer{index}": str(index) for index in (1, 2, 3, 4)}
    backbone = BackboneWithFPN(body, layers, [16, 32, 64, 128], 32, extra_blocks=LastLevelMaxPool())
    anchors = AnchorGenerator(tuple((size,) for size in (20, 28, 36, 44, 52)), ((0.7, 1.0, 1.4),) * 5)
    model: nn.Module = FasterRCNN(
        backbone, len(CLASSES), min_size=SIDE, max_size=SIDE, image_mean=[0.0] * 3, image_std=[1.0] * 3,
        rpn_anchor_generator=anchors, rpn_pre_nms_top_n_train=200, rpn_post_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=100, rpn_post_nms_top_n_test=50, box_detections_per_img=20,
    ).eval()  # fmt: skip
    return folded(model) if said == FOLDED else model


def folded(model: nn.Module) -> nn.Module:
    return normswap.convert(model, "folded", inputs=(list(canvases("train", 2, seed=5).pictures),)).model


def targets(pictures: Canvases, batch: Tensor) -> list[dict[str, Tensor]]:
    return [{"boxes": pictures.boxes[one], "labels": pictures.classes[one]} for one in batch]


def train(said: str, lr: float, seed: int, updates: int, pictures: Canvases) -> tuple[nn.Module, list[float]]:
    """The trained network, and its losses."""
    model = detector(said, seed).train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates)
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    while len(losses) < updates:
        for batch in torch.randperm(len(pictures), generator=random).split(BATCH)[: updates - len(losses)]:
            loss = sum(model(list(pictures.pictures[batch]), targets(pictures, batch)).values())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(learning, CLIP)
            optimizer.step()
            rate.step()
            losses.append(loss.item())
    return model.eval(), losses


@torch.inference_mode()
def found(model: nn.Module, pictures: Canvases) -> float:
    """Percent of the objects."""
    right = 0
    for index in range(len(pictures)):
        said = model([pictures.pictures[index]])[0]
        same = said["labels"][:2, None] == pictures.classes[index]
        overlap = box_iou(said["boxes"][:2], pictures.boxes[index]) >= 0.5
        right += int((same & overlap).any(0).sum())
    return 100 * right / pictures.classes.numel()


class One(nn.Module):
    """Of one picture (3, H, W): boxes, labels, scores."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, picture: Tensor) -> Detections:
        said = self.network([picture])[0]
        return said["boxes"], said["labels"], said["scores"]


def apart(ours: list[Detections], others: list[Detections]) -> Row:
    """How far two lists of detections are from each other: those that differ in number or class, and the rest."""
    same = [len(a[1]) == len(b[1]) and bool((a[1] == b[1]).all()) for a, b in zip(ours, others, strict=True)]
    pairs = [(a, b) for a, b, alike in zip(ours, others, same, strict=True) if alike]
    return {
        "other": same.count(False), "detections": sum(len(a[1]) for a in ours),
        "pixels": max(float((a[0] - b[0]).abs().max()) for a, b in pairs if len(a[1])),
        "scores": max(float((a[2] - b[2]).abs().max()) for a, b in pairs if len(a[1])),
    }  # fmt: skip


def write_onnx(model: nn.Module, file: Path) -> None:
    """By torch's older exporter: the newer one cannot tell how many boxes are left over before it suppresses some."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(One(model).eval(), (torch.zeros(3, SIDE, SIDE),), str(file), dynamo=False, opset_version=17,
                          input_names=["picture"], output_names=["boxes", "labels", "scores"])  # fmt: skip


def ship(known: Canvases, lr: float, test: Canvases) -> Row:
    """A trained detector folded, both exported: what is told apart, how many operators, how long."""
    source, _ = train(FROZEN, lr, SEEDS[0], UPDATES, known)
    model = folded(source)
    pictures = list(test.pictures[:EXPORTED])
    with torch.inference_mode(), tempfile.TemporaryDirectory() as folder:
        runs: dict[str, Callable[[Tensor], Any]] = {}
        nodes: dict[str, dict[str, int]] = {}
        for said, network in (("source", source), ("folded", model)):
            file = Path(folder) / f"{said}.onnx"
            write_onnx(network, file)
            nodes[said] = dict(Counter(node.op_type for node in onnx.load(file).graph.node))
            session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
            runs[said] = One(network)
            runs[f"{said} in ONNX Runtime"] = functools.partial(run_file, session)
        answers = {said: [run(picture) for picture in pictures] for said, run in runs.items()}
        seconds = timed(runs, pictures[:10])
    return {"apart": {said: apart(answers["source"], one) for said, one in answers.items()}, "nodes": nodes,
            "seconds": seconds}  # fmt: skip


def run_file(session: onnxruntime.InferenceSession, picture: Tensor) -> Detections:
    boxes, labels, scores = (torch.from_numpy(value) for value in session.run(None, {"picture": picture.numpy()}))
    return boxes, labels, scores


def timed(runs: dict[str, Callable[[Tensor], Any]], pictures: list[Tensor]) -> dict[str, float]:
    """Median seconds a picture, measured in turns."""
    seen: dict[str, list[float]] = {said: [] for said in runs}
    for _ in range(ROUNDS):
        for said, run in runs.items():
            start = time.perf_counter()
            for picture in pictures:
                run(picture)
            seen[said].append((time.perf_counter() - start) / len(pictures))
    return {said: sorted(values)[len(values) // 2] for said, values in seen.items()}


def measure(kept: Kept, write: Callable[[], None]) -> None:
    train_set, test = canvases("train", TRAINED + HELD_OUT, seed=0), canvases("test", TESTED, seed=1)
    known, held_out = train_set.part(slice(TRAINED)), train_set.part(slice(TRAINED, None))

    def run(updates: int, on: Canvases, said: str, lr: float, seed: int) -> Row:
        model, losses = train(said, lr, seed, updates, known)
        first, last = (sum(part) / 100 for part in (losses[:100], losses[-100:]))
        return {"first": first, "last": last, "found": found(model, on)}

    trial, final = functools.partial(run, TRIAL, held_out), functools.partial(run, UPDATES, test)
    TUNING.measure(kept, WAYS, trial, final, write)
    lr = TUNING.runs(kept, FROZEN)[0]["lr"]
    kept.get(("shipped",), lambda: ship(known, lr, test))


def trained_table(kept: Kept) -> list[str]:
    lines = ["| norms | lr | training loss | found |", "|---|---|---|---|"]
    for said in WAYS:
        if runs := TUNING.runs(kept, said):
            first, last, share = (TUNING.mean(runs, what) for what in ("first", "last", "found"))
            lr, each = runs[0]["lr"], TUNING.each(runs)
            lines.append(f"| {said} | {lr:g} | {first:.2f} then {last:.2f} | {share:.1f} ({each}) |")
    said = "Held-out share of each learning rate, from which it was chosen:"
    return [*lines, "", said, "", *TUNING.tried(kept, WAYS)]


def shipped_lines(row: Row) -> list[str]:
    """What is not a table: a page shows the table of training alone."""
    lines = ["", f"The trained detector with {FROZEN}, folded and exported, on {EXPORTED} test pictures:", ""]
    for said, one in row["apart"].items():
        lines.append(f"- {said}: {one['other']} pictures with other classes or another number; of the rest boxes "
                     f"{one['pixels']:.1g} px and scores {one['scores']:.1g} apart at most; "
                     f"{1000 * row['seconds'][said]:.1f} ms a picture")  # fmt: skip
    for said, counts in row["nodes"].items():
        lines.append(f"- {said} as ONNX: {sum(counts.values())} operators, {counts.get('Conv', 0)} Conv, "
                     f"{counts.get('Mul', 0)} Mul, {counts.get('Add', 0)} Add")  # fmt: skip
    return lines


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "detection.jsonl", fresh=given.fresh)

    def write() -> None:
        made = f"torchvision {torchvision.__version__}, onnxruntime {onnxruntime.__version__}"
        shipped = kept.rows.get(("shipped",))
        lines = [HOW, *trained_table(kept), *(shipped_lines(shipped) if shipped else [])]
        kept.write(given.output, "Detection with two images per update", lines, made)

    measure(kept, write)
    write()


if __name__ == "__main__":
    main()
