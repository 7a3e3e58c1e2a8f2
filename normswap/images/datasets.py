"""Images with labels: where they are, and batches of them, preprocessed as the network wants them;
on timm's readers.

timm's own dataset replaces an image it cannot read by the next one, and its labels follow the
folders present. Both would bend a measured accuracy, so here an unreadable image is an error that
names it, and labels follow the network.

A label has a name (a class folder, a column of a CSV, the dataset's own list). It is looked for
among the names that the network has for its outputs, then among ImageNet's WordNet ids, then read
as an output's number. Where a network has no names for its outputs, as many names go in their
order, as they did in training.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from timm.data import (
    ImageDataset,
    ImageNetInfo,
    create_dataset,
    create_transform,
    infer_imagenet_subset,
)
from timm.data.readers.reader import Reader
from timm.data.readers.reader_image_folder import ReaderImageFolder
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from timm.utils.misc import natural_key
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from normswap import shipped
from normswap.errors import OptionError, SourceError, first_line, quiet, spelled
from normswap.images import array_files
from normswap.models import network_input, preprocessing
from normswap.models.hub import Cfg
from normswap.models.modes import undisturbed
from normswap.models.weight_files import some

TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")
# Calibration takes at most so many images, unless a number is given.
_MOST_TO_CALIBRATE = 512
_REMEDY = "Name the folders as the network names its classes, or give a CSV of files and labels"
_TRANSFORM = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


class Loader:
    """Batches of images (N, C, H, W) and labels (N,), or of several inputs and labels by name, in a
    fixed order.

    `origin` is what the user named; `count` how many images one pass has, of a stream at most, None
    where nobody knows; `notes` which part of a dataset they are, and how labels were read, where
    the user should know.
    """

    def __init__(
        self, batches: DataLoader[Any], origin: str, count: int | None, notes: tuple[str, ...] = ()
    ) -> None:
        self.batches = batches
        self.origin = origin
        self.count = count
        self.notes = notes

    def __len__(self) -> int:
        return len(self.batches)

    def only(self, rows: Sequence[int]) -> Loader:
        """Return a loader of these images; no other is read."""
        old = self.batches
        batches = _batches(
            Subset(old.dataset, rows), old.batch_size, old.num_workers, old.generator
        )
        return Loader(batches, self.origin, len(rows), self.notes)

    def __iter__(self) -> Iterator[Any]:
        left = self.count
        batches = iter(self.batches)
        for batch in batches:
            if isinstance(batch, str):
                # All of them are named at once: the others are read, too.
                broken = "\n".join(
                    [batch, *(other for other in batches if isinstance(other, str))]
                ).splitlines()
                raise SourceError(
                    f"{self.origin}: {some(broken)}", remedy="Remove or replace them."
                )
            if isinstance(batch, dict):
                yield batch
                continue
            images, labels = batch
            yield images[:left], labels[:left]
            if left is not None:
                left -= len(labels)
                if left <= 0:
                    return


def make_loader(
    model: nn.Module | Mapping[str, object],
    data: str,
    *,
    batch_size: int = 64,
    workers: int = 2,
    split: str = "validation",
    samples: int | None = None,
    seed: int = 0,
    labelled: bool | None = True,
) -> Loader:
    """Batches from `data`, resized, cropped and normalized for evaluating `model`.

    Args:
        model: the network, or its record (`image_record`).
        data: a folder of class folders, a `.tar` of one, a `.csv` that begins with the line
            `file,label`, a dataset of timm's as `PREFIX/NAME[:ROOT]`, such as `torch/cifar10:/data`
            or `hfds/user/name`, or arrays (`array_files`).
        split: which part of a dataset that has parts; a folder of that name inside the folder is
            used if present.
        samples: take this many images, drawn without replacement by `seed`; a stream gives its
            first ones.
        labelled: false: labels mean nothing, and the folders may be any; None: only where there are
            class folders and a classifier; else they are -1.

    Raises SourceError: no images there, or of other classes than the network's; OptionError: a
    number below one.
    """
    if batch_size < 1 or workers < 0 or (samples is not None and samples < 1):
        raise OptionError(
            f"batch size {batch_size}, {workers} workers, {samples} samples", "must be positive"
        )
    network_input.require_seed(seed)
    record = image_record(model) if isinstance(model, nn.Module) else model
    values: dict[str, Any] = {name: record[name] for name in _TRANSFORM if name in record}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    dataset: Any = open_images(record, data, split, create_transform(**values), labelled=labelled)
    notes = getattr(dataset, "notes", ())
    count = samples
    if not isinstance(dataset, IterableDataset):
        rows = drawn_rows(len(dataset), samples, seed)
        count = len(rows)
        if count < len(dataset):
            dataset = Subset(dataset, rows)
    elif hasattr(dataset, "set_loader_cfg"):
        dataset.set_loader_cfg(num_workers=workers)
    batches = _batches(dataset, batch_size, workers, torch.Generator().manual_seed(seed))
    return Loader(batches, data, count, notes)


def _batches(dataset: Any, size: int | None, workers: int, generator: Any) -> DataLoader[Any]:
    return DataLoader(dataset, size, num_workers=workers, collate_fn=collate, generator=generator)


def drawn_rows(count: int, samples: int | None, seed: int) -> Sequence[int]:
    """Draw which of so many images are used, ascending."""
    if samples is None or samples >= count:
        return range(count)
    order: list[int] = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[
        :samples
    ].tolist()
    return sorted(order)


def split_for_calibration(
    loader: Loader, first: int | None, *, most: int | None = None
) -> tuple[Loader, Loader]:
    """Draw `first` images to fit to (by default half, at most 512), and `most` others to measure
    on, or all.

    Raises OptionError: a part has none.
    """
    total = loader.count or 0
    count = first
    if count is None:
        count = min(total // 2, _MOST_TO_CALIBRATE)
    if not 0 < count < total:
        what = (
            f"{loader.origin} has {'an unknown number of' if loader.count is None else total}"
            " images"
        )
        why = f"{count or 'some'} to calibrate on leave none to measure on"
        raise OptionError(what, why, f"Give more of them, or lower {spelled('samples')}")
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    return loader.only(sorted(drawn[:count])), loader.only(sorted(drawn[count:][:most]))


def open_images(
    record: Mapping[str, Any], data: str, split: str, transform: object, *, labelled: bool | None
) -> LabelledImages | IterableDataset[object]:
    """Return a dataset of (transformed PIL image, label), by arguments of `make_loader`; a stream
    has no length.
    """
    if files := array_files.find(Path(data)):
        inputs = record.get("inputs") or {"": (record["input_size"], "float32")}
        return array_files.Arrays(files, inputs)  # type: ignore[return-value]
    channels = record["input_size"][0]
    modes = {1: "L", 3: "RGB"}
    if len(record["input_size"]) != 3:
        what = f"the network takes {'x'.join(map(str, record['input_size']))}, which is no image"
        raise SourceError(
            what, f"{data} holds no arrays", "Give a folder of .npy or .safetensors files"
        )
    if channels not in modes:
        raise SourceError(f"the network takes {channels} channels", "images have 1 or 3")
    mode = modes[channels]
    path = Path(data)
    if data == shipped.NAME and not path.exists():
        path = shipped.IMAGES
    place = part_of(path, split) if path.exists() else None
    dataset = _open(place, data, split, mode)
    if isinstance(dataset, IterableDataset):
        dataset.transform = transform  # type: ignore[attr-defined]
        return dataset
    notes = [f"images of {place or f'the part {split} of {data}'}"]
    if place in (Path(data), shipped.IMAGES):
        notes = []
    names = _names(dataset)
    outputs: dict[int, int] = {}
    if names and labelled is not False:
        class_names = record.get("label_names") or []
        if isinstance(class_names, Mapping):
            class_names = class_names.values()
        classes = Outputs(record.get("num_classes"), tuple(map(str, class_names)))
        outputs, note = label_map(names, classes, data, needed=labelled is True)
        notes += filter(None, [note])
    return LabelledImages(dataset, mode, transform, outputs or None, tuple(notes))


def image_record(model: nn.Module) -> Cfg:
    """Return a network's preprocessing (`data_config`) and classes, counted by a run where none are
    stated.
    """
    record = preprocessing.stated(model)
    count = getattr(model, "num_classes", record.get("num_classes"))
    if count is None:
        count = _counted(model)
    named = {name: record.get(name) for name in ("label_names", "inputs")}
    return {**preprocessing.data_config(model), "num_classes": count, **named}


def _counted(model: nn.Module) -> int | None:
    """How many scores the network gives; None where it runs on no example, or gives something else."""
    with suppress(Exception), undisturbed(model), torch.inference_mode():
        return network_input.scores(
            network_input.noise(model, network_input.size(model)).call(model)
        ).shape[1]
    return None


def _open(place: Path | None, data: str, split: str, mode: str) -> object:
    if place is not None and place.suffix.lower() == ".csv":
        return ImageDataset(str(place), reader=CsvReader(place), input_img_mode=mode)
    if place is not None:
        name = ""
        root = str(place)
    elif data.partition("/")[0].lower() in PREFIXES:
        name, _, root = data.partition(":")
    else:
        raise SourceError(
            f"{data} does not exist",
            remedy=f"Other datasets start with {', '.join(PREFIXES)} and '/'.",
        )
    try:
        # timm's readers print what they raise, too.
        with quiet(), redirect_stdout(io.StringIO()):
            return create_dataset(
                name,
                root=root or None,
                split=split,
                input_img_mode=mode,
                search_split=place is None,
            )
    except ImportError as error:
        raise SourceError(
            f"{data} needs a package that is not installed", first_line(error)
        ) from None
    except Exception as error:
        remedy = (
            "Expected class folders with images, a .tar of them, a CSV of files, or a dataset of"
            " timm's."
        )
        raise SourceError(f"{data} is not a dataset of images", first_line(error), remedy) from None


def _names(dataset: object) -> Mapping[str, int]:
    for holder in (getattr(dataset, "reader", None), dataset):
        for attribute in ("class_to_idx", "class_name_to_idx"):
            names = getattr(holder, attribute, None)
            if isinstance(names, Mapping) and names and len(set(names.values())) == len(names):
                return {str(name): int(number) for name, number in names.items()}
    return {}


class LabelledImages(Dataset[object]):
    """Images and the network's labels; a sentence for an unreadable image, as a worker's error is a
    traceback.
    """

    def __init__(
        self,
        images: Any,
        mode: str,
        transform: Any,
        outputs: Mapping[int, int] | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.images = images
        self.mode = mode
        self.transform = transform
        self.outputs = outputs
        self.notes = notes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        try:
            image, label = self._image(index)
        except (OSError, ValueError, SyntaxError) as error:
            name_of = getattr(self.images, "filename", lambda index: f"image {index}")
            return f"{name_of(index)} cannot be read: {first_line(error)}"
        label = -1 if label is None else int(label)
        return self.transform(image), label if self.outputs is None else self.outputs[label]

    def _image(self, index: int) -> tuple[Image.Image, int]:
        if not isinstance(self.images, ImageDataset):
            image, label = self.images[index]
            return _converted(image, self.mode), label
        reader = self.images.reader
        if isinstance(reader, ReaderImageInTar):
            file, label = _tar_member(reader, index)
        else:
            file, label, *_ = reader[index]
        with file, Image.open(file) as image:
            return _converted(image, self.mode), label


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, of 8 bits; Pillow cuts deeper pixels off at 255, so those are refused
    (ValueError).
    """
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels (mode {image.mode}) have more than 8 bits: scale them to 8")
    return image.convert(mode)


