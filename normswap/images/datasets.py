"""Images with labels, read by timm's readers, in batches that are preprocessed for the network.

timm's own dataset replaces an image it cannot read by the next one, and its labels follow the
folders present. Both would bend a measured accuracy, so here an unreadable image is an error that
names it, and labels follow the network.

A label has a name (a class folder, a column of a CSV, the dataset's own list). The name is looked
for among the network's names of its outputs, then among ImageNet's WordNet ids, then read as an
output's number. If the network has no names for its outputs, and as many outputs as there are
labels, the labels are taken in the order of their names, as in training.
"""

from __future__ import annotations

import csv
import functools
import io
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from multiprocessing.connection import Listener
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
from normswap.errors import OptionError, SourceError, first_few, first_line, quiet, spelled
from normswap.images import array_files, places
from normswap.models import network_input, preprocessing
from normswap.models.hub import Cfg
from normswap.models.modes import undisturbed
from normswap.models.records import class_names

TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "eval", "evaluation", "test")
# Calibration takes at most so many images, unless a number is given.
_MOST_TO_CALIBRATE = 512
_REMEDY = "Name the folders as the network names its classes, or give a CSV of files and labels"
# Formats that Pillow hands to a program on this machine.
_READ_BY_PROGRAMS = ("EPS", "WMF")
# How many times longer than wide an image may be. Resizing its short side multiplies its memory by
# this number.
_MOST_TIMES_LONGER = 200
# The most links through which one folder may be seen.
_MOST_LINKS = 100
# A label of so many digits is no output's number.
_MOST_DIGITS = 10
_TRANSFORM = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")


class Loader:
    """Batches of images (N, C, H, W) and labels (N,), in a fixed order.

    For a network of several inputs, a batch is a dict: each input by its name, and the labels under
    `labels`.

    Args:
        batches: torch's own loader, which this class wraps.
        origin: The path or name of the images, as the user gave it.
        count: The number of images in one pass. For a stream it is the largest number that is
            taken. None if the number is not known.
        notes: Sentences for the user on the part of the dataset that is read, and on its labels.
    """

    def __init__(
        self, batches: DataLoader[Any], origin: str, count: int | None, notes: tuple[str, ...] = ()
    ) -> None:
        # torch's own loader, the user's name for the images, the number of images in one pass (None
        # if it is not known), and sentences for the user.
        self.batches = batches
        self.origin = origin
        self.count = count
        self.notes = notes

    def __len__(self) -> int:
        return len(self.batches)

    def only(self, rows: Sequence[int]) -> Loader:
        """Return a loader that reads only some of the images.

        Args:
            rows: The indices of these images in the dataset.
        """
        all_batches = self.batches
        batches = _batches(
            Subset(all_batches.dataset, rows),
            all_batches.batch_size,
            all_batches.num_workers,
            all_batches.generator,
        )
        return Loader(batches, self.origin, len(rows), self.notes)

    def __iter__(self) -> Iterator[Any]:
        # How many images are still to be given. None if the number of images is not known: then
        # all are given.
        remaining = self.count
        batches = iter(self.batches)
        for batch in batches:
            # Where images are broken, `collate` returns sentences about them in place of a batch.
            if isinstance(batch, str):
                # All broken images are named at once, so the rest of the batches is read, too.
                later_sentences = [later for later in batches if isinstance(later, str)]
                broken = "\n".join([batch, *later_sentences]).splitlines()
                raise SourceError(
                    f"{self.origin}: {first_few(broken)}", remedy="Remove or replace them."
                )
            # A dict holds the inputs of a network that takes several. They are read from files, not
            # from a stream, so no more samples come than are taken.
            if isinstance(batch, dict):
                yield batch
                continue

            # A stream may hold more images than are taken, so its last batch is cut.
            images, labels = batch
            yield images[:remaining], labels[:remaining]
            if remaining is not None:
                remaining -= len(labels)
                if remaining <= 0:
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
    """Return batches of images, resized, cropped and normalized for evaluating a network.

    Args:
        model: The network, or the dict that `image_record` returns for it.
        data: A folder of class folders, a `.tar` of one, a `.csv` that begins with the line
            `file,label`, a dataset of timm's as `PREFIX/NAME[:ROOT]`, such as `torch/cifar10:/data`
            or `hfds/user/name`, or arrays (`array_files`).
        batch_size: The number of images in a batch.
        workers: The number of processes that read images. With 0 this process reads them.
        split: Which part of a dataset is read, such as train or validation. Inside a folder, the
            folder with the name of the part is used if there is one.
        samples: How many images are taken, drawn without replacement by `seed`. A stream gives its
            first ones.
        seed: The seed of the draw.
        labelled: Whether labels are needed. With None they are read where there are class folders
            and a classifier. Labels that are not read are -1.

    Raises:
        SourceError: There are no images, or they have other classes than the network's.
        OptionError: `batch_size`, `workers` or `samples` is too small.
    """
    if batch_size < 1 or workers < 0 or (samples is not None and samples < 1):
        raise OptionError(
            f"batch size {batch_size}, {workers} workers, {samples} samples", "must be positive"
        )
    network_input.require_seed(seed)

    # Make the transform of the images from those keys of the network's record that say how images
    # are prepared. A record that was read from JSON has lists in place of tuples.
    record = image_record(model) if isinstance(model, nn.Module) else model
    values: dict[str, Any] = {name: record[name] for name in _TRANSFORM if name in record}
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    dataset: Any = open_images(record, data, split, create_transform(**values), labelled=labelled)

    # Choose the images. A stream has no indices to draw from, so `Loader` takes its first ones.
    notes = getattr(dataset, "notes", ())
    count = samples
    if not isinstance(dataset, IterableDataset):
        rows = drawn_rows(len(dataset), samples, seed)
        count = len(rows)
        if count < len(dataset):
            dataset = Subset(dataset, rows)
    # timm's streams must know how many workers share them before the workers start.
    elif hasattr(dataset, "set_loader_cfg"):
        dataset.set_loader_cfg(num_workers=workers)
    batches = _batches(dataset, batch_size, workers, torch.Generator().manual_seed(seed))
    return Loader(batches, data, count, notes)


