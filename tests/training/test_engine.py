"""The parts of the engine, each against an independent computation."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from hypothesis import given, settings, strategies as st
from PIL import Image
from support.sampled_tables import quick
from support.small_trainings import network, recipe, train, weights, write_images
from timm.data import create_transform
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.errors import OptionError, SourceError
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.training import engine, optimizing, training_images
from normswap.training.optimizing import Objective, Teacher, clip_gradients, optimizer
from normswap.training.recipe import Augment, Clip, Data, Distill, Optim, Recipe, Schedule
from normswap.training.training_images import (
    Order,
    Position,
    Seeded,
    Share,
    TrainingImages,
    drawn_by,
    places,
    transform,
)

RECORD = {
    "input_size": (3, 32, 32),
    "mean": (0.5, 0.4, 0.3),
    "std": (0.2, 0.3, 0.25),
    "interpolation": "bilinear",
}


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images")


def order(
    first: int = 0,
    last: int = 6,
    *,
    batch: int = 8,
    seed: int = 0,
    repeats: int = 1,
    **share: int,
) -> list[list[Position]]:
    return list(Order(27, batch, Share(**share), seed, first, last, repeats))


@pytest.mark.parametrize(
    ("world", "accumulate", "batch"), [(1, 1, 8), (2, 1, 8), (1, 4, 8), (2, 2, 8), (4, 1, 4)]
)
@pytest.mark.parametrize("repeats", [1, 3])
def test_processes_see_together_what_one_sees(
    world: int, accumulate: int, batch: int, repeats: int
) -> None:
    asked = {"batch": batch, "repeats": repeats}
    alone = order(**asked)
    shares = [
        order(**asked, rank=rank, world=world, accumulate=accumulate) for rank in range(world)
    ]

    for update, whole in enumerate(alone):
        parts: list[list[Position]] = []
        for own in shares:
            parts += own[update * accumulate : (update + 1) * accumulate]
        assert sorted(itertools.chain(*parts)) == sorted(whole)

        # The partners of mixup stay together.
        size = batch // world // accumulate
        partner = dict(zip(whole, reversed(whole), strict=True))
        for part in parts:
            assert size % 2 or [partner[image] for image in part] == part[::-1]


def test_an_epoch_has_each_image_once_and_the_next_has_another_order() -> None:
    epochs = [order(3 * epoch, 3 * epoch + 3) for epoch in range(2)]
    for number, epoch in enumerate(epochs):
        seen = list(itertools.chain(*epoch))
        assert {which for which, _, _ in seen} == {number}
        assert len({index for _, index, _ in seen}) == 24
    assert [index for _, index, _ in epochs[0][0]] != [index for _, index, _ in epochs[1][0]]
    assert order(seed=1) != order(seed=0)
    assert order(2) == order()[2:]  # a continued run


def test_an_image_that_is_repeated_comes_so_often_in_succession() -> None:
    seen = list(itertools.chain(*order(0, 3, repeats=3)))

    indices = [index for _, index, _ in seen]
    assert len(set(indices)) == 8
    assert indices == np.repeat(indices[::3], 3).tolist()
    assert [copy for _, _, copy in seen] == [0, 1, 2] * 8
    assert order(2, repeats=3) == order(repeats=3)[2:]  # a continued run


def test_random_numbers_are_a_function_of_their_name_and_are_given_back() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    after = draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    with drawn_by(0, "image", 1):
        one = draw()
    assert draw() == after
    with drawn_by(0, "image", 1):
        assert draw() == one
    with drawn_by(0, "image", 2):
        assert draw() != one


AUGMENT = Augment(scale=(0.3, 1.0), auto_augment="rand-m9-mstd0.5", erase=0.5, color_jitter=0.4)


def batches(images: Path, workers: int, first: int = 0) -> list[Tensor]:
    data = Data(root=str(images), batch_size=8, workers=workers, augment=AUGMENT)
    training = TrainingImages({**RECORD, "num_classes": 10}, data, 0, labelled=True)
    return [batch for batch, _ in training.batches(Share(), first, 6)]


def test_augmentation_does_not_depend_on_workers_nor_on_where_a_run_begins(images: Path) -> None:
    whole = batches(images, 0)
    assert all(map(torch.equal, whole, batches(images, 2)))
    assert all(map(torch.equal, whole[4:], batches(images, 0, first=4)))
    data = Data(root=str(images), batch_size=8, augment=AUGMENT)
    inner = TrainingImages({**RECORD, "num_classes": 10}, data, 0, labelled=True).images
    again = Seeded(inner.images, inner.rows, 0)
    first = again[0, 3, 0][0]
    assert torch.equal(first, again[0, 3, 0][0])
    # Another epoch, and another copy, is another crop.
    assert not torch.equal(first, again[1, 3, 0][0])
    assert not torch.equal(first, again[0, 3, 1][0])


def test_without_augmentation_images_are_those_of_evaluation(images: Path) -> None:
    from PIL import Image

    image = Image.open(next(images.rglob("*.png"))).resize((48, 48))
    plain = transform(RECORD, Augment(hflip=0.0))
    assert torch.allclose(plain(image), create_transform(**RECORD, crop_pct=1.0)(image))
    flipped = transform(RECORD, Augment(hflip=1.0))
    assert torch.allclose(flipped(image), plain(image).flip(2), atol=0.02)
    cropped = transform(RECORD, Augment(hflip=0.0, padding=4))
    torch.manual_seed(0)
    assert cropped(image).shape == (3, 32, 32)
    assert not torch.equal(cropped(image), plain(image))


def test_places(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name / "a").mkdir(parents=True)
    train = str(tmp_path / "train")
    test = str(tmp_path / "test")

    assert places(Data(root=str(tmp_path))) == (train, test)
    assert places(Data(root=train)) == (train, test)
    assert places(Data(root=train, validation="v")) == (train, "v")
    assert places(Data(root=test)) == (test, None)
    assert places(Data(root="torch/cifar10:/d")) == ("torch/cifar10:/d", "torch/cifar10:/d")
    with pytest.raises(SourceError, match=r"no images.*--data PATH, or data.root"):
        places(Data())


def test_the_parts_that_were_taken_are_named_and_no_note_comes_twice(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name / "a").mkdir(parents=True)
    train = str(tmp_path / "train")
    test = str(tmp_path / "test")
    taken: Any = SimpleNamespace(notes=("labels are numbers",))
    checked: Any = SimpleNamespace(notes=("labels are numbers", "one image is broken"))

    of_parts = training_images.image_notes(Data(root=str(tmp_path)), taken, checked)
    of_one = training_images.image_notes(Data(root=train), taken, checked)
    unchecked = training_images.image_notes(Data(root=test), taken, None)

    assert train in of_parts[0]
    assert test in of_parts[0]
    assert of_parts[1:] == of_one == ["labels are numbers", "one image is broken"]
    assert unchecked[0] == "labels are numbers"
    assert "no validation images" in unchecked[1]
    assert len(unchecked) == 2


class Listed(list[str]):
    """A dataset of so many images, which its reader names.

    Args:
        names: The names of the images.
        of_the_hub: Whether it is a Hugging Face dataset, in which a name is read with its image.
    """

    def __init__(self, *names: str, of_the_hub: bool = False) -> None:
        super().__init__(names)
        reader = SimpleNamespace(filenames=lambda: names)
        if of_the_hub:
            reader = SimpleNamespace(dataset="a table", filenames=lambda: pytest.fail("all read"))
        self.images = SimpleNamespace(reader=reader)


def test_images_are_told_apart_by_number_and_name_and_on_the_hub_by_number() -> None:
    files = [Listed("a", "b"), Listed("a", "c"), Listed("a", "b", "c")]
    hub = [Listed("a", "b", of_the_hub=True), Listed("a", of_the_hub=True)]

    digests = [training_images._digest(images) for images in (*files, *hub)]  # type: ignore[arg-type]

    assert len(set(digests)) == 5
    assert training_images._digest(Listed("x", "y", of_the_hub=True)) == digests[3]  # type: ignore[arg-type]


def rates(schedule: Schedule, updates: int = 40, per_epoch: int = 10) -> list[float]:
    own = nn.Parameter(torch.zeros(1))
    scaled = {"params": [nn.Parameter(torch.zeros(1))], "lr_scale": 0.1}
    sgd = torch.optim.SGD([{"params": [own]}, scaled], lr=2.0)
    scheduler = optimizing.scheduler(sgd, schedule, updates, per_epoch)
    found = []
    for update in range(updates):
        scheduler.step_update(update)
        found.append(sgd.param_groups[0]["lr"])
        assert sgd.param_groups[1]["lr"] == pytest.approx(found[-1] / 10)
    return found


def cosine(update: int) -> float:
    return 0.1 + 0.5 * 1.9 * (1 + math.cos(math.pi * (update - 5) / 35))


EXPECTED: dict[str, tuple[Schedule, Callable[[int], float]]] = {
    "constant": (Schedule(name="constant"), lambda u: 2.0),
    "cosine": (Schedule(warmup=0.5, min_lr=0.1), lambda u: 2 * (u + 1) / 6 if u < 5 else cosine(u)),
    "warm-up from a rate": (
        Schedule(name="constant", warmup=1, warmup_lr=0.5),
        lambda u: min(0.5 + 1.5 * u / 10, 2.0),
    ),
    "poly": (Schedule(name="poly"), lambda u: 2 * (1 - u / 40) ** 0.5),
    "step": (Schedule(name="step", milestones=(1.5,), rate=0.5), lambda u: 2 * 0.5 ** (u // 15)),
    "multistep": (
        Schedule(name="multistep", milestones=(1, 3)),
        lambda u: 2 * 0.1 ** ((u >= 10) + (u >= 30)),
    ),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_learning_rates(name: str) -> None:
    schedule, expected = EXPECTED[name]
    assert rates(schedule) == pytest.approx([expected(update) for update in range(40)])


@pytest.mark.slow
def test_every_row_of_the_metrics_is_of_its_own_epoch(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is learned, and two looks at the clock are half a second apart."""
    clock = itertools.count()
    monkeypatch.setattr(engine, "time", SimpleNamespace(perf_counter=lambda: next(clock) / 2))
    rate = {"lr": 1e-12, "weight_decay": 0}
    plan = recipe(images, optim=rate, schedule={"name": "constant"}, train={"epochs": 3})
    model = network("skipinit")

    rows = train(model, plan, tmp_path / "run").rows

    before = evaluate(model, make_loader(model, str(images), workers=0))
    measured = {
        "top1": pytest.approx(before.top1),
        "top5": pytest.approx(before.top5),
        "val_loss": pytest.approx(before.loss, rel=1e-4),
        "ema_top1": None,
    }
    nothing = dict.fromkeys(("lr", "train_loss", "images_per_s", "seconds"))
    assert rows[0] == {"epoch": 0, "update": 0, **nothing, **measured}
    # 40 images in five updates of 8, each of which takes half a second.
    for epoch, row in enumerate(rows[1:], 1):
        assert row == {
            "epoch": epoch,
            "update": 5 * epoch,
            "lr": pytest.approx(1e-12),
            "train_loss": pytest.approx(before.loss, rel=1e-4),
            "images_per_s": pytest.approx(16),
            "seconds": pytest.approx(2.5),
            **measured,
        }
    assert len(rows) == 4