def _tar_member(reader: ReaderImageInTar, index: int) -> tuple[io.BytesIO, int]:
    """Read the image's bytes: timm's own way leaves a tar open, in a state that worker processes
    would share.
    """
    member, _, inside = reader.samples[index]
    with open(reader.root, "rb") as tar:
        tar.seek(member.offset_data + getattr(inside, "offset_data", 0))
        return io.BytesIO(tar.read(member.size)), reader.targets[index]


def collate(batch: list[object]) -> object:
    """Make a batch for `Loader`, which raises what a worker could not read."""
    broken = [item for item in batch if isinstance(item, str)]
    return "\n".join(broken) or default_collate(batch)


def part_named(folder: Path, names: tuple[str, ...]) -> Path | None:
    """The folder or tar in `folder` that has one of these names, the first first."""
    paths = (folder / f"{name}{ending}" for name in names for ending in ("", ".tar"))
    return next((path for path in paths if path.exists() and _is_part(path)), None)


def _is_part(path: Path) -> bool:
    if path.is_file():
        return True
    beside = {other.name for other in path.parent.iterdir() if other.is_dir()}
    return beside <= {*TRAIN, *VALIDATION} or any(other.is_dir() for other in path.iterdir())


def part_of(folder: Path, split: str) -> Path:
    """The part of a folder that a split's name means, or the folder itself where it has none of a
    usual name.
    """
    usual = next((names for names in (TRAIN, VALIDATION) if split in names), ())
    named_part = part_named(folder, (split, *usual))
    if named_part is None and not usual:
        raise SourceError(
            f"{folder} has no part {split}", remedy="A part is a folder in it: train, val, test ..."
        )
    return named_part or folder


