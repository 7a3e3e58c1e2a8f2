"""Every key of a recipe does something: with another value, another run."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel
from support.small_trainings import TINY, merged, network, recipe, train, write_images
from torch import Tensor, nn

import normswap
from normswap.models.zoo import data_config
from normswap.training.engine import Result, finetune
from normswap.training.recipe import Recipe

BASE: dict[str, Any] = {
    "train": {"epochs": 0.6},
    "data": {"validation_samples": 8},
    "optim": {"weight_decay": 0.1},
}
CLIP = {"optim": {"clip": {"mode": "norm", "value": 0.1}}}
STEP = {"schedule": {"name": "step", "milestones": [0.2]}}
MIXUP = {"data": {"augment": {"mixup": 1.0}}}
CUTMIX = {"data": {"augment": {"cutmix": 1.0}}}
BOTH = {"data": {"augment": {"mixup": 1.0, "cutmix": 1.0, "mixup_switch": 0.0}}}
DISTILL: dict[str, Any] = {"convert": {"to": "skipinit", "options": {"alpha": 0.5}}, "distill": {}}

CHANGES: dict[str, tuple[dict[str, Any], Any]] = {  # what to begin with, and the key's other value
    "convert.to": ({"convert": {"to": "skipinit"}}, "groupnorm"),
    "convert.options": ({"convert": {"to": "skipinit"}}, {"alpha": 0.5}),
    "convert.calibrate": ({"convert": {"to": "groupnorm"}}, True),
    "convert.samples": ({"convert": {"to": "groupnorm", "calibrate": True, "samples": 10}}, 20),
    "data.samples": ({}, 16),
    "data.validation_samples": ({}, 4),
    "data.input_size": ({}, 48),
    "data.batch_size": ({}, 4),
    "data.augment.scale": ({}, [0.3, 0.6]),
    "data.augment.padding": ({}, 4),
    "data.augment.hflip": ({}, 1.0),
    "data.augment.color_jitter": ({}, 0.5),
    "data.augment.auto_augment": ({}, "rand-m9"),
    "data.augment.repeats": ({}, 3),
    "data.augment.erase": ({}, 1.0),
    "data.augment.mixup": ({}, 1.0),
    "data.augment.cutmix": ({}, 1.0),
    "data.augment.cutmix_minmax": (CUTMIX, [0.1, 0.3]),
    "data.augment.mixup_probability": (MIXUP, 0.0),
    "data.augment.mixup_switch": (BOTH, 1.0),
    "data.augment.mixup_off": (MIXUP, 0.3),
    "optim.name": ({}, "adamw"),
    "optim.lr": ({}, 0.02),
    "optim.momentum": ({}, 0.5),
    "optim.weight_decay": ({}, 0.2),
    "optim.decay": ({}, "all"),
    "optim.scalar_lr": ({}, 0.1),
    "optim.layer_decay": ({}, 0.5),
    "optim.args": ({}, {"nesterov": False}),
    "optim.clip.mode": (CLIP, "value"),
    "optim.clip.value": (CLIP, 0.05),
    "schedule.name": ({}, "poly"),
    "schedule.warmup": ({}, 0.4),
    "schedule.warmup_lr": ({"schedule": {"warmup": 0.4}}, 0.0),
    "schedule.by_epoch": ({}, True),
    "schedule.min_lr": ({}, 0.005),
    "schedule.milestones": (STEP, [0.4]),
    "schedule.rate": (STEP, 0.5),
    "train.epochs": ({}, 0.4),
    "train.seed": ({}, 1),
    "train.precision": ({}, "bf16"),
    "train.ema.decay": ({"train": {"ema": {"decay": 0.9, "warmup": False}}}, 0.1),
    "train.ema.warmup": ({"train": {"ema": {"decay": 0.9, "warmup": False}}}, True),
    "train.smoothing": ({}, 0.2),
    "train.bce": ({}, True),
    "distill.weight": (DISTILL, 0.9),
    "distill.temperature": (DISTILL, 5.0),
}
ELSEWHERE = {
    "summary",
    "source",  # for people
    "model.name",
    "model.weights",
    "model.args",
    "distill.teacher",
    "data.root",
    "data.validation",  # test_finetune
    "data.workers",
    "train.accumulate",
    "train.checkpoint",
    "train.channels_last",
    "train.compile",  # the same run
    "train.sync_bn",  # test_processes
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images")


def keys(part: type[BaseModel], above: str = "") -> Iterator[str]:
    for name, field in part.model_fields.items():
        options = [field.annotation, *getattr(field.annotation, "__args__", ())]
        inner = next(
            (kind for kind in options if isinstance(kind, type) and issubclass(kind, BaseModel)),
            None,
        )
        if inner is None:
            yield above + name
        else:
            yield from keys(inner, f"{above}{name}.")


def test_every_key_has_a_test() -> None:
    assert set(keys(Recipe)) == CHANGES.keys() | ELSEWHERE


def nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


def outcome(result: Result) -> tuple[Any, ...]:
    clocks = ("images_per_s", "seconds")
    rows = [[value for name, value in row.items() if name not in clocks] for row in result.rows]
    average = torch.load(result.last.parent / "state/run.pt", weights_only=True)["ema"] or {}
    return rows, [
        tensor.tolist() for part in (result.model.state_dict(), average) for tensor in part.values()
    ]


def run(images: Path, out: Path, parts: dict[str, Any]) -> tuple[Any, ...]:
    start = "batchnorm" if "convert" in parts else "skipinit"
    return outcome(train(network(start), recipe(images, **merged(BASE, parts)), out))


@pytest.fixture(scope="module")
def before(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs to compare with, each made once."""
    known: dict[str, tuple[Any, ...]] = {}

    def get(parts: dict[str, Any]) -> tuple[Any, ...]:
        name = repr(parts)
        if name not in known:
            known[name] = run(images, tmp_path_factory.mktemp("runs") / "out", parts)
        return known[name]

    return get


