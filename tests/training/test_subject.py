"""The network of a run: its classifier, its teacher, what is said of it; and that one forward of it
is recorded.
"""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from support.small_trainings import network, recipe, write_images
from torch import Tensor, nn

import normswap
from normswap.errors import OptionError, SourceError
from normswap.models.preprocessing import data_config
from normswap.storage import checkpoint
from normswap.surgery.network import Network
from normswap.training import recipe_files
from normswap.training.assembly import Task, accelerator, begin, converted
from normswap.training.engine import finetune
from normswap.training.optimizing import find_head
from normswap.training.recipe import Distill
from normswap.training.training_images import Share, TrainingImages, require_validation, validation


class HeadFirst(nn.Module):
    """A network of somebody's own, whose classifier is not its last parameter."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (HeadFirst(), "head"),
        (timm.create_model("resnet18", num_classes=3, channels=(4, 4, 4, 4)), "fc"),
        (
            timm.create_model("resnetv2_18", num_classes=3, channels=(4, 4, 4, 4), stem_chs=4),
            "head.fc",
        ),
    ],
)
def test_the_classifier_is_known_by_its_path(model: nn.Module, path: str) -> None:
    assert find_head(model.eval()) is model.get_submodule(path)


def test_a_classifier_that_was_replaced_is_found_again() -> None:
    model = HeadFirst()
    before = find_head(model)
    model.head = nn.Linear(4, 7)
    assert find_head(model) is model.head is not before


def test_a_network_without_a_classifier_is_refused() -> None:
    with pytest.raises(OptionError, match=r"classifier of this network is not known.*head=LAYER"):
        normswap.adaptive_clip_(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()))


def test_an_unconverted_network_learns_from_a_copy_of_itself(tmp_path: Path) -> None:
    model = network()
    subject = begin(model, recipe(tmp_path))
    teacher = subject.teacher(Distill())
    assert teacher is not model
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(teacher(x), model(x))


def test_what_the_recipe_converts_learns_from_what_it_was(tmp_path: Path) -> None:
    said: list[str] = []
    asked = recipe(tmp_path, convert={"to": "skipinit", "options": {"alpha": 0}})
    subject = converted(begin(network(), asked), asked, said.append)
    assert said[0] == "converting to skipinit"
    assert any(
        isinstance(module, nn.BatchNorm2d) for module in subject.teacher(Distill()).modules()
    )
    assert not any(isinstance(module, nn.BatchNorm2d) for module in subject.module.modules())


@pytest.mark.parametrize("teacher", ["source", "another"])
def test_a_run_learns_from_labels_and_teacher_as_its_recipe_says(
    teacher: str, images: Path, tmp_path: Path
) -> None:
    """Hinton et al. 2015, beside labels of which a tenth is spread over all ten classes."""
    distill: dict[str, Any] = {"weight": 0.25, "temperature": 3.0}
    teaches = network()
    if teacher == "another":
        teaches = network("skipinit", alpha=0)
        distill["teacher"] = str(checkpoint.save(teaches, tmp_path / "teacher"))
    convert = {"to": "skipinit", "options": {"alpha": 0.5}}
    plan = recipe(images, convert=convert, distill=distill, train={"smoothing": 0.1})
    subject = converted(begin(network(), plan), plan, lambda _: None)
    training = TrainingImages(record(), plan.data, 0, labelled=True)
    engine = accelerator(plan, "cpu", tmp_path, "none")
    x = torch.randn(4, 3, 32, 32)
    labels = torch.tensor([0, 9, 2, 3])

    task = Task(subject, training, plan, engine, validates=False)
    found = task.objective(task.raw.eval(), x, labels, ("seed",))

    ours = subject.module.eval()(x).double()
    theirs = teaches(x).double()
    target = nn.functional.one_hot(labels, 10) * 0.9 + 0.01
    of_labels = -(target * ours.log_softmax(1)).sum(1).mean()
    p = (theirs / 3).softmax(1)
    of_teacher = 9 * (p * (p.log() - (ours / 3).log_softmax(1))).sum(1).mean()
    expected = 0.75 * of_labels + 0.25 * of_teacher
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)


def test_that_a_folded_network_trains_badly_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    asked = recipe(tmp_path)
    converted(begin(network("folded"), asked), asked, said.append)
    assert "fine-tunes badly" in said[0]


@pytest.mark.slow
def test_images_without_labels_are_fitted_to_and_taught_on(tmp_path: Path) -> None:
    """A flat folder, by the recipe for such: what its values are fitted to wants no labels, nor
    what it learns.
    """
    folder = write_images(tmp_path / "classes", per_class=8)
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, file in enumerate(sorted(folder.rglob("*.png"))):
        file.rename(flat / f"{i}.png")
    words = [
        f"data.root={flat}",
        "data.batch_size=8",
        "convert.samples=8",
        "train.epochs=1",
        "schedule.warmup=0.5",
    ]
    plan = recipe_files.load_recipe("recover_unlabelled", words)
    done = finetune(network(), plan, tmp_path / "run", device="cpu", track="none")

    # A tenth of the images is held out.
    assert done.updates == len(list(flat.iterdir())) * 9 // 10 // 8
    assert [step.scheme for step in Network.of(normswap.load(done.last)).provenance.plan.steps] == [
        "groupnorm"
    ]


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("data") / "images", 2)


def record(**stated: Any) -> dict[str, Any]:
    return {**data_config(network()), "num_classes": 10, **stated}


def test_processes_share_the_validation_images(images: Path) -> None:
    data = recipe(images).data
    whole = torch.cat([batch for batch, _ in validation(record(), data, Share(), 0, batch=8) or ()])
    parts = [[*(validation(record(), data, Share(rank, 3), 0, batch=8) or ())] for rank in range(3)]
    assert [sum(len(batch) for batch, _ in part) for part in parts] == [7, 7, 6]
    seen = torch.cat([batch for part in parts for batch, _ in part])
    assert {tuple(image.flatten().tolist()) for image in seen} == {
        tuple(image.flatten().tolist()) for image in whole
    }


def test_validation_has_a_number_of_images_of_its_own(images: Path) -> None:
    data = recipe(images, data={"samples": 16, "validation_samples": 6}).data
    loader = validation(record(), data, Share(), 0, batch=8)
    assert loader is not None
    assert sum(len(batch) for batch, _ in loader) == 6
    assert len(TrainingImages(record(), data, 0, labelled=True).images) == 16


def test_as_many_images_of_other_names_are_other_images(images: Path, tmp_path: Path) -> None:
    """A run that goes on would else have other images in the order of these."""
    renamed = write_images(tmp_path / "renamed", 2)
    for file in [*renamed.rglob("*.png")]:
        file.rename(file.with_name(f"other{file.name}"))
    same = write_images(tmp_path / "same", 2)
    first, other, again = (
        TrainingImages(record(), recipe(place).data, 0, labelled=True).digest
        for place in (images, renamed, same)
    )
    assert first == again != other


def test_what_is_decided_by_top1_takes_validation_images_that_are_named_or_lie_beside(
    tmp_path: Path,
) -> None:
    write_images(tmp_path / "train")
    lying: dict[str, Any] = {"root": str(tmp_path), "validation": None}
    with pytest.raises(SourceError, match=r"no validation images.*Give data\.validation=PATH"):
        require_validation(recipe(tmp_path, data=lying).data)
    require_validation(recipe(tmp_path, data={**lying, "validation": str(tmp_path / "train")}).data)
    write_images(tmp_path / "val")
    require_validation(recipe(tmp_path, data=lying).data)
