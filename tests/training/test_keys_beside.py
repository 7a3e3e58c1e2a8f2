"""Law: a recipe's key reaches timm's optimizer or transform, alone and beside each other key.

The rows are the keys themselves, so that a new key that does nothing fails by itself.
"""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from PIL import Image
from support.small_trainings import network
from torchvision.transforms.functional import to_pil_image

from normswap.training import optimizing
from normswap.training.recipe import Augment, Optim
from normswap.training.training_images import drawn_by, transform

# Another value of each key than its default.
OPTIM: dict[str, Any] = {
    "name": "adamw",
    "lr": 0.02,
    "momentum": 0.5,
    "weight_decay": 0.2,
    "decay": "all",
    "scalar_lr": 0.1,
    "layer_decay": 0.5,
    "args": {"maximize": True},
}
AUGMENT: dict[str, Any] = {
    "scale": (0.3, 0.6),
    "padding": 4,
    "hflip": 1.0,
    "color_jitter": 0.5,
    "auto_augment": "rand-m9",
    "erase": 1.0,
}
# The network's own record of its images: no value is the default of normswap or timm.
RECORD: dict[str, Any] = {
    "input_size": (3, 24, 20),
    "mean": (0.3, 0.4, 0.5),
    "std": (0.2, 0.3, 0.4),
    "interpolation": "bicubic",
}
OTHER_RECORD: dict[str, Any] = {
    "input_size": (3, 20, 24),
    "mean": (0.5, 0.4, 0.3),
    "std": (0.4, 0.3, 0.2),
    "interpolation": "nearest",
}
# Keys that are read elsewhere.
ELSEWHERE = {
    "clip": "tests/training/test_recipe_keys.py",
    "mixup": "tests/training/test_recipe_keys.py",
    "cutmix": "tests/training/test_recipe_keys.py",
    "cutmix_minmax": "tests/training/test_recipe_keys.py",
    "mixup_probability": "tests/training/test_recipe_keys.py",
    "mixup_switch": "tests/training/test_recipe_keys.py",
    "mixup_off": "tests/training/test_recipe_keys.py",
    "repeats": "tests/training/test_engine.py",
}
# Keys that say nothing beside another one, with the reason.
SILENT = {
    ("momentum", "name"): "AdamW has betas",
    ("padding", "scale"): "a part of the image is cut out, and nothing is padded",
    ("color_jitter", "auto_augment"): "timm's policies change colours themselves",
}

Groups = dict[str, dict[str, Any]]


def reached_optimizer(values: Mapping[str, Any]) -> Groups:
    """The class of timm's optimizer, and the numbers that it has for each parameter, by name."""
    model = network("skipinit")
    optimizer = optimizing.optimizer(model, Optim(**values))

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: Groups = {"": {"class": type(optimizer).__name__}}
    for group in optimizer.param_groups:
        numbers = {key: value for key, value in group.items() if key != "params"}
        # timm's scheduler multiplies each group's rate by its scale.
        numbers["lr"] *= numbers.pop("lr_scale", 1.0)
        for parameter in group["params"]:
            found[names[id(parameter)]] = numbers
    return found


def reached_transform(values: Mapping[str, Any], record: Mapping[str, Any] = RECORD) -> str:
    """What timm's transform makes of an image, drawn eight times."""
    pixels = torch.rand(3, 33, 41, generator=torch.Generator().manual_seed(0))
    image: Image.Image = to_pil_image(pixels)
    made: Callable[[Image.Image], torch.Tensor] = transform(dict(record), Augment(**values))

    results: list[object] = []
    for seed in range(8):
        with drawn_by(seed):
            result = made(image)
        results.append((tuple(result.shape), result.flatten().tolist()))
    return repr(results)


PARTS: dict[str, tuple[dict[str, Any], Callable[[Mapping[str, Any]], object]]] = {
    "optim": (OPTIM, reached_optimizer),
    "augment": (AUGMENT, reached_transform),
}


def test_every_key_has_a_row() -> None:
    assert {*Optim.model_fields} - {*ELSEWHERE} == {*OPTIM}
    assert {*Augment.model_fields} - {*ELSEWHERE} == {*AUGMENT}


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("part", "key"), [(part, key) for part, (values, _) in PARTS.items() for key in values]
)
def test_a_key_reaches_timm(part: str, key: str) -> None:
    values, reached = PARTS[part]

    assert reached({key: values[key]}) != reached({})

    for other, value in values.items():
        if other == key or (key, other) in SILENT:
            continue
        beside = {other: value}
        assert reached({**beside, key: values[key]}) != reached(beside), other


@pytest.mark.parametrize("key", RECORD)
def test_the_networks_own_record_reaches_the_training_transform(key: str) -> None:
    other = {**RECORD, key: OTHER_RECORD[key]}

    for values in ({}, *({name: value} for name, value in AUGMENT.items())):
        assert reached_transform(values, other) != reached_transform(values), values


def test_factors_on_the_rate_are_multiplied() -> None:
    plain = reached_optimizer({})
    by_layer = reached_optimizer({"layer_decay": 0.5})
    of_scalars = reached_optimizer({"scalar_lr": 0.1})

    both = reached_optimizer({"layer_decay": 0.5, "scalar_lr": 0.1})

    names = [name for name in both if name]
    for name in names:
        factor = by_layer[name]["lr"] / plain[name]["lr"] * of_scalars[name]["lr"]
        assert both[name]["lr"] == pytest.approx(factor), name
    assert len({both[name]["lr"] for name in names}) > len({by_layer[name]["lr"] for name in names})

    # The scalars of five blocks stand in five layers.
    rates = [by_layer[name]["lr"] for name in names if name.endswith(".alpha")]
    assert len(rates) == len(set(rates)) == 5
