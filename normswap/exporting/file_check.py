"""Whether a file can be written as it is asked for: seen before torch is imported."""

from __future__ import annotations

from pathlib import Path

from normswap.errors import OptionError, called
from normswap.exporting import formats
from normswap.exporting.settings import FileSettings
from normswap.models import source_names
from normswap.storage import atomic_write

_PRECISIONS = ("fp32", "fp16", "bf16", "int8")


def check(file: Path, settings: FileSettings) -> None:
    """Check that there are such files, and that this one may be written.

    Raises:
        OptionError: the format or dtype is not known; OutputError: the file exists, or its folder does not.
    """
    formats.name_of(file, settings.format)
    if settings.dtype not in _PRECISIONS:
        raise OptionError(f"unknown {called('dtype')} '{settings.dtype}'", f"there are {', '.join(_PRECISIONS)}")
    atomic_write.check_writable(file, force=settings.force, folder_with=source_names.FOLDERS.get(file.suffix.lower()))
