"""Model sources: from what the user names to a network with weights.

The kinds of sources are in `kinds`.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TypedDict, TypeVar

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.errors import NewHeadNote, SourceError, spelled
from normswap.models import hub, kinds
from normswap.models.building import BuildRequest, Built, TooLargeError
from normswap.models.preprocessing import (
    data_config as data_config,
    for_inputs as for_inputs,
    for_size as for_size,
)
from normswap.models.weight_files import hash_tensors as hash_tensors, load_into, read
from normswap.plan import Arch

_T = TypeVar("_T")
OPTIONS = ("weights", "arch", "arch_args", "num_classes", "in_chans", "input_size")


class Asked(TypedDict, total=False):
    """Options of `open_source`, for functions that pass them on.

    Args:
        weights: The weights: `pretrained`, `random` or a file.
        arch: The architecture of a weights file that states none.
        arch_args: The arguments of the architecture, by name.
        num_classes: The number of classes.
        in_chans: The number of input channels.
    """

    weights: str
    arch: str | None
    arch_args: Mapping[str, object] | None
    num_classes: int | None
    in_chans: int | None


def check_unasked(name: str, asked: Mapping[str, object]) -> None:
    """Raise SourceError if an option is given for a MODEL that states everything itself.

    Args:
        name: The MODEL.
        asked: The values of the options, by name.
    """
    # These values ask for nothing.
    usual: tuple[object, ...] = (None, {}, 0, "pretrained")
    useless = [spelled(key) for key in OPTIONS if asked.get(key) not in usual]
    if useless:
        raise SourceError(
            f"{name} was written by normswap and knows its architecture",
            remedy=f"Drop {useless[0]}",
        )


def create(arch: Arch) -> nn.Module:
    """Return the bare network on the CPU, in eval mode, with random values.

    Raises:
        SourceError: The network cannot be built.
    """
    return kinds.by_builder(arch.builder).load().create(arch)


def skeleton(arch: Arch) -> nn.Module:
    """Return the bare network with zeros in place of random values, to be filled strictly."""
    # A library that is imported while the meta device is the default would keep its constants
    # there.
    kinds.by_builder(arch.builder).load()
    return _undrawn(lambda: create(arch), lambda model: model)


def _undrawn(build: Callable[[], _T], network: Callable[[_T], nn.Module]) -> _T:
    """Call `build`, and return its result with zeros in place of random values.

    Drawing random values takes most of the time, so the network is built on the meta device. It is
    built as usual if building needs values, or if its state dict does not hold each of its tensors
    once: the caller loads a state dict, and a tensor that is not in it would stay zero.

    Args:
        build: Builds a network, perhaps with a record of it.
        network: Finds the network in what `build` returns.
    """
    try:
        with torch.device("meta"):
            built = build()
        model = network(built)
        if _count_of_tensors(model) == len(copying.state_tensors(model)):
            model._apply(lambda tensor: torch.zeros_like(tensor, device="cpu"))
            return built
    except TooLargeError:
        raise
    # The same call without the meta device says what is wrong with it.
    except Exception:
        pass
    return build()


def _count_of_tensors(model: nn.Module) -> int:
    """Return how many tensors a network holds as parameters, buffers or plain attributes."""
    tensors: set[int] = set()
    for module in nn.Module.modules(model):
        for holder in (module._parameters, module._buffers, vars(module)):
            tensors.update(id(value) for value in holder.values() if isinstance(value, Tensor))
    return len(tensors)


def identify(
    model: nn.Module, rebuild: Callable[[nn.Module], nn.Module] = lambda skeleton: skeleton
) -> Arch | None:
    """Return how to rebuild a network, or None if no kind of source knows.

    Args:
        model: The network.
        rebuild: Replays the network's plan on a skeleton.
    """
    archs = (kind.identify(model, rebuild) for kind in kinds.KINDS if kind.identify)
    return next((arch for arch in archs if arch is not None), None)


def check_trust(what: str, kind: kinds.Kind, *, trusted: bool) -> None:
    """Raise SourceError for code of this machine if the user has not allowed its import.

    Args:
        what: The name of the code in the error.
        kind: The kind of source.
        trusted: Whether the user named the code, or trusts it.
    """
    if kind.foreign and not trusted:
        why = "to open the file, normswap would import it, which runs it"
        remedy = f"Add {spelled('trust_factory', True)} to allow that, or name it as MODEL yourself"
        raise SourceError(f"{what} is Python code on this machine", why, remedy)


def open_source(
    source: str,
    *,
    weights: str = "pretrained",
    arch: str | None = None,
    arch_args: Mapping[str, object] | None = None,
    num_classes: int | None = None,
    in_chans: int | None = None,
    trust_factory: bool = True,
) -> nn.Module:
    """Return the network that a MODEL names, in eval mode on the CPU, carrying its Provenance.

    Args:
        source: A MODEL: a name, a repository, a directory, a factory, or a weights file.
        weights: The weights: "pretrained", "random" for the bare architecture, or a weights file.
        arch: The architecture of a weights file.
        arch_args: Arguments of the architecture.
        num_classes: The number of classes, by default the usual one. If the trained weights have
            another one, the network gets a new head with random values. A weights file must fit as
            it is: give the number of classes that it was trained with.
        in_chans: The number of input channels, by default the usual one. If the trained weights
            have another one, their stem is adapted, where that is possible. A weights file must fit
            as it is: give the number of channels that it was trained with.
        trust_factory: Whether a factory may be imported. It is false where the name was read from a
            file.

    Raises:
        SourceError: The network cannot be found, read or built.
        OptionError: Two options do not go together.
    """
    name, file = kinds.parts(source, weights, arch)
    kind = kinds.of(name)
    check_trust(name, kind, trusted=trust_factory)
    trained = file is None and weights == "pretrained"
    request = BuildRequest(dict(arch_args or {}), num_classes, in_chans, trained)
    builder = kind.load()
    if file is not None:
        return _filled(lambda: builder.build(name, request), file)

    built: Built = builder.build(name, request)
    if not trained:
        # Random values have no hash in the provenance.
        return _carry(built, built.model, built.source, None)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", NewHeadNote)
        model = built.pretrained()
    # The notes of a conversion say that a head is new; other warnings go on.
    others = [each for each in caught if not issubclass(each.category, NewHeadNote)]
    for warning in others:
        warnings.warn(warning.message, warning.category, stacklevel=2)

    sha256 = hash_tensors(copying.state_tensors(model))
    carrying = _carry(built, model, built.source, sha256)
    new = [str(each.message) for each in caught if issubclass(each.category, NewHeadNote)]
    record = replace(provenance.of(carrying), remarks=tuple(new))
    return provenance.attach(carrying, record)


def _filled(build: Callable[[], Built], file: Path) -> nn.Module:
    """Return a network filled from a weights file."""
    built = _undrawn(build, lambda built: built.model)
    load_into(built.model, read(file), str(file), {})
    # The builder states license and test size of its trained weights. They do not hold for a file.
    for key in ("license", *hub.TESTED):
        built.preprocessing.pop(key, None)
    noted = hub.of_architecture(built.model)
    built.model.__dict__.update(pretrained_cfg=noted, default_cfg=noted)
    return _carry(
        built, built.model, str(file.resolve()), hash_tensors(copying.state_tensors(built.model))
    )


def _carry(built: Built, model: nn.Module, source: str, sha256: str | None) -> nn.Module:
    """Return the network, which carries its provenance from now on."""
    cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **built.preprocessing}
    model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    return provenance.attach(
        model, provenance.Provenance(built.arch, source, sha256, built.preprocessing)
    )
