"""torchvision's Faster R-CNN with two images per update: FrozenBatchNorm2d, and folded.

    python tests/lab/benchmarks/detection.py -o tests/lab/benchmarks/detection.md

What is measured is kept, a line each, in runs/detection.jsonl; test pictures choose nothing.
"""

import functools
from collections.abc import Callable
from statistics import mean

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

TRAINED = 600
HELD_OUT = 100
TESTED = 300
BATCH = 2
CLIP = 1.0
RATES = (3e-4, 1e-3, 3e-3)
TRIAL = 100
UPDATES = 300
SEEDS = (0, 1)
FROZEN = "FrozenBatchNorm2d"
FOLDED = "the same, folded"
WAYS = ("BatchNorm2d", FROZEN, FOLDED)
TUNING = Tuning(RATES, SEEDS, "found")
HOW = f"""
`FasterRCNN` of torchvision on the ResNet of `{NETWORK}`: {TRAINED} training pictures of {SIDE} px \
with two CIFAR-10
objects each ({" or ".join(CLASSES[1:])}); {UPDATES} updates of {BATCH} images, AdamW, one cycle,
gradients clipped to norm {CLIP:g}. Learning rate: of {", ".join(f"{rate:g}" for rate in RATES)} \
the best for that way
after {TRIAL} updates, on {HELD_OUT} held-out training pictures (seed {SEEDS[0]}). Found: of the \
objects in {TESTED}
test pictures the share that has the right class and an overlap of 0.5 among the two best \
detections of its picture, in
percent, mean of {len(SEEDS)} seeds (each in brackets). Loss: mean of the first and of the last \
100 updates.
"""


def detector(way_name: str, seed: int) -> nn.Module:
    body = open_model(str(NETWORKS[NETWORK])).eval()
    if way_name != WAYS[0]:
        body = normswap.convert(body, "frozen-bn").model
    torch.manual_seed(seed)
    layers = {f"layer{index}": str(index) for index in (1, 2, 3, 4)}
    backbone = BackboneWithFPN(body, layers, [16, 32, 64, 128], 32, extra_blocks=LastLevelMaxPool())
    anchors = AnchorGenerator(
        tuple((size,) for size in (20, 28, 36, 44, 52)), ((0.7, 1.0, 1.4),) * 5
    )
    model: nn.Module = FasterRCNN(
        backbone,
        len(CLASSES),
        min_size=SIDE,
        max_size=SIDE,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        rpn_anchor_generator=anchors,
        rpn_pre_nms_top_n_train=200,
        rpn_post_nms_top_n_train=100,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_test=50,
        box_detections_per_img=20,
    ).eval()

    return folded(model) if way_name == FOLDED else model


def folded(model: nn.Module) -> nn.Module:
    return normswap.convert(
        model, "folded", inputs=(list(canvases("train", 2, seed=5).pictures),)
    ).model


def targets(pictures: Canvases, batch: Tensor) -> list[dict[str, Tensor]]:
    return [{"boxes": pictures.boxes[one], "labels": pictures.classes[one]} for one in batch]


def learned(
    model: nn.Module, lr: float, seed: int, updates: int, pictures: Canvases
) -> tuple[nn.Module, list[float]]:
    """The trained network, and its losses."""
    model.train()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=lr)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=updates)
    random = torch.Generator().manual_seed(seed)

    losses: list[float] = []
    while len(losses) < updates:
        for batch in torch.randperm(len(pictures), generator=random).split(BATCH)[
            : updates - len(losses)
        ]:
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
        detections = model([pictures.pictures[index]])[0]
        same = detections["labels"][:2, None] == pictures.classes[index]
        overlap = box_iou(detections["boxes"][:2], pictures.boxes[index]) >= 0.5
        right += int((same & overlap).any(0).sum())
    return 100 * right / pictures.classes.numel()


def measure(kept: Kept, write: Callable[[], None]) -> None:
    train_set = canvases("train", TRAINED + HELD_OUT, seed=0)
    test = canvases("test", TESTED, seed=1)
    known = train_set.part(slice(TRAINED))
    held_out = train_set.part(slice(TRAINED, None))

    def run(updates: int, on: Canvases, way_name: str, lr: float, seed: int) -> Row:
        model, losses = learned(detector(way_name, seed), lr, seed, updates, known)
        first, last = (sum(part) / 100 for part in (losses[:100], losses[-100:]))
        return {"first": first, "last": last, "found": found(model, on)}

    trial = functools.partial(run, TRIAL, held_out)
    final = functools.partial(run, UPDATES, test)
    TUNING.measure(kept, WAYS, trial, final, write)


def trained_table(kept: Kept) -> list[str]:
    lines = ["| norms | lr | training loss | found |", "|---|---|---|---|"]
    for way_name in WAYS:
        if runs := TUNING.runs(kept, way_name):
            first, last, share = (
                mean(row[what] for row in runs) for what in ("first", "last", "found")
            )
            lr = runs[0]["lr"]
            each = TUNING.each(runs)
            lines.append(
                f"| {way_name} | {lr:g} | {first:.2f} then {last:.2f} | {share:.1f} ({each}) |"
            )

    return [*lines, *TUNING.tried(kept, WAYS)]


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "detection.jsonl", fresh=given.fresh)

    def write() -> None:
        made = f"torchvision {torchvision.__version__}"
        kept.write(
            given.output, "Detection with two images per update", [HOW, *trained_table(kept)], made
        )

    measure(kept, write)
    write()


if __name__ == "__main__":
    main()