def _batches(
    dataset: Any, size: int | None, workers: int, generator: torch.Generator | None
) -> DataLoader[Any]:
    """Return torch's loader of a dataset, which gives the images in the order of the dataset.

    In place of a batch with unreadable images it gives a text about them (see `collate`).

    Args:
        dataset: The dataset.
        size: The number of images in a batch.
        workers: The number of processes that read images. With 0 this process reads them.
        generator: torch's generator, from which the loader draws the seeds of these processes.
    """
    check_temporary_folder(workers)
    return DataLoader(dataset, size, num_workers=workers, collate_fn=collate, generator=generator)


def check_temporary_folder(workers: int) -> None:
    """Raise OptionError if processes that read images could not hand the images over.

    torch sends each batch by a socket in the folder for temporary files. The path of a socket has
    about 107 characters at most. If the path is longer, torch drops the batch and waits for ever.

    Args:
        workers: The number of processes that read images.
    """
    # Without processes nothing is handed over, and torch's other way to share memory needs no
    # socket in this folder.
    if workers == 0 or torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    # Open such a socket for a moment, to see whether it can be opened.
    try:
        Listener().close()
    except OSError as error:
        what = f"{workers} processes cannot hand over the images that they read"
        why = f"no socket in {tempfile.gettempdir()}: {first_line(error)}"
        raise OptionError(what, why, "Set TMPDIR to a shorter path: export TMPDIR=/tmp") from None