def test_mixing_ends_at_its_epoch() -> None:
    model = network()
    augment = {"cutmix_minmax": [0.2, 0.8], "mixup_off": 1.5}
    plan = Recipe(summary="", data={"augment": augment})
    objective = Objective(plan, model, None)
    images = torch.rand(4, 3, 32, 32)
    labels = torch.arange(4)
    plain = objective.loss(model.eval(), images, labels)

    losses = {}
    for epoch in (1.4, 1.5):
        objective.begin_update(epoch)
        losses[epoch] = objective(model, images.clone(), labels, ("seed",))

    assert not torch.isclose(losses[1.4], plain)
    torch.testing.assert_close(losses[1.5], plain)


@pytest.mark.parametrize("mixup", [0.0, 1.0])
def test_binary_cross_entropy_takes_each_class_by_itself(mixup: float) -> None:
    model = network().eval()
    train = {"bce": True, "smoothing": 0.2}
    augment = {"mixup": mixup, "mixup_probability": 0.0}
    objective = Objective(Recipe(summary="", train=train, data={"augment": augment}), model, None)
    images = torch.rand(4, 3, 32, 32)
    labels = torch.arange(4)

    loss = objective(model, images.clone(), labels, ("seed",))

    target = torch.full((4, 10), 0.02)
    target[torch.arange(4), labels] = 0.82
    log_probability = nn.functional.logsigmoid(model(images))
    log_of_rest = nn.functional.logsigmoid(-model(images))
    expected = -(target * log_probability + (1 - target) * log_of_rest).mean()
    torch.testing.assert_close(loss, expected)


