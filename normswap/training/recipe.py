"""The keys of a recipe. Every key has a type, a range and a line that explains it; anything else is an error.

A recipe is one YAML file (`recipes/`); `recipe_files` finds them, reads them and applies overrides (`optim.lr=0.05`).
No torch here, nor in what this imports: recipes are listed and checked without it.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from normswap.plan import Body
from normswap.training.augmenting import Augment
from normswap.training.optimizing import Optim, Schedule
from normswap.training.recipe_part import AtLeastOne, Count, Part, Positive, Seed, Share


class RecipeNetwork(Part):
    """`model`: what to train, if the command line names no MODEL."""

    name: str = Field(description="As MODEL on the command line: a timm name, a directory, hf-hub:...")
    weights: Literal["pretrained", "random"] = Field("pretrained", description="Random: train from scratch.")
    args: Body = Field(default_factory=dict, description="Arguments of the timm architecture.")


class Convert(Part):
    """`convert`: the conversion before training, as `normswap convert` does it."""

    to: str = Field(description="A scheme, see `normswap schemes`.")
    options: Body = Field(default_factory=dict, description="Its options, e.g. {alpha: 0}.")
    calibrate: bool = Field(False, description="Fit values on training images (labels are not used).")
    samples: AtLeastOne = Field(1000, description="How many of them.")


class Data(Part):
    """`data`: images. Sizes, mean, std and interpolation are the network's own."""

    root: str | None = Field(None, description="Folder of images; PATH/train and PATH/val (or test) are found.")
    validation: str | None = Field(None, description="Validation images [default: found beside the training ones].")
    batch_size: AtLeastOne = Field(128, description="Images per optimizer step, over all processes.")
    samples: AtLeastOne | None = Field(None, description="Train on this many images, drawn by train.seed.")
    validation_samples: AtLeastOne | None = Field(None, description="Validate on this many.")
    workers: Count = Field(2, description="Loader processes per training process.")
    input_size: AtLeastOne | None = Field(None, description="Side in pixels [default: the network's].")
    augment: Augment = Field(default_factory=lambda: Augment())


class Ema(Part):
    """`train.ema`: timm's ModelEmaV3."""

    decay: Share = 0.9999
    warmup: bool = Field(True, description="Shorter memory at the beginning.")


class Train(Part):
    """`train`: how long, in what precision, and what to do when it goes wrong."""

    epochs: Positive = Field(1.0, description="May be a fraction.")
    seed: Seed = 0
    accumulate: AtLeastOne = Field(1, description="Micro-batches per update: each process holds a share of batch_size.")
    precision: Literal["no", "bf16", "fp16"] = "no"
    channels_last: bool = False
    compile: bool = False
    ema: Ema | None = None
    smoothing: Share = Field(0.0, description="Label smoothing.")
    sync_bn: bool = Field(False, description="BatchNorm statistics over all processes.")
    checkpoint: AtLeastOne | None = Field(None, description="Save every so many updates, as well as every epoch.")
    not_finite: Literal["stop", "rollback"] = Field(
        "stop", description="On a NaN or infinite loss: stop, or go back to the last checkpoint with lr x 0.5."
    )
    rollbacks: Count = Field(3, description="At most so many.")


class Distill(Part):
    """`distill`: learn from the network that the converted one came from (Hinton et al. 2015)."""

    teacher: str = Field("source", description="`source`: the checkpoint knows it; or a MODEL.")
    kind: Literal["logits", "features"] = "logits"
    weight: Share = Field(0.5, description="Of the teacher's loss; 1: labels are not used.")
    temperature: Positive = 2.0


class Anneal(Part):
    """`anneal`: for `nf --mean keep`: the filters' means go to zero over the first part of training."""

    means: Share = Field(0.5, description="The share of all updates after which they are zero.")


class Recipe(Part):
    """Everything that decides a training run, but for where its output goes."""

    summary: str = Field(description="One line for `normswap recipes`.")
    source: str = Field("", description="Paper, section, table.")
    model: RecipeNetwork | None = None
    convert: Convert | None = None
    data: Data = Field(default_factory=lambda: Data())
    optim: Optim = Field(default_factory=lambda: Optim())
    schedule: Schedule = Field(default_factory=lambda: Schedule())
    train: Train = Field(default_factory=lambda: Train())
    distill: Distill | None = None
    anneal: Anneal | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        if self.data.batch_size % self.train.accumulate:
            raise ValueError(f"data.batch_size {self.data.batch_size} is no multiple of train.accumulate")
        if self.schedule.name == "step" and len(self.schedule.milestones) != 1:
            raise ValueError("schedule.milestones: `step` takes one number of epochs")
        if self.schedule.name == "multistep" and not self.schedule.milestones:
            raise ValueError("schedule.milestones: `multistep` needs some")
        if self.train.epochs <= self.schedule.warmup:
            raise ValueError(f"schedule.warmup {self.schedule.warmup} is not shorter than train.epochs")
        return self
