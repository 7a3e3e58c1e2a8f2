"""The record in the header of `model.safetensors`: what it may hold, how it is read and written.

The header has the schema version, the source and its hash, the architecture, the plan, the report,
the hashes of all tensors, the versions of the libraries, and a digest of all that.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, field_validator
from safetensors import SafetensorError, safe_open

from normswap import reading
from normswap.errors import OutputError, PlanError, SourceError, first_line
from normswap.models.records import ImageRecord, image_record, without_addresses
from normswap.plan import Arch, Body, Plan
from normswap.proof.verdict import Report
from normswap.storage.network_folder import CONFIG, WEIGHTS

# The version of the record.
VERSION = 1
# The key of the header in which the record stands.
KEY = "normswap"

# The dtypes of floating-point buffers, by their names.
FLOATS = ("float16", "bfloat16", "float32", "float64")
_DAMAGED = "The file is damaged: get it again"
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ShortHash = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Word = Annotated[str, Field(max_length=10_000)]
JsonText = Annotated[str, Field(max_length=1_000_000)]
Scalar = str | int | float | bool | None


class Header(BaseModel):
    """What the header of a saved `model.safetensors` says, after it was read and checked.

    Args:
        version: The version of this layout.
        arch: How to build the network as it was before its conversions. None if that is not known.
        plan: The plan of the conversions, as `Plan.to_json` wrote it.
        source: The network that was converted, as the user named it.
        sha256: The hash of that network's tensors. None for random weights.
        pretrained_cfg: The record of images and classes.
        report: The measurements of the conversion. None for a network that was not converted.
        hashes: One hash over all tensors of a file, by the file's name.
        tensors: The hash of each tensor, by the file's name and the tensor's name. Older files have
            no such hashes.
        versions: The versions of the libraries that wrote the file.
        layers: For each layer, by its path, the version of the layer that wrote its tensors. torch
            gives it to the layer that loads them. Version 1 is left out. Older files have no such
            record.
        extra_state: The extra state of layers that is no tensor, as JSON, by its name in the state
            dict.
        unsaved: The dtype of each floating-point buffer that is not saved, by its name.
        digest: The hash of all of the above. Older files have none.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    version: int
    arch: Arch | None
    plan: Body
    source: Word
    sha256: Word | None
    pretrained_cfg: ImageRecord
    report: Report | None
    hashes: dict[Word, Sha256]
    tensors: dict[Word, dict[Word, ShortHash]] = {}
    versions: dict[Word, Word]
    layers: dict[Word, dict[Word, Scalar]] | None = None
    extra_state: dict[Word, JsonText] = {}
    unsaved: dict[Word, Word] = {}
    digest: Sha256 | None = None

    @field_validator("pretrained_cfg", mode="before")
    @classmethod
    def _drop_addresses(cls, stated: object) -> object:
        """Return a stored record of images without the keys that only timm's registry uses.

        These are keys such as addresses. They would be refused as unknown keys.

        Args:
            stated: The record, as the file has it.
        """
        return without_addresses(stated)

    @field_validator("report")
    @classmethod
    def _is_printable(cls, report: Report | None) -> Report | None:
        """Raise ValueError for a report that no comparison can have written.

        It could not be printed. Any other report is returned as it is.
        """
        if report is None:
            return None
        if not report.logits:
            raise ValueError("it has no error at the logits")
        # Collect the shares of inputs for which the network has the same argmax before and after
        # the conversion: on test inputs, and on held-out images (`kept`).
        shares = [error.agreement for error in (*report.logits, *report.sites)]
        if report.kept is not None:
            shares.append(report.kept.agreement)
            if report.kept.count < 1:
                raise ValueError("it was measured on no image")
        if not all(share is None or 0 <= share <= 1 for share in shares):
            raise ValueError("an agreement is a share from 0 to 1")
        return report

    @field_validator("hashes")
    @classmethod
    def _has_the_weights(cls, hashes: dict[str, str]) -> dict[str, str]:
        if WEIGHTS not in hashes:
            raise ValueError(f"there is no hash of {WEIGHTS}")
        return hashes

    @field_validator("unsaved")
    @classmethod
    def _are_dtypes(cls, unsaved: dict[str, str]) -> dict[str, str]:
        for name, dtype in unsaved.items():
            if dtype not in FLOATS:
                raise ValueError(f"{name} has no dtype of floating-point numbers: {dtype!r:.40}")
        return unsaved

    @field_validator("extra_state")
    @classmethod
    def _is_json(cls, extra_state: dict[str, str]) -> dict[str, str]:
        for text in extra_state.values():
            reading.parse_json(text, finite=False)
        return extra_state

    @property
    def images(self) -> Body:
        """The saved network's record of images and classes, as a dict with values of JSON."""
        return image_record(self.pretrained_cfg.model_dump())

    def read_plan(self, file: Path) -> Plan:
        """Return the plan of the saved network's conversions.

        Args:
            file: The file that has the header, for the error.

        Raises:
            PlanError: The plan is malformed.
        """
        return Plan.from_json(json.dumps(self.plan), f"{file}: plan")


