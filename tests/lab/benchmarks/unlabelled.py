"""Networks of other kinds learn the plain GroupNorm from their source, without labels; a U-Net's
become constants.

    python tests/lab/benchmarks/unlabelled.py -o tests/lab/benchmarks/unlabelled.md

What is measured is kept, a line each, in runs/unlabelled.jsonl.
"""

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch
from canvases import CLASSES, NETWORK, SIDE, canvases
from detection import UPDATES, found, learned
from kept import Kept, Row, arguments, markdown_head, markdown_row
from kinds_images import of_kind, score
from layer_norms import in_format
from schemes_table import NETWORKS, ROOT, archive, read
from support.zoo_networks import trained
from torch import Tensor, nn
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.utils import save_image

import normswap
from normswap.images.datasets import image_record, make_loader
from normswap.models.calling import named_tensors
from normswap.storage.checkpoint import open_model
from normswap.training import recipe_files
from normswap.training.engine import Result, finetune

IMAGES = 3000
TESTED = 1500
RATE = 1e-3
KEYS = (
    f"optim.lr={RATE}",
    "data.augment.scale=null",
    "train.epochs=12",
    "convert.options.relative_eps=0",
)
HOW = f"""
`recover_unlabelled` with `{" ".join(KEYS)}`
on {IMAGES} CIFAR-10 images, or pictures made of them, of 32 or 64 px, in batches of 16: BatchNorm \
to the plain norm
(eps 1e-5), fitted to 100 of them, then taught by the source. Distance: relative L2 to the \
source's outputs on test
pictures, the mean over outputs. The U-Net is the zoo's; the detector is torchvision's RetinaNet \
on the ResNet of
`{NETWORK}`, trained by labels here for {UPDATES} updates of 2 pictures; the encoder is that \
ResNet, and
its classes the source's classifier tells; two heads give the class, and whether it is an animal \
(least squares).
"""
GROUPS: dict[str, tuple[str, ...]] = {
    "one group": (),
    "groups of 4 channels": ("convert.options.group_size=4",),
}
COUNTS = (100, 1000)
RUNTIMES = ("onnx", "openvino")
MOSAIC = 128
LARGE = 256
HOW_FOLDED = f"""
## GroupNorms as constants

The U-Net with GroupNorms, folded after a fit to so many of its images (`--to folded \
--calibrate`): distance to it, and
the share of pixels that keep their class. Tile: the middle of mosaics of {MOSAIC} px from the \
whole, and from a tile
with 16 px less on each side, relative L2. Runtimes: operators; the least of 40 times for {LARGE} \
px, on one thread.
"""


class Kind(NamedTuple):
    """A network, pictures (N, 3, H, W) to learn on and to test on, and a labelled measure in
    percent.
    """

    network: nn.Module
    pictures: Tensor
    tested: Tensor
    measure: Callable[[Any], float]
    unit: str


@torch.no_grad()
def outputs(network: nn.Module, pictures: Tensor) -> list[Tensor]:
    """Every output, of all pictures."""
    parts = [[tensor for _, tensor in named_tensors(network(part))] for part in pictures.split(250)]
    return [torch.cat(output) for output in zip(*parts, strict=True)]


def unet() -> Kind:
    pictures, _ = of_kind("unet", "train")
    tested, labels = of_kind("unet", "test")
    tested = tested[:TESTED]
    labels = labels[:TESTED]

    return Kind(
        trained("unet"),
        pictures,
        tested,
        lambda net: score(outputs(net, tested)[0], labels),
        "mean IoU",
    )


