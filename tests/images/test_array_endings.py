"""Law of endings: a file of arrays is read whatever the case of its ending's letters is."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

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
