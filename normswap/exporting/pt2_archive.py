"""A .pt2 archive, opened so that nothing in it can run.

`torch.export.load` trusts its file: it unpickles inputs and weights, evaluates expressions,
executes guards, and imports what the file names. So the archive is read here first. Its graph is
held to a grammar (`pt2_program`), its pickles are read by torch's restricted unpickler, and
anything else is refused. torch is then given another archive, written in memory from what was read.
The file itself never reaches torch's reader, which might read the same bytes in another way.

There are two layouts. torch 2.8 and later store the bytes of each weight; torch 2.7 and before
store pickled dicts of tensors. A pickle that passes is written anew, too.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from normswap import reading
from normswap.errors import SourceError, quiet
from normswap.exporting.pt2_expressions import NotAllowedError, shown
from normswap.exporting.pt2_program import checked_payloads, checked_program

_PROGRAM = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_EXTRA = "extra/"
_TABLES = {
    "data/weights/": "data/weights/model_weights_config.json",
    "data/constants/": "data/constants/model_constants_config.json",
}
_PICKLED_TENSORS = ("data/weights/model.pt", "data/constants/model.pt")
_BYTES_OF_TENSORS = re.compile(r"data/(weights/weight|constants/tensor)_[0-9]{1,6}", re.ASCII)
_VERSIONS = ("archive_format", "archive_version", "byteorder", ".data/version")
_UNREAD = (".data/serialization_id",)

_OLD_PROGRAM = "serialized_exported_program.json"
_OLD_SAMPLES = "serialized_example_inputs.pt"
_OLD_TENSORS = ("serialized_state_dict.pt", "serialized_constants.pt")
_OLD_EXTRA = "extra_files/"
_OLD_VERSION = "version"

# What pickles of tensors, numbers and containers call for.
_PICKLED_NAMES = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor(_v2|_v3)?|parameter)|torch \w+Storage"
    r"|torch\.storage UntypedStorage|torch Size|torch device"
    r"|torch (float|int|uint|bfloat|bool|complex)\w*"
)
# Codes of a pickle that torch.save never writes. With STACK_GLOBAL and EXT, the name of what the
# pickle calls for does not stand beside the code, so it could not be checked.
_REFUSED_CODES = ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4", "PERSID")
_MOST_ENTRIES = 100_000
# The bit of a zip entry's flags that says that the entry is encrypted.
_ENCRYPTED = 1


@dataclass
class Pt2Archive:
    """The checked content of a .pt2, which is a zip archive that torch.export.save writes.

    The bytes of weights that are not pickled are left in the file.

    Args:
        program: The graph of the network, as `checked_program` returns it.
        extra: The texts that the exporter added, such as metadata, by name.
        tables: The table of weights and the table of constants, by the folder of the archive that
            has their bytes. A table says for each tensor which entry of the folder holds it.
        tensors: The weights and constants that were pickled, by the entry that held them.
        versions: The versions of the archive's layout, by the entry that holds them.
        old: Whether the archive has the layout of torch 2.7 and before.
    """

    program: Mapping[str, object]
    extra: Mapping[str, str]
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    old: bool = False

    @property
    def operators(self) -> list[str]:
        """The name of the operator of each node of the graph, such as `aten.relu.default`."""
        graph_module = self.program["graph_module"]
        assert isinstance(graph_module, dict)
        targets = [node["target"] for node in graph_module["graph"]["nodes"]]
        return [target.removeprefix("torch.ops.") for target in targets]


def read_pt2(file: Path) -> Pt2Archive:
    """Read a .pt2 and check every part of it, without running anything in it.

    The bytes of weights are left in the file.

    Raises:
        SourceError: The file holds something that could run code. The message says what.
        zipfile.BadZipFile: The file is damaged, or is no archive.
        KeyError: An entry is missing, or the file is no .pt2.
        ValueError: An entry is damaged.
        OSError: The file cannot be read.
    """
    with _opened(file) as entries:
        return _read(entries)


def rewritten_pt2(file: Path) -> io.BytesIO:
    """Return a .pt2 in memory that has the same network as a .pt2 file.

    It is made only of what was read from the file and checked.

    Raises:
        SourceError: The file holds something that could run code. See `read_pt2`.
        zipfile.BadZipFile: The file is damaged, or is no archive.
        KeyError: An entry is missing, or the file is no .pt2.
        ValueError: An entry is damaged.
        OSError: The file cannot be read.
    """
    with _opened(file) as entries:
        archive = _read(entries)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as copy:
            for name, content in _contents(archive, entries):
                copy.writestr(name, content)

    buffer.seek(0)
    return buffer


class _Entries:
    """Reads the entries of a .pt2, which is a zip archive.

    All entries are in one folder. Its name is no part of their names here.

    Args:
        archive: The archive.
        infos: What the archive says of each entry, by the name of the entry.
    """

    def __init__(self, archive: zipfile.ZipFile, infos: Mapping[str, zipfile.ZipInfo]) -> None:
        self.archive = archive
        self.infos = infos

    def read(self, name: str) -> bytes:
        """Return the bytes of an entry.

        Args:
            name: The name of the entry.

        Raises:
            KeyError: There is no entry of that name.
        """
        if name not in self.infos:
            raise KeyError(f"it has no entry {name}")
        return self.archive.read(self.infos[name])

    def record(self, name: str) -> object:
        """Return the content of an entry that is JSON, as Python values.

        The content is not trusted. `reading.parse_json` refuses JSON that is too long or too deep.

        Args:
            name: The name of the entry.
        """
        return reading.parse_json(self.text(name))

    def text(self, name: str) -> str:
        """Return the content of an entry that is text.

        Args:
            name: The name of the entry.
        """
        return self.read(name).decode()


@contextmanager
def _opened(file: Path) -> Iterator[_Entries]:
    """Open a .pt2, which is a zip archive, for a `with` block, and yield its entries.

    Raises:
        SourceError: The block raised a NotAllowedError: the file holds something that is not
            opened.
        ValueError: The block raised a RecursionError: the file's JSON is nested too deeply.
    """
    try:
        with file.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            yield _Entries(archive, _infos(archive, stream))
    except NotAllowedError as error:
        what = f"{file} holds {error}, which normswap does not open"
        why = "it could run code, or torch.export.save does not write it"
        remedy = "If you trust its author, open it by torch.export.load in Python"
        raise SourceError(what, why, remedy) from None
    except RecursionError:
        raise ValueError("its records are nested too deeply") from None


def _infos(archive: zipfile.ZipFile, stream: IO[bytes]) -> dict[str, zipfile.ZipInfo]:
    """Return what a zip archive says of each entry, by the name of the entry.

    The name of the folder that holds all entries is left out. An archive in which torch's reader
    could find other entries than Python's is refused. torch's reader ignores case, and takes the
    first of two entries of one name. Python's takes the last.

    Args:
        archive: The archive.
        stream: The opened file of the archive.

    Raises:
        NotAllowedError: The archive is refused.
    """
    infos = archive.infolist()
    if len(infos) > _MOST_ENTRIES:
        raise NotAllowedError(f"{len(infos)} entries")
    # Entries that neither overlap nor are compressed are together no larger than the file.
    if sum(info.file_size for info in infos) > os.fstat(stream.fileno()).st_size:
        raise NotAllowedError("entries that overlap or are compressed")

    seen: set[str] = set()
    for info in infos:
        _require_plain_entry(info)
        if info.filename.lower() in seen:
            raise NotAllowedError(f"two entries {shown(info.filename)}")
        seen.add(info.filename.lower())

    # All entries are in one folder, which has any name, except in the layout of torch 2.7 and
    # before.
    names = [info.filename for info in infos]
    root = ""
    if names and _OLD_VERSION not in names:
        root = f"{names[0].partition('/')[0]}/"
    for name in names:
        if not name.startswith(root):
            raise NotAllowedError(f"the entry {shown(name)} outside of its folder {shown(root)}")
    return {info.filename.removeprefix(root): info for info in infos}


def _require_plain_entry(info: zipfile.ZipInfo) -> None:
    """Check that an entry of a zip archive is a plain file that lies inside of the archive.

    Args:
        info: What the archive says of the entry.

    Raises:
        NotAllowedError: The entry is compressed, encrypted or a link, or its path leads out of the
            archive.
    """
    name = info.filename
    # The Unix file mode tells the kind of the file. Some writers leave the kind out (0).
    mode = info.external_attr >> 16
    is_regular = stat.S_IFMT(mode) in (0, stat.S_IFREG)
    if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
        raise NotAllowedError(f"the compressed entry {shown(name)}")
    if info.flag_bits & _ENCRYPTED:
        raise NotAllowedError(f"the encrypted entry {shown(name)}")
    if not is_regular:
        raise NotAllowedError(f"the entry {shown(name)}, which is no file")

    parts = name.split("/")
    if not name.isprintable() or "\\" in name or ".." in parts or "" in parts:
        raise NotAllowedError(f"the entry {shown(name)}")


def _read(entries: _Entries) -> Pt2Archive:
    """Return the content of a .pt2, after every entry of it has been checked.

    Args:
        entries: The entries of the archive.

    Raises:
        NotAllowedError: An entry could run code, or torch.export.save does not write it.
        KeyError: An entry is missing.
    """
    # torch knows the operators of int8 once they are imported.
    with quiet():
        importlib.import_module("torch.ao.quantization.fx._decomposed")

    if _OLD_PROGRAM in entries.infos:
        return _read_old(entries)
    if _PROGRAM not in entries.infos:
        raise KeyError(f"it has no entry {_PROGRAM}")

    # Refuse entries that torch.export.save does not write.
    known = (_PROGRAM, _SAMPLES, *_TABLES.values(), *_PICKLED_TENSORS, *_VERSIONS, *_UNREAD)
    for name in entries.infos:
        expected = name in known or name.startswith(_EXTRA) or _BYTES_OF_TENSORS.fullmatch(name)
        if not expected:
            raise NotAllowedError(f"the entry {shown(name)}")

    # Read the graph, and check the sample inputs and the tables of weights and constants.
    program = checked_program(entries.record(_PROGRAM))
    _read_samples(entries, _SAMPLES)
    tables = {
        folder: checked_payloads(entries.record(table))
        for folder, table in _TABLES.items()
        if table in entries.infos
    }
    for folder, table in tables.items():
        _require_bytes(entries, folder, table)

    pickled = [name for name in _PICKLED_TENSORS if name in entries.infos]
    return Pt2Archive(
        program=program,
        extra=_extra(entries, _EXTRA),
        tables=tables,
        tensors={name: _read_tensors(entries, name) for name in pickled},
        versions={name: entries.text(name) for name in _VERSIONS if name in entries.infos},
    )


def _read_old(entries: _Entries) -> Pt2Archive:
    """Return the checked content of a .pt2 in the layout of torch 2.7 and before.

    Args:
        entries: The entries of the archive.

    Raises:
        NotAllowedError: An entry could run code, or torch.export.save does not write it.
        KeyError: An entry is missing.
    """
    # Refuse entries that torch.export.save does not write.
    known = (_OLD_PROGRAM, _OLD_SAMPLES, *_OLD_TENSORS, _OLD_VERSION)
    for name in entries.infos:
        if name not in known and not name.startswith(_OLD_EXTRA):
            raise NotAllowedError(f"the entry {shown(name)}")

    program = checked_program(entries.record(_OLD_PROGRAM))
    _read_samples(entries, _OLD_SAMPLES)
    return Pt2Archive(
        program=program,
        extra=_extra(entries, _OLD_EXTRA),
        tensors={name: _read_tensors(entries, name) for name in _OLD_TENSORS},
        versions={_OLD_VERSION: entries.text(_OLD_VERSION)},
        old=True,
    )


def _extra(entries: _Entries, folder: str) -> dict[str, str]:
    """Return the texts that the exporter added to a .pt2, such as metadata, by name.

    Args:
        entries: The entries of the archive.
        folder: The folder that holds the texts. Its name is left out of theirs.
    """
    names = [name for name in entries.infos if name.startswith(folder)]
    return {name.removeprefix(folder): entries.text(name) for name in names}


def _require_bytes(entries: _Entries, folder: str, table: Mapping[str, object]) -> None:
    """Check that the archive holds the bytes of each weight or constant.

    For a tensor without bytes, torch would make zeros of whatever size the file states.

    Args:
        entries: The entries of the archive.
        folder: The folder of the tensors' entries.
        table: The checked table of weights or of constants in that folder.

    Raises:
        KeyError: The entry of a tensor is missing.
        NotAllowedError: A tensor that has elements has no bytes.
    """
    config = table["config"]
    assert isinstance(config, dict)
    for name, payload in config.items():
        entry = f"{folder}{payload['path_name']}"
        if entry not in entries.infos:
            raise KeyError(f"it has no entry {entry}")
        sides = [side["as_int"] for side in payload["tensor_meta"]["sizes"]]
        if not entries.infos[entry].file_size and 0 not in sides:
            raise NotAllowedError(f"the weight {shown(name)} without its numbers")


def _read_samples(entries: _Entries, name: str) -> None:
    """Check the sample inputs that are stored in a .pt2 as a pickle. They are not used.

    Args:
        entries: The entries of the archive.
        name: The name of the entry with the inputs. It may be missing or empty.
    """
    if name in entries.infos and entries.infos[name].file_size:
        _unpickle(entries, name)


def _read_tensors(entries: _Entries, name: str) -> dict[str, Tensor]:
    """Return the tensors of an entry that torch.save wrote, by their names.

    The entry must be a pickled dict from texts to dense tensors, and nothing else.

    Args:
        entries: The entries of the archive.
        name: The name of the entry.

    Raises:
        NotAllowedError: The entry is something else.
    """
    content = _unpickle(entries, name)
    if not isinstance(content, dict):
        raise NotAllowedError(f"something else than tensors in the entry {shown(name)}")
    for key, value in content.items():
        is_tensor = type(value) in (Tensor, torch.nn.Parameter)
        if not isinstance(key, str) or not is_tensor or value.layout != torch.strided:
            raise NotAllowedError(f"something else than tensors in the entry {shown(name)}")
    return content


def _unpickle(entries: _Entries, name: str) -> object:
    """Return the content of an entry that torch.save wrote, without running code in it.

    torch's restricted unpickler reads it, which makes only tensors, numbers and containers.

    Args:
        entries: The entries of the archive.
        name: The name of the entry.

    Raises:
        NotAllowedError: The entry holds something else.
    """
    content = entries.read(name)
    try:
        _require_known_names(content)
        with quiet():
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    # torch.export.load would read by the full unpickler what the restricted one refuses. So every
    # error refuses the file here.
    except Exception:
        raise NotAllowedError(f"a pickle of more than tensors and numbers: {shown(name)}") from None


def _require_known_names(content: bytes) -> None:
    """Check that a pickle names no functions or classes but those of tensors and containers.

    Args:
        content: What torch.save wrote: a zip archive with one pickle, `data.pkl`, and the bytes of
            the tensors.

    Raises:
        NotAllowedError: The pickle names something else.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        # torch.save writes one pickle, and compresses nothing.
        names = archive.namelist()
        pickles = [name for name in names if name.endswith(".pkl")]
        if len(set(names)) < len(names) or len(pickles) != 1:
            raise NotAllowedError("a pickle")
        if sum(info.file_size for info in archive.infolist()) > len(content):
            raise NotAllowedError("a compressed pickle")
        pickled = archive.read(pickles[0])

    # The codes GLOBAL and INST look up a function or class. Their argument is its module and name,
    # such as `torch._utils _rebuild_tensor_v2`. Codes that look it up in another way are refused.
    for code, argument, _ in pickletools.genops(pickled):
        looks_up_name = code.name in ("GLOBAL", "INST")
        if looks_up_name and not _PICKLED_NAMES.fullmatch(str(argument)):
            raise NotAllowedError("a pickle")
        if code.name in _REFUSED_CODES:
            raise NotAllowedError("a pickle")