class Answers(nn.Module):
    """Of a detector: scores and boxes of every anchor, before any is suppressed."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head

    def forward(self, pictures: Tensor) -> Any:
        return self.head(list(self.backbone(pictures).values()))


def detector() -> Kind:
    torch.manual_seed(0)
    body = open_model(str(NETWORKS[NETWORK]))
    record = image_record(body)
    backbone = BackboneWithFPN(
        body, {f"layer{index}": str(index) for index in (2, 3, 4)}, [32, 64, 128], 64
    )
    anchors = AnchorGenerator(((24, 30), (32, 38), (40, 46), (44, 50)), ((0.8, 1.25),) * 4)
    whole: Any = RetinaNet(
        backbone,
        len(CLASSES),
        min_size=SIDE,
        max_size=SIDE,
        image_mean=[0.0] * 3,
        image_std=[1.0] * 3,
        anchor_generator=anchors,
        detections_per_img=20,
    )
    whole, _ = learned(whole, RATE, 0, UPDATES, canvases("train", 2000, seed=0))
    tested = canvases("test", 300, seed=1)
    answers = Answers(whole.backbone, whole.head).eval()
    answers.pretrained_cfg = record

    def measure(net: Any) -> float:
        with_it = copy.copy(whole)
        with_it._modules = {**whole._modules, "backbone": net.backbone, "head": net.head}
        return found(with_it, tested)

    return Kind(
        answers,
        canvases("train", IMAGES, seed=2).pictures,
        tested.pictures,
        measure,
        "objects found",
    )


class Heads(nn.Module):
    """Features, and what each head says of them, by its name."""

    def __init__(self, body: nn.Module, heads: dict[str, nn.Module]) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleDict(heads)

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        features = self.body(pictures)
        return {name: head(features) for name, head in self.heads.items()}


def encoder() -> Kind:
    network: Any = open_model(str(NETWORKS[NETWORK]))
    pictures, _ = read(network, archive("train"), IMAGES)
    tested, labels = read(network, archive("test"), TESTED)
    classifier = copy.deepcopy(network.get_classifier())
    network.reset_classifier(0)

    return Kind(
        network,
        pictures,
        tested,
        lambda net: score(classifier(outputs(net, tested)[0]), labels),
        "top-1",
    )


def two_heads() -> Kind:
    source: Any = open_model(str(NETWORKS[NETWORK]))
    body, pictures, tested, *_ = encoder()
    _, learnt = read(source, archive("train"), IMAGES)
    _, labels = read(source, archive("test"), TESTED)
    animals = torch.tensor([0, 0, 1, 1, 1, 1, 1, 1, 0, 0])
    features = outputs(body, pictures)[0]
    wanted = 4 * nn.functional.one_hot(animals[learnt]).float()
    second = nn.Linear(features.shape[1], 2, bias=False)
    second.weight.data = torch.linalg.lstsq(features, wanted).solution.T.contiguous()
    network = Heads(body, {"class": source.get_classifier(), "animal": second}).eval()
    network.pretrained_cfg = image_record(source)

    def measure(net: nn.Module) -> float:
        classes, are_animals = outputs(net, tested)
        return (score(classes, labels) + score(are_animals, animals[labels])) / 2

    return Kind(network, pictures, tested, measure, "top-1, mean of both heads")


KINDS = {"U-Net": unet, "detector": detector, "encoder": encoder, "two heads": two_heads}


def written(kind: Kind, folder: Path) -> str:
    """Its pictures as files."""
    mean, std = (
        torch.tensor(image_record(kind.network)[name]).view(3, 1, 1) for name in ("mean", "std")
    )
    for number, picture in enumerate(kind.pictures):
        save_image(picture * std + mean, folder / f"{number}.png")
    return str(folder)


def recovered(kind: Kind, images: str, *words: str) -> Result:
    """What the recipe makes of it."""
    recipe = recipe_files.load_recipe("recover_unlabelled", [f"data.root={images}", *KEYS, *words])
    with tempfile.TemporaryDirectory() as folder:
        return finetune(kind.network, recipe, Path(folder) / "run", device="cpu", track="none")


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """Relative L2, the mean over outputs."""
    return mean(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def recover(kind: Kind) -> Row:
    """Measure the source, the conversion and what it learns."""
    with tempfile.TemporaryDirectory() as folder:
        images = written(kind, Path(folder))
        loader = make_loader(kind.network, images, samples=100, labelled=False, workers=0)
        begin = normswap.convert(kind.network, "groupnorm", calibrate=loader, relative_eps=0).model
        start = time.perf_counter()
        ended = recovered(kind, images)

    seconds = time.perf_counter() - start
    networks = {"source": kind.network, "at once": begin, "after": ended.model}
    answers = {name: outputs(network, kind.tested) for name, network in networks.items()}
    measures = {
        name: [distance(answers[name], answers["source"]), kind.measure(networks[name])]
        for name in networks
    }

    return {**measures, "unit": kind.unit, "updates": ended.updates, "minutes": seconds / 60}


def mosaics(pictures: Tensor, side: int) -> Tensor:
    """Pictures (N, 3, h, h) beside each other, (M, 3, side, side)."""
    across = side // pictures.shape[-1]
    rows = pictures[: len(pictures) // across**2 * across**2].split(across)
    strips = torch.stack([torch.cat([*row], -1) for row in rows])
    return torch.stack([torch.cat([*part], -2) for part in strips.split(across)])


def tile_off(network: nn.Module, whole: Tensor) -> float:
    """How far the middle of a tile is from that of the whole."""
    (of_whole,) = outputs(network, whole)
    (of_tile,) = outputs(network, whole[..., 16:-16, 16:-16])
    return distance([of_tile[..., 16:-16, 16:-16]], [of_whole[..., 32:-32, 32:-32]])


def folded(keys: tuple[str, ...]) -> Row:
    """The network with GroupNorms, and folded after a fit to each number of images."""
    kind = unet()
    with tempfile.TemporaryDirectory() as folder:
        images = written(kind, Path(folder))
        networks = {0: recovered(kind, images, *keys).model}
        for count in COUNTS:
            loader = make_loader(networks[0], images, samples=count, labelled=False, workers=0)
            networks[count] = normswap.convert(networks[0], "folded", calibrate=loader).model

    whole = mosaics(kind.tested, MOSAIC)
    large = mosaics(kind.tested, LARGE)[:1]
    rows = {}

    theirs = outputs(networks[0], kind.tested)
    for count, network in networks.items():
        ours = outputs(network, kind.tested)
        alike = 100 * float((ours[0].argmax(1) == theirs[0].argmax(1)).double().mean())
        rows[count] = [
            kind.measure(network),
            distance(ours, theirs),
            alike,
            tile_off(network, whole),
        ]

    return {
        "rows": rows,
        "runtimes": {name: in_format(name, networks.values(), large) for name in RUNTIMES},
    }


def main() -> None:
    given = arguments(__doc__).parse_args()
    kept = Kept(ROOT / "runs" / "unlabelled.jsonl", fresh=given.fresh)
    columns = (
        "network",
        "distance: at once",
        "after",
        "measure",
        "source",
        "at once",
        "after",
        "updates",
        "minutes",
    )

    lines = [HOW, markdown_head(*columns)]
    for name, kind in KINDS.items():
        row = kept.get((name,), lambda kind=kind: recover(kind()))
        (_, source), (far, low), (near, high) = (
            row[what] for what in ("source", "at once", "after")
        )
        distances = (f"{far:.3f}", f"{near:.3f}")
        measures = (f"{source:.1f}", f"{low:.1f}", f"{high:.1f}")
        lines.append(
            markdown_row(
                name, *distances, row["unit"], *measures, row["updates"], f"{row['minutes']:.1f}"
            )
        )

    columns = (
        "U-Net",
        "norms",
        "mean IoU",
        "distance",
        "same pixels",
        "tile off",
        "ONNX Runtime",
        "OpenVINO",
    )

    lines += [HOW_FOLDED, markdown_head(*columns)]
    for name, keys in GROUPS.items():
        row = kept.get((name,), lambda keys=keys: folded(keys))
        for at, (count, (iou, off, alike, tile)) in enumerate(row["rows"].items()):
            norms = f"folded, {count} images" if int(count) else "GroupNorm"
            times = [
                f"{of['operators'][at][0]}, {of['times'][at]:.1f} ms"
                for of in row["runtimes"].values()
            ]
            lines.append(
                markdown_row(
                    name, norms, f"{iou:.1f}", f"{off:.3f}", f"{alike:.1f} %", f"{tile:.2g}", *times
                )
            )

    kept.write(given.output, "Learning again without labels", lines)


if __name__ == "__main__":
    main()
