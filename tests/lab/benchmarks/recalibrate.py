"""Accuracy on a shifted domain before and after `recalibrate`: CIFAR-10 test images, darkened or
blurred.

    python tests/lab/benchmarks/recalibrate.py > FILE.md

Statistics from 1000 unlabelled training images under the same shift, batches of 100; all 10,000
test images.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from schemes_table import NETWORKS, archive, read
from torch import Tensor, nn

from normswap.images.accuracy import classify
from normswap.models import zoo
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate

Shift = Callable[[Tensor], Tensor]


def shifts(model: nn.Module) -> dict[str, Shift]:
    """On normalized images: pixels are brought back to [0, 1], changed, and normalized again."""
    config = zoo.data_config(model)
    mean, std = (torch.tensor(config[name]).view(1, 3, 1, 1) for name in ("mean", "std"))

    def on_pixels(change: Shift) -> Shift:
        return lambda x: (change(x * std + mean) - mean) / std

    blur = torch.full((3, 1, 5, 5), 1 / 25)
    return {
        "none": lambda x: x,
        "darkened to 40 %": on_pixels(lambda x: 0.4 * x),
        "contrast 30 %": on_pixels(lambda x: 0.5 + 0.3 * (x - 0.5)),
        "blurred, 5 x 5": on_pixels(
            lambda x: F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), blur, groups=3)
        ),
    }


def main() -> None:
    print("| network | shift | top-1 | recalibrated |\n|---|---|---|---|")
    for name, place in NETWORKS.items():
        model = open_model(str(place))
        images, labels = read(model, archive("test"))
        train = read(model, archive("train"), 1000)[0].split(100)
        for shift_name, shift in shifts(model).items():
            new = recalibrate(model, [shift(x) for x in train]).model
            test = [*zip(shift(images).split(250), labels.split(250), strict=True)]
            before, after = (classify(network, test)[0].top1 for network in (model, new))
            print(f"| `{name}` | {shift_name} | {before:.2f} | {after:.2f} |", flush=True)


if __name__ == "__main__":
    main()
