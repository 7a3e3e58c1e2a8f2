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
    """A kind of sources.

    Args:
        builder: Its name in `Arch.builder`.
        file: The file of this folder that builds its networks.
        prefix: The word before the colon in MODEL, and where an architecture is spelled.
        also: Further prefixes. They are part of the name, so they are not cut off.
        package: The package that it needs.
        foreign: Whether its networks are built by the user's own code.
    """

    builder: str
    file: str
    prefix: str = ""
    also: tuple[str, ...] = ()
    package: str = ""
    foreign: bool = False

    def load(self) -> ModuleType:
        """Return the Python module that builds networks of this kind.

        Raises:
            SourceError: The package that the kind needs is not installed.
        """
        if self.package and importlib.util.find_spec(self.package) is None:
            what = f"a network written {self.prefix}:... needs {self.package}"
            raise SourceError(what, "it is not installed", f"pip install {self.package}")
        return importlib.import_module(f"normswap.models.{self.file}")

    @property
    def identify(self) -> Callable[..., Arch | None] | None:
        """The function from a network that somebody built to its `Arch`.

        None where the package is not in use, or its file has no such function.
        """
        if self.package and self.package not in sys.modules:
            return None
        return getattr(self.load(), "identify", None)


TIMM = Kind("timm", "timm_models", also=("hf-hub", "hf_hub", "local-dir"))
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
    """Return the kind of source that a MODEL names.

    The kind is found by the prefix or the ending of the MODEL. Any other name is a factory's name
    if it is written like one, or else timm's.
    """
    if name.endswith(".yaml"):
        return ULTRALYTICS

    prefix, colon, _ = name.partition(":")
    for kind in KINDS:
        if prefix in kind.also or (colon and kind.prefix == prefix):
            return kind
    return FACTORY if _FACTORY.fullmatch(name) else TIMM


def prefixes() -> tuple[str, ...]:
    """Return every prefix that a MODEL may have."""
    found: list[str] = []
    for kind in KINDS:
        found += filter(None, (kind.prefix, *kind.also))
    return tuple(found)


def by_builder(builder: str) -> Kind:
    """Return the kind whose networks the builder makes.

    Raises:
        SourceError: No kind has this builder.
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
    """Return the architecture as MODEL and `--arch` name it."""
    return f"{by_builder(arch.builder).prefix}:{arch.name}".removeprefix(":")


def mark_converted(model: object) -> None:
    """Let a converted network's own library know that it was converted, where it may save it."""
    if TRANSFORMERS.package in sys.modules:
        TRANSFORMERS.load().mark_converted(model)


def exported(file: Path) -> bool:
    """Return whether a place is an exported file, or a directory that is one."""
    ending = file.suffix.lower()
    return ending in EXPORTED and (file.is_dir() if ending in FOLDERS else file.is_file())


def parts(source: str, weights: str, arch: str | None) -> tuple[str, Path | None]:
    """Return the name of the architecture, and the weights file that fills it (or None).

    Args:
        source: A MODEL.
        weights: "pretrained", "random", or a weights file.
        arch: The architecture of a weights file.

    Raises:
        SourceError: There is no such file.
        OptionError: Two options do not go together.
    """
    file = Path(source)
    if exported(file):
        remedy = (
            "`evaluate`, `verify`, `inspect` and `bench` take it; else name the network that it was"
            " exported from"
        )
        raise SourceError(f"{file} is an exported file", "it runs in its own runtime", remedy)

    # A prefix, a directory or the name of a description says what a source is, whatever its ending.
    prefix, colon, _ = source.partition(":")
    is_named = (colon and prefix in prefixes()) or file.is_dir() or of(source) is ULTRALYTICS
    # The MODEL is itself a file of weights, so `arch` must name the network.
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
