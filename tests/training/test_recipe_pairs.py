"""Every key of a recipe beside every other: the run ends, a cut one goes on as if it had not been, halves add up."""

from __future__ import annotations

import csv
import itertools
import math
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from crossed import sampled
from trained import merged, network, recipe, train, weights, write_images

from normswap.storage import checkpoint
from normswap.training.progress_records import TrainingProgress


class Key(NamedTuple):
    """One part of a recipe.

    Args:
        name: how the case is called.
        parts: as a recipe has them.
        scheme: what the network has in the place of its norms.
        alike: whether two halves of a batch add up to the whole: nothing is drawn or measured for each half.
    """

    name: str
    parts: dict[str, Any]
    scheme: str = "skipinit"
    alike: bool = True


KEYS = (
    Key("accumulate", {"train": {"accumulate": 2}}),
    Key("ema", {"train": {"ema": {"decay": 0.9}}}),
    Key("ema from the start", {"train": {"ema": {"decay": 0.99, "warmup": False}}}),
    Key("smoothing", {"train": {"smoothing": 0.1}}),
    Key("channels last", {"train": {"channels_last": True}}),
    Key("bf16", {"train": {"precision": "bf16"}}, alike=False),
    Key("saved at each update", {"train": {"checkpoint": 1}}),
    Key("rollback", {"train": {"not_finite": "rollback"}}),
    Key("half an epoch", {"train": {"epochs": 1.5}}),
    Key("sync_bn", {"train": {"sync_bn": True}}, "batchnorm", alike=False),
    Key("agc", {"optim": {"clip": {"mode": "agc", "value": 0.1}}}),
    Key("clipped norm", {"optim": {"clip": {"mode": "norm", "value": 0.5}}}),
    Key("adamw", {"optim": {"name": "adamw", "lr": 0.001}}, alike=False),  # it divides by gradients near zero
    Key("decay", {"optim": {"decay": "weights-only", "weight_decay": 0.01}}),
    Key("layer decay", {"optim": {"layer_decay": 0.8}}),
    Key("scalars' rate", {"optim": {"scalar_lr": 0.1}}),
    Key("warmup", {"schedule": {"warmup": 0.5}}),
    Key("steps", {"schedule": {"name": "step", "milestones": [1]}}),
    Key("polynomial", {"schedule": {"name": "poly", "min_lr": 0.001}}),
    Key("logits", {"distill": {}}),
    Key("features", {"distill": {"kind": "features", "weight": 1.0}}),
    Key("some images", {"data": {"samples": 24}}),
    Key("smaller images", {"data": {"input_size": 24}}),
    Key("mixup", {"data": {"augment": {"mixup": 0.2}}}, alike=False),
    Key("cutmix", {"data": {"augment": {"cutmix": 1.0}}}, alike=False),
    Key("erasing", {"data": {"augment": {"erase": 0.5, "padding": 2}}}),
    Key("crops", {"data": {"augment": {"scale": [0.5, 1.0], "hflip": 0.5}}}),
    Key("workers", {"data": {"workers": 1}}),
    Key("nf", {"optim": {"lr": 0.001}}, "nf"),
    Key("dropout", {}, "regularized-skipinit", alike=False),
    Key("groupnorm", {}, "groupnorm"),
    Key("frozen", {}, "frozen-bn"),
)


def together(one: Key, two: Key) -> bool:
    """Whether both can stand in one recipe: not the same key twice, nor on two kinds of network."""
    kinds = {key.scheme for key in (one, two)} - {"skipinit"}
    return len(kinds) < 2 and not _leaves(one.parts) & _leaves(two.parts)


def _leaves(parts: dict[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """The paths of the keys; one choice among several (a scheduler, a clip, a teacher) counts as one."""
    found: set[tuple[str, ...]] = set()
    for key, value in parts.items():
        one_choice = key in ("clip", "distill", "ema") or key == "name" or above == ("schedule",)
        path = above if above == ("schedule",) and key != "warmup" else (*above, key)
        found |= {path} if one_choice or not isinstance(value, dict) else _leaves(value, path)
    return found


PAIRS = [(one, two) for one, two in itertools.combinations(KEYS, 2) if together(one, two)]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 3)  # 30: the fourth batch is not full


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(network(), tmp_path_factory.mktemp("models") / "teacher")


class Killed(BaseException):
    """What takes the place of SIGKILL where the process should live on."""


def kill(moment: TrainingProgress) -> None:
    if moment.update == 4:
        raise Killed


def largest_difference(one: Path, two: Path) -> float:
    """Of any weight, as a share of its tensor's largest, or of 1."""
    ours, theirs = weights(one / "last"), weights(two / "last")
    assert ours.keys() == theirs.keys()
    return max(
        float((a.double() - theirs[key].double()).abs().max() / a.double().abs().max().clamp(min=1))
        for key, a in ours.items()
    )


def taught(parts: dict[str, Any], teacher: Path) -> dict[str, Any]:
    return {"distill": {**parts["distill"], "teacher": str(teacher)}} if "distill" in parts else parts


@pytest.mark.parametrize("pair", sampled(PAIRS, 48), ids=lambda pair: f"{pair[0].name}, {pair[1].name}")
def test_two_keys_of_a_recipe(pair: tuple[Key, Key], images: Path, teacher: Path, tmp_path: Path) -> None:
    one, two = (key._replace(parts=taught(key.parts, teacher)) for key in pair)
    scheme = next((key.scheme for key in pair if key.scheme != "skipinit"), "skipinit")
    options = {"mean": "keep"} if scheme == "nf" else {}
    plan = recipe(images, **merged(one.parts, two.parts))

    whole = train(network(scheme, **options), plan, tmp_path / "whole")
    rows = list(csv.DictReader((tmp_path / "whole/metrics.csv").read_text().splitlines()))
    assert whole.finished
    assert all(math.isfinite(float(row["val_loss"])) for row in rows)
    assert [key for key, tensor in weights(tmp_path / "whole/last").items() if not tensor.isfinite().all()] == []

    with pytest.raises(Killed):
        train(network(scheme, **options), plan, tmp_path / "cut", progress=kill)
    torch.manual_seed(5)  # another process would have another state
    again = train(network(scheme, **options), plan, tmp_path / "cut", resume="auto")
    assert again.updates == whole.updates
    assert largest_difference(tmp_path / "whole", tmp_path / "cut") == 0
    ema, then = (torch.load(tmp_path / name / "state/run.pt", weights_only=True)["ema"] for name in ("whole", "cut"))
    assert (ema is None) == (then is None)
    assert ema is None or all(torch.equal(tensor, then[key]) for key, tensor in ema.items())

    if one.name == "accumulate" and two.alike:
        train(network(scheme, **options), recipe(images, **two.parts), tmp_path / "at once")
        assert largest_difference(tmp_path / "whole", tmp_path / "at once") < 1e-4
