"""Mistakes in names that are found before torch is imported, so that they take no seconds.

A name passes if it may be right: only a place that is surely missing, or a timm name that no file
of timm registers, is refused here. Whatever passes is looked at again by whoever opens it.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from normswap import shipped
from normswap.errors import SourceError, near
from normswap.images import places
from normswap.models import kinds

# Options that name images.
_IMAGES = ("data", "calibrate")
# Arguments that name a directory that normswap wrote.
_DIRECTORY = "directory"
# A registered network has the lines `@register_model` and `def resnet50(`. A deprecated name stands
# in a dict, as in `    'old_name': 'new_name'`.
_REGISTERED = re.compile(r"^@register_model\s+def (\w+)\(|^    ['\"](\w+)['\"] *: *['\"]", re.M)


def check(options: Mapping[str, object]) -> None:
    """Refuse options that name a file, a directory or a model that surely does not exist.

    Args:
        options: The values of all options and arguments, by their name in Python.

    Raises:
        SourceError: A file, a directory or a model that an option names does not exist.
    """
    directory = options.get(_DIRECTORY)
    if isinstance(directory, Path):
        _check_directory(str(directory))
    for name in ("model", "models", "against"):
        for source in _texts(options.get(name)):
            _check_model(source)
    for name in _IMAGES:
        for data in _texts(options.get(name)):
            places.check(data)


def _texts(value: object) -> list[str]:
    """Return the texts that an option holds: a list of one or several, or an empty list."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list):
        return [text for text in value if isinstance(text, str)]
    return []


def _check_directory(name: str) -> None:
    """Raise SourceError if there is no directory or file of this name.

    Args:
        name: The name of a directory that `convert` wrote, or of a file that `export` wrote.
    """
    if os.path.exists(name):
        return
    if name == shipped.NAME or name in _timm_names():
        raise SourceError(
            f"{name} is a source", "it was not converted", f"normswap convert {name} --to SCHEME"
        )
    raise SourceError(f"{name} does not exist", remedy="Name what `convert` or `export` wrote")


def _check_model(name: str) -> None:
    """Raise SourceError if a MODEL is surely no file, directory or timm name."""
    # A name with a prefix, such as hf-hub:, is checked when it is opened.
    if name == shipped.NAME or ":" in name or os.path.exists(name):
        return
    if kinds.of(name) is not kinds.TIMM:
        return

    is_file = name.lower().endswith((*kinds.EXPORTED, *kinds.SUFFIXES))
    if is_file or "/" in name:
        remedy = "" if is_file else "A network of the hub is written hf-hub:ORG/NAME"
        raise SourceError(f"{name} does not exist", remedy=remedy)

    # A timm name may have the tag of its weights behind a dot: resnet50.a1_in1k. If no names could
    # be read, any name passes.
    names = _timm_names()
    base = name.partition(".")[0]
    if names and base not in names:
        otherwise = "No file or directory is called so, and timm.list_models() has no such name"
        raise SourceError(f"unknown model '{name}'", remedy=near(name, names, otherwise))


def _timm_names() -> set[str]:
    """Return the names that timm's files register, read without importing timm.

    The set is empty if timm is imported already: then its own list is as quick, and it may have
    more names.
    """
    if "timm" in sys.modules:
        return set()
    spec = importlib.util.find_spec("timm")
    if spec is None or not spec.submodule_search_locations:
        return set()

    names: set[str] = set()
    folder = Path(spec.submodule_search_locations[0]) / "models"
    for file in folder.glob("*.py"):
        # A match is a registered name or a deprecated one. The other of the two is an empty text.
        for registered, deprecated in _REGISTERED.findall(file.read_text(encoding="utf-8")):
            names.add(registered or deprecated)
    return names
