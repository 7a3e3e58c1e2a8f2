"""Files that somebody else may have written: every JSON and YAML of the package is read here.

A file gives plain, bounded data or an `UnreadableError`, whose text is one line. Nothing in it can
hang the reader, use up the memory, or become anything else than text, numbers, lists and objects.
No torch in this file.
"""

from __future__ import annotations

import datetime
import json
import math
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeAlias, TypeVar

from normswap.errors import demanded

if TYPE_CHECKING:
    from pydantic import TypeAdapter, ValidationError

Checked = TypeVar("Checked")
# Where a value stands in a tree: the place of the object or list that holds it, "." for an object
# or "[" for a list, and the value's key in it. None is the tree itself. A text is made of it for a
# message only (`_where`).
_Place: TypeAlias = "tuple[_Place, str, object] | None"

# The index of the largest sharded network has 10 MB.
MOST_BYTES = 100 * 2**20
# A recipe has 2 KB.
MOST_BYTES_OF_YAML = 2**20
# The deepest records are configurations of transformers, which have 6 levels.
MOST_LEVELS = 40
# The labels of 20,000 classes, or a plan for 10,000 layers, are 100,000 values.
MOST_VALUES = 2_000_000
MOST_EVENTS_OF_YAML = 20_000
# A number of 128 bits has 39 digits.
MOST_DIGITS = 40
_KEYS = (str, int, float, type(None))
_VALUES = (int, float, datetime.date, type(None))


class UnreadableError(ValueError):
    """A file or a text cannot be read, or must not be. The message says why, in one line."""


def file_bytes(file: Path, most: int = MOST_BYTES) -> bytes:
    """Return the content of a regular file.

    Args:
        file: The file. A pipe or a device is refused, since reading it may never end.
        most: The largest size in bytes that is read.

    Raises:
        UnreadableError: The file is missing, is too large or is no regular file.
    """
    try:
        status = file.stat()
        # A directory is let through, because reading it raises an error that says what is wrong.
        if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
            raise UnreadableError("it is no regular file")
        if status.st_size > most:
            raise UnreadableError(f"it has {status.st_size} bytes, at most {most} are read")
        return file.read_bytes()
    except OSError as error:
        raise UnreadableError(error.strerror or str(error)) from None
    # A path may hold a NUL character.
    except ValueError as error:
        raise UnreadableError(str(error)) from None


def file_text(file: Path, most: int = MOST_BYTES) -> str:
    """Return the text of a UTF-8 file.

    Args:
        file: The path of the file.
        most: The largest number of bytes.

    Raises:
        UnreadableError: The file is no UTF-8, or cannot be read (`file_bytes`).
    """
    try:
        return file_bytes(file, most).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableError(f"it is no UTF-8 text (byte {error.start})") from None


def parse_json(text: str, *, finite: bool = True) -> object:
    """Return the value that a JSON text holds: text, numbers, booleans, None, lists and dicts.

    Args:
        text: The JSON.
        finite: Whether NaN and Infinity are refused.

    Raises:
        UnreadableError: The text is no JSON, an object in it has a key twice, or it is too long, is
            nested too deep, or has too many values or a number of too many digits.
    """
    if len(text) > MOST_BYTES:
        raise UnreadableError(f"it has more than {MOST_BYTES} characters")

    # The two functions refuse a number of too many digits, and a key that an object has twice.
    try:
        tree = json.loads(text, parse_int=_whole_number, object_pairs_hook=_object_of_pairs)
    except RecursionError:
        raise UnreadableError(f"it is nested more than {MOST_LEVELS} levels deep") from None
    except json.JSONDecodeError as error:
        raise UnreadableError(f"it is not JSON: {error}") from None

    check_plain(tree, finite=finite)
    return tree


