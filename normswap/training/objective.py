"""The loss: cross-entropy with the labels, mixed if the recipe says so, and the distance to a teacher.

Distillation: Hinton et al. 2015, arXiv:1503.02531, section 2 (logits: T^2 KL(teacher / T || student / T)); for
features, the squared distance of the normalized inputs of the two classifiers.
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
        head: the layer of `model` whose input is compared with the teacher's, if features are.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, teacher: Teacher | None, head: nn.Module | None) -> None:
        self.distill, self.teacher = recipe.distill, teacher
        self.labels = 1 - (recipe.distill.weight if recipe.distill else 0.0)
        self.smoothing, augment = recipe.train.smoothing, recipe.data.augment
        classes: int | None = getattr(model, "num_classes", None)
        self.mixup: Mixup | None = None
        if augment.mixup or augment.cutmix:
            if classes is None:
                raise OptionError("data.augment.mixup needs a network that knows its num_classes")
            self.mixup = Mixup(augment.mixup, augment.cutmix, label_smoothing=self.smoothing, num_classes=classes)
        features = recipe.distill is not None and recipe.distill.kind == "features"
        self.tap = Tap(head) if features and head is not None else None

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
            taught = self.teacher(images)
        if self.tap is None:
            heat = part.temperature
            learned, taught = F.log_softmax(logits / heat, 1), F.log_softmax(taught / heat, 1)
            return heat**2 * F.kl_div(learned, taught, reduction="batchmean", log_target=True)
        learned = F.normalize(self.tap.take().flatten(1).float(), dim=1)
        return (learned - F.normalize(taught.flatten(1), dim=1)).square().sum(1).mean()


class Tap:
    """The input of a layer at its latest call."""

    def __init__(self, layer: nn.Module) -> None:
        self.value: Tensor | None = None
        self.hook = layer.register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        self.value = args[0]

    def take(self) -> Tensor:
        """Return the value, which is then forgotten."""
        value, self.value = self.value, None
        if value is None:
            raise OptionError("distill.kind features: the network did not call its classifier")
        return value


class Teacher(nn.Module):
    """A network that is only asked, for logits or for its classifier's input, about images preprocessed for another.

    Args:
        network: the teacher.
        student: the network that learns.
        head: its classifier, to give what that reads (N, C), not the logits.

    Raises:
        SourceError: their outputs cannot be compared.
    """

    def __init__(self, network: nn.Module, student: nn.Module, head: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.tap = Tap(head) if head is not None else None
        self._require_alike(network, student, features=head is not None)
        seen, known = zoo.data_config(student), zoo.data_config(network)
        ratio = torch.tensor(seen["std"]) / torch.tensor(known["std"])
        shift = (torch.tensor(seen["mean"]) - torch.tensor(known["mean"])) / torch.tensor(known["std"])
        self.same = seen["mean"] == known["mean"] and seen["std"] == known["std"]
        self.register_buffer("ratio", ratio.view(1, -1, 1, 1))
        self.register_buffer("shift", shift.view(1, -1, 1, 1))

    ratio: Tensor
    shift: Tensor

    def forward(self, images: Tensor) -> Tensor:
        """Map (N, C, H, W), preprocessed for the student, to (N, classes) or (N, features), in float32."""
        output = self.network(images if self.same else images * self.ratio + self.shift)
        return (scores(output) if self.tap is None else self.tap.take()).float()

    def train(self, mode: bool = True) -> Teacher:
        """A teacher stays in eval mode."""
        return super().train(False)

    @staticmethod
    def _require_alike(network: nn.Module, student: nn.Module, *, features: bool) -> None:
        names = ("num_features", "head_hidden_size") if features else ("num_classes",)
        for name in names:
            learned, taught = getattr(student, name, None), getattr(network, name, None)
            if learned is not None and taught is not None and learned != taught:
                raise SourceError(f"the teacher has {name} {taught}, the network {learned}", "they cannot be compared")