@pytest.mark.parametrize(
    ("part", "key"),
    [
        ({"data": {"augment": {"cutmix_minmax": [0.5, 0.5]}}}, "cutmix_minmax"),
        ({"train": {"bce": True, "smoothing": 1.0}}, "smoothing"),
    ],
)
def test_keys_of_timm_that_contradict_are_refused(part: dict[str, Any], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        Recipe(summary="", **part)


def test_scalars_have_a_rate_of_their_own_and_nothing_but_weights_decays() -> None:
    model = network("fixup")
    groups = optimizer(model, Optim(scalar_lr=0.1, weight_decay=0.5, decay="kim2022")).param_groups

    names = {id(p): name for name, p in model.named_parameters()}
    for group in groups:
        for parameter in group["params"]:
            scalar = parameter.numel() == 1
            assert group.get("lr_scale", 1.0) == (0.1 if scalar else 1.0), names[id(parameter)]
            assert (group["weight_decay"] > 0) == (parameter.ndim > 1), names[id(parameter)]

    every = optimizer(
        model, Optim(weight_decay=0.5)
    ).param_groups  # auto: as Fixup's authors have it

    assert {group["weight_decay"] for group in every} == {0.5}
    with pytest.raises(OptionError, match="no_such_thing"):
        optimizer(model, Optim(name="no_such_thing"))


class HeadFirst(nn.Module):
    """A network whose classifier is not its last parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.conv = nn.Conv2d(3, 4, 3)
        self.body = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.conv(x).mean((2, 3))))


@pytest.mark.parametrize(
    ("make", "head"),
    [
        (HeadFirst, "head."),
        (
            lambda: timm.create_model(
                "resnetv2_18", num_classes=3, channels=(4, 4, 4, 4), stem_chs=4
            ),
            "head.fc.",
        ),
        (lambda: timm.create_model("resnet18", num_classes=3, channels=(4, 4, 4, 4)), "fc."),
    ],
    ids=["own", "v2", "v1"],
)
def test_adaptive_clipping_leaves_the_classifier_alone(
    make: Callable[[], nn.Module], head: str
) -> None:
    torch.manual_seed(0)
    model = make()
    model(torch.randn(2, 3, 32, 32)).square().sum().mul(1e4).backward()
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    clip_gradients(model, Clip(mode="agc", value=0.01))

    some = False
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None

        if name.startswith(head):
            assert torch.equal(parameter.grad, before[name])
            continue

        rows = (
            parameter.detach().reshape(len(parameter), -1)
            if parameter.ndim > 1
            else parameter.detach()[None]
        )
        bound = 0.01 * rows.norm(dim=1).clamp(min=1e-3)
        now, old = (g.reshape_as(rows) for g in (parameter.grad, before[name]))

        assert (now.norm(dim=1) <= bound * 1.0001).all()

        factor = (bound / old.norm(dim=1).clamp(min=1e-6)).clamp(max=1.0)
        assert torch.allclose(now, old * factor[:, None], rtol=1e-4, atol=1e-8)

        some = some or not torch.equal(now, old)

    assert some


@pytest.mark.parametrize(
    ("mode", "expected"),
    [("norm", [0.3, -0.4, 0.0]), ("value", [0.5, -0.5, 0.0])],
)
def test_gradients_are_clipped_by_their_common_norm_or_one_by_one(
    mode: str, expected: list[float]
) -> None:
    """They are 3, -4 and 0, whose norm is 5."""
    linear = nn.Linear(2, 1)
    linear.weight.grad = torch.tensor([[3.0, -4.0]])
    linear.bias.grad = torch.zeros(1)

    clip_gradients(linear, Clip(mode=mode, value=0.5))

    found = [*linear.weight.grad.flatten().tolist(), *linear.bias.grad.tolist()]
    assert found == pytest.approx(expected, rel=1e-5)


def test_adaptive_clipping_of_a_transposed_convolution_goes_by_its_outputs() -> None:
    torch.manual_seed(0)
    conv = nn.ConvTranspose2d(4, 6, 3, bias=False)
    gradient = torch.full_like(conv.weight, 1e-6)
    gradient[:, 2] = 1.0
    conv.weight.grad = gradient.clone()
    normswap.adaptive_clip_(conv, 0.01, head=nn.Identity())
    assert torch.equal(conv.weight.grad[:, [0, 1, 3, 4, 5]], gradient[:, [0, 1, 3, 4, 5]])
    bound = 0.01 * conv.weight[:, 2].detach().norm()
    torch.testing.assert_close(conv.weight.grad[:, 2].norm(), bound)


@pytest.mark.parametrize("share", [0, -1, 0.0, -0.01, math.nan, True])
def test_adaptive_clipping_by_nothing_is_refused(share: float) -> None:
    """A negative share would turn the gradients round; they stay as they were."""
    linear = nn.Linear(4, 3)
    linear.weight.grad = torch.ones(3, 4)
    with pytest.raises(OptionError, match="share="):
        normswap.adaptive_clip_(linear, share, head=nn.Identity())
    assert torch.equal(linear.weight.grad, torch.ones(3, 4))


def test_adaptive_clipping_returns_the_norms_from_before() -> None:
    """One for each output, in the shape that broadcasts to the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3), nn.Linear(6, 5))
    parameters = [*model.parameters()][:4]
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    before = [torch.linalg.vector_norm(p.grad) for p in parameters if p.grad is not None]

    norms = normswap.adaptive_clip_(model, 0.01, head=model[2])

    assert [tuple(norm.shape) for norm in norms] == [(4, 1, 1, 1), (), (1, 2, 1, 1), ()]
    for norm, whole, parameter in zip(norms, before, parameters, strict=True):
        torch.testing.assert_close(torch.linalg.vector_norm(norm), whole)
        assert parameter.grad is not None
        assert parameter.grad.norm() < 0.5 * whole