def parse_object(text: str, *, finite: bool = True) -> dict[str, object]:
    """Return the JSON object that a text holds, as a dict.

    Args:
        text: The JSON.
        finite: Whether NaN and Infinity are refused.

    Raises:
        UnreadableError: The text is no object, or cannot be parsed (`parse_json`).
    """
    tree = parse_json(text, finite=finite)
    if not isinstance(tree, dict):
        raise UnreadableError(f"it holds a {type(tree).__name__}, not an object")
    return tree


def parse_yaml(text: str) -> object:
    """Return the value that a YAML text holds: text, numbers, booleans, None, dates, lists, dicts.

    The version is YAML 1.2, in which `no` is a word and `1e-4` a number. Infinite numbers and NaN
    are let through. The caller validates the data afterwards, and its errors name the key.

    Raises:
        UnreadableError: The text is no YAML, has a key twice or an alias, is too long, is nested
            too deep, or has too many values or a number of too many digits.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError

    if len(text) > MOST_BYTES_OF_YAML:
        raise UnreadableError(f"it has more than {MOST_BYTES_OF_YAML} characters")

    try:
        _check_events(text)
        tree: object = YAML(typ="safe", pure=True).load(text)
    except UnreadableError:
        raise
    # The error may know where in the text the problem is.
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise UnreadableError(f"{line}{error.problem or error.context}") from None
    # The YAML library raises whatever its constructors of numbers and dates raise.
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), "")
        raise UnreadableError(first_line or type(error).__name__) from None

    check_plain(tree, finite=False)
    return tree


def _check_events(text: str) -> None:
    """Raise UnreadableError if a YAML text is nested too deep, has too many values or an alias.

    An alias repeats a value. Aliases of aliases let a short text stand for billions of values.
    """
    from ruamel.yaml import YAML
    from ruamel.yaml.events import AliasEvent, CollectionEndEvent, CollectionStartEvent

    levels = 0
    for count, event in enumerate(YAML(typ="safe", pure=True).parse(text)):
        if count > MOST_EVENTS_OF_YAML:
            raise UnreadableError(f"it has more than {MOST_EVENTS_OF_YAML} values")
        if isinstance(event, AliasEvent):
            line = event.start_mark.line + 1
            raise UnreadableError(f"line {line}: aliases (*{event.anchor}) are not read")
        if isinstance(event, CollectionStartEvent):
            levels += 1
        elif isinstance(event, CollectionEndEvent):
            levels -= 1
        if levels > MOST_LEVELS:
            raise UnreadableError(f"it is nested more than {MOST_LEVELS} levels deep")


def check_plain(tree: object, *, finite: bool = True) -> None:
    """Raise UnreadableError unless nested data is plain, and neither too deep nor too large.

    Plain data are text, numbers, booleans, null, lists and objects. Dates, which YAML has, are let
    through: the caller validates the data afterwards.

    Args:
        tree: The data, such as a dict of lists.
        finite: Whether NaN and infinite numbers are refused.

    Raises:
        UnreadableError: The data holds a value of another kind, is nested too deep, or has too many
            values or a number of too many digits.
    """
    # A stack, not a recursion, so that no depth is too large. Each entry is a value, its place (for
    # messages), and its level. A place is a triple: the place of the container that holds the
    # value, "." for an object or "[" for a list, and the key of the value in it.
    pending: list[tuple[object, _Place, int]] = [(tree, None, 0)]
    count = 0
    while pending:
        value, place, level = pending.pop()
        count += 1
        if count > MOST_VALUES:
            raise UnreadableError(f"it has more than {MOST_VALUES} values")
        if level > MOST_LEVELS:
            raise UnreadableError(f"it is nested more than {MOST_LEVELS} levels deep")

        if isinstance(value, Mapping):
            for key, entry in value.items():
                _check_key(key, place)
                pending.append((entry, (place, ".", key), level + 1))
        elif isinstance(value, list | tuple):
            pending += [(entry, (place, "[", i), level + 1) for i, entry in enumerate(value)]
        else:
            _check_value(value, place, finite=finite)


def _where(place: _Place) -> str:
    """Return where a value stands in nested data, as text such as `norms[3].path`.

    The text for the whole data is `it`.

    Args:
        place: The keys that lead to the value, the last one first.
    """
    # A place is a triple: the place of the container, "[" for a list or "." for an object, and the
    # key in it. So the text is made from its end to its beginning.
    text = ""
    while place is not None:
        place, kind, key = place
        step = f"[{key}]" if kind == "[" else f".{key}"
        text = step + text
    return text.removeprefix(".") or "it"


def _check_value(value: object, place: _Place, *, finite: bool) -> None:
    """Raise UnreadableError for a value that is no text, number, boolean, date or null.

    A number of too many digits is refused, too.

    Args:
        value: The value.
        place: Where the value stands in the nested data, for the message.
        finite: Whether NaN and infinity are refused.
    """
    if isinstance(value, str):
        if not _is_text(value):
            raise UnreadableError(f"{_where(place)} is no valid text")
    elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
        raise UnreadableError(f"{_where(place)} is a number of more than {MOST_DIGITS} digits")
    elif finite and isinstance(value, float) and not math.isfinite(value):
        raise UnreadableError(f"{_where(place)} is {value}, no finite number")
    elif not isinstance(value, _VALUES):
        raise UnreadableError(f"{_where(place)} is a {type(value).__name__}, no plain value")


def _check_key(key: object, place: _Place) -> None:
    """Raise UnreadableError for a key that is neither a valid text nor a number nor null.

    Args:
        key: The key.
        place: Where the object that has the key stands in the nested data, for the message.
    """
    if not isinstance(key, _KEYS):
        raise UnreadableError(f"a key in {_where(place)} is no text")
    if isinstance(key, str) and not _is_text(key):
        raise UnreadableError(f"a key in {_where(place)} is no valid text")


def _is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8.

    A text with a lone surrogate, which is half a character, can not.
    """
    if text.isascii():
        return True
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def validated(adapter: TypeAdapter[Checked], text: str) -> Checked:
    """Return the object of a pydantic class (or dataclass) that a JSON text holds.

    Args:
        adapter: pydantic's adapter of the class.
        text: The JSON. The caller has seen with `parse_json` that it is bounded.

    Raises:
        UnreadableError: The text does not fit the class. The message names the key.
    """
    from pydantic import ValidationError

    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        raise UnreadableError(first_problem(error)) from None


