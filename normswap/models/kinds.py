"""What a MODEL may be: the kinds of sources, files of weights and exported files.

A kind is a row, and a file that is imported when first needed. The file has `build(name, request)`,
from a name to a `Built`; `create(arch)`, from an `Arch` to the bare network; and perhaps
`identify(model, rebuild)`, from a network to an `Arch`. No torch is imported here.
"""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from normswap.errors import OptionError, SourceError, spelled
from normswap.plan import Arch

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")
EXPORTED = {".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2", ".param": "ncnn"}
EXPORTED |= {".pte": "executorch", ".tflite": "litert", ".mlpackage": "coreml"}
# Those of them that are directories, with a file that each has.
FOLDERS = {".mlpackage": ("Manifest.json", "Data")}


@dataclass(frozen=True)
class Kind:
    """A kind of source from which a network can be built, such as timm or torchvision.

    Args:
        builder: The name of the kind in `Arch.builder`.
        file: The file in `normswap.models` that builds networks of this kind.
        prefix: The word before the colon in the user's name of a network, such as `hf` in
            `hf:owner/name`. Empty if the names have none.
        other_prefixes: Further words before the colon, such as `hf-hub` in `hf-hub:owner/name`. The
            builder itself reads them, so they are not cut off the name.
        package: The package that the kind needs. Empty if it needs none that must be installed.
        foreign: Whether the user's own code builds the networks.
    """

    builder: str
    file: str
    prefix: str = ""
    other_prefixes: tuple[str, ...] = ()
    package: str = ""
    foreign: bool = False

    def load(self) -> ModuleType:
        """Return the module of normswap that builds the networks of one library, such as timm.

        Raises:
            SourceError: The library is not installed.
        """
        if self.package and importlib.util.find_spec(self.package) is None:
            what = f"a network written {self.prefix}:... needs {self.package}"
            raise SourceError(what, "it is not installed", f"pip install {self.package}")
        return importlib.import_module(f"normswap.models.{self.file}")

    @property
    def identify(self) -> Callable[..., Arch | None] | None:
        """The function that finds out whether, and how, a library has built a given network.

        The function returns the network's `Arch` (the builder's name and arguments). The property
        is None if there is no function for this library, or if nobody has imported the library.
        """
        # A package that nobody has imported built no network, so it need not be loaded.
        if self.package and self.package not in sys.modules:
            return None
        return getattr(self.load(), "identify", None)


TIMM = Kind("timm", "timm_models", other_prefixes=("hf-hub", "hf_hub", "local-dir"))
FACTORY = Kind("factory", "factories", foreign=True)
ULTRALYTICS = Kind("ultralytics", "ultralytics_models", prefix="ultralytics", package="ultralytics")
TRANSFORMERS = Kind("transformers", "transformers_models", prefix="hf", package="transformers")
KINDS = (
    TIMM,
    Kind("torchvision", "torchvision_models", prefix="torchvision"),
    TRANSFORMERS,
    ULTRALYTICS,
    FACTORY,
)


def of(name: str) -> Kind:
    """Return the kind of source, such as timm or torchvision, for the name of a network.

    The kind is found by the prefix or the ending of the name. Any other name is the user's own
    function if it is written like one (`package.module:function`), or else a name of timm's.
    """
    # Only Ultralytics describes its networks in such files.
    if name.endswith(".yaml"):
        return ULTRALYTICS

    # The name may have a prefix, as in `torchvision:resnet18` or `hf-hub:owner/name`.
    prefix, colon, _ = name.partition(":")
    for kind in KINDS:
        if prefix in kind.other_prefixes:
            return kind
        # Without a colon, `prefix` is the whole name.
        if colon and kind.prefix == prefix:
            return kind
    return FACTORY if _FACTORY.fullmatch(name) else TIMM


