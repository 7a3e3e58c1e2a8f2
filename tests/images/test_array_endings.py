"""Laws of files of arrays: their endings, and the labels that they have or have not."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from normswap.errors import SourceError
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader

RECORD = {"input_size": (2, 4, 4), "inputs": {"": ((2, 4, 4), "float32")}, "num_classes": 0}
VALUES = np.random.default_rng(0).standard_normal((5, 2, 4, 4)).astype(np.float32)


@pytest.mark.parametrize("name", ["a.npy", "a.NPY", "a.Npy", "a.safetensors", "a.SafeTensors"])
def test_arrays_are_read(name: str, tmp_path: Path) -> None:
    if name.lower().endswith(".npy"):
        with (tmp_path / name).open("wb") as file:
            np.save(file, VALUES)
    else:
        save_file({"": torch.from_numpy(VALUES)}, tmp_path / name)

    loader = make_loader(RECORD, str(tmp_path), batch_size=5, workers=0, labelled=False)

    ((images, _),) = loader
    assert torch.equal(images, torch.from_numpy(VALUES))


@pytest.mark.parametrize("stored", [None, [2, 0, 1, 1, 2]])
@pytest.mark.parametrize("beside", [None, [0, 0, 1, 2, 2]])
def test_arrays_have_the_labels_that_stand_in_their_file_or_none(
    stored: list[int] | None, beside: list[int] | None, tmp_path: Path
) -> None:
    """-1 stands for no label, beside another file with labels too: 0 would be a class."""
    record = {**RECORD, "num_classes": 3}
    for name, labels in (("a", stored), ("b", beside)):
        tensors = {"": torch.from_numpy(VALUES)}
        if labels is not None:
            tensors["labels"] = torch.tensor(labels)
        save_file(tensors, tmp_path / f"{name}.safetensors")

    loader = make_loader(record, str(tmp_path), batch_size=5, workers=0, labelled=False)

    found = [labels.tolist() for _, labels in loader]
    assert found == [stored or [-1] * 5, beside or [-1] * 5]


def test_the_answers_to_arrays_without_labels_are_not_rated(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", VALUES)
    network = nn.Sequential(nn.Flatten(), nn.Linear(32, 3)).eval()
    record = {**RECORD, "num_classes": 3}
    loader = make_loader(record, str(tmp_path), batch_size=5, workers=0, labelled=False)

    with pytest.raises(SourceError, match="label"):
        evaluate(network, loader)
