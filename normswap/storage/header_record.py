"""The record in the header of the weights: where the network is from, how it is built, its plan and its proof."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import safe_open

from normswap.errors import SourceError, explained
from normswap.plan import Arch
from normswap.storage.network_folder import WEIGHTS
from normswap.surgery.report import Report

VERSION = 1


class Header(BaseModel):
    """The record as it is read: hashes are those of the tensors, by file; the report is that of the conversion."""

    model_config = ConfigDict(strict=True)
    version: int
    arch: Arch | None
    plan: dict[str, Any]
    source: str
    sha256: str | None
    pretrained_cfg: dict[str, Any]
    report: Report | None
    hashes: dict[str, str]
    versions: dict[str, str]


def read_header(place: Path) -> Header:
    """Read the record in a directory or in a weights file; raises SourceError: missing, damaged, or of a later one."""
    file = place if place.is_file() else place / WEIGHTS
    if not file.is_file():
        raise SourceError(f"{place} has no {WEIGHTS}", remedy="Name a directory that normswap wrote")
    what = f"{file} is not a readable safetensors file"
    with explained(SourceError, what, "Is it truncated?"), safe_open(file, "pt") as opened:
        text = (opened.metadata() or {}).get("normswap")
    if text is None:
        remedy = "Name what `normswap convert` wrote; in Python, normswap.open(MODEL) takes any other"
        raise SourceError(f"{file} was not written by normswap", "its header holds no plan", remedy)
    try:
        version = json.loads(text)["version"]
        if version != VERSION:
            what = f"{file} has schema version {version}, this normswap reads {VERSION}"
            raise SourceError(what, remedy="Upgrade it")
        return Header.model_validate_json(text)
    except (ValueError, KeyError, TypeError) as error:
        why = repr(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"
        raise SourceError(f"{file}: the header cannot be read", why, "The file is damaged: get it again") from None
