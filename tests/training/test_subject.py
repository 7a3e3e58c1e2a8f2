"""The network of a run: its classifier, its teacher, what is said of it; and that one forward of it is recorded."""

from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn
from trained import network, recipe, write_images

import normswap
from normswap.errors import OptionError
from normswap.surgery.network import Network
from normswap.training import recipe_files
from normswap.training.engine import finetune
from normswap.training.optimizing import find_head
from normswap.training.recipe import Distill
from normswap.training.subject import begin, converted


class HeadFirst(nn.Module):
    """A network of somebody's own, whose classifier is not its last parameter."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.head = nn.Linear(4, classes)
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "path"),
    [
        (HeadFirst(), "head"),
        (timm.create_model("resnet18", num_classes=3, channels=(4, 4, 4, 4)), "fc"),
        (timm.create_model("resnetv2_18", num_classes=3, channels=(4, 4, 4, 4), stem_chs=4), "head.fc"),
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
    with pytest.raises(OptionError, match="classifier of this network is not known"):
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
    assert any(isinstance(module, nn.BatchNorm2d) for module in subject.teacher(Distill()).modules())
    assert not any(isinstance(module, nn.BatchNorm2d) for module in subject.module.modules())


def test_that_a_folded_network_trains_badly_is_said(tmp_path: Path) -> None:
    said: list[str] = []
    asked = recipe(tmp_path)
    converted(begin(network("folded"), asked), asked, said.append)
    assert "fine-tunes badly" in said[0]


def test_images_without_labels_are_fitted_to_and_taught_on(tmp_path: Path) -> None:
    """A flat folder, by the recipe for such: what its values are fitted to wants no labels, nor what it learns."""
    folder = write_images(tmp_path / "classes", per_class=8)
    flat = tmp_path / "flat"
    flat.mkdir()
    for i, file in enumerate(sorted(folder.rglob("*.png"))):
        file.rename(flat / f"{i}.png")
    words = [f"data.root={flat}", "data.batch_size=8", "convert.samples=8", "train.epochs=1", "schedule.warmup=0.5"]
    plan = recipe_files.load_recipe("recover_unlabelled", words)
    done = finetune(network(), plan, tmp_path / "run", device="cpu", track="none")
    assert done.updates == len(list(flat.iterdir())) // 8
    assert [step.scheme for step in Network.of(normswap.load(done.last)).provenance.plan.steps] == ["groupnorm"]
