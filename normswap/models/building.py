"""The result of every kind of source: a bare network, and how to build and fill it again.

The arguments of an architecture may come from somebody else's file. So `check_arguments` checks
them for every builder, and `make` runs the builder offline, and stops it if the network becomes too
large.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from timm.models import is_model
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrize

from normswap import reading
from normswap.copying import state_tensors
from normswap.errors import PlanError, SourceError, first_line, quiet
from normswap.models import hub
from normswap.models.hub import Cfg
from normswap.plan import Arch

Made = TypeVar("Made")

# Arguments, at any depth, by which a builder loads weights, opens files or asks a hub.
_LOADING = frozenset(
    [
        "pretrained",
        "pretrained_cfg_overlay",
        "pretrained_model_name_or_path",
        "checkpoint",
        "checkpoint_path",
        "checkpoint_file",
        "state_dict",
        "hf_hub_id",
        "hf_hub_filename",
        "url",
        "file",
        "custom_load",
        "weights_backbone",
        "cache_dir",
        "local_dir",
        "token",
        "use_auth_token",
        "auth_token",
        "proxies",
        "force_download",
        "revision",
        "code_revision",
        "subfolder",
        "gguf_file",
        "trust_remote_code",
        "auto_map",
        "custom_pipelines",
        "quantization_config",
    ]
)
# Arguments by which transformers would ask the hub for another network, where they are true.
_FETCHING = frozenset({"use_pretrained_backbone"})
# Arguments that name a network inside another one. It must be one of timm's.
_OF_TIMM = frozenset({"backbone", "architecture"})
# Arguments whose text is shown to people. Any other text is a short name.
_SHOWN = frozenset({"id2label", "label2id", "label_names", "label_descriptions", "problem_type"})
# The implementations of attention that may be named. They are torch's own, no kernel from a hub.
_IMPLEMENTATIONS = (None, "eager", "sdpa")
# The largest number among arguments. No network has more classes, pixels or channels.
_LARGEST = 2**24
_LONGEST_NAME = 500
# timm's largest networks have 5,000 modules.
_MOST_MODULES = 50_000


@dataclass(frozen=True)
class BuildRequest:
    """What the user asks of a network beside its name.

    Args:
        args: Further keyword arguments for the function that builds the network.
        num_classes: The number of classes to build the network with. None stands for the usual one.
        in_chans: The number of input channels to build the network with. None stands for the usual
            one.
        trained: Whether the trained weights are loaded after the network is built.
    """

    args: Cfg = field(default_factory=dict)
    num_classes: int | None = None
    in_chans: int | None = None
    trained: bool = False

    def arguments(self, num_classes: str = "num_classes", in_chans: str = "in_chans") -> Cfg:
        """Return what the user asks of a network, as keyword arguments for its builder.

        Args:
            num_classes: What the builder calls the number of classes. The default is timm's name.
            in_chans: What the builder calls the number of input channels. The default is timm's
                name.
        """
        numbers = {num_classes: self.num_classes, in_chans: self.in_chans}
        stated = {argument: value for argument, value in numbers.items() if value is not None}
        return {**self.args, **stated}


@dataclass(frozen=True)
class Built:
    """A network that was built, and how to build it again. It is on the CPU and in eval mode.

    Args:
        model: The network, with random values.
        arch: How to build the network again.
        source: The name under which the user can open the network again, with its weights.
        preprocessing: The preprocessing and classes with which the weights were trained, by the
            keys of timm's record, as far as they are known. The values are of types that JSON can
            hold.
        pretrained: A function that loads the trained weights, and returns the network with them.
    """

    model: nn.Module
    arch: Arch
    source: str
    preprocessing: Cfg
    pretrained: Callable[[], nn.Module]


class TooLargeError(SourceError):
    """A network has more layers or numbers than any that is known."""


def make(
    arch: str,
    factory: Callable[..., Made],
    kwargs: Mapping[str, object],
    *,
    online: bool = False,
) -> Made:
    """Return the network that `factory` builds. Building stops if the network becomes too large.

    Args:
        arch: The name of the network in errors.
        factory: The function that builds the network.
        kwargs: The keyword arguments of `factory`.
        online: Whether `factory` may ask the hub. Only the user's own code may.

    Raises:
        SourceError: The factory does not take the arguments, or fails.
        TooLargeError: The network has more layers than any known one, or does not fit in memory.
    """
    try:
        with quiet(), nullcontext() if online else hub.offline(), _bounded(arch):
            return factory(**kwargs)
    # This is an error for the user already, so the broad `except` below must not take it.
    except TooLargeError:
        raise
    # The builder is another library's or the user's own code, which may raise anything, or exit.
    except (Exception, SystemExit) as error:
        described = ", ".join(f"{key}={value!r:.200}" for key, value in kwargs.items())
        if len(described) > 200:
            described = f"{described[:200]} ..."
        what = f"{arch} cannot be built with {described or 'its defaults'}"
        raise SourceError(what, first_line(error)) from None


@contextmanager
def _bounded(arch: str) -> Iterator[None]:
    """In a `with` block, raise TooLargeError as soon as too many layers or numbers are built.

    A layer is counted when it becomes part of another layer. Its numbers are counted before they
    are drawn.

    Args:
        arch: The name of the network, for the message.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    modules = 0
    size = 0

    def count_module(_parent: nn.Module, _name: str, _child: nn.Module | None) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            why = f"it has more than {_MOST_MODULES} layers"
            raise TooLargeError(f"{arch} cannot be built", why, "Check its arguments")

    def count_bytes(_module: nn.Module, _name: str, tensor: Tensor | None) -> None:
        nonlocal size
        if tensor is None or nn.parameter.is_lazy(tensor):
            return
        size += tensor.numel() * tensor.element_size()
        if size > memory:
            why = f"its numbers are more than this machine's memory of {memory / 2**30:.0f} GB"
            raise TooLargeError(f"{arch} cannot be built", why, "Check its arguments")

    # torch calls these hooks whenever any module or parameter becomes part of a module.
    handles = [
        module_hooks.register_module_module_registration_hook(count_module),
        module_hooks.register_module_parameter_registration_hook(count_bytes),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def check_size(build: Callable[[], object]) -> None:
    """Raise TooLargeError if `build` makes a network that this machine cannot hold.

    The network is built on the meta device, without values, which takes a moment. Drawing values
    would take minutes.

    Args:
        build: A function that builds the network. It calls `make`, which counts layers and numbers
            while it builds.
    """
    # The error is raised by `make` (`_bounded`).
    try:
        with torch.device("meta"):
            build()
    except TooLargeError:
        raise
    # Some networks cannot be built on the meta device. If anything else is wrong, the real build
    # will say so.
    except Exception:
        return


def check_arguments(arch: Arch, forbidden: Iterable[str] = ()) -> None:
    """Raise SourceError for an architecture whose arguments may do more than build a network.

    They must be plain data, and none may make the builder load a file or ask a hub.

    Args:
        arch: The architecture, perhaps from a file that somebody wrote.
        forbidden: The names of more arguments that this builder must not get. They are not looked
            for inside of other arguments.

    Raises:
        SourceError: An argument would load weights, open a file or ask a hub, or is no plain data.
            The message names the argument.
    """
    if len(arch.name) > _LONGEST_NAME:
        raise SourceError(f"{arch.name[:40]} ... is no name of a network", "it is too long")
    wrong = sorted(set(arch.kwargs) & set(forbidden))
    if wrong:
        raise SourceError(
            f"{arch.name} cannot be built with {', '.join(wrong)}", "not part of an architecture"
        )

    try:
        reading.check_plain(arch.kwargs)
    except reading.UnreadableError as error:
        raise SourceError(f"{arch.name} cannot be built with these arguments", str(error)) from None
    _check_entries(arch.name, arch.kwargs)


def _check_entries(arch: str, arguments: Mapping[str, object]) -> None:
    """Raise SourceError for an argument that would load a file, ask a hub, or is far too large.

    The arguments in lists and objects are checked too.

    Args:
        arch: The name of the network, for the message.
        arguments: The arguments by name.
    """
    for name, value in arguments.items():
        # First the argument itself, then the arguments inside it.
        why = _reason_against(name, value)
        if why:
            raise SourceError(f"{arch} cannot be built with {name}={value!r:.200}", why)

        # An argument of texts for people, such as the names of classes, may hold any keys.
        for entry in _entries(value):
            if isinstance(entry, Mapping) and name not in _SHOWN:
                _check_entries(arch, entry)


def _entries(value: object) -> Iterator[object]:
    """Yield the entries of lists in lists, at any depth. A value that is no list is yielded itself.

    Args:
        value: The value of a builder's argument.
    """
    if isinstance(value, list | tuple):
        for entry in value:
            yield from _entries(entry)
    else:
        yield value


def _reason_against(name: str, value: object) -> str:
    """Return the reason to refuse an argument of a builder, or "" if it is allowed.

    Args:
        name: The name of the argument.
        value: The value of the argument.
    """
    if name in _LOADING and value:
        return "it would load files, and is not part of an architecture"
    if name in _FETCHING and value:
        return "it would fetch weights, and is not part of an architecture"
    if name.endswith("_implementation") and value not in _IMPLEMENTATIONS:
        return "it may name code on a hub; eager and sdpa are taken"
    if name in _OF_TIMM and isinstance(value, str) and not is_model(value.partition(".")[0]):
        return "it is no network of timm, and other ones are not fetched"
    # Texts for people, such as the names of classes, may have slashes, which no other text may.
    if name in _SHOWN:
        return ""

    return _reason_against_values(value)


def _reason_against_values(value: object) -> str:
    """Return the reason to refuse the value of a builder's argument, or "" if it is allowed.

    A path of a file, an address and a huge number are refused, also inside lists.
    """
    for entry in _entries(value):
        if isinstance(entry, str) and _names_a_place(entry):
            return "it names a file or an address"
        if isinstance(entry, int | float) and abs(entry) > _LARGEST:
            return f"no argument is larger than {_LARGEST}"
    return ""


def _names_a_place(text: str) -> bool:
    """Return whether a text looks like a path of a file or an address on a hub."""
    return "/" in text or "\\" in text or text.startswith(("hf-hub:", "hf_hub:", "local-dir:", "~"))


def rebuilds(build: Callable[[], nn.Module], model: nn.Module) -> bool:
    """Return whether `build` gives a network of the same architecture as `model`.

    The names and shapes of the tensors are compared, and the class and settings of each module. If
    `build` fails, the answer is False. Building does not advance torch's random numbers.
    """
    try:
        with torch.random.fork_rng(devices=[]):
            return _blueprint(build()) == _blueprint(model)
    except (SourceError, PlanError):
        return False


def _blueprint(model: nn.Module) -> tuple[object, ...]:
    """Return what makes up a network's architecture, to be compared with that of another network.

    The result is a pair: path, class and settings of each module, and name and shape of each tensor
    in the state dict.
    """
    # torch gives each parametrized layer a new class, so the class that it had before is compared.
    kind = parametrize.type_before_parametrizations
    layers = tuple(
        (path, kind(layer), layer.extra_repr()) for path, layer in nn.Module.named_modules(model)
    )
    shapes = tuple((key, tuple(tensor.shape)) for key, tensor in state_tensors(model).items())
    return layers, shapes
