"""The formats a network can be exported to, and which of them a file name means."""

from __future__ import annotations

import functools
import importlib
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

from normswap.errors import OptionError, first_line, require_packages, spelled

if TYPE_CHECKING:  # the command's help lists the formats, and need not wait for torch
    from torch import nn

    from normswap.exporting.exported_module import FileContents
    from normswap.exporting.settings import Quantization
    from normswap.plan import Body

Runs: TypeAlias = "Callable[..., Any]"  # from the tensors that a file takes to the one that it gives, or several
NOT_RUN = "not run here"  # of what a tool makes of the network that another system has to run
FP16 = "for GPUs: on a CPU without fp16 units torch's fp16 convolutions take many times as long as fp32"


class Format(Protocol):
    """The functions of a format's module."""

    NAME: str
    NEEDS: tuple[str, ...]  # packages
    GRAPH: bool  # it holds operators, not only tensors
    NOTES: Mapping[str, str]  # what a user should know of a dtype in it
    PARTS: tuple[str, ...]  # endings of further files that lie beside it

    def write(self, contents: FileContents, file: Path) -> None:
        """Write the file, and its further parts beside it.

        Raises:
            RefusedError: the format cannot hold it; says what.
        """

    def open(self, file: Path) -> Runs:
        """The file in its own runtime: from what goes in to what the network computes.

        Raises:
            VerificationError: the runtime does not take it.
        """

    def nodes(self, file: Path) -> dict[str, int]:
        """How many operators of each kind the file has, the most frequent first."""

    def metadata(self, file: Path) -> dict[str, str]:
        """The metadata that `sidecar.metadata` gave it; of a file of somebody else's, other ones or none."""


class Quantizer(Protocol):
    """The functions of a module that writes a format in int8."""

    NEEDS: tuple[str, ...]  # packages
    LAYERS: tuple[type[nn.Module], ...]  # what it quantizes of `graph.node_reader.LINEAR`

    def levels(self, layer: nn.Module, bits: int) -> float:
        """How many steps from 0 the file puts the largest weight that a step is made for."""

    def write_int8(self, contents: FileContents, file: Path, how: Quantization) -> None:
        """Write the network in int8.

        Raises:
            RefusedError: the runtime's tool cannot quantize it.
        """


class EngineBuilder(Protocol):
    """The functions of a module that says how another tool builds its own file from one that was exported."""

    def build(self, file: Path, contents: FileContents, dtype: str) -> Body:
        """The command line, or the reason why there is none."""


class _Row(NamedTuple):
    module: str
    endings: tuple[str, ...]
    int8: str = ""  # the module that quantizes, if one does
    builders: tuple[str, ...] = ()  # modules of further tools that build on such a file
    extra: str = "export"  # of normswap, which brings its packages
    system: str = ""  # the `sys.platform` that alone has its runtime


_FORMATS = {
    "onnx": _Row("onnx_file", (".onnx",), "onnx_int8", ("tensorrt",)),
    "onnx-data": _Row("onnx_data_file", (".onnx",), builders=("tensorrt",)),
    "openvino": _Row("openvino_file", (".xml",), "openvino_int8"),
    "pt2": _Row("pt2", (".pt2",), "pt2_int8"),
    "torchscript": _Row("torchscript", (".torchscript", ".ts")),
    "ncnn": _Row("ncnn_file", (".param",), extra="ncnn"),
    "executorch": _Row("executorch_file", (".pte",), "executorch_int8", extra="executorch"),
    "litert": _Row("litert_file", (".tflite",), "litert_int8", extra="litert"),
    "coreml": _Row("coreml_file", (".mlpackage",), extra="coreml", system="darwin"),
    "safetensors": _Row("safetensors_file", (".safetensors",)),
}
_ENDINGS = {ending: name for name, row in reversed(_FORMATS.items()) for ending in row.endings}  # the first has it


def names() -> list[str]:
    """The formats by name."""
    return list(_FORMATS)


def get(name: str) -> Format:
    """The module of a format.

    Raises:
        OptionError: there is none of that name, or a package it needs is not installed.
    """
    form = cast(Format, _module(_FORMATS[_known(name)].module))
    require_packages(name, form.NEEDS, _FORMATS[name].extra)
    return form


def _known(name: str) -> str:
    if name not in _FORMATS:
        raise OptionError(f"unknown format '{name}'", f"there are {', '.join(_FORMATS)}")
    return name


def _module(name: str) -> object:
    return importlib.import_module(f"normswap.exporting.{name}")


