"""The keys of a recipe, each with a type, a range and a line that explains it.

Any other key is an error. A recipe is one YAML file (`recipes/`); `recipe_files` finds them, reads
them and applies overrides (`optim.lr=0.05`). No torch here, nor in what this imports: recipes are
listed and checked without it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from normswap.plan import Body

Share = Annotated[float, Field(ge=0, le=1)]
# The largest number of a recipe: no machine or paper needs more, and none overflows.
_LARGEST = 10**9
Positive = Annotated[float, Field(gt=0, le=_LARGEST, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, le=_LARGEST, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=_LARGEST)]
AtLeastOne = Annotated[int, Field(ge=1, le=_LARGEST)]
# Pixels, which take memory.
Pixels = Annotated[int, Field(ge=0, le=2**14)]
# The smallest difference between the two shares of `cutmix_minmax`. timm draws the sides of the box
# from the whole pixels between them, and fails if there is none. With 0.1, 10 pixels leave one.
_LEAST_RANGE = 0.1
# The seeds that torch's generators take.
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Part(BaseModel):
    """A group of a recipe's keys, such as `optim`, with their types and ranges.

    Unknown keys are refused, and no value can be changed after validation.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class RecipeNetwork(Part):
    """The keys under `model` in a recipe: the network to train.

    They are not read if the command line names a network.
    """

    name: str = Field(
        description="As MODEL on the command line: a timm name, a directory, hf-hub:..."
    )
    weights: Literal["pretrained", "random"] = Field(
        "pretrained", description="Random: train from scratch."
    )
    args: Body = Field(default_factory=dict, description="Arguments of the timm architecture.")


class Convert(Part):
    """The keys under `convert` in a recipe: a conversion of the network's norms before training.

    It does what `normswap convert` does.
    """

    to: str = Field(description="A scheme, see `normswap schemes`.")
    options: Body = Field(default_factory=dict, description="Its options, e.g. {alpha: 0}.")
    calibrate: bool = Field(
        False, description="Fit values on training images (labels are not used)."
    )
    samples: AtLeastOne = Field(1000, description="How many of them.")


class Augment(Part):
    """The keys under `data.augment` in a recipe: how training images are changed at random.

    They set timm's training transforms and mixup, under timm's names.
    """

    scale: tuple[Share, Share] | None = Field(
        None, description="Area of random resized crops; null: no such crops."
    )
    padding: Pixels = Field(
        0, description="Pixels (at input_size) around a random crop, if `scale` is null."
    )
    hflip: Share = Field(0.5, description="Chance of a horizontal flip.")
    color_jitter: NotNegative = Field(0.0, description="timm's color_jitter.")
    auto_augment: str | None = Field(
        None, description="timm's policy string, e.g. rand-m9-mstd0.5-inc1."
    )
    repeats: Annotated[int, Field(ge=1, le=64)] = Field(
        1, description="Copies of an image in an epoch, each drawn anew (timm's aug_repeats)."
    )
    erase: Share = Field(0.0, description="Chance of random erasing (timm's re_prob).")
    mixup: NotNegative = Field(0.0, description="Alpha of mixup; 0: off.")
    cutmix: NotNegative = Field(0.0, description="Alpha of cutmix; 0: off.")
    cutmix_minmax: tuple[Share, Share] | None = Field(
        None, description="Sides of cutmix's box, as shares of the image's; alpha is then 1."
    )
    mixup_probability: Share = Field(1.0, description="Chance that a batch is mixed.")
    mixup_switch: Share = Field(0.5, description="Chance of cutmix, where both are on.")
    mixup_off: NotNegative | None = Field(
        None, description="Epoch from which nothing is mixed; null: never."
    )

    @property
    def mixes(self) -> bool:
        """Whether images are mixed, by mixup or cutmix."""
        return bool(self.mixup or self.cutmix or self.cutmix_minmax)


class Data(Part):
    """The keys under `data` in a recipe: which images are read, and in what batches.

    Mean, standard deviation and interpolation are the network's own. So is the size, by default.
    """

    root: str | None = Field(
        None, description="Folder of images; PATH/train and PATH/val (or test) are found."
    )
    validation: str | None = Field(
        None, description="Validation images [default: found beside the training ones]."
    )
    batch_size: AtLeastOne = Field(
        128, description="Images per optimizer step, over all processes."
    )
    samples: AtLeastOne | None = Field(
        None, description="Train on this many images, drawn by train.seed."
    )
    validation_samples: AtLeastOne | None = Field(None, description="Validate on this many.")
    workers: Annotated[int, Field(ge=0, le=1024)] = Field(
        2, description="Loader processes per training process."
    )
    input_size: Annotated[int, Field(ge=1, le=2**14)] | None = Field(
        None, description="Side in pixels [default: the network's]."
    )
    augment: Augment = Field(default_factory=lambda: Augment())


class Clip(Part):
    """The keys under `optim.clip` in a recipe: how gradients are clipped.

    Adaptive clipping (AGC) does not clip the gradients of the classifier.
    """

    mode: Literal["agc", "norm", "value"] = Field(
        "agc", description="Adaptive (Brock et al. 2021), by norm or value."
    )
    value: Positive = Field(
        0.01, description="The largest gradient; agc: as a share of the weights."
    )


