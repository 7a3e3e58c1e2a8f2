"""YAML by the rules of its version 1.2: `no` is a word, `1e-4` is a number, and a key stands only once in a group.

PyYAML reads version 1.1, where `precision: no` is false, `1:30` is ninety and `1e-4` is text, and of two equal keys the
last one wins in silence. Only plain values are built, never objects.

By hand, because OmegaConf 2.4 reads `precision: no` as false, 010 as 8 and -.5 as text, and ruamel.yaml, which differs
only in 1_000 and dates, would be one more package, with 22 ms to import instead of 3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import yaml

_MERGE = "tag:yaml.org,2002:merge"
_RULES = (
    ("null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    ("bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    ("int", re.compile(r"[-+]?(?:0|[1-9][0-9]*)$"), list("-+0123456789")),
    (
        "float",
        re.compile(
            r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN))$"
        ),
        list("-+.0123456789"),
    ),
)


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader with the resolvers of version 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, object]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) and key_node.tag != _MERGE:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is no word", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} stands twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind, _pattern, _first in _RULES:
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", _pattern, _first)


def load(text: str) -> object:
    """The plain value that `text` writes.

    Raises:
        ValueError: it is not YAML; the message has the line.
    """
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{where}{error.problem or error.context or 'not YAML'}") from None
    except yaml.YAMLError as error:  # characters that YAML does not allow
        raise ValueError(str(error).splitlines()[0].partition(": ")[2]) from None


def dump(value: object) -> str:
    """`value` as YAML that `load` reads as the same: keys in their order, lists of numbers on one line."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=110, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Writes numbers so that both versions of YAML read them as numbers; quotes what either might misread."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:  # 1e-05: version 1.1 reads text
        text = text.replace("e", ".0e")
    named = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return dumper.represent_scalar("tag:yaml.org,2002:float", named.get(text, text))


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
    misread = any(pattern.match(value) for _, pattern, _ in _RULES)
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="'" if misread else None)


def _list(dumper: yaml.SafeDumper, value: Iterable[object]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", list(value), flow_style=True)


_Dumper.add_representer(float, _float)
_Dumper.add_representer(str, _text)
_Dumper.add_representer(list, _list)
_Dumper.add_representer(tuple, _list)