@pytest.mark.parametrize("temperature", [0, 0.0, -1, math.nan, math.inf, True])
def test_a_temperature_that_softens_nothing_is_refused(temperature: float) -> None:
    scores = torch.randn(2, 3)
    with pytest.raises(OptionError, match="temperature="):
        normswap.teacher_loss(scores, scores, temperature)


def test_scores_of_unequal_shapes_are_refused() -> None:
    with pytest.raises(OptionError, match=r"\(2, 3\), the teacher's have \(2, 4\)"):
        normswap.teacher_loss(torch.randn(2, 3), torch.randn(2, 4))


def test_outputs_that_are_no_scores_are_compared_by_name_and_relative_to_the_teachers() -> None:
    ours = {"map": torch.full((2, 3, 4, 4), 1.5), "box": torch.full((2, 5), 3.0)}
    theirs = {"map": torch.ones(2, 3, 4, 4), "box": torch.full((2, 5), -1.0)}
    not_compared = {"ids": torch.ones(2, dtype=torch.long), "other": torch.ones(2, 7)}

    loss = normswap.teacher_loss(
        {**ours, "ids": torch.zeros(2), "other": torch.ones(2, 6)}, {**not_compared, **theirs}
    )

    # The first is off by a half, and the second by four times the teacher's.
    assert loss.item() == pytest.approx((0.5**2 + 4.0**2) / 2)