class CsvReader(ReaderImageFolder):
    """timm's reader of images that a CSV lists: its first line is `file,label`, files are named
    relative to it.
    """

    def __init__(self, file: Path) -> None:
        Reader.__init__(self)
        self.root = str(file.parent)
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                rows = [
                    (row["file"].strip(), row["label"].strip()) for row in csv.DictReader(lines)
                ]
        except (OSError, UnicodeDecodeError, csv.Error, KeyError, AttributeError):
            rows = []
        pairs = [(str(file.parent / name), label) for name, label in rows]
        absent = [f"{path} does not exist" for path, _ in pairs if not Path(path).is_file()]
        if absent or not pairs:
            remedy = (
                "It is UTF-8 text, its first line is file,label, and files are named relative to"
                " its folder"
            )
            raise SourceError(
                f"{file} is no list of images and labels", "".join(absent[:1]), remedy
            )
        ordered = sorted({label for _, label in pairs}, key=natural_key)
        self.class_to_idx = {label: number for number, label in enumerate(ordered)}
        self.samples = [(path, self.class_to_idx[label]) for path, label in pairs]


@dataclass(frozen=True)
class Outputs:
    """How many outputs a network has, and the names of all, in order; None and empty where it does
    not say.
    """

    count: int | None = None
    names: tuple[str, ...] = ()


