"""Whether the tensors of a weights file are those of a network: by name, shape and kind of number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from normswap.errors import SourceError

_SHOWN = 5


def some(items: Iterable[str]) -> str:
    """Return the first few items and a count of the rest."""
    listed = list(items)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def listed(misfits: Mapping[str, Sequence[str]]) -> str:
    """Return how many names there are of each kind of misfit, and the first few of them."""
    return "; ".join(f"{len(names)} {kind}: {some(names)}" for kind, names in misfits.items() if names)


def check_plain(state: Mapping[str, Tensor], origin: str) -> None:
    """Raises SourceError naming the tensors that are sparse, quantized or complex, which no weights here may be."""
    for name, tensor in state.items():
        kinds = {"quantized": tensor.is_quantized, "sparse": tensor.layout is not torch.strided,
                 "complex": torch.is_complex(tensor)}  # fmt: skip
        for kind in (kind for kind, is_kind in kinds.items() if is_kind):
            remedy = "Save what it was made from: plain tensors of real numbers."
            raise SourceError(f"{origin} holds {kind} tensors", name, remedy)


def check_fit(state: Mapping[str, Tensor], bare: Mapping[str, Tensor], origin: str, name: str) -> None:
    """Check that a file's tensors are those of the bare network.

    Raises:
        SourceError: some are missing, nobody's, of another shape, or whole numbers in place of real ones.
    """
    # torch fills in num_batches_tracked, which files from before torch 0.4.1 do not have
    missing = [key for key in bare if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in bare]
    both = [key for key in bare if key in state]
    shapes = [
        f"{key} is {tuple(state[key].shape)} in the file, {tuple(bare[key].shape)} in the network"
        for key in both
        if state[key].shape != bare[key].shape
    ]
    whole = [
        f"{key} is {str(state[key].dtype).removeprefix('torch.')}"
        for key in both
        if bare[key].is_floating_point() and not state[key].is_floating_point()
    ]
    misfits = {"missing": missing, "unexpected": unexpected, "of another shape": shapes,
               "of whole numbers, not real ones": whole}  # fmt: skip
    if any(misfits.values()):
        prefix = _common_prefix(missing, unexpected)
        remedy = "Check the architecture, its arguments and the number of classes."
        if prefix:
            remedy = f"The missing ones are there, with '{prefix}' before their names: save them without it."
        raise SourceError(f"{origin} does not fit {name}", listed(misfits), remedy)


def _common_prefix(missing: list[str], unexpected: list[str]) -> str:
    """Return what stands before every missing name in the file; nothing where that does not explain all of them."""
    first = missing[0] if missing else ""
    prefix = next((name.removesuffix(first) for name in unexpected if first and name.endswith(f".{first}")), "")
    return prefix if {f"{prefix}{name}" for name in missing} <= {*unexpected} else ""