def test_outputs_without_a_common_name_and_shape_are_refused_with_the_names_of_both() -> None:
    ours = {"map": torch.ones(2, 3, 4, 4), "box": torch.ones(2, 5)}
    theirs = {"mask": torch.ones(2, 3, 4, 4), "box": torch.ones(2, 6)}

    with pytest.raises(OptionError, match=r"gives map \(2, 3, 4, 4\), box .*, the teacher mask .*"):
        normswap.teacher_loss(ours, theirs, None)
    with pytest.raises(OptionError, match=r"gives \(2, 3, 4, 4\), the teacher \(2, 6\)"):
        normswap.teacher_loss(ours["map"], theirs["box"], None)
    with pytest.raises(OptionError, match=r"gives .*map.*, the teacher no tensor"):
        normswap.teacher_loss(ours, {}, None)
    with pytest.raises(OptionError, match=r"gives no tensor, the teacher .*mask"):
        normswap.teacher_loss((), theirs, None)


def distilled(part: Distill, model: nn.Module, teacher: nn.Module) -> Objective:
    return Objective(
        Recipe(summary="", distill=part), model, Teacher(copy.deepcopy(teacher), model)
    )


def test_distillation_of_logits_is_hintons() -> None:
    model = network()
    teacher = network("skipinit", alpha=0)
    x = torch.randn(4, 3, 32, 32)
    y = torch.tensor([0, 1, 2, 3])
    objective = distilled(Distill(weight=0.25, temperature=3.0), model, teacher)
    ours = model(x).double()
    theirs = teacher(x).double()
    p = (theirs / 3).softmax(1)
    q = (ours / 3).softmax(1)
    hard = -ours.log_softmax(1)[range(4), y].mean()
    expected = 0.75 * hard + 0.25 * 9 * (p * (p.log() - q.log())).sum(1).mean()

    assert objective(model, x, y, ()).item() == pytest.approx(expected.item(), rel=1e-5)

    only = distilled(Distill(weight=1.0, temperature=3.0), model, teacher)
    assert torch.equal(
        only(model, x, y, ()), only(model, x, y.flip(0) + 50, ())
    )  # labels are not used


