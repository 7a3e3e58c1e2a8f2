"""Networks of the user's own code: `package.module:factory`.

The factory is called with the arguments of `--arch-arg`.
The module is looked for where Python looks, and in the working directory. The factory's random
numbers come from a fixed seed, so that a network it draws can be had again.
"""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from normswap.errors import SourceError, first_line, near
from normswap.layers.seeding import seeded
from normswap.models import kinds
from normswap.models.building import BuildRequest, Built, make
from normswap.models.hub import RECORDED, own_cfg
from normswap.models.weight_files import check_network
from normswap.plan import Arch


def build(name: str, request: BuildRequest) -> Built:
    """Return the network that a factory (the user's own function) builds, with its weights.

    Args:
        name: The name of the factory, as package.module:factory.
        request: The arguments that the user asked for.

    Raises:
        SourceError: The factory cannot be imported, fails, or gives no network.
    """
    arch = Arch(name, request.arguments(), "factory")
    model = create(arch)
    stated = own_cfg(model)
    preprocessing = {key: stated[key] for key in RECORDED if key in stated}
    if request.num_classes is not None:
        preprocessing["num_classes"] = request.num_classes

    # The factory has loaded the trained weights itself, if there are any.
    def pretrained() -> nn.Module:
        check_network(model, f"what {name} gives")
        return model

    return Built(model, arch, name, preprocessing, pretrained)


def create(arch: Arch) -> nn.Module:
    """Call the user's factory, and return its network on the CPU and in eval mode.

    Args:
        arch: The name of the factory, as package.module:factory, and its arguments.

    Raises:
        SourceError: The factory cannot be imported, fails, or returns no network.
    """
    # The factory may lie in the working directory. Random values come from a fixed seed, so that
    # each build gives the same ones. The user's own code may ask the hub (`online`).
    with _working_directory():
        factory = _found(arch.name)
        with seeded():
            model = make(arch.name, factory, arch.kwargs, online=True)
    if not isinstance(model, nn.Module):
        what = f"{arch.name} gives something of type {type(model).__name__}"
        raise SourceError(what, "it must give a torch.nn.Module")
    return model.cpu().eval()


@contextmanager
def _working_directory() -> Iterator[None]:
    """Inside a `with` block, let Python import modules that lie in the working directory."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _found(name: str) -> Callable[..., object]:
    """Import the function or class that a name means, and return it.

    Args:
        name: The name, as package.module:factory. The part behind the colon may have dots.

    Raises:
        SourceError: The module cannot be imported, or has no such function or class.
    """
    module_name, _, path = name.partition(":")
    try:
        # The network may be built on the meta device, but constants of the module need values.
        with torch.device("cpu"):
            module = importlib.import_module(module_name)
    # The module is the user's code, which may raise anything, or exit.
    except (Exception, SystemExit) as error:
        why = f"{type(error).__name__}: {first_line(error)}"
        remedy = near(
            module_name,
            kinds.prefixes(),
            "It is looked for in the working directory and on PYTHONPATH",
        )
        raise SourceError(f"{module_name} cannot be imported for {name}", why, remedy) from None

    try:
        factory: object = functools.reduce(getattr, path.split("."), module)
    except AttributeError:
        raise SourceError(f"{module_name} has no {path}", remedy=near(path, vars(module))) from None

    if not callable(factory):
        raise SourceError(
            f"{name} is of type {type(factory).__name__}", "it must be a function or class"
        )
    return factory
