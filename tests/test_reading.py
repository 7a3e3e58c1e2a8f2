"""JSON and YAML of others: what is read whole, and where reading stops."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from normswap import reading
from normswap.reading import UnreadableError


def test_numbers_that_are_not_finite_are_read_only_where_they_are_asked_for() -> None:
    text = '{"error": [NaN, Infinity, -Infinity, 1.5]}'

    tree = reading.parse_object(text, finite=False)

    error = tree["error"]
    assert isinstance(error, list)
    assert math.isnan(error[0])
    assert error[1:] == [math.inf, -math.inf, 1.5]
    with pytest.raises(UnreadableError, match=r"error\[[012]\]"):
        reading.parse_object(text)


def levels_of_json(count: int) -> str:
    """A text of JSON whose innermost value is so many levels deep."""
    return "[" * count + "7" + "]" * count


def values_of_json(count: int) -> str:
    """A text of JSON with so many values: a list, and what is in it."""
    return f"[{', '.join(['7'] * (count - 1))}]"


def digits(count: int) -> str:
    return "9" * count


def values_of_yaml(count: int) -> str:
    """A text of YAML with an event of each number up to `count`, from 0.

    Each entry of a list is one event. A text begins with two events (of the stream and the
    document) and ends with two, and its list has two.
    """
    return f"[{', '.join(['7'] * (count + 1 - 6))}]"


def characters_of_json(count: int) -> str:
    return f'"{"x" * (count - 2)}"'


# The name of a limit, the function that reads, and a text that is as large as a number says.
LIMITS: dict[str, tuple[str, Callable[[str], object], Callable[[int], str]]] = {
    "levels of JSON": ("MOST_LEVELS", reading.parse_json, levels_of_json),
    "levels of YAML": ("MOST_LEVELS", reading.parse_yaml, levels_of_json),
    "values of JSON": ("MOST_VALUES", reading.parse_json, values_of_json),
    "values of YAML": ("MOST_EVENTS_OF_YAML", reading.parse_yaml, values_of_yaml),
    "digits of JSON": ("MOST_DIGITS", reading.parse_json, digits),
    "digits of YAML": ("MOST_DIGITS", reading.parse_yaml, digits),
    "characters of JSON": ("MOST_BYTES", reading.parse_json, characters_of_json),
    "characters of YAML": ("MOST_BYTES_OF_YAML", reading.parse_yaml, characters_of_json),
}


@pytest.mark.parametrize("case", LIMITS)
def test_a_text_is_read_up_to_the_limit_and_not_beyond_it(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit, read, text = LIMITS[case]
    monkeypatch.setattr(reading, limit, 12)

    assert read(text(12)) is not None
    with pytest.raises(UnreadableError, match=r"12|13"):
        read(text(13))


def test_a_file_is_read_up_to_the_limit_and_not_beyond_it(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"twelve bytes")

    assert reading.file_text(file, most=12) == "twelve bytes"
    with pytest.raises(UnreadableError, match="12 bytes, at most 11"):
        reading.file_text(file, most=11)


@pytest.mark.parametrize("read", [reading.parse_json, reading.parse_yaml])
@pytest.mark.parametrize(
    "text", ['{"a": 1, "b": 2, "a": 3}', '{"outer": [{"x": 1}, {"a": 1, "a": 1}]}']
)
def test_a_key_that_an_object_has_twice_is_named(read: Callable[[str], object], text: str) -> None:
    with pytest.raises(UnreadableError, match=r"key ['\"]a['\"] "):
        read(text)


def test_objects_side_by_side_may_have_the_same_keys() -> None:
    text = '[{"a": 1, "b": {"a": 2}}, {"a": 3}]'

    assert reading.parse_json(text) == [{"a": 1, "b": {"a": 2}}, {"a": 3}]
    assert reading.parse_yaml(text) == [{"a": 1, "b": {"a": 2}}, {"a": 3}]


# Half a character, as JSON may spell it and no file in UTF-8 can hold it.
HALF = "\ud800"


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ({"outer": [{HALF: 1}]}, r"a key in outer\[0\]"),
        ({"outer": [1, {"inner": HALF}]}, r"outer\[1\]\.inner"),
        ({"outer": {(1, 2): 3}}, "a key in outer"),
        ({"outer": {"inner": b"bytes"}}, r"outer\.inner is a bytes"),
        ([{1, 2}], r"\[0\] is a set"),
    ],
)
def test_what_is_no_plain_data_is_named_by_its_place(tree: object, said: str) -> None:
    with pytest.raises(UnreadableError, match=said):
        reading.check_plain(tree)


@pytest.mark.parametrize("text", [r'{"a": {"\ud800": 1}}', r'{"a": "\ud800"}'])
def test_half_a_character_is_refused_in_json(text: str) -> None:
    with pytest.raises(UnreadableError, match="no valid text"):
        reading.parse_json(text)
