"""The formats that a network can be exported to: one record each, and what all of them do alike.

A format's module has four functions, which raise whatever its tools raise:

- `write(contents, file)` writes the file, and the second file that some formats have beside it.
- `open(file)` returns the file in its runtime: a function that takes tensors and returns one tensor
  or a list. If `Format.inside` is true, `open(file, inside=True)` returns a function that returns
  all values that the file computes.
- `nodes(file)` returns how many operators of each kind the file has, the most frequent first.
- `metadata(file)` returns the texts of `sidecar.metadata` that the file holds. A file of another
  program may hold other texts, or none.

A format that can be written in int8 also has `write_int8(contents, file, how)`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from normswap.errors import (
    NormswapError,
    OptionError,
    OutputError,
    RefusedError,
    SourceError,
    VerificationError,
    called,
    explained,
    first_line,
    quiet,
    require_packages,
    spelled,
)
from normswap.exporting.settings import DTYPES, SAFE_BITS, WHOLE_BITS, FileSettings, Quantization
from normswap.models import kinds
from normswap.storage import atomic_write

# The command's help lists the formats, and should not wait for torch.
if TYPE_CHECKING:
    from torch import Tensor

    from normswap.exporting.exported_module import FileContents

# A file in its runtime: a function that takes the file's input tensors and returns its outputs, one
# tensor or several.
Runs: TypeAlias = "Callable[..., Any]"
# What is said of a file that this system cannot run.
NOT_RUN = "not run here"
_HALF_WEIGHTS = (
    "weights only: {} computes in what the device is fast in, and here it was checked in fp32"
)


@dataclass(frozen=True)
class Format:
    """A format that networks can be exported to, such as ONNX.

    Args:
        name: The name of the format. Its functions are in NAME_file.py of this package.
        ending: The ending of its files.
        tool: The name of the tool that writes it, for messages.
        runtime: The name of the runtime that runs it, for messages.
        needs: The packages that write and run it.
        extra: The extra of normswap that installs these packages.
        part: The ending of a second file, which lies beside each file. Empty if there is none.
        dtypes: The precisions that it can be written in.
        notes: A sentence for the user on each precision in this format, by precision.
        any_count: Whether its files can take any number of images at a time.
        any_input: Whether its files can take tensors of other types than float32, too.
        quantizer: The name of the tool that writes it in int8, for messages.
        quantizer_needs: The packages of that tool.
        quantizer_extra: The extra of normswap that installs them.
        weight_bits: The allowed bits per int8 weight. The first is the default.
        halves: Whether 7-bit weights are written for every layer except depthwise ones.
        inside: Whether its runtime shows the values that the layers inside of a file compute.
        system: The only `sys.platform` that has its runtime. Empty if every system has it.
    """

    name: str
    ending: str
    tool: str
    runtime: str
    needs: tuple[str, ...] = ()
    extra: str = "export"
    part: str = ""
    dtypes: tuple[str, ...] = ("fp32", "fp16")
    notes: Mapping[str, str] = field(default_factory=dict)
    any_count: bool = True
    any_input: bool = True
    quantizer: str = ""
    quantizer_needs: tuple[str, ...] = ()
    quantizer_extra: str = "quantize"
    weight_bits: tuple[int, ...] = (SAFE_BITS, WHOLE_BITS)
    halves: bool = False
    inside: bool = True
    system: str = ""

    @property
    def runs_here(self) -> bool:
        """Whether the runtime that runs files of this format exists for this operating system."""
        return self.system in ("", sys.platform)

    @property
    def functions(self) -> ModuleType:
        """The Python module whose functions write, open and describe files of this format."""
        return importlib.import_module(f"normswap.exporting.{self.name}_file")

    def files(self, file: Path) -> tuple[Path, ...]:
        """Return the paths of a file and of the second file beside it, if the format has one.

        For net.xml of OpenVINO they are net.xml and net.bin.
        """
        if not self.part:
            return (file,)
        return (file, file.with_suffix(self.part))

    def size(self, file: Path) -> int:
        """Return the size in bytes of a file and its second file (`part`).

        Where the format's "file" is a directory, it is the size of all files in it.
        """
        total = 0
        for part in self.files(file):
            for path in (part, *part.rglob("*")):
                if path.is_file():
                    total += path.stat().st_size
        return total

    def write(self, contents: FileContents, file: Path, how: Quantization | None = None) -> None:
        """Write the file, and the second file in which some formats keep their weights.

        Args:
            contents: The network and its metadata.
            file: The path to write.
            how: How to quantize the network to int8. None writes it in its own precision.

        Raises:
            RefusedError: The network cannot be written in this format. The message says why.
        """
        if contents.dynamic and not self.any_count:
            remedy = f"Leave out {spelled('dynamic_batch', True)}"
            raise RefusedError(f"{self.name} files take one image at a time", remedy=remedy)
        are_floats = all(str(tensor.dtype) == "torch.float32" for tensor in contents.example)
        if not self.any_input and not are_floats:
            raise RefusedError(f"{self.name} files take floating-point inputs", remedy="Try onnx")

        if how:
            with refusing(f"{self.quantizer} cannot quantize it"):
                self.functions.write_int8(contents, file, how)
        else:
            with refusing(f"{self.tool} cannot express the network"):
                self.functions.write(contents, file)

    def open(self, file: Path, **inside: bool) -> Runs:
        """Open a file in its runtime, and return a function that takes inputs and returns outputs.

        A single output is returned as a tensor, several as a tuple.

        Args:
            file: The path of the file.
            inside: The keyword `inside=True`, or nothing, as some formats do not have it. With it,
                the function returns all values that the file computes, not only its outputs.

        Raises:
            VerificationError: The runtime does not take the file.
        """
        from normswap.exporting.signature import alone, together

        with explained(VerificationError, f"{self.runtime} cannot run it"), quietly():
            runs = self.functions.open(file, **inside)

        def answers(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
            return alone(together(runs(*tensors)))

        return answers


_PT2_NOTES = {
    "fp16": (
        "for GPUs: on a CPU without fp16 units torch's fp16 convolutions take many times as long as"
        " fp32"
    ),
    "bf16": (
        "each run casts the weights to fp32, unless the graph is compiled: the file is smaller, not"
        " faster"
    ),
    "int8": (
        "import torch.ao.quantization.fx._decomposed before torch.export.load: it defines the"
        " operators. The file rounds to int8 and computes in fp32, unless the graph is compiled:"
        " the file is smaller, not faster"
    ),
}
_FORMATS = {
    form.name: form
    for form in (
        Format(
            "onnx",
            ".onnx",
            "ONNX",
            "ONNX Runtime",
            needs=("onnx", "onnxscript", "onnxruntime"),
            dtypes=DTYPES,
            quantizer="onnxruntime.quantization",
            quantizer_needs=("onnxruntime", "onnx"),
        ),
        Format(
            "openvino",
            ".xml",
            "OpenVINO",
            "OpenVINO",
            needs=("openvino", "onnx", "onnxscript"),
            part=".bin",
            dtypes=("fp32", "fp16", "int8"),
            notes={"fp16": _HALF_WEIGHTS.format("OpenVINO")},
            quantizer="NNCF",
            halves=True,
            quantizer_needs=("nncf", "openvino"),
        ),
        Format(
            "pt2",
            ".pt2",
            "torch.export",
            "torch.export.load",
            dtypes=DTYPES,
            notes=_PT2_NOTES,
            quantizer="torchao",
            quantizer_needs=("torchao",),
        ),
        Format(
            "ncnn",
            ".param",
            "pnnx",
            "ncnn",
            needs=("ncnn", "pnnx"),
            extra="ncnn",
            part=".bin",
            notes={"fp16": _HALF_WEIGHTS.format("ncnn")},
            any_count=False,
            any_input=False,
        ),
        Format(
            "executorch",
            ".pte",
            "ExecuTorch",
            "ExecuTorch",
            needs=("executorch",),
            extra="executorch",
            dtypes=("fp32", "int8"),
            any_count=False,
            quantizer="ExecuTorch",
            quantizer_needs=("executorch", "torchao"),
            quantizer_extra="executorch",
            weight_bits=(WHOLE_BITS,),
            inside=False,
        ),
        Format(
            "litert",
            ".tflite",
            "LiteRT",
            "LiteRT",
            needs=("litert_torch", "ai_edge_litert"),
            extra="litert",
            dtypes=("fp32", "fp16", "int8"),
            notes={"fp16": _HALF_WEIGHTS.format("LiteRT")},
            any_count=False,
            any_input=False,
            quantizer="ai-edge-quantizer",
            quantizer_needs=("ai_edge_quantizer",),
            quantizer_extra="litert",
            weight_bits=(WHOLE_BITS,),
        ),
        Format(
            "coreml",
            ".mlpackage",
            "Core ML",
            "Core ML",
            needs=("coremltools",),
            extra="coreml",
            any_count=False,
            any_input=False,
            inside=False,
            system="darwin",
        ),
    )
}


def names() -> list[str]:
    """Return the names of all formats that a network can be exported to, such as `onnx`."""
    return list(_FORMATS)


def get(name: str) -> Format:
    """Return the format with a name, after checking that its packages are installed.

    Args:
        name: The name, such as `onnx`.

    Raises:
        OptionError: There is no format of that name, or a package that it needs is not installed.
    """
    form = _named(name)
    require_packages(name, form.needs, form.extra)
    return form


def choose(file: Path, name: str | None) -> Format:
    """Return the format that is asked for by name, or the one that the file's ending belongs to.

    Args:
        file: The path of the file.
        name: The name of the format. None leaves it to the ending.

    Raises:
        OptionError: The name and the ending belong to different formats, neither names a format, or
            a package that the format needs is not installed.
    """
    return get(_name_of(file, name))


def _named(name: str) -> Format:
    """Return the format with a name. Whether its packages are installed is not checked.

    Args:
        name: The name, such as `onnx`.

    Raises:
        OptionError: There is no format of that name.
    """
    if name not in _FORMATS:
        raise OptionError(f"unknown format '{name}'", f"there are {', '.join(_FORMATS)}")
    return _FORMATS[name]


def _name_of(file: Path, name: str | None) -> str:
    """Return the name that is given, or the name of the format that the file's ending belongs to.

    Args:
        file: The path of the file.
        name: The name of the format that is asked for, or None.

    Raises:
        OptionError: No name is given and the ending belongs to no format, or the name and the
            ending belong to different formats.
    """
    # The name of the format that has the file's ending, or None.
    by_ending = next(
        (other for other, form in _FORMATS.items() if form.ending == file.suffix.lower()), None
    )
    if name is None and by_ending is None:
        endings = ", ".join(f"{form.ending} ({other})" for other, form in _FORMATS.items())
        remedy = f"Known: {endings}; or name it: {spelled('format', metavar='NAME')}"
        raise OptionError(f"the ending '{file.suffix}' of {file} says no format", remedy=remedy)
    # A name that is no format is refused later, by `_named`.
    if name in _FORMATS and by_ending not in (None, name):
        raise OptionError(
            f"{file} ends as {by_ending} files do, not as {name} ones", remedy="Drop one of the two"
        )

    return name or str(by_ending)


def check(file: Path, settings: FileSettings) -> Format:
    """Check the path and the settings of a file to be exported, and return its format.

    These checks need no torch, so a mistake is told at once.

    Args:
        file: The path of the file to write.
        settings: The settings of the file.

    Raises:
        OptionError: The format or dtype is not known, they do not go together, or a package is not
            installed.
        OutputError: The file or its sidecar exists and may not be replaced, its folder does not
            exist, or its second file (such as the .bin beside an .xml) would overwrite that of a
            file of another format.
    """
    if settings.dtype not in DTYPES:
        raise OptionError(
            f"unknown {called('dtype')} '{settings.dtype}'", f"there are {', '.join(DTYPES)}"
        )

    form = _named(_name_of(file, settings.format))
    _check_precision(form, settings)
    _check_paths(form, file, force=settings.force)

    require_packages(form.name, form.needs, form.extra)
    if settings.dtype == "int8":
        require_packages(f"{form.name} in int8", form.quantizer_needs, form.quantizer_extra)
    return form


def _check_precision(form: Format, settings: FileSettings) -> None:
    """Raise OptionError if a format lacks the precision or the weight bits that are asked for.

    Args:
        form: The format.
        settings: What is asked for.
    """
    if settings.dtype not in form.dtypes:
        formats = (other.name for other in _FORMATS.values() if settings.dtype in other.dtypes)
        remedy = f"Its files are {' or '.join(form.dtypes)}"
        raise OptionError(
            f"{form.name} is not written in {settings.dtype}",
            f"there are {', '.join(formats)}",
            remedy,
        )

    if settings.dtype != "int8" and settings.weight_bits is not None:
        raise OptionError(f"{spelled('weight_bits', settings.weight_bits)} is for int8")
    if settings.weight_bits not in (None, *form.weight_bits):
        bits = " or ".join(map(str, form.weight_bits))
        raise OptionError(
            f"weights of {settings.weight_bits} bits", f"{form.name} has them of {bits}"
        )


def _check_paths(form: Format, file: Path, *, force: bool) -> None:
    """Raise OutputError if the file, or one of the files beside it, cannot be written.

    Beside it stand its second file (`Format.part`, such as the .bin of an .xml) and its sidecar.

    Args:
        form: The format.
        file: The path of the file to write.
        force: Whether files that exist are replaced.
    """
    # Some formats' files are directories. Only such a directory may be replaced.
    package_of = kinds.FOLDERS.get(file.suffix.lower(), ())
    atomic_write.check_writable(file, force=force, package_of=package_of)

    # Two formats may name their second files alike: net.bin may hold the weights of net.xml or of
    # net.param. If the file of another format (its owner) exists, the second file is not replaced,
    # since the owner would lose its weights.
    parts = form.files(file)[1:]
    for part in parts:
        for other in _FORMATS.values():
            owner = part.with_suffix(other.ending)
            names_part_alike = other != form and other.part == part.suffix
            if names_part_alike and part.is_file() and owner.is_file():
                raise OutputError(
                    f"{part} belongs to {owner}", remedy=f"Give {file.name} another name"
                )

    for beside in (*parts, sidecar_of(file)):
        atomic_write.check_writable(beside, force=force)


def sidecar_of(file: Path) -> Path:
    """Return the path of a file's sidecar, the JSON file that says how to prepare an image."""
    return file.with_name(f"{file.name}.preprocess.json")


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn an error of a tool in a `with` block into a RefusedError, and keep its output away.

    Errors of this package and of the file system are raised as they are.

    Args:
        what: The sentence of the error, to which the first line of the tool's message is added.
    """
    try:
        with quietly():
            yield
    except (NormswapError, OSError):
        raise
    # A vendor's exporter may raise anything.
    except Exception as error:
        # The first error in a chain of errors (`raise ... from ...`) says what went wrong.
        while error.__cause__ is not None:
            error = error.__cause__  # type: ignore[assignment]
        raise RefusedError(what, first_line(error)) from None


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """In a `with` block, hide the output of torch and other libraries, and compute no gradients."""
    import torch

    with quiet(), torch.no_grad():
        yield


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """In a `with` block, hide all output of libraries, and compute no gradients.

    Beside what `quietly` hides, this is everything that Python prints and C++ writes to stderr.
    """
    # C++ writes to file descriptor 2, which Python's redirection does not reach.
    error_stream = os.dup(2)
    null_file = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null_file, 2)
        with (
            quietly(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            yield
    finally:
        os.dup2(error_stream, 2)
        os.close(error_stream)
        os.close(null_file)


def require_inside(file: Path, folder: Path, part: str) -> None:
    """Check that a file whose name is written in an exported file lies in a folder.

    Otherwise an exported file could have normswap read any file.

    Args:
        file: The exported file, for the message.
        folder: The folder that the second file must be in. Links are followed.
        part: The path of the second file, as the exported file spells it.

    Raises:
        SourceError: The second file lies elsewhere.
    """
    path = (folder / part).resolve()
    if Path(part).is_absolute() or not path.is_relative_to(folder.resolve()):
        raise SourceError(
            f"{file} names {part!a}, which is outside of its folder",
            "normswap reads nothing there on behalf of a file",
        )


def counted(kinds: Iterable[str]) -> dict[str, int]:
    """Return how often each kind occurs, the most frequent kind first.

    Args:
        kinds: Names of kinds, such as those of a file's operators, with repetitions.
    """
    return dict(Counter(kinds).most_common())
