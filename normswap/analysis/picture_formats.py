"""The formats of pictures: known before torch is imported."""

from __future__ import annotations

from pathlib import Path

from normswap.errors import OutputError, require_packages


def check(file: Path) -> str:
    """Return the picture format that the suffix names.

    Raises:
        OptionError: matplotlib is not installed.
        OutputError: it cannot write that.
    """
    require_packages(f"a picture ({file})", ("matplotlib",), "plots")
    from matplotlib.backend_bases import FigureCanvasBase

    form, known = file.suffix.removeprefix(".").lower(), sorted(FigureCanvasBase.get_supported_filetypes())
    if form not in known:
        raise OutputError(f"{file}: no picture format {form!r}", remedy=f"Known: {', '.join(known)}")
    return form
