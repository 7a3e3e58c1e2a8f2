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
from normswap.layers.seeding import seeded
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
    """The options of `open_source`, as a type for functions that pass them on.

    Args:
        weights: The weights: `pretrained`, `random` or a file.
        arch: The architecture, if the user names a weights file, which states none.
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
    """Raise SourceError if options are given for a saved network, which states everything itself.

    Args:
        name: What the user typed as the network.
        asked: The values of the options of `open_source`, by name.
    """
    # An option with one of these values asks for nothing.
    without_effect: tuple[object, ...] = (None, {}, 0, "pretrained")
    useless = [spelled(key) for key in OPTIONS if asked.get(key) not in without_effect]
    if useless:
        raise SourceError(
            f"{name} was written by normswap and knows its architecture",
            remedy=f"Drop {useless[0]}",
        )


def create(arch: Arch) -> nn.Module:
    """Build a network with random values, on the CPU and in eval mode.

    Args:
        arch: The library that builds it, the name that the library knows, and its arguments.

    Raises:
        SourceError: The network cannot be built.
    """
    return kinds.by_builder(arch.builder).load().create(arch)


def skeleton(arch: Arch) -> nn.Module:
    """Build a network with zeros in place of random values, for a caller who loads all its tensors.

    Args:
        arch: The library that builds it, the name that the library knows, and its arguments.
    """
    # The library is imported first, because `_undrawn` makes the meta device the default: a library
    # that is imported meanwhile would keep its constants there.
    kinds.by_builder(arch.builder).load()
    return _undrawn(lambda: create(arch), lambda model: model)


def _undrawn(build: Callable[[], _T], network: Callable[[_T], nn.Module]) -> _T:
    """Call `build`, and return its result, with zeros in place of the network's random values.

    Drawing random values takes most of the time, so the network is built on the meta device. It is
    built as usual, with random values, if building needs values, or if its state dict does not hold
    each of its tensors once: the caller loads a state dict, and a tensor that is not in it would
    stay zero.

    Args:
        build: A function that returns a network, or an object that holds one.
        network: A function that returns the network in the result of `build`.
    """
    try:
        with torch.device("meta"):
            built = build()
        model = network(built)
        # If the state dict holds each of the network's tensors once, no zero stays.
        if _saves_each_tensor_once(model):
            model._apply(lambda tensor: torch.zeros_like(tensor, device="cpu"))
            return built
    except TooLargeError:
        raise
    # The same call without the meta device says what is wrong with it.
    except Exception:
        pass
    return build()


def _saves_each_tensor_once(model: nn.Module) -> bool:
    """Whether a network's state dict holds each of its tensors, and under one name alone.

    Its tensors are parameters, buffers and plain attributes.
    """
    # A tensor that stands in several places is one tensor, by its identity.
    own_tensors: set[int] = set()
    for module in nn.Module.modules(model):
        for holder in (module._parameters, module._buffers, vars(module)):
            own_tensors.update(id(value) for value in holder.values() if isinstance(value, Tensor))

    # With `keep_vars`, the state dict has the network's own tensors and no views of them.
    state = model.state_dict(keep_vars=True)
    saved = [id(value) for value in state.values() if isinstance(value, Tensor)]
    return len(saved) == len(own_tensors) and set(saved) == own_tensors


def identify(
    model: nn.Module, rebuild: Callable[[nn.Module], nn.Module] = lambda skeleton: skeleton
) -> Arch | None:
    """Return how to rebuild a network, or None if no library of `models.kinds` has built it.

    Args:
        model: The network, which may be converted.
        rebuild: Converts a newly built network as `model` was converted, and returns it. By default
            `model` was not converted.
    """
    # The libraries are asked one by one, until one knows the network.
    archs = (kind.identify(model, rebuild) for kind in kinds.KINDS if kind.identify)
    return next((arch for arch in archs if arch is not None), None)


def with_present_head(arch: Arch, model: nn.Module) -> Arch:
    """Return how to rebuild a network with the head that it has now.

    A method of its library may have given it another head than it was built with.

    Args:
        arch: How the network was built.
        model: The network.
    """
    with_head = getattr(kinds.by_builder(arch.builder).load(), "with_present_head", None)
    present: Arch = arch if with_head is None else with_head(arch, model)
    return present


def check_trust(what: str, kind: kinds.Kind, *, trusted: bool) -> None:
    """Raise SourceError if a network is built by Python code that the user does not trust.

    Args:
        what: The name of the code in the error.
        kind: The kind of source. Only one kind, the user's own functions, needs trust.
        trusted: Whether the user has named the code, or has allowed its import.
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
    """Return the network that the user names, in eval mode on the CPU, carrying its `Provenance`.

    Args:
        source: What the user types as MODEL: the name of a network in a library, a repository of
            the hub, a directory, a function of the user's that builds it (a factory), or a weights
            file.
        weights: The weights: "pretrained", "random" for random values, or a weights file.
        arch: The name of the architecture, if `source` is a weights file.
        arch_args: Further arguments for the function that builds the network.
        num_classes: The number of classes, by default the usual one. If the trained weights have
            another one, the network gets a new head with random values. A weights file must fit as
            it is: give the number of classes that it was trained with.
        in_chans: The number of input channels, by default the usual one. If the trained weights
            have another one, their stem is adapted, where that is possible. A weights file must fit
            as it is: give the number of channels that it was trained with.
        trust_factory: Whether a factory may be imported, which runs its code. It is false if the
            name was read from a file.

    Raises:
        SourceError: The network cannot be found, read or built.
        OptionError: Two options do not go together.
    """
    # Find the library that builds the network, and the weights that fill it.
    name, file = kinds.parts(source, weights, arch)
    kind = kinds.of(name)
    check_trust(name, kind, trusted=trust_factory)
    trained = file is None and weights == "pretrained"
    request = BuildRequest(dict(arch_args or {}), num_classes, in_chans, trained)
    builder = kind.load()
    if file is not None:
        return _filled(lambda: builder.build(name, request), file)

    if not trained:
        built: Built = builder.build(name, request)
        # Random values have no hash in the provenance.
        return _carry(built, built.model, built.source, None)

    # Values that the trained weights do not fill, such as a new head, come from a fixed seed, so
    # that the network is the same each time that it is opened. Some libraries draw them when they
    # build the network, others build it once more to load it. Both begin with the seed: in one
    # block, the second network's values would depend on how many the first has drawn.
    with seeded():
        built = builder.build(name, request)

    # Load the trained weights. A warning that the head is new becomes a remark in the provenance,
    # which the notes of a conversion show. Other warnings are given again.
    with warnings.catch_warnings(record=True) as caught, seeded():
        warnings.simplefilter("always", NewHeadNote)
        model = built.pretrained()
    other_warnings = [each for each in caught if not issubclass(each.category, NewHeadNote)]
    for warning in other_warnings:
        warnings.warn(warning.message, warning.category, stacklevel=2)

    sha256 = hash_tensors(copying.state_tensors(model))
    carrying = _carry(built, model, built.source, sha256)
    remarks = [str(each.message) for each in caught if issubclass(each.category, NewHeadNote)]
    record = replace(provenance.of(carrying), remarks=tuple(remarks))
    return provenance.attach(carrying, record)