def prefixes() -> tuple[str, ...]:
    """Return every word that may stand before the colon in the name of a network.

    One of them is `torchvision`, as in `torchvision:resnet18`.
    """
    all_prefixes: list[str] = []
    for kind in KINDS:
        # Kinds without a prefix have an empty one, which is left out.
        all_prefixes += filter(None, (kind.prefix, *kind.other_prefixes))
    return tuple(all_prefixes)


def by_builder(builder: str) -> Kind:
    """Return the kind of source (such as timm) by the name that an `Arch` has for its builder.

    Args:
        builder: The name, such as `timm` or `torchvision`.

    Raises:
        SourceError: There is no builder of this name.
    """
    match = next((kind for kind in KINDS if kind.builder == builder), None)
    if match is None:
        names = ", ".join(kind.builder for kind in KINDS)
        raise SourceError(
            f"this normswap does not know the builder {builder!r}",
            f"it knows {names}",
            "Upgrade it",
        )
    return match


def named(arch: Arch) -> str:
    """Return the architecture as a user types it, such as `torchvision:resnet18`."""
    # A builder without a prefix, such as timm, leaves a colon in front, which is taken off.
    return f"{by_builder(arch.builder).prefix}:{arch.name}".removeprefix(":")


def mark_converted(model: object) -> None:
    """Let a converted network of transformers know that it was converted.

    Then the network's own method `save_pretrained` writes the conversion, too. A network of another
    library is not changed.
    """
    # If transformers was not imported, the network cannot be one of its networks.
    if TRANSFORMERS.package in sys.modules:
        TRANSFORMERS.load().mark_converted(model)


def exported(file: Path) -> bool:
    """Return whether a path is an exported network, judged by its ending, such as `.onnx`.

    It must be a file that exists, or a folder if the ending is `.mlpackage`.
    """
    ending = file.suffix.lower()
    return ending in EXPORTED and (file.is_dir() if ending in FOLDERS else file.is_file())


def parts(source: str, weights: str, arch: str | None) -> tuple[str, Path | None]:
    """Return the name of the architecture, and the weights file that fills it (or None).

    Args:
        source: What the user gave as MODEL: the name of a network, or a weights file.
        weights: "pretrained", "random", or a weights file.
        arch: The name of the architecture. It is needed if MODEL is a weights file, and refused
            otherwise.

    Raises:
        SourceError: The weights file does not exist, or is an exported network.
        OptionError: Two of the arguments do not go together.
    """
    file = Path(source)
    if exported(file):
        remedy = (
            "`evaluate`, `verify`, `inspect` and `bench` take it; else name the network that it was"
            " exported from"
        )
        raise SourceError(f"{file} is an exported file", "it runs in its own runtime", remedy)

    # A source with a prefix (`hf:owner/name.bin`), a directory or a network of Ultralytics is no
    # weights file, even if its name ends like that of one.
    prefix, colon, _ = source.partition(":")
    is_named = (colon and prefix in prefixes()) or file.is_dir() or of(source) is ULTRALYTICS
    # Otherwise MODEL may itself be a file of weights. Then `arch` must name the network.
    if not is_named and (file.is_file() or source.endswith(SUFFIXES)):
        if not file.is_file():
            raise SourceError(f"{file} does not exist")
        if weights != "pretrained":
            raise OptionError(f"{file} and weights '{weights}' exclude each other")
        if arch is None:
            remedy = f"Say what it is: '{spelled('arch', metavar='NAME')}' (named as a MODEL is)."
            raise OptionError(f"{file} holds weights only, or is no MODEL", remedy=remedy)
        return arch, file

    # The MODEL names a network. Its weights are its own, random, or those of a file.
    if arch is not None:
        raise OptionError(
            f"an architecture ({arch}) goes with a weights file, and {source} is none"
        )
    if weights in ("pretrained", "random"):
        return source, None
    if not (weights.endswith(SUFFIXES) or Path(weights).is_file()):
        raise OptionError(
            f"weights '{weights}'", "must be 'pretrained' or 'random', or a weights file"
        )
    return source, Path(weights)