@pytest.mark.parametrize("key", CHANGES)
@pytest.mark.one_in(16)
def test_another_value_is_another_run(images: Path, tmp_path: Path, before: Any, key: str) -> None:
    start, value = CHANGES[key]
    assert run(images, tmp_path / "out", merged(start, nested(key, value))) != before(start)


@pytest.mark.slow
def test_what_trained_on_a_size_is_recorded_with_it(images: Path, tmp_path: Path) -> None:
    """Whoever evaluates or exports it next does so as it was trained and measured."""
    plan = recipe(images, data={"input_size": 48})
    done = finetune(network(), plan, tmp_path / "run", device="cpu", track="none")
    for trained in (done.model, normswap.load(done.best), normswap.load(done.last)):
        assert tuple(data_config(trained)["input_size"]) == (3, 48, 48)


@pytest.mark.slow
def test_the_same_values_are_the_same_run(images: Path, tmp_path: Path, before: Any) -> None:
    assert run(images, tmp_path / "one", {}) == before({})
    assert run(
        images, tmp_path / "two", {"data": {"workers": 2}, "train": {"checkpoint": 1}}
    ) == before({})


@pytest.mark.slow
def test_a_recipe_may_name_its_network(images: Path, tmp_path: Path) -> None:
    part = {"name": "resnet18", "weights": "random", "args": {"num_classes": 10, **TINY}}
    plan = recipe(images, model=part, data={"input_size": 32}, train={"epochs": 0.4})
    one, two = (
        finetune(None, plan, tmp_path / name, device="cpu", track="none") for name in ("one", "two")
    )
    assert outcome(one) == outcome(two)  # random weights are the seed's
    assert [p.shape for p in one.model.parameters()] == [p.shape for p in network().parameters()]


class Own(nn.Module):
    """A network that timm cannot build."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_a_network_of_ones_own_trains(images: Path, tmp_path: Path) -> None:
    import normswap

    torch.manual_seed(0)
    model = Own()
    plan = recipe(images, data={"input_size": 32}, optim={"clip": {}})
    result = train(model, plan, tmp_path / "out")
    again = normswap.load(result.last, skeleton=Own())
    x = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(x), result.model(x))
    assert not torch.equal(again(x), model.eval()(x))


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_on_a_gpu(images: Path, tmp_path: Path, precision: str) -> None:
    part = {"precision": precision, "channels_last": True, "ema": {}, "epochs": 3}
    plan = recipe(images, train=part, convert={"to": "skipinit"}, distill={}, optim={"clip": {}})
    result = train(network(), plan, tmp_path / "out", device="cuda")
    losses = [row["train_loss"] for row in result.rows[1:]]

    assert losses[0] is not None
    assert losses[-1] is not None
    assert losses[-1] < losses[0]
    assert (
        train(network(), plan, tmp_path / "out", device="cuda", resume="auto").updates
        == result.updates
    )