def _filled(build: Callable[[], Built], file: Path) -> nn.Module:
    """Build a network, fill it from a weights file, and return it with its provenance.

    Args:
        build: A function that builds the network.
        file: The weights file.
    """
    built = _undrawn(build, lambda built: built.model)
    load_into(built.model, read(file), str(file), {})
    # The builder states license and test size of its trained weights. They do not hold for a file.
    for key in ("license", *hub.TESTED):
        built.preprocessing.pop(key, None)
    own_cfg = hub.of_architecture(built.model)
    built.model.__dict__.update(pretrained_cfg=own_cfg, default_cfg=own_cfg)
    return _carry(
        built, built.model, str(file.resolve()), hash_tensors(copying.state_tensors(built.model))
    )


def _carry(built: Built, model: nn.Module, source: str, sha256: str | None) -> nn.Module:
    """Put a network's provenance and its record of images on the network, and return it.

    Args:
        built: How the network was built, and the preprocessing of its weights.
        model: The network.
        source: The name under which it can be opened again.
        sha256: The hash of its tensors. None for random values.
    """
    cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **built.preprocessing}
    model.__dict__.update(pretrained_cfg=cfg, default_cfg=cfg)
    return provenance.attach(
        model, provenance.Provenance(built.arch, source, sha256, built.preprocessing)
    )
