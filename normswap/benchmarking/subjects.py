"""What is timed: a network as it came, the folded one, an exported file. Each gives the file that a runtime opens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.benchmarking.runtimes import DTYPES, Settings
from normswap.errors import NormswapError, OptionError, RefusedError, first_line
from normswap.models import network_input, zoo
from normswap.models.imaged import imaged
from normswap.models.weight_files import quiet
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import conversion, unfolding
from normswap.surgery.network import Network

KINDS = {".onnx": "onnx", ".xml": "openvino", ".pt2": "pt2", ".torchscript": "torchscript", ".ts": "torchscript"}
_SUFFIX = {"directory": "", "onnx": ".onnx", "torchscript": ".torchscript"}
_NEEDS: dict[str, tuple[str, ...]] = {"onnx": ("onnx", "onnxscript")}
_ONE = "Only networks that take images and give one answer are timed"
Make = Callable[[], Path]
Size = tuple[int, int, int]


@dataclass
class Subject:
    """One form of a network.

    Args:
        form: what it is called in the table.
        make: for each kind of file it can be had as, what makes that file; a runtime opens the first kind it knows.
        answers: what it must compute, from images (N, C, H, W); None if nobody knows.
        raw: from images as the network takes them to images as the file does.
        plain: whether it may still hold norms that a runtime could fold itself.
        needs: for each kind of file, the packages that making it takes.
        precision: that of its weights, where it says so.
    """

    form: str
    make: dict[str, Make]
    answers: Callable[[Tensor], Tensor] | None = None
    raw: Callable[[Tensor], Tensor] = lambda images: images
    plain: bool = False
    needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    precision: str | None = None
    _made: dict[str, Path | Exception] = field(default_factory=dict)

    def file(self, kind: str) -> Path:
        """The file of that kind, made when first asked for.

        Raises:
            whatever the exporter raises; again, each time it is asked for.
        """
        if kind not in self._made:
            try:
                self._made[kind] = self.make[kind]()
            except Exception as error:  # exporters raise what they like
                self._made[kind] = error
        made = self._made[kind]
        if isinstance(made, Exception):
            raise made
        return made


@dataclass
class Group:
    """Forms of one network; in eager mode the first one is what the others' speed is measured by.

    Args:
        size: (C, H, W).
    """

    network: str
    subjects: list[Subject]
    size: Size
    notes: list[str] = field(default_factory=list)
    model: nn.Module | None = None


class Export(Protocol):
    """`normswap.export`; this room does not know the one next door."""

    def __call__(
        self, model: nn.Module, path: Path, /, *, dtype: str, dynamic_batch: bool, input_size: Size, force: bool
    ) -> object: ...


@dataclass(frozen=True)
class Making:
    """How files are made: in `folder`, for `batches` of images of this size.

    Args:
        export: writes a folded network to a file.
        sidecar: what is written beside an exported file, if there is anything.
    """

    folder: Path
    settings: Settings
    batches: Sequence[int]
    export: Export
    sidecar: Callable[[Path], Body | None]

    @property
    def dynamic(self) -> bool:
        return any(batch != 1 for batch in self.batches)

    def place(self, form: str, kind: str) -> Path:
        return self.folder / f"{form}{_SUFFIX[kind]}"


def of_model(network: str, model: nn.Module, making: Making, side: int | None = None) -> Group:
    """The original, the network as given if that is another one, and the folded one.

    Args:
        side: height and width of the images; by default those of the network.

    Raises:
        OptionError: the network rejects images of that size.
    """
    chans, height, width = network_input.size(model)
    size = (chans, side or height, side or width)
    group = Group(network, [], size, model=model)
    _demand_size(network, model, size)
    making.folder.mkdir(parents=True, exist_ok=True)
    record = provenance.of(model)
    steps = record.plan.steps if record else ()
    last = steps[-1].scheme if steps else "original"
    if steps:
        try:
            source = unfolding.unfold(Network(model)).module
            group.subjects.append(original(source, size, making))
        except RefusedError as why:
            group.notes.append(f"{network} is measured by itself as it is, not by its source: {why}")
    if last != "folded":
        group.subjects.append(original(model, size, making, form=last))
    group.subjects.append(folded(model, size, making))
    return group


def _demand_size(network: str, model: nn.Module, size: Size) -> None:
    try:
        with quiet():
            imaged(model, torch.zeros(1, *size))
    except NormswapError as error:
        raise OptionError(f"{network} is not timed", f"{error.what}, {error.why}", _ONE) from None
    except Exception as error:  # torch's and timm's own, whatever does not fit
        raise OptionError(f"{network} rejects images of {size[1]} x {size[2]}", first_line(error)) from None


def original(model: nn.Module, size: Size, making: Making, form: str = "original") -> Subject:
    """`model` as anybody would run it: itself, or exported by torch without our help."""

    called = imaged(model, torch.zeros(1, *size))

    def directory() -> Path:
        return checkpoint.save(model, making.place(form, "directory"), force=True)

    def onnx() -> Path:
        file = making.place(form, "onnx")
        shapes = ({0: torch.export.Dim("batch", min=1)},) if making.dynamic else None
        with quiet(), torch.no_grad():
            torch.onnx.export(_fed(called, making), _example(size, making), file, dynamo=True, verbose=False,
                              dynamic_shapes=shapes)  # fmt: skip
        return file

    def torchscript() -> Path:
        file = making.place(form, "torchscript")
        with quiet(), torch.no_grad():
            traced = torch.jit.trace(_fed(called, making), _example(size, making), check_trace=False)
            torch.jit.save(torch.jit.freeze(traced), file)
        return file

    make: dict[str, Make] = {"directory": directory, "onnx": onnx, "torchscript": torchscript}
    return Subject(form, make, answers=called, plain=True, needs=_NEEDS)


def folded(model: nn.Module, size: Size, making: Making) -> Subject:
    """`model` folded, and exported by us."""

    def directory() -> Path:
        record = provenance.of(model)
        done = record is not None and bool(record.plan.steps) and record.plan.steps[-1].scheme == "folded"
        result = model if done else conversion.convert(model, "folded", size=size)
        return checkpoint.save(result, making.place("folded", "directory"), force=True)

    def export(kind: str) -> Path:
        file, dtype = making.place("folded", kind), making.settings.dtype
        making.export(model, file, dtype=dtype, dynamic_batch=making.dynamic, input_size=size, force=True)
        return file

    make = {"directory": directory, "onnx": lambda: export("onnx"), "torchscript": lambda: export("torchscript")}
    return Subject("folded", make, answers=imaged(model, torch.zeros(1, *size)), needs=_NEEDS)


class _Fed(nn.Module):
    """Takes and gives float32, whatever is inside, as our own exports do."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()