def first_problem(error: ValidationError) -> str:
    """Return the first error that pydantic found, such as `steps[0].edits: is missing`."""
    problem = error.errors(include_url=False, include_input=False)[0]
    place = ""
    for key in problem["loc"]:
        # Between the keys pydantic names a type that it tried, such as `list[constrained-str]`.
        if isinstance(key, str) and ("[" in key or key.startswith("constrained-")):
            continue
        # A number is an index into a list.
        place += f"[{key}]" if isinstance(key, int) else f".{key}"

    reason = demanded(problem["msg"].lower())
    if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        reason = "unexpected key"
    # If the whole text is wrong, there is no key, and nothing stands in front of the reason.
    return f"{place.removeprefix('.')}: {reason}".removeprefix(": ")


def _whole_number(digits: str) -> int:
    """Return the whole number that a text of digits stands for.

    Raises:
        UnreadableError: There are too many digits.
    """
    # The text of a negative number begins with a minus sign.
    if len(digits) > MOST_DIGITS + 1:
        raise UnreadableError(f"it holds a number of {len(digits)} digits")
    return int(digits)


def _object_of_pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return the JSON object that has these pairs of key and value.

    Raises:
        UnreadableError: The object has a key twice.
    """
    tree = dict(pairs)
    if len(tree) < len(pairs):
        _refuse_repeated_key(pairs)
    return tree


def _refuse_repeated_key(pairs: list[tuple[str, object]]) -> NoReturn:
    """Raise UnreadableError that names the first key that stands in the pairs twice."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            raise UnreadableError(f"the key {key[:100]!r} stands in it twice")
        seen.add(key)
    raise AssertionError("no key stands twice")
