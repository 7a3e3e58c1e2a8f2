"""How data enter a conversion: whether a step wants them, and the call to its scheme's `fit`.

A plan's structure never depends on data; a scheme with a `fit` sets values of the converted network afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from normswap import schemes
from normswap.errors import OptionError
from normswap.models.calling import Example
from normswap.plan import Step
from normswap.surgery import applying
from normswap.surgery.held_out import Dealt
from normswap.surgery.made_images import Batches, MadeImages
from normswap.surgery.network import Network


def images_for(step: Step, network: Network) -> Batches | None:
    """What the step's values are to be fitted to; None where nothing in it is fitted, or there are no images.

    Raises:
        OptionError: the scheme needs data and there are none.
    """
    scheme, options = schemes.get(step.scheme), schemes.resolve(step.scheme, step.options)
    if not fits(step):
        return None
    if network.images is None and scheme.demands_data(options):
        remedy = "Give '--calibrate DATA' (images, no labels needed), or '--calibrate synthetic', which makes some"
        remedy += _exact_instead(scheme, options)
        raise OptionError(f"{step.scheme} fits its values to images", "there are none", remedy)
    return network.images


def require_use(step: Step, network: Network) -> None:
    """Raises:
    OptionError: there are images, and nothing in the step is fitted.
    """
    if network.calibrate is not None and not fits(step):
        raise OptionError(f"{step.scheme} has no use for calibration data", "nothing in it is fitted")


def _exact_instead(scheme: schemes.Scheme, options: schemes.Options) -> str:
    """An option that makes do without data, if the scheme declares one among the words that it takes."""
    for option in scheme.options:
        for word in option.choices:
            if not scheme.demands_data({**options, option.name: word}):
                return f", or '{option.flag} {word}', which is exact"
    return ""


def fits(step: Step) -> bool:
    """Whether the step's scheme can fit values to data."""
    scheme = schemes.get(step.scheme)
    return scheme.fit is not None and not scheme.is_exact(schemes.resolve(step.scheme, step.options))


@dataclass(frozen=True)
class _Calls:
    """Batches of any form, as calls of the network, as often as they are read."""

    batches: Iterable[object]
    form: Example

    def __iter__(self) -> Iterator[Example]:
        return (self.form.read(batch)[0] for batch in self.batches)

    def __length_hint__(self) -> int:
        return operator.length_hint(self.batches)

    @classmethod
    def of(cls, calibrate: Batches, form: Example) -> _Calls:
        """Of batches, of a function that gives them, or of a single one."""
        given: Any = calibrate() if callable(calibrate) else calibrate
        several = isinstance(given, tuple) and len(given) == len(form.args) > 1
        return cls([given] if several or isinstance(given, Tensor | Mapping | Example) else given, form)


def fit(network: Network, result: nn.Module, step: Step, images: Batches) -> tuple[tuple[str, ...], Dealt | None]:
    """Let the step's scheme set the values of `result`, in place.

    Returns:
        What the user should know, and the images as they were dealt; None of noise, and where the result is not fitted
        to a pattern but measures all images.

    Raises:
        SourceError: unusable or too few images.
    """
    notes: tuple[str, ...] = ()
    dealt: Dealt | None = None
    telling = True
    if isinstance(images, MadeImages):
        notes, telling, images = (images.note,), images.telling, images.batches
    calls = _Calls.of(images, network.form)
    batches: Iterable[Example] = iter(calls) if isinstance(calls.batches, Iterator) else calls
    scheme = schemes.get(step.scheme)
    if telling and scheme.pattern is not None:
        batches = dealt = Dealt(list(batches) if isinstance(batches, Iterator) else batches)
    source = network.module
    if scheme.pattern is not None:  # what the result is fitted to: the source in the gauge of the result
        source = applying.apply_step(source, scheme.pattern(step))
    assert scheme.fit is not None
    more = scheme.fit(source, result, step, batches, seed=network.seed, progress=network.progress)
    return (*notes, *(more or ())), dealt
