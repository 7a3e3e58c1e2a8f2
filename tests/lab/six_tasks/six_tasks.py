"""Six tasks as a new user does them: the blocks of the docs' sections, one after the other, and their times.

    python tests/lab/six_tasks/six_tasks.py -o tests/lab/six_tasks/six_tasks.md

Nothing is run that the docs do not show. A command is a process of its own, the Python of a section is one.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))
import circumstances
from docs_pages import ROOT, blocks_in

LIMIT = 600  # seconds


class Task(NamedTuple):
    """A task, and the headings of a page under which the docs say how it is done."""

    name: str
    page: str
    headings: tuple[str, ...]


TASKS = (
    Task("a U-Net class of one's own to int8", "int8.md", ("A network of your own",)),
    Task("Faster R-CNN, its backbone with a calibrated GroupNorm", "small_batches.md",
         ("A Unet with a pretrained encoder", "A detector")),
    Task("a robot's encoder, loaded without normswap", "robot_policy.md", ("The encoder, as both projects build it",)),
    Task("private fine-tuning", "private_training.md", ("Convert", "Train")),
    Task("BatchNorm back", "situations.md", ("I need BatchNorm back",)),
    Task("three schemes swept on a folder, one figure and table", "train.md",
         ("Sweeps: schemes, rates and seeds in one figure and one table",)),
)  # fmt: skip


def section(page: str, heading: str) -> str:
    """The text under a heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    _, found, rest = text.partition(f"\n## {heading}\n")
    if not found:
        raise SystemExit(f"{page} has no section {heading}")
    return re.split(r"^## ", rest, maxsplit=1, flags=re.M)[0]


def steps(task: Task) -> list[list[str]]:
    """The processes of a task, and, before them, the files that it has one save."""
    commands: list[list[str]] = []
    python = ""
    for block in (block for heading in task.headings for block in blocks_in(section(task.page, heading))):
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            python += block.text
            commands = [command for command in commands if command[1] != "section.py"]
            Path("section.py").write_text(python)
            commands.append([sys.executable, "section.py"])
        elif block.language == "bash":
            words = [shlex.split(line, comments=True) for line in block.lines()]
            commands += [[sys.executable, "-m", *line] for line in words if line[0] == "normswap"]
    return commands


def row(task: Task) -> str:
    """Do a task in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        commands = steps(task)
        begun, failed = time.monotonic(), ""
        for command in commands:
            left = LIMIT - (time.monotonic() - begun)
            try:
                subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, timeout=left,
                               capture_output=True)  # fmt: skip
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                tail = (error.stderr or b"").decode().strip().splitlines()[-1:]
                failed = f"failed: {shlex.join(command[1:5])} {' '.join(tail)}"
                break
        seconds = time.monotonic() - begun
        os.chdir(ROOT)
    sections = ", ".join(task.headings)
    print(task.name, round(seconds), failed, flush=True)
    return f"| {task.name} | {task.page}: {sections} | {len(commands)} | {failed or f'{seconds:.0f} s'} |"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path, required=True)
    asked = parser.parse_args()
    output = asked.output.absolute()
    head = ["# Six tasks, from the docs alone", "", str(__doc__).splitlines()[0], ""]
    made = circumstances.lines(f"python tests/lab/six_tasks/six_tasks.py -o {asked.output}", "cpu")
    rows = ["| task | docs | processes | time |", "|---|---|---|---|", *map(row, TASKS)]
    output.write_text("\n".join([*head, *made, *rows]) + "\n")