def test_a_teacher_sees_the_images_as_it_was_trained() -> None:
    model = network()
    teacher = network("skipinit", alpha=0)
    theirs: Any = teacher
    theirs.__dict__["pretrained_cfg"] = {
        **theirs.pretrained_cfg,
        "mean": (0.1, 0.2, 0.3),
        "std": (0.4, 0.5, 0.6),
    }
    if (record := provenance.of(teacher)) is not None:
        record.pretrained_cfg.update(mean=[0.1, 0.2, 0.3], std=[0.4, 0.5, 0.6])
    x = torch.randn(4, 3, 32, 32)
    ours: Any = model
    mean, std = (torch.tensor(ours.pretrained_cfg[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
    pixels = x * std + mean
    seen = (pixels - torch.tensor([0.1, 0.2, 0.3]).view(1, 3, 1, 1)) / torch.tensor(
        [0.4, 0.5, 0.6]
    ).view(1, 3, 1, 1)
    with torch.no_grad():
        assert torch.allclose(Teacher(copy.deepcopy(theirs), model)(x), theirs(seen), atol=1e-5)


def test_a_teacher_with_other_classes_is_refused() -> None:
    other = timm.create_model("resnet18", num_classes=3, channels=(4, 4, 8, 8))
    with pytest.raises(SourceError, match="num_classes 3, the network 10"):
        Teacher(other, network())


def test_mixup_mixes_mirror_images_and_their_labels() -> None:
    model = network()
    plan = Recipe.model_validate(
        {"summary": "", "data": {"augment": {"mixup": 0.4}}, "train": {"smoothing": 0.1}}
    )
    x = torch.randn(4, 3, 32, 32)
    y = torch.tensor([0, 1, 2, 3])
    found = Objective(plan, model, None)(model, x.clone(), y, (0, "mixup", 0))

    with drawn_by(0, "mixup", 0):
        np.random.rand()  # timm asks whether to mix at all
        share = float(np.random.beta(0.4, 0.4))

    soft = F.one_hot(y, 10) * 0.9 + 0.01
    target = share * soft + (1 - share) * soft.flip(0)
    logits = model(share * x + (1 - share) * x.flip(0))

    assert found.item() == pytest.approx(
        -(target * logits.log_softmax(1)).sum(1).mean().item(), rel=1e-5
    )


def by_hand(model: nn.Module, x: Tensor, y: Tensor, updates: int) -> None:
    """Nesterov SGD with weight decay on everything and a cosine schedule, from the formulas."""
    speed = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for update in range(updates):
        lr = 0.005 * (1 + math.cos(math.pi * update / updates))
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                assert p.grad is not None
                gradient = p.grad + 0.01 * p
                speed[name] = 0.9 * speed[name] + gradient
                p -= lr * (gradient + 0.9 * speed[name])


@pytest.mark.parametrize("accumulate", quick([1, 4], [4]))
def test_training_is_sgd_by_hand(images: Path, tmp_path: Path, accumulate: int) -> None:
    from PIL import Image

    model = network("skipinit", double=True)
    optim = {"lr": 0.01, "weight_decay": 0.01, "decay": "all"}
    plan = recipe(
        images, optim=optim, data={"batch_size": 40}, train={"epochs": 4, "accumulate": accumulate}
    )
    result = train(model, plan, tmp_path / "out")
    known: Any = model
    files = sorted(images.rglob("*.png"))
    mean, std = (torch.tensor(known.pretrained_cfg[k]).view(3, 1, 1) for k in ("mean", "std"))
    pixels = [
        torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1).float() / 255
        for file in files
    ]
    x = torch.stack([(image - mean) / std for image in pixels]).double()
    y = torch.tensor([int(file.parent.name.removeprefix("class")) for file in files])
    twin = copy.deepcopy(model).train()
    by_hand(twin, x, y, 4)
    moved = 0.0
    found = weights(result.last)
    for name, tensor in twin.state_dict().items():
        assert torch.allclose(found[name], tensor, rtol=1e-9, atol=1e-10), name
        moved = max(moved, float((tensor - model.state_dict()[name]).abs().max()))
    assert moved > 1e-3
    assert [row["update"] for row in result.rows] == [0, 1, 2, 3, 4]
    with torch.no_grad():
        hits = (twin.eval()(x).argmax(1) == y).double().mean() * 100
    assert result.rows[-1]["top1"] == pytest.approx(hits.item())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_average_is_that_of_the_weights(images: Path, tmp_path: Path, accumulate: int) -> None:
    model = network("skipinit", double=True)
    seen = []
    plan = recipe(
        images,
        train={"epochs": 0.6, "accumulate": accumulate, "ema": {"decay": 0.5, "warmup": False}},
    )
    from normswap.training.engine import TrainingRun

    run: dict[str, TrainingRun] = {}

    class Spy(TrainingRun):
        def update(self, batches: Any) -> None:
            super().update(batches)
            run["it"] = self
            seen.append({name: t.clone() for name, t in self.task.raw.state_dict().items()})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("normswap.training.engine.TrainingRun", Spy)
        train(model, plan, tmp_path / "out")
    average = seen[0]
    for state in seen[1:]:
        average = {name: 0.5 * average[name] + 0.5 * state[name] for name in state}
    ema = run["it"].task.ema
    assert ema is not None
    assert len(seen) == 3
    for name, tensor in ema.module.state_dict().items():
        assert torch.allclose(tensor, average[name], atol=1e-12), name


@pytest.fixture(scope="module")
def alike(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same picture and label forty times, so that the loss of a network that does not change is
    one number.
    """
    folder = tmp_path_factory.mktemp("alike")
    Image.new("RGB", (32, 32), (200, 90, 30)).save(folder / "one.png")
    (folder / "all.csv").write_text("file,label\n" + "one.png,3\n" * 40, encoding="utf-8")
    return folder / "all.csv"


@pytest.mark.slow
@settings(max_examples=4)
@given(
    epochs=st.sampled_from([0.4, 1.0, 1.25, 2.6]),
    batch=st.sampled_from([4, 8, 12]),
    accumulate=st.sampled_from([1, 2]),
    checkpoint=st.sampled_from([None, 1, 3]),
)
def test_every_row_has_the_loss_of_its_updates(
    alike: Path,
    tmp_path_factory: pytest.TempPathFactory,
    epochs: float,
    batch: int,
    accumulate: int,
    checkpoint: Any,
) -> None:
    """The rate is so small that no digit of the loss changes."""
    model = network("affine", double=True)
    with torch.no_grad():
        loss = evaluate(model, make_loader(model, str(alike), workers=0)).loss
    plan = recipe(
        alike,
        data={"batch_size": batch},
        optim={"lr": 1e-12},
        train={"epochs": epochs, "accumulate": accumulate, "checkpoint": checkpoint},
    )
    result = train(model, plan, tmp_path_factory.mktemp("run") / "out")
    rows = result.rows[1:]

    assert [row["train_loss"] for row in rows] == pytest.approx([loss] * len(rows), rel=1e-5)
    assert [row["val_loss"] for row in rows] == pytest.approx([loss] * len(rows), rel=1e-5)
    assert rows[-1]["epoch"] == pytest.approx(result.updates / (40 // batch))


def test_without_validation_images_the_held_out_loss_is_that_of_the_labels(
    alike: Path, tmp_path: Path
) -> None:
    model = network("affine", double=True)
    with torch.no_grad():
        expected = evaluate(model, make_loader(model, str(alike), workers=0)).loss
    plan = recipe(alike, data={"validation": None}, train={"epochs": 0.2})

    before, _ = train(model, plan, tmp_path / "out").rows

    assert before["top1"] is None
    assert before["val_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_process_that_is_not_the_first_writes_and_says_nothing(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does all updates, and keeps its notes for who has started it."""
    monkeypatch.setattr(Accelerator, "is_main_process", property(lambda _: False))
    said: list[str] = []
    shown: list[engine.TrainingProgress] = []
    parts = {"epochs": 0.4, "checkpoint": 1, "ema": {"decay": 0.5}}
    plan = recipe(images, data={"validation": None}, train=parts)

    result = train(
        network("skipinit"), plan, tmp_path / "out", say=said.append, progress=shown.append
    )

    assert (result.updates, len(result.rows)) == (2, 2)
    assert "no validation images" in result.notes[0]
    assert (said, shown) == ([], [])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float64), ("cuda", torch.float64), ("mps", torch.float32)],
)
def test_losses_are_summed_in_the_most_precise_dtype_of_a_device(
    device: str, dtype: torch.dtype
) -> None:
    assert engine.precise(torch.device(device)) is dtype


class OneOfTwo:
    """A process of two, of which the other has measured already."""

    device = torch.device("cpu")
    num_processes = 1

    def __init__(self, other: Tensor | None = None) -> None:
        self.other = other
        self.sums = torch.zeros(0)

    def reduce(self, parts: Tensor, how: str) -> Tensor:
        assert how == "sum"
        self.sums = parts.clone()
        return parts if self.other is None else parts + self.other


@pytest.mark.parametrize("share", [1, 13, 39])
def test_two_processes_of_unequal_shares_measure_what_one_does(share: int, tmp_path: Path) -> None:
    model = network("affine")
    whole = make_loader(model, str(write_images(tmp_path / "images")), workers=0, batch_size=7)
    first: Any = OneOfTwo()
    engine.measure(model, whole.only(range(share)), first)
    second: Any = OneOfTwo(first.sums)
    together = engine.measure(model, whole.only(range(share, 40)), second)
    alone = evaluate(model, whole)

    assert together is not None
    assert (together.top1, together.top5, together.count) == pytest.approx(
        (alone.top1, alone.top5, 40)
    )
    assert together.loss == pytest.approx(alone.loss)
