"""The file that a report is written to: seen before torch is imported."""

from __future__ import annotations

from pathlib import Path

from normswap.errors import OutputError
from normswap.storage import atomic_write, network_folder

MARK = "<!doctype html>"
_SUFFIXES = (".html", ".htm")  # by any other, a browser shows the text of the page


def check_writable(file: Path, *, force: bool) -> None:
    """See, before any work, that `file` may be written.

    Raises:
        OutputError: it is a directory, lies in one of a network, exists (without `force`), or is no page of HTML
            by its content or its name.
    """
    network_folder.check_beside(file)
    atomic_write.check_writable(file, force=force)
    if file.suffix.lower() not in _SUFFIXES:
        raise OutputError(f"{file} has another ending than a page of HTML", remedy=f"Name it {file.stem}.html")
    if not file.exists():
        return
    with file.open(errors="replace") as opened:
        if opened.read(len(MARK)).lower() not in (MARK, ""):
            raise OutputError(f"{file} is no HTML file", remedy="Give another -o")
