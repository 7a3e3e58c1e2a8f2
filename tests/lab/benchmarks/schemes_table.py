"""Accuracy before and after every conversion, on the trained networks, with no gradient step.

    python tests/lab/benchmarks/schemes_table.py
        [--networks NAME ...] [--parts rows fitted] > rows.md

10,000 test images and the relative L2 at their logits; where the row says so, calibrated on 1000
unlabelled training images (seed 0), or on 128 that are made from the network's own statistics
("synthetic"). "gamma, beta copied" replaces the modules: a GroupNorm with the BatchNorm's own gamma
and beta; "Opacus" is its `ModuleValidator.fix`, which makes fresh GroupNorms. What is measured is
kept, a line each, in runs/schemes_table.jsonl; `--fresh` measures it again.
"""

import argparse
import copy
import functools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from kept import Kept, markdown_head, markdown_row
from support.cifar_tars import unpacked
from support.trained_networks import NETWORKS, SHARED
from torch import Tensor, nn

from normswap.errors import NormswapError
from normswap.images.datasets import make_loader
from normswap.layers import per_sample
from normswap.schemes.groupnorm import nearest_divisor
from normswap.sites import affine
from normswap.storage.checkpoint import open_model
from normswap.surgery import conversion

ROOT = Path(__file__).resolve().parents[3]
Way = tuple[str, dict[str, Any]]
RULES = ("balduzzi", "szegedy", "hanin", "arpit", "rescale")
EXACT: tuple[Way, ...] = (
    ("folded", {}),
    ("skipinit", {}),
    ("regularized-skipinit", {}),
    ("fixup", {}),
    ("frozen-bn", {}),
    ("tune", {}),
    *(("residual-scale", {"rule": rule}) for rule in RULES),
    ("weightnorm", {}),
    ("spectralnorm", {}),
    ("nf", {"mean": "keep"}),
    ("centered-weightnorm", {"mean": "keep"}),
)
DATALESS: tuple[Way, ...] = (
    ("groupnorm", {"relative_eps": 0}),
    ("groupnorm", {"relative_eps": 1}),
    ("groupnorm", {}),
    ("groupnorm", {"groups": 4}),
    ("instancenorm", {}),
    ("dyt", {}),
)
FITTED: tuple[Way, ...] = (
    ("groupnorm", {}),
    ("nf", {}),
    ("nf", {"stem": "fit"}),
    ("centered-weightnorm", {}),
    ("dyt", {}),
)
MADE: tuple[Way, ...] = (("groupnorm", {}), ("nf", {}), ("dyt", {}))


def named(way: Way) -> str:
    return " ".join([way[0], *(f"--{key} {value}" for key, value in way[1].items())])


def archive(split: str) -> str:
    """CIFAR-10's `train` or `test` images."""
    return str(unpacked(SHARED / "data" / "cifar10" / f"{split}.tar.xz"))


def read(
    source: nn.Module | Mapping[str, object], data: str, count: int | None = None, **options: Any
) -> tuple[Tensor, Tensor]:
    """Images (N, 3, H, W) as a network, or its record, takes them, and labels (N,): all, or so many
    drawn ones.
    """
    loader = make_loader(source, data, batch_size=250, workers=0, samples=count, **options)
    images, labels = zip(*loader, strict=True)
    return torch.cat(images), torch.cat(labels)


