"""Rows that a benchmark measured before: a line of JSON each, by what they are of, with the commit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import circumstances

Row = dict[str, Any]
Key = tuple[str, ...]


class Kept:
    """What `file` holds (a key's last line counts); `fresh`: as if it held nothing yet."""

    def __init__(self, file: Path, *, fresh: bool = False) -> None:
        self.file = file
        file.parent.mkdir(exist_ok=True)
        lines = file.read_text().splitlines() if file.is_file() and not fresh else []
        self.rows: dict[Key, Row] = {tuple(row["key"]): row for row in map(json.loads, lines)}
        self.commit = circumstances.commit()

    def add(self, key: Key, **row: Any) -> Row:
        """Keep a row."""
        self.rows[key] = {"key": key, "commit": self.commit, **row}
        with self.file.open("a") as out:
            out.write(json.dumps(self.rows[key]) + "\n")
        return self.rows[key]

    def get(self, key: Key, measure: Callable[[], Row]) -> Row:
        """The row of `key`, measured if there is none."""
        return self.rows[key] if key in self.rows else self.add(key, **measure())
