"""Images with labels, preprocessed as the network wants them, through timm's datasets and transforms.

timm's own dataset replaces an image it cannot read by the next one, and its labels follow the folders present. Both
would bend a measured accuracy, so here an unreadable image is an error that names it, and labels follow the network.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image, UnidentifiedImageError
from timm.data import ImageDataset, create_dataset, create_transform
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from normswap import demo_files, provenance
from normswap.errors import OptionError, SourceError, first_line, spelled
from normswap.images.labels import LabelMap, Outputs, label_map, no_labels
from normswap.images.places import CsvReader, chosen
from normswap.models import network_input, zoo
from normswap.models.hub_config import Cfg
from normswap.models.modes import undisturbed
from normswap.models.weight_files import quiet

PREFIXES = ("torch", "hfds", "hfids", "tfds", "wds")  # timm's dataset families
_MOST_TO_CALIBRATE = 512  # images, unless a number is given


@dataclass(frozen=True)
class _Unreadable:
    """The value that a worker gives for an image it could not read: errors raised there arrive as a traceback."""

    name: str
    why: str


class Loader:
    """Batches of images (N, C, H, W) and labels (N,), in a fixed order.

    Args:
        batches: the DataLoader underneath.
        origin: what the user named, for errors.
        count: how many images one pass has; None when the dataset cannot tell.
        limit: stop after this many (a stream cannot be sampled).
        notes: what the user should know of them: which part of a dataset they are, how labels were read.
    """

    def __init__(
        self, batches: DataLoader[object], origin: str, count: int | None, limit: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.batches, self.origin, self.count, self.limit, self.notes = batches, origin, count, limit, notes

    def __len__(self) -> int:
        return len(self.batches)

    def only(self, rows: Sequence[int]) -> Loader:
        """Return a loader of these images; no other is read."""
        old = self.batches
        some: DataLoader[object] = DataLoader(
            Subset(old.dataset, rows), old.batch_size, num_workers=old.num_workers, collate_fn=old.collate_fn,
            generator=old.generator,
        )  # fmt: skip
        return Loader(some, self.origin, len(rows), notes=self.notes)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        left = self.limit
        for batch in self.batches:
            if isinstance(batch, _Unreadable):
                raise SourceError(f"{self.origin}: {batch.name} cannot be read", batch.why, "Remove or replace it.")
            images, labels = batch
            yield images[:left], labels[:left]
            left = None if left is None else left - len(labels)
            if left is not None and left <= 0:
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
        model: the network, or its preprocessing record (`zoo.data_config`, with `num_classes` and `label_names` if
            labels are to be checked against them).
        data: a folder of class folders, a `.tar` of one, a `.csv` that begins with the line `file,label`, or a dataset
            of timm's as `PREFIX/NAME[:ROOT]`, such as `torch/cifar10:/data` or `hfds/user/name`.
        split: which part of a dataset that has parts; a folder of that name inside the folder is used if present.
        samples: take this many images, drawn without replacement by `seed`; a stream gives its first ones.
        labelled: false: labels mean nothing, and the folders may be any; None: only where there are class folders and
            a classifier; else they are -1.

    Raises:
        SourceError: nothing there, no images, an unreadable archive, or other classes than the network's.
        OptionError: a batch size or number of samples below one.
    """
    if batch_size < 1 or workers < 0 or (samples is not None and samples < 1):
        raise OptionError(f"batch size {batch_size}, {workers} workers, {samples} samples", "must be positive")
    network_input.require_seed(seed)
    dataset = open_images(model, data, split, create_transform(**_wanted(model)), labelled=labelled)
    notes = dataset.notes if isinstance(dataset, LabelledImages) else ()
    count: int | None = None
    if isinstance(dataset, IterableDataset):
        if hasattr(dataset, "set_loader_cfg"):
            dataset.set_loader_cfg(num_workers=workers)  # shards are dealt out by it
    else:
        count = len(dataset)
        if samples is not None and samples < count:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:samples]
            dataset, count = Subset(dataset, sorted(order.tolist())), samples
    batches: DataLoader[object] = DataLoader(
        dataset, batch_size, num_workers=workers, collate_fn=collate, generator=torch.Generator().manual_seed(seed)
    )
    return Loader(batches, data, count if count is not None else samples, samples if count is None else None, notes)