def digest_of(record: Mapping[str, object]) -> str:
    """Return the SHA-256 of a record as JSON with sorted keys, without its entry `digest`."""
    body = {key: value for key, value in record.items() if key != "digest"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_header(place: Path) -> Header:
    """Return what the header of a saved network says.

    Args:
        place: The directory that `save` wrote, or its weights file alone.

    Raises:
        SourceError: The record in the header is missing, damaged, changed since it was written, or
            of a later version.
    """
    file = place if place.is_file() else place / WEIGHTS
    if not file.is_file():
        raise SourceError(
            f"{place} has no {WEIGHTS}", remedy="Name a directory that normswap wrote"
        )

    text = _text_in(file)
    if text is None:
        remedy = (
            "Name what `normswap convert` wrote; in Python, normswap.open(MODEL) takes any other"
        )
        raise SourceError(f"{file} was not written by normswap", "its header holds no plan", remedy)

    record, header = _parsed(text, file)
    _check_digests(record, header, place, file)
    return header


def _parsed(text: str, file: Path) -> tuple[Body, Header]:
    """Return the record in a JSON text twice: as a plain dict, and as a checked `Header`.

    Args:
        text: The JSON.
        file: The file that has the header, for the error.

    Raises:
        SourceError: The record is damaged, or of a later version.
    """
    # The report of a network may hold infinite numbers, so they are only refused further below.
    try:
        record = reading.parse_object(text, finite=False)
        version = record.get("version")
        # In Python, True equals 1.
        if version != VERSION or isinstance(version, bool):
            what = f"{file} has schema version {version!r:.40}, this normswap reads {VERSION}"
            raise SourceError(what, remedy="Upgrade it")

        # Every number must be finite, except in the report, where a measured error may be infinite.
        reading.check_plain({key: value for key, value in record.items() if key != "report"})
        header = reading.validated(_reader(), _with_todays_names(record, text))
    except reading.UnreadableError as error:
        raise SourceError(f"{file}: the header cannot be read", str(error), _DAMAGED) from None
    return record, header


def _with_todays_names(record: Body, text: str) -> str:
    """Return the JSON text of a record, with the key `vacuous` of its report renamed to `remarks`.

    Older versions of normswap wrote the old name.

    Args:
        record: The record, as it was read.
        text: The text of the record. It is returned as it is if the old name is not in it.
    """
    report = record.get("report")
    if not isinstance(report, dict) or "vacuous" not in report:
        return text
    other_entries = {name: value for name, value in report.items() if name != "vacuous"}
    renamed = {"remarks": report["vacuous"], **other_entries}
    return json.dumps({**record, "report": renamed})


def _text_in(file: Path) -> str | None:
    """Return the JSON text in a weights file's header. None if normswap did not write the file.

    Raises:
        SourceError: The file is no safetensors file.
    """
    try:
        with safe_open(file, "pt") as opened:
            return (opened.metadata() or {}).get(KEY)
    except (SafetensorError, OSError, ValueError) as error:
        what = f"{file} is not a readable safetensors file"
        raise SourceError(what, first_line(error), "Is it truncated?") from None


def _check_digests(record: Body, header: Header, place: Path, file: Path) -> None:
    """Raise SourceError if the header was changed since it was written.

    The header has a digest of its own entries. The directory's config.json has a copy of the
    digest, so that a header that has lost its digest is noticed too.

    Args:
        record: The record, as a plain dict.
        header: The checked record.
        place: The directory of the network, or its weights file alone.
        file: The weights file, for the error.
    """
    copied_digest = None
    if place.is_dir():
        copied_digest = noted_digest(place)
    # Directories of older versions have no digest.
    if header.digest is None and copied_digest is None:
        return

    right_digest = digest_of(record)
    if header.digest != right_digest or copied_digest not in (None, right_digest):
        raise SourceError(
            f"{file}: the header is not the one that was saved",
            "its plan, preprocessing, labels, hashes or report were changed",
            _DAMAGED,
        )


def noted_digest(folder: Path) -> str | None:
    """Return the digest of the weights file's header that a directory's config.json has noted.

    The result is None if there is no such digest.
    """
    config = read_config(folder)
    entry = config.get(KEY) if config is not None else None
    digest = entry.get("header") if isinstance(entry, dict) else None
    return digest if isinstance(digest, str) else None


def read_config(folder: Path) -> Body | None:
    """Return the config.json of a directory, or None if it cannot be read."""
    try:
        return reading.parse_object(reading.file_text(folder / CONFIG))
    except reading.UnreadableError:
        return None


def is_checkpoint(place: Path) -> bool:
    """Return whether normswap wrote a directory or a weights file.

    The config.json of the directory, or the header of the file, has an entry `normswap`.
    """
    if place.suffix == ".safetensors" and place.is_file():
        try:
            return _text_in(place) is not None
        except SourceError:
            return False
    return KEY in (read_config(place) or {})


def record_to_write(record: Mapping[str, object], file: Path) -> str:
    """Return the JSON text of a record that is to be saved in a header, with its digest.

    Args:
        record: The record.
        file: The weights file that will have the header, for the error.

    Raises:
        OutputError: The record could not be read again.
    """
    # The digest is that of the values as they will be read: by way of JSON, tuples become lists.
    plain = json.loads(json.dumps(record))
    text = json.dumps({**plain, "digest": digest_of(plain)})
    # What could not be read again must not be written.
    try:
        _, header = _parsed(text, file)
        header.read_plan(file)
    except (SourceError, PlanError) as error:
        why = f"what is to be written could not be read again: {error.why or error}"
        raise OutputError(f"cannot write {file.name}", why) from None
    return text


def without_folders(contents: bytes) -> tuple[bytes, str | None]:
    """Return a weights file whose header does not tell the folders of this machine.

    If the source is a path, only its last part stays. The tensors are the same. Any other file is
    returned as it is.

    Args:
        contents: The bytes of a `model.safetensors` that was read without an error.

    Returns:
        The bytes of the file, and the digest of its header. Older files have no digest.
    """
    # A safetensors file begins with the length of its header, which is JSON: the texts of the file,
    # and where each tensor lies behind the header.
    start = 8 + int.from_bytes(contents[:8], "little")
    entries = json.loads(contents[8:start])
    record = json.loads(entries["__metadata__"][KEY])

    # The source is a path alone, or stands behind a prefix: `local-dir:/home/me/net`.
    prefix, colon, place = record["source"].rpartition(":")
    if not PurePath(place).is_absolute():
        return contents, record.get("digest")
    record["source"] = f"{prefix}{colon}{PurePath(place).name}"
    record["digest"] = digest_of(record)

    entries["__metadata__"][KEY] = json.dumps(record)
    text = json.dumps(entries).encode()
    # The tensors begin at a multiple of eight bytes, as safetensors itself writes them.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + contents[start:], record["digest"]


@functools.cache
def _reader() -> TypeAdapter[Header]:
    return TypeAdapter(Header)
