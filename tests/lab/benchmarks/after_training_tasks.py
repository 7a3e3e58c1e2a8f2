"""The tasks of `after_training.py`: what is trained, on which data, and what it is scored by."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import robot_task
import torch
import torch.nn.functional as F
from canvases import CLASSES, canvases
from kinds_images import score
from recalibrate import shifts
from schemes_table import NETWORKS, cached, logits, shuffled
from support.zoo_networks import trained
from torch import Tensor, nn

from normswap.storage.checkpoint import open_model

Split = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class Task:
    """A classifier that learns on.

    Args:
        about: what the table says of it.
        network: whose norms are changed: of `schemes_table.NETWORKS`, or of the zoo.
        batch, updates: images of an update, and updates of a run; a trial has half as many.
        rates, clips: learning rates and norms to which gradients are clipped (0: not at all) that
            each way may choose.
        optimizer: sgd (momentum 0.9) or adamw.
        teacher: half of the loss is the distance to the source's answers (Hinton et al. 2015,
            temperature 2).
        shift: of `recalibrate.shifts`, on every image.
        images: how many there are to train on.
        seeds: of the runs that are shown.
        epsilon: of private training by Opacus, whose `updates` are epochs; 0: not private.
        options: of every conversion.
    """

    about: str
    network: str = "resnet18_narrow"
    batch: int = 128
    updates: int = 160
    rates: tuple[float, ...] = (0.002, 0.005, 0.01, 0.02, 0.05)
    clips: tuple[float, ...] = (0.0,)
    optimizer: str = "sgd"
    teacher: bool = False
    shift: str = "none"
    images: int = 10_000
    seeds: tuple[int, ...] = (0, 1, 2)
    epsilon: float = 0.0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    part: ClassVar[str] = ""  # what comes of `source`, within the network that is trained
    measure: ClassVar[str] = "top-1"
    flips: ClassVar[bool] = True
    held_out: ClassVar[int] = 2000
    tested: ClassVar[int] = 5000
    # Whether a score at once and after a tenth of the updates says anything.
    scored_early: ClassVar[bool] = True

    def source(self) -> nn.Module:
        """The trained network whose norms are changed."""
        place = NETWORKS.get(self.network)
        return open_model(str(place)).eval() if place else trained(self.network).eval()

    def learner(self, converted: nn.Module, seed: int) -> nn.Module:
        """The network that is trained, on a copy of what came of `source`."""
        return copy.deepcopy(converted)

    def data(self) -> dict[str, Split]:
        """`train`, `held-out` and `test`, on the CPU."""
        held_out = self.held_out
        name = f"{self.network}-{self.images}"
        count = self.images + held_out
        train, labels = cached(f"{name}-train", lambda: shuffled(self.source(), "train", count))
        images, answers = cached(
            f"{name}-test", lambda: shuffled(self.source(), "test", self.tested)
        )
        change = shifts(self.source())[self.shift] if self.shift != "none" else torch.nn.Identity()
        train = change(train)
        images = change(images)

        return {
            "train": (train[held_out:], labels[held_out:]),
            "held-out": (train[:held_out], labels[:held_out]),
            "test": (images, answers),
        }

    def loss(
        self, learner: nn.Module, inputs: Tensor, targets: Tensor, source: nn.Module
    ) -> Tensor:
        """Of one update."""
        outputs = learner(inputs)
        loss = F.cross_entropy(outputs, targets)
        if not self.teacher:
            return loss

        with torch.no_grad():
            answers = F.softmax(source(inputs) / 2, 1)
        return 0.5 * loss + 0.5 * 4 * F.kl_div(
            F.log_softmax(outputs / 2, 1), answers, reduction="batchmean"
        )

    def score(self, learner: nn.Module, split: Split) -> float:
        """Percent of right answers, or, per pixel, the mean over classes of intersection over
        union.
        """
        images, targets = split
        return score(logits(learner, images.split(500)), targets)

    def elsewhere(self, learner: nn.Module, split: Split) -> dict[str, float]:
        """Scores where images differ from those of training, by what differs."""
        return {}


class Segmentation(Task):
    """segmentation_models_pytorch's Unet, whose encoder is the trained network and whose decoder is
    fresh.
    """

    part: ClassVar[str] = "encoder"
    measure: ClassVar[str] = "mean IoU"
    flips: ClassVar[bool] = False
    held_out: ClassVar[int] = 200
    tested: ClassVar[int] = 300

    def source(self) -> nn.Module:
        state = super().source().state_dict()
        encoder = self._unet().encoder
        encoder.model.load_state_dict(
            {name: value for name, value in state.items() if not name.startswith("fc.")}
        )
        return encoder.eval()

    def learner(self, converted: nn.Module, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        unet = self._unet()
        unet.encoder = copy.deepcopy(converted)
        return unet

    def _unet(self) -> Any:
        import segmentation_models_pytorch as smp

        shape = {"channels": (16, 32, 64, 128), "stem_type": "deep", "stem_width": 8}
        widths = (64, 48, 32, 16, 16)
        return smp.Unet(
            "tu-resnet18",
            encoder_weights=None,
            classes=len(CLASSES),
            decoder_channels=widths,
            **shape,
        )

    def data(self) -> dict[str, Split]:
        pictures, masks = cached(
            "canvases-train", functools.partial(self._draw, "train", self.images + self.held_out)
        )
        return {
            "train": (pictures[: self.images], masks[: self.images]),
            "held-out": (pictures[self.images :], masks[self.images :]),
            "test": cached("canvases-test", functools.partial(self._draw, "test", self.tested)),
        }

    def _draw(self, split: str, count: int) -> Split:
        drawn = canvases(split, count, seed=int(split == "test"))
        return drawn.pictures, drawn.masks


class Frames(nn.Module):
    """A robot's policy: frames (N, 3, 64, 64), normalized, to actions (N, 2)."""

    def __init__(self, features: nn.Module) -> None:
        super().__init__()
        self.features = features
        width = features(torch.zeros(1, 3, robot_task.SIDE, robot_task.SIDE)).numel()
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(width, 256), nn.ReLU(), nn.Linear(256, 2))

    def forward(self, frames: Tensor) -> Tensor:
        actions: Tensor = self.head(self.features(frames))
        return actions