def label_map(
    labels: Mapping[str, int], outputs: Outputs, origin: str, *, needed: bool = True
) -> tuple[dict[int, int], str]:
    """The network's output for each number of a label (by its name), and a note on how it was
    found, if to be known.

    Where labels are not needed and mean nothing, the output is -1. Raises SourceError: some names
    are the network's and others are not, or nothing says which output a label is.
    """
    flat = set(labels) == {""}
    if outputs.count == 0 or (flat and not (needed and outputs.count == 1)):
        what = f"{origin} has no class folders"
        why = "labels are needed"
        if outputs.count == 0:
            what = "the network has no classifier"
            why = "features have no accuracy"
        if needed:
            raise SourceError(what, why, _REMEDY)
        return dict.fromkeys(labels.values(), -1), f"{what}: accuracy is not known"
    for way, output_of in _ways(labels, outputs).items():
        output_of_label = {label: output_of.get(label) for label in labels}
        strange = [label for label, output in output_of_label.items() if output is None]
        if len(strange) == len(labels):
            continue
        if strange:
            names = some(label or "(images outside of the class folders)" for label in strange)
            what = (
                f"{origin}: {len(strange)} of {len(labels)} labels are no classes of the network"
                f" ({names})"
            )
            raise SourceError(
                what, f"its classes are {some(outputs.names)}" if outputs.names else "", _REMEDY
            )
        output_of_number = {
            labels[label]: output for label, output in output_of_label.items() if output is not None
        }
        largest = max(output_of_number.values())
        if outputs.count is not None and largest >= outputs.count:
            what = f"{origin} has a label {largest}"
            raise SourceError(what, f"the network's outputs are 0 to {outputs.count - 1}", _REMEDY)
        if outputs.count is None or len(labels) >= outputs.count:
            return output_of_number, ""
        return (
            output_of_number,
            f"labels by {way}: {len(labels)} of the network's {outputs.count} classes",
        )
    if outputs.names or outputs.count not in (None, len(labels)):
        what = (
            f"{origin} has {len(labels)} class{'es' * (len(labels) > 1)} ({some(sorted(labels))})"
        )
        why = f"the network has {outputs.count}" + (
            f" ({some(outputs.names)})" if outputs.names else ""
        )
        raise SourceError(what, why, _REMEDY)
    return {number: number for number in labels.values()}, ""


def _ways(labels: Mapping[str, int], outputs: Outputs) -> dict[str, Mapping[str, int]]:
    """The outputs that labels may mean: by name, by WordNet id, by number.

    Names are compared letter for letter, then without case, `_` and `-`; a name that two outputs
    have is none. timm lists the WordNet ids of networks with as many classes as a set of
    ImageNet's.
    """
    by_name: dict[str, int] = {}
    for names in ([_plain(name) for name in outputs.names], outputs.names):
        by_name |= {name: index for index, name in enumerate(names) if names.count(name) == 1}
    subset = infer_imagenet_subset({"num_classes": outputs.count})
    wordnet_ids = ImageNetInfo(subset).label_names() if subset else []
    return {
        "name": {
            label: by_name[name]
            for label in labels
            for name in (_plain(label), label)
            if name in by_name
        },
        "WordNet id": {label: index for index, label in enumerate(wordnet_ids)},
        "number": {label: int(label) for label in labels if label.isdecimal()},
    }


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
