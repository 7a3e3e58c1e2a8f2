"""DO: fit values of a step's result to images, where its scheme has a `fit`; the structure never depends on data."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from normswap import schemes
from normswap.calibration.synthetic_images import COUNT, SyntheticImages
from normswap.errors import OptionError, spelled
from normswap.graph import selection
from normswap.models.calling import Example
from normswap.plan import Step
from normswap.schemes import Chosen
from normswap.schemes.scheme import FitTask
from normswap.surgery import applying
from normswap.surgery.held_out import TOO_FEW, HeldOutSplit
from normswap.surgery.network import Batches, Network, calls_of


def images_for(chosen: Chosen, network: Network) -> Batches | None:
    """The images to fit a step to, if any; raises OptionError: it needs images, or images of the user's."""
    if not chosen.fits:
        return None
    images = network.images
    remedy = f"Give `{spelled('calibrate', metavar='DATA')}` (images, no labels needed)"
    if chosen.measures and (images is None or isinstance(images, SyntheticImages)):
        why = "there are none" if images is None else "those of synthetic images are not what training would begin from"
        raise OptionError(f"{chosen.scheme.name} measures statistics on images", why, remedy)
    if images is None and chosen.scheme.needs_data:
        remedy += f", or `{spelled('calibrate', 'synthetic')}`, which makes some"
        remedy += "".join(f", or `{option}`, which is exact" for option in _exact_options(chosen))
        raise OptionError(f"{chosen.scheme.name} fits its values to images", "there are none", remedy)
    return images


def _exact_options(chosen: Chosen) -> list[str]:
    words = [(option.name, word) for option in chosen.scheme.options for word in option.choices]
    exact = [(name, word) for name, word in words if chosen.scheme.is_exact({**chosen.options, name: word})]
    return [spelled(name, word) for name, word in exact]


@dataclass(frozen=True)
class Fitted:
    """The outcome of a fit: held-out calls, why there are none, and notes for the user."""

    held: tuple[Example, ...] = ()
    unmeasured: str = ""
    notes: tuple[str, ...] = ()


def fit(chosen: Chosen, network: Network, result: nn.Module, step: Step, images: Batches | None) -> Fitted:
    """Let the step's scheme set the values of `result`, in place; raises SourceError: unusable or too few images."""
    if not chosen.fits:
        return Fitted()
    batches = None if images is None else calls_of(images, network)
    split: HeldOutSplit | None = None
    # Steps that are no targets measure statistics, on all images.
    if batches is not None and chosen.scheme.name not in schemes.STEPS and not isinstance(images, SyntheticImages):
        batches = split = HeldOutSplit(list(batches) if isinstance(batches, Iterator) else batches, network.device)
    assert chosen.scheme.fit is not None
    after = functools.partial(applying.apply_step, network.module)
    task = FitTask(
        source=network.module,
        result=result,
        step=step,
        batches=batches,
        example=network.examples[0],
        after=after,
        takes_part=selection.restrict(network.anatomy, **selection.patterns(step.options)).takes_part,
        seed=network.seed,
        progress=network.progress,
    )
    notes = tuple(chosen.scheme.fit(task) or ())
    if isinstance(images, SyntheticImages):
        notes += (f"fitted to {COUNT} images made from the network's own statistics: real ones may keep less, or more",)
    if split is None:
        return Fitted((), "" if images is None else "no calibration image was held out to measure on", notes)
    if split.copies:
        notes += (f"{split.copies} of the held-out images are copies of others, and do not count",)
    return Fitted(tuple(split.held), "" if split.held else TOO_FEW, notes)
