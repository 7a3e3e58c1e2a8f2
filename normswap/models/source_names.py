"""The names of MODELs that are files, and what is wrong with them: seen before torch is imported."""

from __future__ import annotations

from pathlib import Path

from normswap.errors import OptionError, SourceError, spelled
from normswap.models import kinds

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".tar", ".ckpt")
# files that run by themselves, by the endings of their names
EXPORTED = {
    ".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2",
    ".param": "ncnn", ".pte": "executorch", ".tflite": "litert",
    ".mlpackage": "coreml",
}  # fmt: skip
FOLDERS = {".mlpackage": "Manifest.json"}  # those of them that are directories, with a file that each has


def exported(file: Path) -> bool:
    """Whether there is a file, or a directory, that runs by itself."""
    ending = file.suffix.lower()
    return ending in EXPORTED and (file.is_dir() if ending in FOLDERS else file.is_file())


def parts(source: str, weights: str, arch: str | None) -> tuple[str, Path | None]:
    """Return the name of the architecture, and the weights file, if it is to be filled from one.

    Raises:
        SourceError: there is no such file; OptionError: options that do not go together.
    """
    if _is_file(source):
        return _check_name(Path(source), weights, arch), Path(source)
    if arch is not None:
        raise OptionError(f"an architecture ({arch}) goes with a weights file, and {source} is none")
    if weights in ("pretrained", "random"):
        return source, None
    if not (weights.endswith(SUFFIXES) or Path(weights).is_file()):
        raise OptionError(f"weights '{weights}'", "must be 'pretrained' or 'random', or a weights file")
    return source, Path(weights)


def _is_file(source: str) -> bool:
    """Tell whether that is meant to be a weights file, there or not."""
    prefix, colon, _ = source.partition(":")
    if exported(Path(source)):
        return True
    if (colon and prefix in kinds.prefixes()) or Path(source).is_dir():
        return False
    return Path(source).is_file() or source.endswith(SUFFIXES)


def _check_name(file: Path, weights: str, arch: str | None) -> str:
    if file.suffix.lower() in EXPORTED:
        why = "it runs in its own runtime: `evaluate`, `verify`, `inspect` and `bench` take it"
        remedy = "Name the network that it was exported from"
        raise SourceError(f"{file} is an exported file", why, remedy)
    if not file.is_file():
        raise SourceError(f"{file} is a directory" if file.is_dir() else f"{file} does not exist")
    if weights == "random":
        raise OptionError(f"random weights and the weights of {file} exclude each other")
    if weights != "pretrained":
        raise OptionError(f"{file} and {weights} are both weights", remedy="Name an architecture, and one of them")
    if arch is None and not file.name.endswith(SUFFIXES):
        raise SourceError(f"{file} is no MODEL", f"weights files end in {', '.join(SUFFIXES)}")
    if arch is None:
        raise OptionError(
            f"{file} holds weights only",
            remedy=f"Say what it is: '{spelled('arch', metavar='NAME')}' (named as a MODEL is).",
        )
    return arch
