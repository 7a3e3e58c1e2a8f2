"""The directory that `save_pretrained` of a converted transformers network writes.

It is transformers' own, with the plan in the header of the weights and the record in config.json,
so `load` opens it. The class that config.json names has other layers, and transformers would fill
them with random numbers. So config.json names a weights file that is not there.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor, nn

from normswap import copying
from normswap.storage import checkpoint, header
from normswap.storage.network_folder import CARD, CONFIG, NORMS, NOT_OF_TRANSFORMERS, WEIGHTS

# What transformers writes where the weights are in several files.
_INDEX = "model.safetensors.index.json"


def add_conversion(model: nn.Module, folder: Path, state: Mapping[str, Tensor] | None) -> None:
    """Add the conversion to a directory that transformers wrote, so that `normswap.load` opens it.

    Args:
        model: The converted network.
        folder: The directory, with the config.json and the weights that transformers wrote.
        state: The tensors that are saved. None stands for the network's own.

    Raises:
        SourceError: Weights are NaN, infinite, or missing.
        OutputError: A file cannot be written.
    """
    # The network itself is not changed if other tensors than its own are to be saved.
    if state is not None:
        model = copying.duplicate(model, {})
        model.load_state_dict(dict(state))

    # normswap writes its own directory first. Then its files are moved to that of transformers.
    with tempfile.TemporaryDirectory() as aside:
        saved = checkpoint.save(model, Path(aside) / "network")
        # config.json stays transformers' own, with normswap's entry in it. One more entry keeps
        # transformers from opening the directory.
        config = header.read_config(folder) or {}
        saved_config = header.read_config(saved) or {}
        config[header.KEY] = saved_config[header.KEY]
        config |= NOT_OF_TRANSFORMERS

        # The weights that transformers wrote, perhaps in several files, are replaced by one file.
        for file in (*folder.glob("model-*-of-*.safetensors"), folder / _INDEX):
            file.unlink(missing_ok=True)
        for name in (WEIGHTS, NORMS, CARD):
            if (saved / name).is_file():
                shutil.move(saved / name, folder / name)
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
