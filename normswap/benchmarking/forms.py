"""The forms of a network that are timed: as it came, folded, exported. Each makes the file that a runtime opens."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from normswap import provenance
from normswap.benchmarking.runtimes import DTYPES, Settings
from normswap.errors import NormswapError, OptionError, RefusedError, first_line
from normswap.models import network_input, source_names, zoo
from normswap.models.imaged import imaged
from normswap.models.weight_files import quiet
from normswap.plan import Body
from normswap.storage import checkpoint
from normswap.surgery import conversion, unfolding
from normswap.surgery.network import Network

_NEEDS = {"onnx": ("onnx", "onnxscript")}
_ONE = "Only networks that take images and give one answer are timed"
_QUANTIZERS = (b"QuantizeLinear", b"FakeQuantize", b"quantized_decomposed")
Size = tuple[int, int, int]
Write = Callable[[Path], object]


@dataclass(frozen=True)
class Form:
    """One form of a network.

    Args:
        name: what the table calls it.
        make: for each kind of file that it can be had as, the function that makes that file; a runtime opens the first
            kind it knows.
        answers: gives the right outputs for images (N, C, H, W); None if nobody knows them.
        raw: turns images as the network takes them into images as the file does.
        foldable: whether it may still hold norms that a runtime could fold itself.
        precision: that of its weights, where it says so.
        needs: for each kind of file, the packages that making it takes.
    """

    name: str
    make: Mapping[str, Callable[[], Path]]
    answers: Callable[[Tensor], Tensor] | None = None
    raw: Callable[[Tensor], Tensor] = lambda images: images
    foldable: bool = False
    precision: str | None = None
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass
class Group:
    """The forms of one network; the speed of all is relative to the first one in eager mode."""

    network: str
    forms: list[Form]
    size: Size
    notes: list[str] = field(default_factory=list)
    model: nn.Module | None = None

    def images(self, batch: int) -> Tensor:
        """Draw N(0, 1) noise (batch, C, H, W), the same for all contenders."""
        return torch.randn(batch, *self.size, generator=torch.Generator().manual_seed(0))


class Export(Protocol):
    """`normswap.export`; this room does not know the one next door."""

    def __call__(
        self, model: nn.Module, path: Path, /, *, dtype: str, dynamic_batch: bool, input_size: Size, force: bool
    ) -> object: ...


@dataclass(frozen=True)
class Making:
    """How files are made.

    Args:
        folder: where they are put.
        batches: the numbers of images that they must take.
        export: writes a folded network to a file.
        sidecar: reads the description beside an exported file, if there is one.
    """

    folder: Path
    settings: Settings
    batches: Sequence[int]
    export: Export
    sidecar: Callable[[Path], Body | None]

    @property
    def dynamic(self) -> bool:
        return any(batch != 1 for batch in self.batches)

    def files(self, form: str, **writers: Write) -> dict[str, Callable[[], Path]]:
        """Give, by kind, what makes a file of a form when it is first asked for."""

        @cache
        def made(kind: str) -> Path:
            file = self.folder / (form if kind == "directory" else f"{form}.{kind}")
            with quiet(), torch.no_grad():
                writers[kind](file)
            return file

        return {kind: partial(made, kind) for kind in writers}


def of_model(network: str, model: nn.Module, making: Making, side: int | None = None) -> Group:
    """Group the original, the network as it is if that is another one, and the folded one.

    Args:
        side: height and width of the images; by default those of the network.

    Raises:
        OptionError: the network rejects images of that size.
    """
    channels, height, width = network_input.size(model)
    group = Group(network, [], (channels, side or height, side or width), model=model)
    called = _called(network, model, group.size)
    making.folder.mkdir(parents=True, exist_ok=True)
    record = provenance.of(model)
    last = record.plan.steps[-1].scheme if record and record.plan.steps else None
    if last is not None:
        try:
            group.forms.append(original(unfolding.unfold(Network(model)).module, group.size, making))
        except RefusedError as why:
            group.notes.append(f"{network} is measured by itself as it is, not by its source: {why}")
    if last != "folded":
        group.forms.append(original(model, group.size, making, last or "original"))

    def directory(file: Path) -> None:
        result = model if last == "folded" else conversion.convert(model, "folded", input_size=group.size)
        checkpoint.save(result, file, force=True)

    def exported(file: Path) -> None:
        making.export(model, file, dtype=making.settings.dtype, dynamic_batch=making.dynamic, input_size=group.size,
                      force=True)  # fmt: skip

    files = making.files("folded", directory=directory, onnx=exported, torchscript=exported)
    group.forms.append(Form("folded", files, called, needs=_NEEDS))
    return group


def _called(network: str, model: nn.Module, size: Size) -> nn.Module:
    """Return the network as one that takes images and gives one tensor.

    Raises:
        OptionError: it cannot be timed on images of that size.
    """
    try:
        with quiet():
            return imaged(model, torch.zeros(1, *size))
    except NormswapError as error:
        raise OptionError(f"{network} is not timed", f"{error.what}, {error.why}", _ONE) from None
    except Exception as error:  # torch's and timm's own, whatever does not fit
        raise OptionError(f"{network} rejects images of {size[1]} x {size[2]}", first_line(error)) from None


def original(model: nn.Module, size: Size, making: Making, name: str = "original") -> Form:
    """Describe `model` as anybody would run it: itself, or exported by torch without our help."""
    called, dtype = imaged(model, torch.zeros(1, *size)), getattr(torch, DTYPES[making.settings.dtype])
    example = (torch.zeros(2 if making.dynamic else 1, *size),)

    def fed() -> nn.Module:
        return called if dtype is torch.float32 else _Fed(copy.deepcopy(called).to(dtype), dtype).eval()

    def onnx(file: Path) -> None:
        shapes = ({0: torch.export.Dim("batch", min=1)},) if making.dynamic else None
        torch.onnx.export(fed(), example, file, dynamo=True, verbose=False, dynamic_shapes=shapes)

    def torchscript(file: Path) -> None:
        torch.jit.save(torch.jit.freeze(torch.jit.trace(fed(), example, check_trace=False)), file)

    directory = partial(checkpoint.save, model, force=True)
    files = making.files(name, directory=directory, onnx=onnx, torchscript=torchscript)
    return Form(name, files, called, foldable=True, needs=_NEEDS)


class _Fed(nn.Module):
    """Takes and gives float32, whatever is inside, as our own exports do."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.to(self.dtype)).float()


