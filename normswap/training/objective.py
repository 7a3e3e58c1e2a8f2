"""The loss: cross-entropy with the labels, mixed if the recipe says so, and the distance to a teacher.

Distillation: Hinton et al. 2015, arXiv:1503.02531, section 2: T^2 KL(teacher / T || student / T).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from timm.data import Mixup
from torch import Tensor, nn

from normswap.errors import OptionError, SourceError
from normswap.models import zoo
from normswap.models.network_input import scores
from normswap.training.recipe import Distill, Recipe
from normswap.training.training_images import drawn_by


class Objective:
    """The loss of one micro-batch.

    Args:
        recipe: its `distill`, `train.smoothing` and `data.augment.{mixup,cutmix}`.
        model: the network, not wrapped.
        teacher: in eval mode, where the network is; for `distill`.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, teacher: Teacher | None) -> None:
        self.distill, self.teacher = recipe.distill, teacher
        self.labels = 1 - (recipe.distill.weight if recipe.distill else 0.0)
        self.smoothing, augment = recipe.train.smoothing, recipe.data.augment
        classes: int | None = getattr(model, "num_classes", None)
        self.mixup: Mixup | None = None
        if augment.mixup or augment.cutmix:
            if classes is None:
                raise OptionError("data.augment.mixup needs a network that knows its num_classes")
            self.mixup = Mixup(augment.mixup, augment.cutmix, label_smoothing=self.smoothing, num_classes=classes)

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor, seed: tuple[object, ...]) -> Tensor:
        """Return the mean loss over images (N, C, H, W) with labels (N,); mixup is drawn by `seed`."""
        target = labels if self.labels else torch.zeros_like(labels)
        if self.mixup is not None:
            with drawn_by(*seed):
                images, target = self.mixup(images, target)
        logits = scores(model(images))
        loss = logits.new_zeros(())
        if self.labels:
            smoothing = 0.0 if self.mixup is not None else self.smoothing
            loss = self.labels * F.cross_entropy(logits, target, label_smoothing=smoothing)
        if self.distill and self.teacher:
            loss = loss + self.distill.weight * self._distance(self.distill, logits, images)
        return loss

    def _distance(self, part: Distill, logits: Tensor, images: Tensor) -> Tensor:
        assert self.teacher is not None
        with torch.no_grad():
            taught = F.log_softmax(self.teacher(images) / part.temperature, 1)
        learned = F.log_softmax(logits / part.temperature, 1)
        return part.temperature**2 * F.kl_div(learned, taught, reduction="batchmean", log_target=True)


class Teacher(nn.Module):
    """A network that is only asked, for logits, about images preprocessed for another.

    Args:
        network: the teacher.
        student: the network that learns.

    Raises:
        SourceError: they have other numbers of classes.
    """

    ratio: Tensor
    shift: Tensor

    def __init__(self, network: nn.Module, student: nn.Module) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        learned, taught = getattr(student, "num_classes", None), getattr(network, "num_classes", None)
        if learned is not None and taught is not None and learned != taught:
            what = f"the teacher has num_classes {taught}, the network {learned}"
            raise SourceError(what, "they cannot be compared")
        ours, theirs = zoo.data_config(student), zoo.data_config(network)
        ratio = torch.tensor(ours["std"]) / torch.tensor(theirs["std"])
        shift = (torch.tensor(ours["mean"]) - torch.tensor(theirs["mean"])) / torch.tensor(theirs["std"])
        self.same = ours["mean"] == theirs["mean"] and ours["std"] == theirs["std"]
        self.register_buffer("ratio", ratio.view(1, -1, 1, 1))
        self.register_buffer("shift", shift.view(1, -1, 1, 1))

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W), preprocessed for the student, to (N, classes), in float32."""
        return scores(self.network(images if self.same else images * self.ratio + self.shift)).float()

    def train(self, mode: bool = True) -> Teacher:
        """A teacher stays in eval mode."""
        return super().train(False)