class Optim(Part):
    """The keys under `optim` in a recipe: timm's optimizer, and its groups of parameters."""

    name: str = Field(
        "sgd", description="timm's name: sgd (with Nesterov), momentum, adamw, lamb ..."
    )
    lr: Positive = Field(0.1, description="Peak, for the whole batch (not per image).")
    momentum: Share = Field(0.9, description="Of sgd.")
    weight_decay: NotNegative = Field(5e-5, description="Of the parameters that `decay` names.")
    decay: Literal["auto", "kim2022", "timm", "all", "weights-only"] | tuple[str, ...] = Field(
        "auto",
        description=(
            "Who decays: a policy of `normswap decay`, or roles; auto: kim2022, or the scheme's."
        ),
    )
    scalar_lr: Positive = Field(1.0, description="Factor on the lr of scalars (Fixup: 0.1).")
    layer_decay: Positive | None = Field(
        None, description="Factor on the lr per layer below the head."
    )
    args: Body = Field(
        default_factory=dict, description="More of timm's, e.g. {betas: [0.9, 0.95]}."
    )
    clip: Clip | None = None


class Schedule(Part):
    """The keys under `schedule` in a recipe: how the learning rate changes during training.

    They set one of timm's schedulers, which is stepped at each update.
    """

    name: Literal["cosine", "step", "multistep", "poly", "constant"] = Field(
        "cosine", description="timm's scheduler."
    )
    warmup: NotNegative = Field(
        0.0, description="Epochs (may be a fraction) from warmup_lr to the peak."
    )
    warmup_lr: NotNegative | None = Field(
        None, description="Lr at the first update of the warm-up; null: the peak / (updates + 1)."
    )
    by_epoch: bool = Field(False, description="Keep the lr of an epoch's first update.")
    min_lr: NotNegative = Field(0.0, description="Lr at the end.")
    milestones: tuple[Positive, ...] = Field(
        (), description="multistep: epochs; step: one number, every so many."
    )
    rate: Positive = Field(0.1, description="step, multistep: the factor.")


class Ema(Part):
    """The keys under `train.ema` in a recipe: the moving average of the weights.

    It is computed by timm's ModelEmaV3.
    """

    decay: Share = Field(0.9999, description="Share of the old average at each update.")
    warmup: bool = Field(True, description="Shorter memory at the beginning.")


class Train(Part):
    """The keys under `train` in a recipe: epochs, precision, loss, averaged weights and saving."""

    epochs: Positive = Field(1.0, description="May be a fraction.")
    seed: Seed = Field(0, description="Of the order of images and of all that is drawn.")
    accumulate: AtLeastOne = Field(
        1, description="Micro-batches per update: each process holds a share of batch_size."
    )
    precision: Literal["no", "bf16", "fp16"] = Field("no", description="Autocast to it.")
    channels_last: bool = Field(False, description="Memory format.")
    compile: bool = Field(False, description="By torch.compile.")
    ema: Ema | None = None
    smoothing: Share = Field(0.0, description="Label smoothing.")
    bce: bool = Field(False, description="timm's binary cross entropy, each class by itself.")
    sync_bn: bool = Field(False, description="BatchNorm statistics over all processes.")
    checkpoint: AtLeastOne | None = Field(
        None, description="Save every so many updates, as well as every epoch."
    )


class Distill(Part):
    """The keys under `distill` in a recipe: learning from the outputs of a teacher network.

    By default the teacher is the network before its conversion. Source: Hinton et al. 2015.
    """

    teacher: str = Field("source", description="`source`: the checkpoint knows it; or a MODEL.")
    weight: Share = Field(0.5, description="Of the teacher's loss; 1: labels are not used.")
    temperature: Positive = Field(2.0, description="Both networks' scores are divided by it.")


class Recipe(Part):
    """Everything that decides a training run, except where its output goes."""

    summary: str = Field(description="One line for `normswap recipes`.")
    source: str = Field("", description="Paper, section, table.")
    model: RecipeNetwork | None = None
    convert: Convert | None = None
    data: Data = Field(default_factory=lambda: Data())
    optim: Optim = Field(default_factory=lambda: Optim())
    schedule: Schedule = Field(default_factory=lambda: Schedule())
    train: Train = Field(default_factory=lambda: Train())
    distill: Distill | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Recipe:
        """Return the recipe, unless keys that are valid one by one contradict each other.

        Raises:
            ValueError: Two keys contradict each other. pydantic turns it into a ValidationError.
        """
        if self.data.batch_size % self.train.accumulate:
            raise ValueError(
                f"data.batch_size {self.data.batch_size} is no multiple of train.accumulate"
            )
        sides = self.data.augment.cutmix_minmax
        if sides is not None and sides[1] - sides[0] < _LEAST_RANGE:
            raise ValueError(
                f"data.augment.cutmix_minmax {list(sides)} is no range: the second number is"
                f" larger by {_LEAST_RANGE} or more"
            )
        if self.train.bce and self.train.smoothing == 1:
            raise ValueError("train.smoothing is below 1 with train.bce")
        if self.schedule.name == "step" and len(self.schedule.milestones) != 1:
            raise ValueError("schedule.milestones: `step` takes one number of epochs")
        if self.schedule.name == "multistep" and not self.schedule.milestones:
            raise ValueError("schedule.milestones: `multistep` needs some")
        if self.train.epochs <= self.schedule.warmup:
            raise ValueError(
                f"schedule.warmup {self.schedule.warmup} is not shorter than train.epochs"
            )
        return self
