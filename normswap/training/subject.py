"""The network that a run trains: opened, converted as the recipe says."""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from normswap import provenance
from normswap.errors import NormswapError, OptionError, SourceError
from normswap.images import datasets
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import conversion, reverification, unfolding
from normswap.surgery.network import Network
from normswap.training.recipe import Distill, Recipe
from normswap.training.training_images import drawn_by, places

_FOLDED = (
    "a folded network fine-tunes badly (arXiv:2305.11624): its weights have absorbed the norms' scales. "
    "Convert it to tune, skipinit or unfold first"
)
_NO_SOURCE = "Name the teacher: distill.teacher=MODEL"


@dataclass(frozen=True, eq=False)
class Subject:
    """The network as training begins, and before the recipe's conversion (`source`)."""

    network: Network
    source: nn.Module

    @property
    def module(self) -> nn.Module:
        return self.network.module

    def blank(self) -> nn.Module:
        """Return a copy with its architecture recorded, which saving would look for each time."""
        record = replace(provenance.of(self.module), arch=unfolding.architecture(self.module))
        return provenance.attach(copy.deepcopy(self.module), record)

    def preprocessing(self, side: int | None) -> Body:
        """Return the preprocessing of its images, `side` pixels high and wide if the recipe says so."""
        record = datasets.image_record(self.module)
        if side is not None:
            record["input_size"] = (record["input_size"][0], side, side)
        return record

    def teacher(self, distill: Distill) -> nn.Module:
        """Return the teacher: a MODEL, this network's source, or, of an unconverted network, a copy.

        Raises SourceError: the source cannot be opened, or has changed.
        """
        if distill.teacher != "source":
            return checkpoint.open_model(distill.teacher, named=False)
        if self.source is not self.module or not self.network.provenance.plan.steps:
            return copy.deepcopy(self.source)
        module = self.module
        try:
            origin = reverification.recorded(module, Path("the network"))
            source = checkpoint.open_model(origin, **reverification.how(module))
        except NormswapError as error:
            raise SourceError("the teacher, the network's source, cannot be had", error.what, _NO_SOURCE) from None
        if reverification.unchanged(source, module) is False:
            raise SourceError(f"the teacher {origin} is not what the network was made from", remedy=_NO_SOURCE)
        return source


def begin(model: nn.Module | None, recipe: Recipe) -> Subject:
    """Open the recipe's network if `model` is None; raises NormswapError: it cannot."""
    settings = recipe.model
    if model is None:
        if settings is None:
            raise OptionError("nothing to train", "neither a MODEL is given nor does the recipe name one")
        # Random weights depend on the seed, so that a run can be continued.
        with drawn_by(recipe.train.seed, "weights"):
            model = checkpoint.open_model(settings.name, weights=settings.weights, arch_args=settings.args, named=False)
    return Subject(Network.of(model), model)


def converted(subject: Subject, recipe: Recipe, say: Callable[[str], None]) -> Subject:
    """Convert the network if the recipe says so, as a new one; `say` is called with notes for the user."""
    network, model, how = subject.network, subject.source, recipe.convert
    if how is not None:
        say(f"converting to {how.to}")
        images = None
        if how.calibrate:
            images = datasets.make_loader(
                model,
                places(recipe.data)[0],
                split="train",
                samples=how.samples,
                seed=recipe.train.seed,
                workers=0,
                labelled=False,
            )
        result = conversion.convert(network, how.to, calibrate=images, **how.options)
        for note in result.notes:
            say(note)
        network = result.network
    steps = network.provenance.plan.steps
    if steps and steps[-1].scheme == "folded":
        say(_FOLDED)
    return Subject(network, model)