def drawn_rows(count: int, samples: int | None, seed: int) -> Sequence[int]:
    """Return the indices of the images that are used, in ascending order.

    Args:
        count: How many images there are.
        samples: How many images are drawn. With None all images are used.
        seed: The seed of the draw.
    """
    if samples is None or samples >= count:
        return range(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    drawn: list[int] = order[:samples].tolist()
    return sorted(drawn)


def split_for_calibration(
    loader: Loader, first: int | None, *, most: int | None = None
) -> tuple[Loader, Loader]:
    """Divide images at random: return a loader to calibrate on, and one of others to measure on.

    Args:
        loader: All images.
        first: The number of images to calibrate on. By default it is half of all images, at most
            512.
        most: The largest number of images to measure on. By default all other images are used.

    Raises:
        OptionError: One of the two parts has no images.
    """
    # If the number of images is not known, it counts as 0, which is refused below.
    total = loader.count or 0
    count = first
    if count is None:
        count = min(total // 2, _MOST_TO_CALIBRATE)

    has_both_parts = 0 < count < total
    if not has_both_parts:
        number = "an unknown number of" if loader.count is None else total
        what = f"{loader.origin} has {number} images"
        why = f"{count or 'some'} to calibrate on leave none to measure on"
        raise OptionError(what, why, f"Give more of them, or lower {spelled('samples')}")
    # The seed is fixed, so that every run draws the same images. They are then read in the order of
    # the dataset.
    drawn = torch.randperm(total, generator=torch.Generator().manual_seed(0)).tolist()
    to_calibrate = drawn[:count]
    to_measure = drawn[count:][:most]
    return loader.only(sorted(to_calibrate)), loader.only(sorted(to_measure))


def calibration_images(loader: Loader, first: int | None) -> Loader:
    """Return images to calibrate on, out of a dataset that is used for nothing else.

    No images are held back, because accuracy is measured on another dataset.

    Args:
        loader: All images of the dataset.
        first: The number of images to draw. By default all are taken, at most 512.

    Raises:
        OptionError: The number of images in the dataset is not known.
    """
    # Images cannot be drawn from an unknown number. `split_for_calibration` raises the error.
    if loader.count is None:
        return split_for_calibration(loader, first)[0]
    # The seed is fixed, so that every run draws the same images. They are then read in the order of
    # the dataset.
    count = min(first or _MOST_TO_CALIBRATE, loader.count)
    drawn = torch.randperm(loader.count, generator=torch.Generator().manual_seed(0)).tolist()
    return loader.only(sorted(drawn[:count]))


def open_images(
    record: Mapping[str, Any], data: str, split: str, transform: object, *, labelled: bool | None
) -> LabelledImages | IterableDataset[object]:
    """Return a dataset of transformed images and labels. An `IterableDataset` has no length.

    Args:
        record: The dict that `image_record` returns for the network.
        data: The path of the images, or the name of a dataset that timm opens, such as
            `torch/cifar10:/data`, or `demo`.
        split: The part of the dataset that is read, such as `train` or `validation`.
        transform: A function from a PIL image to a tensor.
        labelled: Whether labels are needed. With None they are used if there are class folders and
            the network is a classifier.

    Raises:
        SourceError: There are no images, or they have other classes than the network's.
    """
    # Arrays are given to the network as they are. A single input has an empty name.
    if files := array_files.find(Path(data)):
        inputs = record.get("inputs") or {"": (record["input_size"], "float32")}
        return array_files.Arrays(files, inputs)  # type: ignore[return-value]

    # All other data are images, which the network must be able to take.
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
    location = located(data, split)
    if location is not None:
        _check_location(location)
    dataset = _open(location, data, split, mode)
    # A stream is timm's own dataset, which transforms its images itself.
    if isinstance(dataset, IterableDataset):
        dataset.transform = transform  # type: ignore[attr-defined]
        return dataset

    # A note names what is read, unless that is just the path that the user named, or `demo`.
    notes: list[str] = []
    if location not in (Path(data), shipped.IMAGES):
        part = location or f"the part {split} of {data}"
        notes.append(f"images of {part}")

    outputs, note = _outputs_of_labels(record, dataset, data, labelled)
    notes += filter(None, [note])
    # Without a map from labels to outputs, the labels stay as they are.
    return LabelledImages(dataset, mode, transform, outputs or None, tuple(notes))


def _outputs_of_labels(
    record: Mapping[str, Any], dataset: object, data: str, labelled: bool | None
) -> tuple[dict[int, int], str]:
    """Return the network's output for each label of a dataset, and a note for the user.

    Both are empty if labels are not read, or have no names. The note is also empty if there is
    nothing to say.

    Args:
        record: The dict that `image_record` returns for the network.
        dataset: The dataset, as timm opened it.
        data: The name of the images in errors.
        labelled: Whether labels are needed. With None they are used if there are class folders and
            the network is a classifier.
    """
    names = _label_by_name(dataset)
    if not names or labelled is False:
        return {}, ""

    classes = Outputs(record.get("num_classes"), tuple(class_names(record) or ()))
    return label_map(names, classes, data, needed=labelled is True)


def _check_location(location: Path) -> None:
    """Raise SourceError for a pipe or a device, and for a folder that links make endless.

    timm lists a folder with everything behind its links. A link to a folder above it would have no
    end. Thirty folders, each with two links to the next folder, would show a billion folders.

    Args:
        location: The path of the images: a folder or a tar.
    """
    if location.is_file():
        return
    if not location.is_dir():
        raise SourceError(f"{location} is neither a folder nor a file")

    # How many paths lead to each folder, by the folder's identity. `pending` has the folders to
    # look into, each with the identities of the folders above it.
    visits: Counter[tuple[int, int]] = Counter()
    pending = [(location, frozenset({_identity(location)}))]
    while pending:
        folder, above = pending.pop()
        for inner in _folders_in(folder):
            identity = _identity(inner)
            visits[identity] += 1
            if identity in above:
                raise SourceError(f"{inner} is a link to a folder above it", remedy="Remove it")
            if visits[identity] > _MOST_LINKS:
                raise SourceError(
                    f"more than {_MOST_LINKS} links show {inner}", remedy="Remove them"
                )
            pending.append((inner, above | {identity}))


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, with those that are links. Empty if it may not be read."""
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if entry.is_dir()]
    except OSError:
        return []


def _identity(folder: Path) -> tuple[int, int]:
    """Return a key of a folder that is the same for all paths and links that lead to it."""
    status = folder.stat()
    return status.st_dev, status.st_ino


def image_record(model: nn.Module) -> Cfg:
    """Return a dict of what must be known about a network to feed it images.

    It has the preprocessing (the keys of `data_config`), the number of classes (`num_classes`, None
    if it is not known), their names (`label_names`) and the shape and type of each input of a
    network that has several (`inputs`). The last two are None if they are not stated. If the
    number of classes is not stated, the network is run to count them.
    """
    record = preprocessing.stated(model)
    count = getattr(model, "num_classes", record.get("num_classes"))
    if count is None:
        count = _counted(model)
    named = {name: record.get(name) for name in ("label_names", "inputs")}
    return {**preprocessing.data_config(model), "num_classes": count, **named}


def _counted(model: nn.Module) -> int | None:
    """Return how many class scores a network gives for an image.

    The network is run once to find out. The result is None if it fails or gives no scores.
    """
    # The forward is the user's, and may raise anything for an input that it does not take.
    with suppress(Exception), undisturbed(model), torch.inference_mode():
        return network_input.scores(
            network_input.noise(model, network_input.size(model)).call(model)
        ).shape[1]
    return None


def _open(location: Path | None, data: str, split: str, mode: str) -> object:
    """Return timm's dataset of a path on this disk, or of a name that timm knows.

    Args:
        location: The folder or file. None stands for a dataset that timm knows by name.
        data: The path or name that the user gave, such as `torch/cifar10:/data`.
        split: Which part of a dataset that has parts.
        mode: Pillow's mode of the images, L or RGB.

    Raises:
        SourceError: The dataset cannot be opened. The message says why.
    """
    if location is not None and location.suffix.lower() == ".csv":
        return ImageDataset(str(location), reader=CsvReader(location), input_img_mode=mode)

    library, _, _ = data.partition("/")
    if location is not None:
        name = ""
        root = str(location)
    # A dataset of a library that timm reads is written LIBRARY/NAME:FOLDER, such as
    # `torch/cifar10:/data`. The folder may be left out.
    elif library.lower() in places.PREFIXES:
        name, _, root = data.partition(":")
    else:
        raise places.missing(data)

    try:
        # timm's readers print what they raise, too.
        with quiet(), redirect_stdout(io.StringIO()):
            if location is not None and location.suffix == ".tar" and location.is_file():
                # Beside a tar of more than 10 GB, timm would otherwise read a pickle of the tar's
                # contents, which anybody may have put there, or write one into the user's folder.
                reader = ReaderImageInTar(root, cache_tarinfo=False)
                return ImageDataset(root, reader=reader, input_img_mode=mode)
            return create_dataset(
                name,
                root=root or None,
                split=split,
                input_img_mode=mode,
                # On this disk, the caller has found the split's folder already.
                search_split=location is None,
            )
    except ImportError as error:
        raise SourceError(
            f"{data} needs a package that is not installed", first_line(error)
        ) from None
    # timm's readers of datasets raise many kinds of errors.
    except Exception as error:
        remedy = (
            "Expected class folders with images, a .tar of them, a CSV of files, or a dataset of"
            " timm's."
        )
        raise SourceError(f"{data} is not a dataset of images", first_line(error), remedy) from None


def _label_by_name(dataset: object) -> Mapping[str, int]:
    """Return the number of each label of a dataset, by the name of the label (the class).

    The result is empty if the labels have no names.

    Args:
        dataset: The dataset, as timm opened it.
    """
    # timm's readers, and torchvision's datasets, keep the names in one of two attributes.
    for holder in (getattr(dataset, "reader", None), dataset):
        for attribute in ("class_to_idx", "class_name_to_idx"):
            names = getattr(holder, attribute, None)
            # Two names of one label would not say which name the label has.
            if isinstance(names, Mapping) and names and len(set(names.values())) == len(names):
                return {str(name): int(number) for name, number in names.items()}
    return {}


class LabelledImages(Dataset[object]):
    """Transformed images, each with the index of the network's output for its class.

    For an unreadable image, indexing returns a sentence that names the image. It raises no error,
    because an error in a worker process would print a traceback.

    Args:
        images: The dataset, as timm opened it.
        mode: Pillow's mode of the images, L or RGB.
        transform: A function from a PIL image to a tensor.
        outputs: The network's output for each label. With None labels stay as they are.
        notes: Sentences that the user should read.
    """

    def __init__(
        self,
        images: Any,
        mode: str,
        transform: Any,
        outputs: Mapping[int, int] | None,
        notes: tuple[str, ...] = (),
    ) -> None:
        # timm's or torchvision's dataset, and Pillow's mode (L or RGB) that images are brought to.
        self.images = images
        self.mode = mode
        # A function from a PIL image to a tensor, the index of the network's output for each label
        # (None leaves the labels as they are), and sentences for the user.
        self.transform = transform
        self.outputs = outputs
        self.notes = notes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | str:
        try:
            image, label = self._image(index)
        # Pillow's readers of a hundred formats raise any kind of error for a damaged file. A
        # sentence takes the place of the image, because an error in a worker process prints a
        # traceback.
        except Exception as error:
            # Datasets that are not timm's own have no names of files.
            name_of = getattr(self.images, "filename", lambda index: f"image {index}")
            return f"{name_of(index)} cannot be read: {first_line(error)}"

        # An image without a label has -1.
        label = -1 if label is None else int(label)
        if self.outputs is not None:
            label = self.outputs[label]
        return self.transform(image), label

    def _image(self, index: int) -> tuple[Image.Image, int]:
        """Return an image of the dataset in the mode L or RGB, and its label.

        Args:
            index: The number of the image in the dataset.
        """
        # torchvision's datasets give an opened image.
        if not isinstance(self.images, ImageDataset):
            image, label = self.images[index]
            return _converted(image, self.mode), label

        # timm's dataset would put another image in place of an unreadable one. So its reader is
        # asked for the file, and the file is opened here.
        reader = self.images.reader
        if isinstance(reader, ReaderImageInTar):
            file, label = _tar_member(reader, index)
        else:
            _check_regular(reader, index)
            file, label, *_ = reader[index]
        with file, Image.open(file, formats=_formats()) as image:
            return _converted(image, self.mode), label


@functools.cache
def _formats() -> tuple[str, ...]:
    """Return the image formats that Pillow reads by itself, without starting another program."""
    Image.init()
    return tuple(name for name in Image.ID if name not in _READ_BY_PROGRAMS)


def _check_regular(reader: Any, index: int) -> None:
    """Raise ValueError if an image in a folder is a pipe or a device, whose bytes may never end.

    Args:
        reader: timm's reader of the folder.
        index: The number of the image.
    """
    # timm's readers of folders list the images in `samples`. Other readers have no list of paths.
    samples = getattr(reader, "samples", None)
    if samples is None:
        return
    file = Path(str(samples[index][0]))
    if file.exists() and not file.is_file():
        raise ValueError("it is no regular file")


def _converted(image: Image.Image, mode: str) -> Image.Image:
    """Return the image in `mode` (L or RGB), with 8 bits per channel.

    Raises:
        ValueError: The pixels have more bits, which Pillow would cut off at 255, or the image is so
            narrow that an image resized from it would fill the memory.
    """
    width, height = image.size
    if max(width, height) > _MOST_TIMES_LONGER * min(width, height):
        raise ValueError(f"it has {width}x{height} pixels, too narrow to be resized")
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels (mode {image.mode}) have more than 8 bits: scale them to 8")
    return image.convert(mode)


def _tar_member(reader: ReaderImageInTar, index: int) -> tuple[io.BytesIO, int]:
    """Return the bytes of an image in a tar, and its label.

    The tar is opened anew, because worker processes would share the position in timm's open file.

    Args:
        reader: timm's reader of the tar.
        index: The number of the image.
    """
    # The image may lie in a tar inside the tar. Then its offset is counted from the inner tar.
    member, _, inner_tar = reader.samples[index]
    start = member.offset_data + getattr(inner_tar, "offset_data", 0)
    if start + member.size > Path(reader.root).stat().st_size:
        raise ValueError("the tar ends before it")

    with open(reader.root, "rb") as tar:
        tar.seek(start)
        return io.BytesIO(tar.read(member.size)), reader.targets[index]


def collate(batch: list[object]) -> object:
    """Return a batch of samples, or one text with a line for each unreadable image.

    A worker process returns the text, and `Loader` raises an error with it.

    Args:
        batch: The samples. In place of an unreadable image there is a sentence about it.
    """
    broken = [item for item in batch if isinstance(item, str)]
    return "\n".join(broken) or default_collate(batch)


def part_named(folder: Path, names: tuple[str, ...]) -> Path | None:
    """Return the path of a split (train, val ...) inside a folder, or None if there is none.

    Args:
        folder: The folder of the dataset.
        names: The names that the split may have. The first that exists counts.
    """
    for name in names:
        for path in (folder / name, folder / f"{name}.tar"):
            if path.exists() and _is_split(path):
                return path
    return None


def _is_split(path: Path) -> bool:
    """Return whether a path that has the name of a split (`train`, `val` ...) is a split.

    A folder of that name may hold the images of a class instead: `train` may be a class beside
    `car` and `bus`. It is a split if all folders beside it have names of splits, or if it has
    folders of its own, one for each class.

    Args:
        path: The file or folder.
    """
    if path.is_file():
        return True

    names_beside = {folder.name for folder in path.parent.iterdir() if folder.is_dir()}
    has_only_splits_beside = names_beside <= {*TRAIN, *VALIDATION}
    return has_only_splits_beside or any(inner.is_dir() for inner in path.iterdir())


def located(data: str, split: str) -> Path | None:
    """Return the path of the images that a user names, or None if it is no path.

    Then it may be a dataset that timm knows by name.

    Args:
        data: What the user typed. The word `demo` names the images of this package.
        split: The part (train, val ...) of a dataset that has parts.
    """
    path = Path(data)
    if data == shipped.NAME and not path.exists():
        path = shipped.IMAGES
    return part_of(path, split) if path.exists() else None


def part_of(folder: Path, split: str) -> Path:
    """Return the folder or tar that holds a split (train, val ...) of a dataset.

    The result is `folder` itself if a split for training or validation is asked for and `folder`
    has none.

    Raises:
        SourceError: Another split is asked for, and `folder` does not have it.
    """
    # All usual names of this split. There are none for a name of the user's own.
    usual = next((names for names in (TRAIN, VALIDATION) if split in names), ())
    named_part = part_named(folder, (split, *usual))
    if named_part is None and not usual:
        raise SourceError(
            f"{folder} has no part {split}", remedy="A part is a folder in it: train, val, test ..."
        )
    return named_part or folder


class CsvReader(ReaderImageFolder):
    """timm's reader of images that a CSV lists.

    The first line is `file,label`, and files are named relative to the CSV.
    """

    def __init__(self, file: Path) -> None:
        # The constructor of `ReaderImageFolder` is left out, because it would list a folder.
        Reader.__init__(self)
        self.root = str(file.parent)
        # A list that cannot be read counts as empty, and an empty one is refused below. A row
        # without a label raises AttributeError, as its label is None.
        try:
            with file.open(newline="", encoding="utf-8-sig") as lines:
                rows = [
                    (row["file"].strip(), row["label"].strip()) for row in csv.DictReader(lines)
                ]
        except (OSError, UnicodeDecodeError, csv.Error, KeyError, AttributeError):
            rows = []

        # The error names only the first file that does not exist.
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

        try:
            ordered = sorted({label for _, label in pairs}, key=natural_key)
        # A label may hold more digits than Python reads as a number.
        except ValueError as error:
            what = f"{file} has a label that cannot be put in order"
            raise SourceError(what, first_line(error)) from None
        # `ReaderImageFolder` reads the images that `samples` lists.
        self.class_to_idx = {label: number for number, label in enumerate(ordered)}
        self.samples = [(path, self.class_to_idx[label]) for path, label in pairs]


@dataclass(frozen=True)
class Outputs:
    """The outputs of a network.

    Args:
        count: The number of outputs. None if the network does not say it.
        names: The names of all outputs, in order. Empty if the network does not say them.
    """

    count: int | None = None
    names: tuple[str, ...] = ()


def label_map(
    labels: Mapping[str, int], outputs: Outputs, origin: str, *, needed: bool = True
) -> tuple[dict[int, int], str]:
    """Return which output of a network stands for which label of a dataset, and a note.

    The result is a pair. First a dict: the index of the network's output, by the number of the
    label in the dataset. Second a note for the user, which is empty if there is nothing to say.

    Labels cannot be matched with outputs if the images lie in no class folders, or if the network
    has no classifier. Then every index is -1 if `needed` is False, and an error is raised if it is
    True. A network with a single output is an exception: if labels are needed, images without class
    folders get this output, unless it has a name.

    Args:
        labels: The number of each label in the dataset, by the label's name. Images that lie in no
            class folders have one label, whose name is empty.
        outputs: The number and names of the network's outputs.
        origin: The name of the images in errors.
        needed: Whether the images must have labels.

    Raises:
        SourceError: Some labels are classes of the network and others are not, or nothing says
            which output a label is.
    """
    # The empty name of images without class folders says nothing. It can only stand for the output
    # of a network that has a single one.
    has_no_folders = set(labels) == {""}
    is_the_only_class = needed and outputs.count == 1
    if outputs.count == 0 or (has_no_folders and not is_the_only_class):
        return _without_meaning(labels, outputs, origin, needed=needed)

    # A label may be the name, the WordNet id or the number of a class. These readings are tried in
    # order. The first that fits any label must fit all labels.
    for meaning, output_of in _possible_meanings(labels, outputs).items():
        output_of_label = {label: output_of.get(label) for label in labels}
        unknown = [label for label, output in output_of_label.items() if output is None]
        if len(unknown) == len(labels):
            # No label can be read in this way. The next way is tried.
            continue

        # If only some labels can be read so, the images are not of the network's classes.
        if unknown:
            raise _unknown_classes(unknown, labels, outputs, origin)
        output_of_number = {
            labels[label]: output for label, output in output_of_label.items() if output is not None
        }
        largest = max(output_of_number.values())
        if outputs.count is not None and largest >= outputs.count:
            what = f"{origin} has a label {largest}"
            raise SourceError(what, f"the network's outputs are 0 to {outputs.count - 1}", _REMEDY)
        # The user should know if the images show only some of the network's classes.
        if outputs.count is None or len(labels) >= outputs.count:
            return output_of_number, ""
        return (
            output_of_number,
            f"labels by {meaning}: {len(labels)} of the network's {outputs.count} classes",
        )

    # No label can be read as a class. If the network names its outputs, or has more or fewer of
    # them than there are labels, the labels cannot be the outputs in their order.
    if outputs.names or outputs.count not in (None, len(labels)):
        classes = "class" if len(labels) == 1 else "classes"
        what = f"{origin} has {len(labels)} {classes} ({first_few(sorted(labels))})"
        why = f"the network has {outputs.count}"
        if outputs.names:
            why += f" ({first_few(outputs.names)})"
        raise SourceError(what, why, _REMEDY)
    # Nothing names the outputs, and their number does not differ: label i is output i.
    return {number: number for number in labels.values()}, ""


def _unknown_classes(
    unknown: Sequence[str], labels: Mapping[str, int], outputs: Outputs, origin: str
) -> SourceError:
    """Return the error about labels that are no classes of the network.

    Args:
        unknown: The names of the labels that are no classes.
        labels: The number of each label in the dataset, by the label's name.
        outputs: The number and names of the network's outputs.
        origin: The name of the images.
    """
    # Images that lie in no class folder have an empty label.
    names = first_few(label or "(images outside of the class folders)" for label in unknown)
    what = (
        f"{origin}: {len(unknown)} of {len(labels)} labels are no classes of the network ({names})"
    )
    why = f"its classes are {first_few(outputs.names)}" if outputs.names else ""
    return SourceError(what, why, _REMEDY)


def _without_meaning(
    labels: Mapping[str, int], outputs: Outputs, origin: str, *, needed: bool
) -> tuple[dict[int, int], str]:
    """Return the output -1 for every label, and a note that says why accuracy is not known.

    Args:
        labels: The number of each label in the dataset, by the label's name.
        outputs: The number and names of the network's outputs.
        origin: The name of the images in messages.
        needed: Whether the images must have labels.

    Raises:
        SourceError: Labels are needed.
    """
    what = f"{origin} has no class folders"
    why = "labels are needed"
    if outputs.count == 0:
        what = "the network has no classifier"
        why = "features have no accuracy"

    if needed:
        raise SourceError(what, why, _REMEDY)
    return dict.fromkeys(labels.values(), -1), f"{what}: accuracy is not known"


def _possible_meanings(labels: Mapping[str, int], outputs: Outputs) -> dict[str, Mapping[str, int]]:
    """Return which output of a network each label may stand for, in each way to read the labels.

    The result is a dict of dicts: the index of the output, by the way of reading and the label. A
    label that cannot be read in some way is missing there.

    The ways are `name`, `WordNet id` and `number`, in the order in which they are tried. Names
    are compared letter for letter, then without case, `_` and `-`. A name that two outputs have is
    left out. WordNet ids are known for networks that have as many classes as one of ImageNet's
    sets, which timm lists.

    Args:
        labels: The number of each label in the dataset, by the label's name.
        outputs: The number and names of the network's outputs.
    """
    # `_once` returns the index of each name that occurs once. If a plain name is also the name of
    # another output letter for letter, that output is meant.
    plain_names = [_plain(name) for name in outputs.names]
    by_name = {**_once(plain_names), **_once(outputs.names)}
    named: dict[str, int] = {}
    for label in labels:
        # The name letter for letter goes before the plain one.
        output = by_name.get(label, by_name.get(_plain(label)))
        if output is not None:
            named[label] = output

    # timm tells the set of ImageNet (1k, 21k ...) by its number of classes, or returns None.
    subset = infer_imagenet_subset({"num_classes": outputs.count})
    wordnet_ids = ImageNetInfo(subset).label_names() if subset else []
    return {
        "name": named,
        "WordNet id": {label: index for index, label in enumerate(wordnet_ids)},
        "number": {
            label: int(label) for label in labels if label.isdecimal() and len(label) < _MOST_DIGITS
        },
    }


def _once(names: Sequence[str]) -> dict[str, int]:
    """Return the index of each name that occurs exactly once in the list."""
    counts = Counter(names)
    return {name: index for index, name in enumerate(names) if counts[name] == 1}


def _plain(name: str) -> str:
    """Return a name for comparisons: in lower case, with a blank in place of `_` and `-`."""
    return re.sub(r"[\s_-]+", " ", name).strip().casefold()
