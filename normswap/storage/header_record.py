"""The record in the header of the weights: where the network is from, how it is built, its plan and its proof.

It is looked through as a whole when it is read, so that nobody else meets a record that is half there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from normswap.errors import SourceError, first_line
from normswap.plan import Body
from normswap.storage.network_folder import WEIGHTS
from normswap.surgery.report import Report

VERSION = 1
_TYPES: dict[str, type | tuple[type, ...]] = {
    "arch": (dict, type(None)), "plan": dict, "source": str, "sha256": (str, type(None)), "pretrained_cfg": dict,
}  # fmt: skip
_MAY_BE_MISSING: dict[str, type | tuple[type, ...]] = {
    "report": (dict, type(None)), "hashes": (dict, type(None)), "versions": (dict, type(None)),
}  # fmt: skip
_ARCH: dict[str, type | tuple[type, ...]] = {"name": str, "kwargs": dict, "builder": str}


def weights_of(place: Path) -> Path:
    """Return the weights of a directory; a file is its own."""
    return place if place.is_file() else place / WEIGHTS


def read_header(folder: Path) -> Body:
    """Read the record; its fields are there and of their types.

    Raises:
        SourceError: missing, truncated, not ours, damaged, or from a later normswap.
    """
    file = weights_of(folder)
    if not file.is_file():
        raise SourceError(f"{folder} has no {WEIGHTS}", remedy="Name a directory that normswap wrote")
    try:
        with safe_open(file, "pt") as opened:
            text = (opened.metadata() or {}).get("normswap")
    except (OSError, SafetensorError) as error:
        reason = first_line(error)
        raise SourceError(f"{file} is not a readable safetensors file", reason, "Is it truncated?") from None
    if text is None:
        raise SourceError(
            f"{file} was not written by normswap", "its header holds no plan", "Name what `normswap convert` wrote"
        )
    try:
        header: Body = json.loads(text)
        version = header["version"]
    except (ValueError, KeyError, TypeError) as error:
        raise SourceError(f"{file}: the header cannot be read", repr(error)) from None
    if version != VERSION:
        raise SourceError(f"{file} has schema version {version}, this normswap reads {VERSION}", remedy="Upgrade it")
    _check_fields(header, _TYPES, _MAY_BE_MISSING, file)
    if header["arch"]:  # those of before there were other builders than timm have none
        _check_fields(header["arch"], {"name": str}, _ARCH, file, "arch.")
        _check_known(header["arch"], _ARCH, file)
    return header


def read_report(folder: Path) -> Report | None:
    """Read the report of what was measured when the directory was written.

    Raises:
        SourceError: as `read_header`; or the report is damaged.
    """
    body = read_header(Path(folder)).get("report")
    try:
        return None if body is None else Report.from_dict(body)
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(f"{weights_of(Path(folder))}: the report cannot be read", repr(error)) from None


def _check_fields(
    record: Mapping[str, object],
    types: Mapping[str, type | tuple[type, ...]],
    maybe: Mapping[str, type | tuple[type, ...]],
    file: Path,
    above: str = "",
) -> None:
    """Check that the fields are there and of their types.

    Raises:
        SourceError: one is not; says which.
    """
    missing = [name for name in types if name not in record]
    wrong = [name for name, kind in {**maybe, **types}.items() if name in record and not isinstance(record[name], kind)]
    if missing or wrong:
        what = (
            f"{above}{missing[0]} is missing"
            if missing
            else f"{above}{wrong[0]} is a {type(record[wrong[0]]).__name__}"
        )
        raise SourceError(f"{file}: the header cannot be read", what, "The file is damaged: get it again")


def _check_known(record: Mapping[str, object], known: Mapping[str, object], file: Path) -> None:
    unknown = sorted(set(record) - set(known))
    if unknown:
        raise SourceError(f"{file}: the header cannot be read", f"arch has an unknown field {unknown[0]!r}")
