"""Whether the tensors of a weights file are those of a network: by name, shape and kind of number."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from normswap.errors import SourceError

_SHOWN = 5


def some(items: Iterable[str]) -> str:
    """Return the first few items and a count of the rest."""
    listed = list(items)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more


def check_plain(state: Mapping[str, Tensor], origin: str) -> None:
    """Raises SourceError naming the tensors that are sparse, quantized or complex, which no weights here may be."""
    for kind, is_kind in (("quantized", _is_quantized), ("sparse", _is_sparse), ("complex", torch.is_complex)):
        named = [name for name, tensor in state.items() if is_kind(tensor)]
        if named:
            remedy = "Save what it was made from: plain tensors of real numbers."
            raise SourceError(f"{origin} holds {kind} tensors", some(named), remedy)


def _is_quantized(tensor: Tensor) -> bool:
    return tensor.is_quantized


def _is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is not torch.strided


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
    misfits = [
        f"{len(keys)} {label}: {some(keys)}"
        for label, keys in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("of another shape", shapes),
            ("of whole numbers, not real ones", whole),
        )
        if keys
    ]
    if misfits:
        prefix = _common_prefix(missing, unexpected)
        remedy = "Check the architecture, its arguments and the number of classes."
        if prefix:
            remedy = f"The missing ones are there, with '{prefix}' before their names: save them without it."
        raise SourceError(f"{origin} does not fit {name}", "; ".join(misfits), remedy)


def _common_prefix(missing: list[str], unexpected: list[str]) -> str:
    """Return what stands before every missing name in the file; nothing where that does not explain all of them."""
    first = missing[0] if missing else ""
    prefix = next((name.removesuffix(first) for name in unexpected if first and name.endswith(f".{first}")), "")
    return prefix if {f"{prefix}{name}" for name in missing} <= {*unexpected} else ""