def split_for_calibration(
    loader: Loader, first: int | None, *, most: int | None = None, seed: int = 0
) -> tuple[Loader, Loader]:
    """Draw `first` images by `seed` to set numbers by, and `most` others, or all, to measure on.

    Without a number half of them, at most 512, are the first part.

    Raises:
        OptionError: none are left for the second part, or the loader cannot tell how many it has.
    """
    if loader.count is None:
        remedy = f"Give {spelled('samples', metavar='N')}, or a folder"
        raise OptionError(f"how many images {loader.origin} has is not known", remedy=remedy)
    if loader.count < 2 or (first is not None and first >= loader.count):
        why = f"{'half of them' if first is None else first} to calibrate on leave none to measure on"
        remedy = f"Give more of them, or lower {spelled('samples')}"
        raise OptionError(f"{loader.origin} has {loader.count} images", why, remedy)
    drawn = torch.randperm(loader.count, generator=torch.Generator().manual_seed(seed))
    count = min(loader.count // 2, _MOST_TO_CALIBRATE) if first is None else first
    calibration, others = drawn[:count], drawn[count:][:most]
    return loader.only(sorted(calibration.tolist())), loader.only(sorted(others.tolist()))


def open_images(
    model: nn.Module | Mapping[str, object], data: str, split: str, transform: object, *, labelled: bool | None
) -> Any:
    """Return a dataset of (transformed image, the network's label); one that streams has no length.

    Args:
        model, data, split: as in `make_loader`.
        transform: what becomes of a PIL image.
        labelled: as in `make_loader`.

    Raises:
        SourceError: as `make_loader`.
    """
    mode = "RGB" if _wanted(model)["input_size"][0] == 3 else "L"
    place = _place(data, split)
    dataset = _open(place, data, split, mode)
    if isinstance(dataset, IterableDataset):
        dataset.transform = transform  # type: ignore[attr-defined]
        return dataset
    whole = place in (Path(data), demo_files.IMAGES)
    notes = [] if whole else [f"images of {place}" if place else f"images of the part {split} of {data}"]
    names = _names(dataset)
    labels = LabelMap({}) if labelled is False or not names else _labels(model, names, data, needed=labelled is True)
    notes += [labels.note] if labels.note else []
    return LabelledImages(dataset, mode, transform, labels.outputs or None, tuple(notes))


def _labels(model: nn.Module | Mapping[str, object], names: Mapping[str, int], data: str, *, needed: bool) -> LabelMap:
    outputs = outputs_of(model)
    none = set(names) == {""} or outputs.count == 0  # no class folders, no classifier
    return no_labels(names, outputs) if none and not needed else label_map(names, outputs, data)


def _wanted(model: nn.Module | Mapping[str, object]) -> Cfg:
    """The transform's arguments."""
    config: Cfg = zoo.data_config(model) if isinstance(model, nn.Module) else dict(model)
    kept = ("input_size", "mean", "std", "interpolation", "crop_pct", "crop_mode")
    config = {key: tuple(v) if isinstance(v := config[key], list) else v for key in kept if key in config}
    if config["input_size"][0] not in (1, 3):
        raise SourceError(f"the network takes {config['input_size'][0]} channels", "images have 1 or 3")
    return config


def outputs_of(model: nn.Module | Mapping[str, object]) -> Outputs:
    """How many outputs the network has, and their names, as it or its record says; else by running it once."""
    record: Mapping[str, Any]
    count: Any
    if isinstance(model, nn.Module):
        origin = provenance.of(model)
        record = dict(origin.pretrained_cfg) if origin else {}
        count = getattr(model, "num_classes", record.get("num_classes"))
        count = _counted(model) if count is None else count
    else:
        record = model
        count = record.get("num_classes")
    names: Any = record.get("label_names") or []
    return Outputs(count, tuple(map(str, names.values() if isinstance(names, Mapping) else names)))


def _counted(model: nn.Module) -> int | None:
    """How many scores the network gives; None where it runs on no example, or gives something else."""
    try:
        with undisturbed(model), torch.inference_mode():
            return network_input.scores(network_input.noise(model, network_input.size(model)).call(model)).shape[1]
    except Exception:  # whatever the network raises: the images will show
        return None


def _place(data: str, split: str) -> Path | None:
    """The file or folder that holds the images; None for a dataset of timm's."""
    path = Path(data)
    if data == demo_files.NAME and not path.exists():
        path = demo_files.IMAGES
    return chosen(path, split) if path.exists() else None


def _open(place: Path | None, data: str, split: str, mode: str) -> object:
    if place is not None and place.suffix.lower() == ".csv":
        return ImageDataset(str(place), reader=CsvReader(place), input_img_mode=mode)
    if place is not None:
        name, root = "", str(place)
    elif data.partition("/")[0].lower() in PREFIXES:
        name, _, root = data.partition(":")
    else:
        raise SourceError(f"{data} does not exist", remedy=f"Other datasets start with {', '.join(PREFIXES)} and '/'.")
    try:
        with quiet(), redirect_stdout(io.StringIO()):  # timm's readers print what else they raise
            return create_dataset(name, root=root or None, split=split, input_img_mode=mode, search_split=place is None)
    except ImportError as error:
        raise SourceError(f"{data} needs a package that is not installed", first_line(error)) from None
    except Exception as error:  # timm and the libraries behind it raise whatever they like
        what = f"{data} is not a dataset of images" if place is not None else f"{data} cannot be opened"
        remedy = "" if place is None else "Expected class folders with images, a .tar of them, or a CSV of files."
        why = "no images in it" if isinstance(error, ValueError) and Path(root).suffix == ".tar" else first_line(error)
        raise SourceError(what, why, remedy) from None


def _names(dataset: object) -> Mapping[str, int]:
    """The dataset's number of each label, by its name; empty where it has no names."""
    for holder in (getattr(dataset, "reader", None), dataset):
        for attribute in ("class_to_idx", "class_name_to_idx"):
            names = getattr(holder, attribute, None)
            if isinstance(names, Mapping) and names and len(set(names.values())) == len(names):
                return {str(name): int(number) for name, number in names.items()}
    return {}


class LabelledImages(Dataset[object]):
    """Images and the network's labels; an image that cannot be read comes as `_Unreadable`."""

    def __init__(
        self, images: Any, mode: str, transform: Any, outputs: Mapping[int, int] | None, notes: tuple[str, ...] = ()
    ) -> None:
        self.images, self.mode, self.transform, self.outputs, self.notes = images, mode, transform, outputs, notes

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int] | _Unreadable:
        try:
            image, label = self._image(index)
        except UnidentifiedImageError:  # whose message shows an object of Python's
            return _Unreadable(self._name(index), "it is no image that Pillow knows")
        except (OSError, ValueError, SyntaxError) as error:  # what Pillow raises for broken files
            return _Unreadable(self._name(index), first_line(error))
        label = -1 if label is None else int(label)
        return self.transform(image), label if self.outputs is None else self.outputs[label]

    def _image(self, index: int) -> tuple[Image.Image, int]:
        if not isinstance(self.images, ImageDataset):
            image, label = self.images[index]
            return converted(image, self.mode), label
        reader = self.images.reader
        if isinstance(reader, ReaderImageInTar):
            file, label = _tar_member(reader, index)
        else:
            file, label, *_ = reader[index]
        with file, Image.open(file) as image:
            return converted(image, self.mode), label

    def _name(self, index: int) -> str:
        named = getattr(self.images, "filename", None)
        return str(named(index)) if named else f"image {index}"


def converted(image: Image.Image, mode: str) -> Image.Image:
    """The image in `mode`, of 8 bits; Pillow cuts deeper pixels off at 255, so those are refused.

    Raises:
        ValueError: its pixels have more bits.
    """
    if image.mode.startswith(("I", "F")):
        bits = 16 if ";16" in image.mode else 32
        raise ValueError(f"its pixels have {bits} bits (mode {image.mode}), and networks are given 8: scale them to 8")
    return image.convert(mode)


def _tar_member(reader: ReaderImageInTar, index: int) -> tuple[io.BytesIO, int]:
    """Read the image's bytes: timm's own way leaves a tar open, in a state that worker processes would share."""
    member, _, inside = reader.samples[index]  # `inside`: the tar within the tar that has it, or None
    with open(reader.root, "rb") as tar:
        tar.seek(member.offset_data + (inside.offset_data if inside else 0))
        return io.BytesIO(tar.read(member.size)), reader.targets[index]


def collate(batch: list[object]) -> object:
    """Make a batch for `Loader`, which raises what a worker could not read."""
    broken = next((item for item in batch if isinstance(item, _Unreadable)), None)
    return default_collate(batch) if broken is None else broken