def _fed(model: nn.Module, making: Making) -> nn.Module:
    if making.settings.dtype == "fp32":
        return model
    import copy

    dtype = getattr(torch, DTYPES[making.settings.dtype])
    return _Fed(copy.deepcopy(model).to(dtype), dtype).eval()


def _example(size: Size, making: Making) -> tuple[Tensor]:
    return (torch.zeros(2 if making.dynamic else 1, *size),)


def is_file(name: str) -> bool:
    """Whether MODEL is an exported file."""
    return Path(name).suffix.lower() in KINDS


def of_file(file: Path, before: Group | None, body: Body | None, side: int | None) -> tuple[Subject, Size]:
    """An exported file, as one more form of the network that was named before it, and the size it takes.

    Args:
        body: what is written beside it.

    Raises:
        OptionError: there is no such file, or it takes other images than that network.
    """
    if not file.is_file():
        raise OptionError(f"{file} does not exist" if not file.exists() else f"{file} is no file")
    takes = tuple(body["input"]["size"]) if body else None
    known = before.size if before else (3, side or 224, side or 224)
    if takes and before and takes != before.size:
        raise OptionError(f"{file} takes images of {takes}", f"{before.network} is timed on {before.size}")
    subject = Subject(file.name, {KINDS[file.suffix.lower()]: lambda: file.resolve()})
    subject.precision = body["precision"]["weights"] if body and body.get("precision") else _foreign_precision(file)
    if before and before.model:
        subject.answers = called = imaged(before.model, torch.zeros(1, *before.size))
        if body:
            subject.raw, subject.answers = _unprepared(before.model, body), _answering(called, body)
    return subject, takes if takes and not side else known


def _foreign_precision(file: Path) -> str | None:
    """int8, if a file that nothing lies beside has a quantizer's operators in it."""
    held = file.read_bytes()
    operators = (b"QuantizeLinear", b"FakeQuantize", b"quantized_decomposed")
    return "int8" if any(operator in held for operator in operators) else None


def _unprepared(model: nn.Module, body: Body) -> Callable[[Tensor], Tensor]:
    """From images as `model` takes them to images as the file does."""
    if body["normalize"] is not None:
        return lambda images: images
    config = zoo.data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
    return lambda images: images * std + mean


def _answering(model: nn.Module, body: Body) -> Callable[[Tensor], Tensor]:
    """What the file must compute."""
    if body["output"]["name"] != "probabilities":
        return model
    return lambda images: model(images).softmax(-1)


def groups(named: Sequence[tuple[str, str, nn.Module | None]], making: Making, side: int | None = None) -> list[Group]:
    """The groups of (MODEL, label, network or None for a file), in order.

    Raises:
        NormswapError: one of them cannot be timed at all.
    """
    found: list[Group] = []
    open_group: Group | None = None
    for i, (name, label, model) in enumerate(named):
        if model is not None:
            inside = replace(making, folder=making.folder / str(i))
            open_group = of_model(label, model, inside, side)
            found.append(open_group)
            continue
        subject, size = of_file(Path(name), open_group, making.sidecar(Path(name)), side)
        if open_group is None:
            found.append(Group(subject.form, [subject], size))
        else:
            open_group.subjects.append(subject)
    if not found:
        raise NormswapError("nothing to time")
    return found
