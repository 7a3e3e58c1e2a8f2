"""Why a weights file cannot be read, as its first bytes and the names in it say."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from normswap.errors import SourceError, first_line
from normswap.models.weights_fit import some

# how files begin that lie under the name of a weights file
_LFS, _PAGE, _PICKLE = b"version ", b"<", b"\x80"


def safetensors(file: Path, error: Exception) -> SourceError:
    """Return the error for a .safetensors file that its library refuses."""
    return _other_file(file) or SourceError(
        f"{file} is not a readable safetensors file", first_line(error), "It may be truncated: fetch or write it again."
    )


def pickle(file: Path, error: Exception) -> SourceError:
    """Return the error for a file that torch's loader for plain tensors refuses: foreign objects, or no torch file."""
    names = _foreign_names(file) or re.findall(r"GLOBAL (\S+)", str(error))
    if names or "TorchScript" in str(error) or _head(file).startswith(_PICKLE):
        what = f"{file} is a pickle of Python objects, and normswap never executes those"
        why = f"it needs {some(names)}" if names else "it was not written by torch.save"
        remedy = "Save the tensors alone: torch.save(model.state_dict(), file), or better as .safetensors."
        return SourceError(what, why, remedy)
    remedy = "It may be truncated, or something else under this name: fetch or write it again."
    return _other_file(file) or SourceError(f"{file} is not a readable torch file", remedy=remedy)


def _other_file(file: Path) -> SourceError | None:
    head = _head(file)
    what, remedy = f"{file} is not a readable weights file", "Fetch or write it again."
    if not head:
        return SourceError(what, "it is empty", remedy)
    if head.startswith(_LFS):
        return SourceError(what, "it is a pointer of Git LFS to one", "`git lfs pull` fetches it.")
    return SourceError(what, "it is a page of text", remedy) if head.lstrip().startswith(_PAGE) else None


def _head(file: Path) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(8)
    except OSError:
        return b"?"


def _foreign_names(file: Path) -> list[str]:
    """Return the classes and functions that an archive wants to import, read without importing them."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(str(file)))
    except Exception:  # no archive of torch.save
        return []
