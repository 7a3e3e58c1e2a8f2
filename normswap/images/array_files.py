"""Inputs that are no pictures: arrays in .npy files, or tensors by the names of inputs in
.safetensors files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset

from normswap.errors import SourceError, first_line

_LABELS = "labels"


def find(place: Path) -> list[Path]:
    """The files of arrays that a file or a folder is or holds, by name; none where it holds
    something else.
    """
    files = sorted(place.iterdir()) if place.is_dir() else [place]
    return [
        file for file in files if file.suffix.lower() in (".npy", ".safetensors") and file.is_file()
    ]


class Arrays(Dataset[object]):
    """Samples of files: (tensor, label) for a network of one input, else a dict by input with
    "labels"; -1: no label.

    A file holds one sample, of a shape as stated, or many, with one dimension more in front.
    `inputs` has shape and type of each input by name, which is empty where there is one. Raises
    SourceError: a file does not hold these.
    """

    notes = ("arrays are taken as they are: nothing is resized or normalized",)

    def __init__(
        self, files: Sequence[Path], inputs: Mapping[str, tuple[Sequence[int], str]]
    ) -> None:
        samples = [_read(file, inputs) for file in files]
        try:
            self.tensors = {
                name: torch.cat([sample[name] for sample in samples]) for name in samples[0]
            }
        except RuntimeError as error:
            raise SourceError(
                f"the files of {files[0].parent} differ in shape", first_line(error)
            ) from None

    def __len__(self) -> int:
        return len(self.tensors[_LABELS])

    def __getitem__(self, index: int) -> object:
        sample = {name: tensor[index] for name, tensor in self.tensors.items()}
        return sample if "" not in sample else (sample[""], sample[_LABELS])


def _read(file: Path, inputs: Mapping[str, tuple[Sequence[int], str]]) -> dict[str, Tensor]:
    try:
        is_array = file.suffix.lower() == ".npy"
        stored = (
            {"": torch.from_numpy(np.load(file, allow_pickle=False))}
            if is_array
            else load_file(file)
        )
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise SourceError(f"{file} cannot be read", first_line(error)) from None
    labels = stored.pop(_LABELS, None)
    if len(inputs) == len(stored) == 1:
        stored = dict(zip(inputs, stored.values(), strict=True))
    if not inputs.keys() <= stored.keys():
        has, needs = (", ".join(filter(None, names)) or "one array" for names in (stored, inputs))
        remedy = "Give .safetensors files whose tensors have the names of the inputs"
        raise SourceError(f"{file} holds {has}", f"the network takes {needs}", remedy)
    samples: dict[str, Tensor] = {}
    for name, (shape, dtype) in inputs.items():
        tensor = samples[name] = stored[name].to(getattr(torch, dtype))
        if tensor.ndim == len(shape):
            samples[name] = tensor[None]
        if samples[name].ndim != len(shape) + 1:
            what = f"{file}: {name or 'the array'} has the shape {'x'.join(map(str, tensor.shape))}"
            raise SourceError(what, f"one sample has {len(shape)} dimensions")
    count = len(samples[name])
    if labels is None:
        labels = torch.full((count,), -1)
    samples[_LABELS] = labels.reshape(-1).long()
    if {len(tensor) for tensor in samples.values()} != {count}:
        raise SourceError(f"{file} has not as many samples of each input as labels")
    return samples
