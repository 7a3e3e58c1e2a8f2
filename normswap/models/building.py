"""The result of every kind of source: a bare network, how to build it again, and how to get its
weights.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import nn
from torch.nn.utils import parametrize

from normswap.errors import PlanError, SourceError, first_line, quiet
from normswap.models.hub import Cfg
from normswap.plan import Arch

Made = TypeVar("Made")


@dataclass(frozen=True)
class BuildRequest:
    """The user's wishes beside a name: arguments of the architecture, another head or stem, trained
    weights or none.
    """

    args: Cfg = field(default_factory=dict)
    num_classes: int | None = None
    in_chans: int | None = None
    trained: bool = False

    def arguments(self, num_classes: str = "num_classes", in_chans: str = "in_chans") -> Cfg:
        """Return all of it as keyword arguments, the two by the builder's own words for them, by
        default timm's.
        """
        words = {num_classes: self.num_classes, in_chans: self.in_chans}
        return {**self.args, **{word: value for word, value in words.items() if value is not None}}


@dataclass(frozen=True)
class Built:
    """A bare network: random values, on the CPU, in eval mode; arch and source say how to build and
    open it again.

    Args:
        preprocessing: the preprocessing it was trained with, as JSON has it, in timm's words, as
            far as that is known.
        pretrained: gives the network with the weights that the source stands for.
    """

    model: nn.Module
    arch: Arch
    source: str
    preprocessing: Cfg
    pretrained: Callable[[], nn.Module]


def make(arch: str, factory: Callable[..., Made], kwargs: Mapping[str, object]) -> Made:
    """Call `factory`; raises SourceError where it does not take the arguments, or fails."""
    try:
        with quiet():
            return factory(**kwargs)
    except (Exception, SystemExit) as error:
        described = ", ".join(f"{key}={value!r}" for key, value in kwargs.items()) or "its defaults"
        if len(described) > 200:
            described = f"{described[:200]} ..."
        raise SourceError(f"{arch} cannot be built with {described}", first_line(error)) from None


def check_allowed(arch: str, kwargs: Iterable[str], forbidden: Iterable[str]) -> None:
    """Raises SourceError for an argument that would load weights, or give something else than the
    network.
    """
    wrong = sorted(set(kwargs) & set(forbidden))
    if wrong:
        raise SourceError(
            f"{arch} cannot be built with {', '.join(wrong)}", "not part of an architecture"
        )


def rebuilds(build: Callable[[], nn.Module], model: nn.Module) -> bool:
    """Tell whether `build` gives a network like `model`: tensor names and shapes, each module's
    class and settings.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _blueprint(build()) == _blueprint(model)
    except (SourceError, PlanError):
        return False


def _blueprint(model: nn.Module) -> tuple[object, ...]:
    # torch makes a class of its own for each parametrized layer.
    kind = parametrize.type_before_parametrizations
    layers = tuple((path, kind(layer), layer.extra_repr()) for path, layer in model.named_modules())
    return layers, tuple((key, tuple(tensor.shape)) for key, tensor in model.state_dict().items())