def shuffled(
    source: nn.Module | Mapping[str, object], split: str, count: int, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """So many CIFAR-10 images of a split, drawn by `seed`, and their labels, in an order that mixes
    the classes.
    """
    images, labels = read(source, archive(split), count, seed=seed)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def cached(name: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, computed once on this machine."""
    file = ROOT / "runs" / "cached" / f"{name}.pt"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        torch.save(make(), new)
        new.rename(file)
    return torch.load(file, weights_only=False)


class Network:
    """A trained network with its images, read when first needed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.model = open_model(str(NETWORKS[name]))

    @functools.cached_property
    def test(self) -> tuple[Tensor, Tensor, Tensor]:
        """The test images, their labels, and the network's own logits."""
        images, labels = read(self.model, archive("test"))
        return images, labels, logits(self.model, images.split(250))

    @functools.cached_property
    def train(self) -> list[Tensor]:
        return list(read(self.model, archive("train"), 1000)[0].split(100))

    def measured(self, make: Callable[[], nn.Module]) -> dict[str, Any]:
        """The row of a result: `why` it was refused, or its accuracy and distance."""
        images, labels, reference = self.test
        start = time.perf_counter()

        try:
            result = make()
        except NormswapError as error:
            return {"why": str(error)}

        seconds = time.perf_counter() - start
        found = logits(result, images.split(250))
        before, after = (
            100 * float((x.argmax(1) == labels).double().mean()) for x in (reference, found)
        )
        error = float((found - reference).double().norm() / reference.double().norm())
        left = sum(affine.is_batchnorm(module) for module in result.modules())

        return {
            "before": before,
            "after": after,
            "l2": error,
            "seconds": seconds,
            "norms_left": left,
        }

    def converted(self, way: Way, images: str) -> nn.Module:
        """Calibrated on 1000 images, on "synthetic" ones, or on none."""
        calibrate: dict[str, Any] = {
            "none": None,
            "1000 images": self.train,
            "synthetic": "synthetic",
        }
        return conversion.convert(self.model, way[0], calibrate=calibrate[images], **way[1]).model


def copied(model: nn.Module, groups: int = 1) -> nn.Module:
    """The naive way: GroupNorms with the BatchNorms' gamma and beta; by default of one group."""
    return swapped(
        model, lambda norm: group_norm(norm, groups), lambda norm: (norm.weight, norm.bias)
    )


def fresh(model: nn.Module) -> nn.Module:
    """The most naive way: a new GroupNorm of one group."""

    def ones_and_zeros(norm: Any) -> tuple[Tensor, Tensor]:
        return torch.ones_like(norm.weight), torch.zeros_like(norm.bias)

    return swapped(model, lambda norm: group_norm(norm, 1), ones_and_zeros)


def group_norm(norm: Any, groups: int, eps: float | None = None) -> nn.Module:
    """The GroupNorm for a BatchNorm, matched on average; of a number of groups that divides its
    channels.
    """
    channels = affine.channels(norm)
    count = nearest_divisor(channels, groups)
    count = nearest_divisor(channels, channels // 2) if count == channels else count

    new: Any = per_sample.GroupNorm.replacing(norm, like=torch.empty(0), groups=count)
    if eps is not None:
        variance = per_sample.group_moments(*affine.statistics(norm), count)[1].repeat_interleave(
            channels // count
        )
        new.weight.mul_(((variance + eps) / (variance + new.eps)).sqrt())
        new.eps = eps

    return cast(nn.Module, new)


def swapped(
    model: nn.Module,
    replacement: Callable[[Any], nn.Module],
    values: Callable[[Any], tuple[Tensor, Tensor]] | None,
) -> nn.Module:
    """A copy with another norm for each BatchNorm; its gamma and beta are `values`, if given."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for path, norm in [*model.named_modules()]:
            if affine.is_batchnorm(norm):
                parent, _, name = path.rpartition(".")
                new = replacement(norm)
                group_norm: Any = next(module for module in new.modules() if hasattr(module, "eps"))
                if values is not None:
                    for tensor, value in zip(
                        (group_norm.weight, group_norm.bias), values(norm), strict=True
                    ):
                        tensor.copy_(value)
                setattr(model.get_submodule(parent), name, new)

    return model.eval()


def opacus(model: nn.Module) -> nn.Module:
    """Opacus' fix: fresh GroupNorms. Its lookup is by exact class: timm's BatchNormAct2d stays as
    it is.
    """
    from opacus.validators import ModuleValidator

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ModuleValidator.fix(copy.deepcopy(model)).eval()


@torch.inference_mode()
def logits(model: Callable[[Tensor], Tensor], batches: Iterable[Tensor]) -> Tensor:
    return torch.cat([model(batch) for batch in batches])


def rows(kept: Kept, network: Network, parts: list[str]) -> None:
    if "rows" in parts:
        for how, make in (("gamma, beta copied", copied), ("Opacus `ModuleValidator.fix`", opacus)):
            measure = functools.partial(network.measured, functools.partial(make, network.model))
            row = kept.get((network.name, how, "none"), measure)
            show(
                row,
                how + (f", {row['norms_left']} BatchNorms left" if row.get("norms_left") else ""),
            )

    for images, ways in (
        ("none", (*EXACT, *DATALESS)),
        ("1000 images", FITTED),
        ("synthetic", MADE),
    ):
        if ("rows" if images == "none" else "fitted") in parts:
            for way in ways:
                measure = functools.partial(
                    network.measured, functools.partial(network.converted, way, images)
                )
                show(kept.get((network.name, named(way), images), measure), f"`{named(way)}`")


def show(row: dict[str, Any], how: str) -> None:
    name, _, data = row["key"]
    figures = ["refused", "", "", "", ""]
    if "why" not in row:
        before = row["before"]
        after = row["after"]
        figures = [
            f"{row['l2']:.1e}",
            f"{before:.2f}",
            f"{after:.2f}",
            f"{100 * after / before:.1f} %",
        ]
        figures.append(f"{row['seconds']:.0f}")

    print(markdown_row(f"`{name}`", how, data, *figures, row["commit"]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--parts", nargs="*", default=["rows", "fitted"])
    parser.add_argument("--fresh", action="store_true", help="measure again what was kept")
    given = parser.parse_args()
    kept = Kept(ROOT / "runs" / "schemes_table.jsonl", fresh=given.fresh)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads\n")
    columns = (
        "network",
        "to",
        "calibration",
        "relative L2",
        "top-1 before",
        "after",
        "kept",
        "seconds",
        "commit",
    )
    print(markdown_head(*columns))
    for name in given.networks:
        rows(kept, Network(name), given.parts)


if __name__ == "__main__":
    main()