# Where a policy acts that was cloned from demonstrations in one light, from one place.
CAMERAS = {
    "light": robot_task.Camera(darkest=0.4),
    "viewpoint": robot_task.Camera(away=10, zoom=0.65),
}


class Policy(Task):
    """A policy cloned from demonstrations (`robot_task.py`); its encoder is the trained network,
    its head is new.
    """

    part: ClassVar[str] = "features"
    measure: ClassVar[str] = "success"
    flips: ClassVar[bool] = False
    scored_early: ClassVar[bool] = False

    def source(self) -> nn.Module:
        return nn.Sequential(*list(super().source().children())[:-2]).eval()

    def learner(self, converted: nn.Module, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return Frames(copy.deepcopy(converted).eval())

    def data(self) -> dict[str, Split]:
        config: Any = super().source().pretrained_cfg
        moments = torch.tensor([config["mean"], config["std"]]).view(2, 1, 3, 1, 1)
        frames, actions = cached("demonstrations", lambda: robot_task.demonstrations(60, 1000))
        inputs = (torch.from_numpy(frames).float() / 255 - moments[0]) / moments[1]
        return {
            "train": (inputs, torch.from_numpy(actions).float()),
            "held-out": (moments, torch.tensor([9, 200])),
            "test": (moments, torch.tensor([2000, 300])),
        }

    def loss(
        self, learner: nn.Module, inputs: Tensor, targets: Tensor, source: nn.Module
    ) -> Tensor:
        return F.mse_loss(learner(inputs), targets)

    def score(self, learner: nn.Module, split: Split) -> float:
        """Percent of `robot_task`'s episodes that reach the thing; `split`: (mean, std) and (seed,
        count).
        """
        return self._success(learner, split, robot_task.Camera())

    def elsewhere(self, learner: nn.Module, split: Split) -> dict[str, float]:
        """The same episodes, seen by each of `CAMERAS`."""
        return {what: self._success(learner, split, camera) for what, camera in CAMERAS.items()}

    @torch.inference_mode()
    def _success(self, learner: nn.Module, split: Split, camera: robot_task.Camera) -> float:
        (mean, std) = split[0]
        (seed, count) = split[1].tolist()
        task = robot_task.Task(count, seed, camera)
        for _ in range(robot_task.STEPS):
            # What is done moves no more, so only the others ask for an action.
            going = ~task.done
            frames = torch.from_numpy(task.frames(going)).to(mean.device).float() / 255
            actions = np.zeros_like(task.hand)
            actions[going] = learner((frames - mean) / std).double().cpu().numpy()
            task.step(actions)
        return 100 * float(task.done.mean())


SMALL = (0.0002, 0.0005, 0.001, 0.002, 0.005)
TASKS: dict[str, Task] = {
    "labels": Task("CIFAR-10, 128 images an update, labels alone"),
    "teacher": Task("CIFAR-10, 128 images an update, the source as teacher", teacher=True),
    "two": Task(
        "CIFAR-10, two images an update, labels alone",
        batch=2,
        updates=1500,
        rates=SMALL,
        clips=(0.0, 1.0),
    ),
    "shifted": Task(
        "CIFAR-10 blurred, 3,000 images, 32 an update",
        batch=32,
        updates=300,
        images=3000,
        shift="blurred, 5 x 5",
    ),
    "preact": Task(
        "a pre-activation network, 128 images an update, teacher",
        "resnetv2_18_narrow",
        teacher=True,
    ),
    "depthwise": Task(
        "a network of depthwise convolutions, 128 images an update, teacher",
        "depthwise",
        teacher=True,
    ),
    "segmentation": Segmentation(
        "an encoder in a Unet, two pictures an update",
        batch=2,
        updates=400,
        rates=(0.0003, 0.001, 0.003, 0.01),
        clips=(1.0,),
        optimizer="adamw",
        images=600,
    ),
    "policy": Policy(
        "an encoder in a robot's policy, 32 frames an update",
        batch=32,
        updates=250,
        rates=(0.0001, 0.0003, 0.001, 0.003, 0.01),
        clips=(0.0, 1.0),
        optimizer="adamw",
        seeds=tuple(range(20)),
    ),
    "private": Task(
        "blurred CIFAR-10, privately: epsilon 3, 500 images an update, 2 epochs of 3,000",
        batch=500,
        updates=2,
        rates=(0.05, 0.1, 0.2, 0.5, 1.0),
        images=3000,
        shift="blurred, 5 x 5",
        options={"purpose": "opacus"},
        seeds=(0,),
        epsilon=3.0,
    ),
}
BLOCKS = re.compile(r"(layer\d|stages\.\d\.blocks|stages\.\d|blocks\.\d)\.\d+")
