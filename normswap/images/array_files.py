"""Inputs that are no pictures: arrays in .npy files, or tensors in .safetensors files.

The tensors of a .safetensors file have the names of the network's inputs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from normswap.errors import SourceError, first_line

_LABELS = "labels"


def find(place: Path) -> list[Path]:
    """Return the files of arrays (.npy and .safetensors) in a folder, sorted by name.

    The list is empty if there are none.

    Args:
        place: The path of a folder, or of one such file.
    """
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return [
        file for file in files if file.suffix.lower() in (".npy", ".safetensors") and file.is_file()
    ]


class Arrays(Dataset[object]):
    """A dataset of samples that are arrays in files.

    A sample is a pair (tensor, label). For a network of several inputs it is a dict: the tensor of
    each input by its name, and the label under `labels`. The label is -1 if a file has no labels.

    Args:
        files: The files. Each holds one sample of the stated shape, or many samples, with a
            dimension for them in front.
        inputs: Shape and type of each input of the network, by name. A single input has an empty
            name.

    Raises:
        SourceError: A file does not hold such samples.
    """

    notes = ("arrays are taken as they are: nothing is resized or normalized",)

    def __init__(
        self, files: Sequence[Path], inputs: Mapping[str, tuple[Sequence[int], str]]
    ) -> None:
        # `inputs` has the shape and type of each input of the network, by name. Each file gives a
        # batch for each input. Join the batches of all files to one tensor for each input.
        samples = [_read_samples(file, inputs) for file in files]
        self.tensors: dict[str, Tensor] = {}
        try:
            for name in samples[0]:
                self.tensors[name] = torch.cat([sample[name] for sample in samples])
        except RuntimeError as error:
            raise SourceError(
                f"the files of {files[0].parent} differ in shape", first_line(error)
            ) from None

    def __len__(self) -> int:
        return len(self.tensors[_LABELS])

    def __getitem__(self, index: int) -> object:
        sample = {name: tensor[index] for name, tensor in self.tensors.items()}
        # The empty name is that of a single input.
        if "" not in sample:
            return sample
        return sample[""], sample[_LABELS]


def _read_samples(file: Path, inputs: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Tensor]:
    """Return the samples in a file: a batch for each input of the network, by the input's name.

    The labels of the samples are under the name `labels`. They are -1 if the file has none.

    Args:
        file: The file.
        inputs: Shape and type of each input of the network, by name.

    Raises:
        SourceError: The file cannot be read, or lacks an input.
    """
    stored = _read_tensors(file)
    labels = stored.pop(_LABELS, None)
    # If the network has one input and the file one tensor, they belong together, whatever the name
    # of the tensor is.
    if len(inputs) == len(stored) == 1:
        stored = dict(zip(inputs, stored.values(), strict=True))
    if not inputs.keys() <= stored.keys():
        has = ", ".join(filter(None, stored)) or "one array"
        needs = ", ".join(filter(None, inputs)) or "one array"
        remedy = "Give .safetensors files whose tensors have the names of the inputs"
        raise SourceError(f"{file} holds {has}", f"the network takes {needs}", remedy)

    samples = {
        name: _batch(stored[name], name, len(shape), dtype, file)
        for name, (shape, dtype) in inputs.items()
    }
    # Every input, and the labels, must have the same number of samples.
    count = len(next(iter(samples.values())))
    if labels is None:
        labels = torch.full((count,), -1)
    samples[_LABELS] = labels.reshape(-1).long()
    if {len(tensor) for tensor in samples.values()} != {count}:
        raise SourceError(f"{file} has not as many samples of each input as labels")
    return samples


def _batch(tensor: Tensor, name: str, dimensions: int, dtype: str, file: Path) -> Tensor:
    """Return the samples of one input in its type, with a batch dimension in front.

    Args:
        tensor: One sample, or many.
        name: The name of the input. Empty if the network has one input.
        dimensions: How many dimensions one sample has.
        dtype: The type of the input.
        file: The file that holds them.

    Raises:
        SourceError: The tensor has other dimensions, or numbers of a type that is not read.
    """
    try:
        samples = tensor.to(getattr(torch, dtype))
    except RuntimeError as error:
        raise SourceError(f"{file} cannot be read", first_line(error)) from None

    # A single sample gets a batch dimension.
    if samples.ndim == dimensions:
        samples = samples[None]
    if samples.ndim != dimensions + 1:
        shape = "x".join(map(str, tensor.shape))
        what = f"{file}: {name or 'the array'} has the shape {shape}"
        raise SourceError(what, f"one sample has {dimensions} dimensions")
    return samples


def _read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name. The array of a .npy file has an empty name.

    Raises:
        SourceError: The file cannot be read.
    """
    try:
        if file.suffix.lower() != ".npy":
            return load_file(file)
        _check_size(file)
        return {"": torch.from_numpy(np.load(file, allow_pickle=False))}
    # numpy reads the header as a literal of Python, and raises what Python's own reader raises.
    except Exception as error:
        raise SourceError(f"{file} cannot be read", first_line(error)) from None


def _check_size(file: Path) -> None:
    """Raise ValueError if the header of a .npy file states more numbers than the file can hold.

    numpy would reserve the memory for them before it reads the first number.
    """
    # The header of version 1.0 is read by another function than that of the later versions.
    with file.open("rb") as opened:
        version = np.lib.format.read_magic(opened)
        read_header = np.lib.format.read_array_header_1_0
        if version != (1, 0):
            read_header = np.lib.format.read_array_header_2_0
        shape, _, dtype = read_header(opened)
        start = opened.tell()

    # Python's whole numbers do not overflow.
    size = dtype.itemsize
    for side in shape:
        size *= side
    # A damaged header may state a side below zero.
    if min((0, *shape)) < 0 or size > file.stat().st_size - start:
        raise ValueError(f"its header says {size} bytes of numbers, and the file has fewer")
