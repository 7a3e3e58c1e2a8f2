"""What training runs keep in their folders, so that two runs can be compared to the last bit."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils._pytree import keystr, tree_flatten_with_path

from support.small_trainings import weights


def kept(out: Path) -> dict[str, Any]:
    """Everything that a run keeps: two networks, and its state with the average and the optimizer.

    The values are by file and place. A run's position is left out, as a clock has a part in it.
    """
    values: dict[str, Any] = {}
    for name in ("best", "last"):
        values |= {f"{name} {key}": tensor for key, tensor in weights(out / name).items()}

    state = torch.load(out / "state/run.pt", weights_only=True)
    parts = {name: state[name] for name in ("model", "ema", "optimizer", "scaler")}
    for place, value in tree_flatten_with_path(parts)[0]:
        values[f"state {keystr(place)}"] = value
    return values


def same(one: Path, two: Path) -> bool:
    """Whether two runs keep the same, to the last bit."""
    ours = kept(one)
    theirs = kept(two)
    assert any("ema" in name for name in ours)
    assert any("optimizer" in name for name in ours)
    if ours.keys() != theirs.keys():
        return False
    for name, value in ours.items():
        is_tensor = isinstance(value, torch.Tensor)
        if not (torch.equal(value, theirs[name]) if is_tensor else value == theirs[name]):
            return False
    return True


def table(out: Path) -> list[list[str]]:
    """metrics.csv without what a clock says."""
    rows = [
        line.split(",") for line in (out / "metrics.csv").read_text(encoding="utf-8").splitlines()
    ]
    clock = {rows[0].index("images_per_s"), rows[0].index("seconds")}
    return [[cell for at, cell in enumerate(row) if at not in clock] for row in rows]


def files_of(out: Path) -> dict[str, object]:
    """What all files of a run hold beside its tensors, its state and its table, by path."""
    found: dict[str, object] = {}
    for path in out.rglob("*"):
        name = str(path.relative_to(out))
        if path.suffix == ".safetensors":
            # The entries of a header have no order.
            with safe_open(path, "pt") as file:
                found[name] = file.metadata()
        elif path.is_file() and name not in ("state/run.pt", "metrics.csv"):
            found[name] = path.read_bytes()
    return found