def _contents(archive: Pt2Archive, entries: _Entries) -> Iterator[tuple[str, bytes]]:
    """Yield the entries of the .pt2 that torch is given: the name and the bytes of each.

    They are written anew from what was checked, so torch never reads the user's file itself.

    Args:
        archive: What was read of the user's file, and checked.
        entries: The entries of the user's file, from which the bytes of the weights are copied.
    """
    # The layout of torch 2.7 and before has no folder around the entries.
    root = "" if archive.old else "model/"
    for name, version in archive.versions.items():
        yield f"{root}{name}", version.encode()

    program = _OLD_PROGRAM if archive.old else _PROGRAM
    yield f"{root}{program}", json.dumps(archive.program).encode()
    # From sample inputs torch would write guards as Python source, and run it. So none are given.
    samples = _OLD_SAMPLES if archive.old else _SAMPLES
    yield f"{root}{samples}", b""

    for name, tensors in archive.tensors.items():
        buffer = io.BytesIO()
        torch.save(tensors, buffer)
        yield f"{root}{name}", buffer.getvalue()

    for folder, table in archive.tables.items():
        yield f"{root}{_TABLES[folder]}", json.dumps(table).encode()
        config = table["config"]
        assert isinstance(config, dict)
        for entry in sorted({payload["path_name"] for payload in config.values()}):
            yield f"{root}{folder}{entry}", entries.read(f"{folder}{entry}")