def is_file(name: str) -> bool:
    """Tell whether MODEL is an exported file."""
    return Path(name).suffix.lower() in source_names.EXPORTED


def of_file(file: Path, before: Group | None, body: Body | None, side: int | None) -> tuple[Form, Size]:
    """Describe an exported file as one more form of the network that was named before it; also the size it takes.

    Args:
        body: the description beside it.

    Raises:
        OptionError: there is no such file, or it takes other images than that network.
    """
    if source_names.exported(file) and file.is_dir():
        raise OptionError(f"bench does not run {file}", "it is a package, not a file")
    if not file.is_file():
        raise OptionError(f"{file} does not exist" if not file.exists() else f"{file} is no file")
    takes = tuple(body["input"]["size"]) if body else None
    size = before.size if before else (3, side or 224, side or 224)
    if takes and before and takes != before.size:
        raise OptionError(f"{file} takes images of {takes}", f"{before.network} is timed on {before.size}")
    form = Form(file.name, {source_names.EXPORTED[file.suffix.lower()]: file.resolve}, precision=_precision(file, body))
    if before and before.model:
        called = imaged(before.model, torch.zeros(1, *before.size))
        form = replace(form, answers=called)
        if body and body["output"]["name"] == "probabilities":
            form = replace(form, answers=lambda images: called(images).softmax(-1))
        if body and body["normalize"] is None:
            config = zoo.data_config(before.model)
            mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1) for key in ("mean", "std"))
            form = replace(form, raw=lambda images: images * std + mean)
    return form, takes if takes and not side else size


def _precision(file: Path, body: Body | None) -> str | None:
    """Say the precision of a file's weights; int8 where nothing describes it and it holds a quantizer's operators."""
    if body and body.get("precision"):
        return str(body["precision"]["weights"])
    held = file.read_bytes()
    return "int8" if any(operator in held for operator in _QUANTIZERS) else None


def groups(named: Sequence[tuple[str, str, nn.Module | None]], making: Making, side: int | None = None) -> list[Group]:
    """Group (MODEL, label, network or None for a file), in order: a file belongs to the network before it.

    Raises:
        NormswapError: one of them cannot be timed at all.
    """
    made: list[Group] = []
    for i, (name, label, model) in enumerate(named):
        if model is not None:
            made.append(of_model(label, model, replace(making, folder=making.folder / str(i)), side))
            continue
        before = next((group for group in reversed(made) if group.model is not None), None)
        form, size = of_file(Path(name), before, making.sidecar(Path(name)), side)
        if before is None:
            made.append(Group(form.name, [form], size))
        else:
            before.forms.append(form)
    return made
