"""A vision encoder as robot policies build it, BatchNorm to GroupNorm: its features before and
after.

    python tests/lab/benchmarks/robot_policy.py -o tests/lab/benchmarks/robot_policy.md

The encoder is `Sequential(*list(resnet18.children())[:-2])` with 16 channels to a group, of two
trained narrow ResNet-18s. Frames are CIFAR-10 images: those it is fitted to are unlabelled training
images (seed 0), those it is measured on are test images. Nothing is trained. "loads" asks whether
torch loads the result's state_dict, strictly, into what diffusion_policy and lerobot build.
"""

import argparse
import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kept import markdown_head, markdown_row, write_table
from schemes_table import NETWORKS, archive, logits, read, swapped
from timm.layers import BatchNormAct2d
from torch import Tensor, nn

import normswap
from normswap.storage.checkpoint import open_model

SIZE = 16  # channels to a group, as both projects have it
HOW = (
    (
        "Relative L2 and cosine: the encoder's feature maps on held-out test images against the"
        " source's. Top-1: the"
    ),
    (
        "source's own pooling and classifier on these features, in percent. Loads: its state_dict,"
        " strictly and without"
    ),
    (
        "normswap, into the encoder with every BatchNorm2d replaced by `GroupNorm(channels // 16,"
        " channels)`; or into the"
    ),
    (
        "same with a bias in every convolution, and the result's eps in every norm. Norms of fewer"
        " than 16 channels,"
    ),
    "which a ResNet-18 has not, get one group.",
    "",
)


def encoder(network: nn.Module) -> nn.Sequential:
    """The network without pooling and classifier."""
    return nn.Sequential(*list(copy.deepcopy(network).children())[:-2]).eval()


def replaced(model: nn.Module, *, keep: bool = False) -> nn.Module:
    """What diffusion_policy and lerobot do, a fresh GroupNorm for every BatchNorm2d; one group for
    few channels.

    Args:
        keep: with its gamma and beta.
    """

    def group_norm(norm: Any) -> nn.Module:
        new = nn.GroupNorm(max(norm.num_features // SIZE, 1), norm.num_features)
        # timm's BatchNormAct2d holds the activation, too.
        return nn.Sequential(new, norm.act) if isinstance(norm, BatchNormAct2d) else new

    return swapped(model, group_norm, (lambda norm: (norm.weight, norm.bias)) if keep else None)


def biased(model: nn.Module) -> nn.Module:
    """With a bias in every convolution."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.bias is None:
            module.bias = nn.Parameter(torch.zeros(module.out_channels))
    return model


def loads(source: nn.Module, result: nn.Module, x: Tensor) -> str:
    """Which encoder of plain layers can load the result's tensors and compute the same."""
    biases = biased(replaced(source))
    for label, skeleton in (
        ("yes", replaced(source)),
        ("with biases", biases),
        ("with biases and eps", biases),
    ):
        for path, norm in skeleton.named_modules() if "eps" in label else ():
            if isinstance(norm, nn.GroupNorm):
                norm.eps = getattr(result.get_submodule(path), "eps", norm.eps)

        try:
            skeleton.load_state_dict(result.state_dict())
        except RuntimeError:
            continue

        with torch.inference_mode():
            if torch.allclose(skeleton(x), result(x), rtol=1e-4, atol=1e-5):
                return label

    return "no"


def rows(name: str, images: int) -> Iterator[str]:
    """One table line for each way."""
    network = open_model(str(NETWORKS[name])).eval()
    source = encoder(network)
    head = nn.Sequential(*list(network.children())[-2:]).eval()
    test, labels = read(network, archive("test"), images, seed=0)
    batches = test.split(250)
    expected = logits(source, batches)

    def ours(to: str, **options: Any) -> nn.Module:
        return normswap.convert(source, to, input_size=tuple(test[0].shape), **options).model

    ways: dict[str, Callable[[], nn.Module]] = {
        "source (BatchNorm)": lambda: source,
        "fresh GroupNorm, as both projects do": lambda: replaced(source),
        "GroupNorm, gamma and beta copied": lambda: replaced(source, keep=True),
        "`groupnorm --relative-eps 0`": lambda: ours("groupnorm", group_size=SIZE, relative_eps=0),
        "`groupnorm`": lambda: ours("groupnorm", group_size=SIZE),
        "`groupnorm`, 24 frames": lambda: ours(
            "groupnorm", group_size=SIZE, calibrate=frames(network, 24)
        ),
        "`groupnorm`, 48 frames": lambda: ours(
            "groupnorm", group_size=SIZE, calibrate=frames(network, 48)
        ),
        "`skipinit`": lambda: ours("skipinit"),
        "`folded`": lambda: ours("folded"),
    }
    for way_name, make in ways.items():
        start = time.perf_counter()
        result = make().eval()
        took = time.perf_counter() - start
        found = logits(result, batches)
        off = float((found - expected).double().norm() / expected.double().norm())
        cosine = float(
            torch.cosine_similarity(found.flatten().double(), expected.flatten().double(), dim=0)
        )
        with torch.inference_mode():
            top1 = 100 * float((head(found).argmax(1) == labels).double().mean())
        where = loads(source, result, batches[0][:4])
        yield markdown_row(
            f"`{name}`",
            way_name,
            f"{off:.2g}",
            f"{cosine:.3f}",
            f"{top1:.1f}",
            where,
            f"{took:.1f}",
        )


def frames(network: nn.Module, count: int) -> list[Tensor]:
    return list(read(network, archive("train"), count, seed=0)[0].split(24))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--networks", nargs="*", default=["resnet18_narrow", "demo"], choices=list(NETWORKS)
    )
    parser.add_argument(
        "--images", type=int, default=2000, help="test images that it is measured on"
    )
    parser.add_argument("-o", "--output", type=Path, required=True)
    given = parser.parse_args()
    columns = ("network", "to", "relative L2", "cosine", "top-1", "loads", "seconds")

    lines = [f"{given.images} test images.", "", *HOW, markdown_head(*columns)]
    for name in given.networks:
        for line in rows(name, given.images):
            print(line, flush=True)
            lines.append(line)

    command = f"benchmarks/robot_policy.py --images {given.images} -o {given.output}"
    write_table(given.output, "A robot policy's encoder, BatchNorm to GroupNorm", command, lines)


if __name__ == "__main__":
    main()