def runs_here(name: str) -> bool:
    """Whether this system has the runtime of a format."""
    return _FORMATS[name].system in ("", sys.platform)


def size(file: Path, form: Format) -> int:
    """Bytes of a file with its further parts, or of all that is in it where it is a directory."""
    places = (file, *(file.with_suffix(ending) for ending in form.PARTS))
    files = (one for place in places for one in (place, *place.rglob("*")) if one.is_file())
    return sum(one.stat().st_size for one in files)


def builders(name: str) -> dict[str, EngineBuilder]:
    """The further tools that build on a file of a format, by name."""
    return {tool: cast(EngineBuilder, _module(tool)) for tool in _FORMATS[name].builders}


def quantizer(name: str) -> Quantizer:
    """The writer of a format in int8.

    Raises:
        OptionError: nothing does, or a package it needs is not installed.
    """
    if not _FORMATS[name].int8:
        able = ", ".join(other for other, row in _FORMATS.items() if row.int8)
        raise OptionError(f"{name} is not written in int8", f"there are {able}")
    module = cast(Quantizer, _module(_FORMATS[name].int8))
    extra = _FORMATS[name].extra
    require_packages(f"{name} in int8", module.NEEDS, "quantize" if extra == "export" else extra)
    return module


def choose(file: Path, name: str | None) -> Format:
    """The format of `file`: the one that is named, or the one that its ending says.

    Raises:
        OptionError: as `name_of`, or a package it needs is not installed.
    """
    return get(name_of(file, name))


def name_of(file: Path, name: str | None) -> str:
    """The name of the format of `file`: the one that is given, or the one that its ending says.

    Raises:
        OptionError: the ending says nothing, or something else than the name; or there is no such format.
    """
    meant = _ENDINGS.get(file.suffix.lower())
    if name is None and meant is None:
        known = ", ".join(f"{ending} ({of})" for of, row in _FORMATS.items() for ending in row.endings)
        what = f"the ending '{file.suffix}' of {file}" if file.suffix else f"{file} has no ending, which"
        raise OptionError(
            f"{what} says no format", remedy=f"Known: {known}; or name it: {spelled('format', metavar='NAME')}"
        )
    if name in _FORMATS and meant is not None and file.suffix.lower() not in _FORMATS[name].endings:
        raise OptionError(f"{file} ends as {meant} files do, not as {name} ones", remedy="Drop one of the two")
    return _known(name or str(meant))


def of_file(file: Path) -> Format:
    """The format of a file that is there: of those with its ending, the one whose further parts lie beside it.

    Raises:
        OptionError: no format has the ending, or a package it needs is not installed.
    """
    alike = [name for name, row in _FORMATS.items() if file.suffix.lower() in row.endings]
    forms = [get(name) for name in alike] or [choose(file, None)]
    whole = (form for form in forms if form.PARTS and all(file.with_suffix(part).is_file() for part in form.PARTS))
    return next(whole, forms[0])


def owner(part: Path, form: Format) -> Path | None:
    """The file of another format that has `part` already, which a file of this format would have, if there is one."""
    for row in _FORMATS.values() if part.is_file() else ():
        other = cast(Format, _module(row.module))
        if other.NAME == form.NAME or not any(part.name.endswith(ending) for ending in other.PARTS):
            continue
        if file := next(filter(Path.is_file, map(part.with_suffix, row.endings)), None):
            return file
    return None


def described(
    read: Callable[[Path], tuple[dict[str, int], dict[str, str]]],
) -> tuple[Callable[[Path], dict[str, int]], Callable[[Path], dict[str, str]]]:
    """`Format.nodes` and `Format.metadata` of a format that finds both in one reading.

    A file is read again only when it has changed.
    """

    @functools.lru_cache(maxsize=4)
    def kept(file: Path, _written: int, _size: int) -> tuple[dict[str, int], dict[str, str]]:
        return read(file)

    def current(file: Path) -> tuple[dict[str, int], dict[str, str]]:
        status = file.stat()
        return kept(file, status.st_mtime_ns, status.st_size)

    return lambda file: dict(current(file)[0]), lambda file: dict(current(file)[1])


def extra_files(file: Path) -> dict[str, str]:
    """See `Format.metadata`, for the archives of torch."""
    with zipfile.ZipFile(file) as archive:
        inside = {name.partition("/extra/")[2]: name for name in archive.namelist() if "/extra/" in name}
        return {key: archive.read(name).decode() for key, name in inside.items()}


def reason(error: BaseException) -> str:
    """The cause at the bottom of an exporter's error, in a line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)
