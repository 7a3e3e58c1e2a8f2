"""Rows that a benchmark measured before: a line of JSON for each key, with the commit."""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import circumstances

Row = dict[str, Any]
Key = tuple[str, ...]


class Kept:
    """The rows in a file; the last line of a key counts.

    Args:
        file: The file, to which new rows are added.
        fresh: Whether to begin as if the file held nothing.
    """

    def __init__(self, file: Path, *, fresh: bool = False) -> None:
        self.file = file
        file.parent.mkdir(exist_ok=True)
        lines = (
            file.read_text(encoding="utf-8").splitlines() if file.is_file() and not fresh else []
        )
        self.rows: dict[Key, Row] = {tuple(row["key"]): row for row in map(json.loads, lines)}
        self.commit = circumstances.commit()

    def add(self, key: Key, **row: Any) -> Row:
        self.rows[key] = {"key": key, "commit": self.commit, **row}
        with self.file.open("a", encoding="utf-8") as out:
            out.write(json.dumps(self.rows[key]) + "\n")
        return self.rows[key]

    def get(self, key: Key, measure: Callable[[], Row]) -> Row:
        """The row of `key`, measured if there is none."""
        return self.rows[key] if key in self.rows else self.add(key, **measure())

    def write(self, output: Path, title: str, lines: Iterable[str], made: str = "") -> None:
        """Write a table's file.

        Args:
            output: The file.
            title: The title of the table.
            lines: The lines of the table.
            made: The libraries that the rows were measured with, and their versions.
        """
        commits = ", ".join(dict.fromkeys(str(row["commit"]) for row in self.rows.values()))
        at = f"Measured at commit {commits}{made and '; '}{made}."
        write_table(output, title, f"benchmarks/{self.file.stem}.py -o {output}", [at, *lines])


def write_table(output: Path, title: str, command: str, lines: Iterable[str]) -> None:
    """Write a table's file: its title, the script and machine that made it, then `lines`.

    Args:
        output: The file.
        title: The title of the table.
        command: The script and its arguments, from tests/lab.
        lines: The lines of the table.
    """
    made_with = circumstances.lines(f"python tests/lab/{command}", "cpu")
    output.write_text("\n".join([f"# {title}", "", *made_with, *lines]) + "\n", encoding="utf-8")


def markdown_row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def markdown_head(*columns: str) -> str:
    """The first two lines of a table."""
    return f"{markdown_row(*columns)}\n{'|---' * len(columns)}|"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line of a benchmark with this description."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what was kept")
    parser.add_argument("-o", "--output", type=Path, required=True)
    return parser
