"""Every command on the demo's network at 80 and 120 columns and in a pipe, one file of output each, to look at.

    python tests/lab/terminal/widths.py -o /tmp/widths [COMMAND ...]

Ends with 1 where a line is wider than the terminal, or filled up with blanks in a pipe.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import struct
import sys
import tempfile
import termios
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

from normswap.cli.app import main

MODES = (80, 120, None)  # None: a pipe
END = b"\0end"  # a process that outlives the command keeps the other end open
CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
FREE = ("next: ", "written to ", "#")  # to be copied: one line, which the terminal wraps
FIRST = ("convert demo --to skipinit -o skip", "export skip -o skip.onnx --data demo --samples 16")
KEYS = "data.root=demo train.epochs=0.05 data.batch_size=8 data.workers=0 train.ema=null schedule.warmup=0"
COMMANDS = (
    "", "--help", "inspect demo", "inspect skip", "inspect skip.onnx", "convert demo --to folded -o folded",
    "convert demo --to groupnorm --calibrate demo --samples 16 -o gn", "convert demo --to groupnorm --dry-run",
    "convert demo --to skipinit --dry-run", "convert skip --to unfold -o back",
    "verify skip --data demo --samples 16", "verify skip.onnx --against demo --data demo --samples 16",
    "evaluate demo --data demo --samples 16", "schemes", "schemes groupnorm",
    "advise demo --batch-size 2", "bench demo --runtime eager,onnxruntime --batch-size 1,2 --rounds 2 --seconds 0.2",
    "export demo -o demo.xml --data demo --samples 16", "push skip name", "doctor demo",
    "doctor demo --data demo --samples 32",
    f"finetune demo --recipe cifar10_recover_bn -o run {KEYS}",
    "recalibrate demo --data demo --samples 16 -o again",
    f"sweep cifar10_recover_bn demo --lr 0.1,0.2 -o sweep {KEYS}", "report skip -o skip.html",
    "spp demo skip -o spp.svg --samples 2", "decay demo", "recipes", "recipes show cifar10_recover_bn",
    "inspect nothing", "convert demo --to nothing",
)  # fmt: skip


@contextmanager
def standing_at(columns: int | None) -> Iterator[list[bytes]]:
    """What is written to stdout and stderr, which are a terminal of that width, or a pipe."""
    read, write = os.pipe() if columns is None else pty.openpty()
    if columns is not None:
        fcntl.ioctl(write, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    written: list[bytes] = []

    def collect() -> None:
        while not b"".join(written[-2:]).endswith(END):
            written.append(os.read(read, 1 << 16))

    reader = threading.Thread(target=collect)
    reader.start()
    kept = [os.dup(fd) for fd in (1, 2)]
    try:
        with open(os.dup(write), "w") as out, redirect_stdout(out), redirect_stderr(out):
            for fd in (1, 2):
                os.dup2(write, fd)  # of processes, and of what writes past Python
            yield written
    finally:
        os.write(write, END)
        for fd, old in zip((1, 2), kept, strict=True):
            os.dup2(old, fd)
            os.close(old)
        reader.join()
        os.close(write)
        os.close(read)


def output(words: Sequence[str], columns: int | None) -> str:
    """What a command writes, stdout and stderr as they come."""
    with standing_at(columns) as written:
        main(words)
    text = b"".join(written).removesuffix(END).decode().replace("\r\n", "\n")
    lines = CODES.sub("", text).split("\n")
    return "\n".join(line.rpartition("\r")[2] for line in lines)  # progress is written over


def faults(text: str, columns: int | None) -> list[str]:
    """The lines that a terminal of this width wraps, or that are filled up with blanks in a pipe."""
    lines = text.split("\n")
    if columns is None:
        return [line for line in lines if line != line.rstrip()]
    return [line for line in lines if len(line) > columns and not line.startswith(FREE)]


def look(folder: Path, chosen: Sequence[str]) -> int:
    """Write what every command writes in each mode; return how many lines are wrong."""
    wrong = 0
    for columns in MODES:
        name = f"{columns or 'pipe'}"
        os.environ.pop("COLUMNS", None)
        with tempfile.TemporaryDirectory() as work:
            os.chdir(work)
            for words in FIRST:
                output(words.split(), columns)
            for number, words in enumerate(COMMANDS):
                if chosen and words.split(" ")[0] not in chosen:
                    continue
                text = output(words.split(), columns)
                (folder / f"{number:02d}_{words.split(' ')[0] or 'alone'}.{name}.txt").write_text(
                    f"$ normswap {words}\n{text}"
                )
                for line in faults(text, columns):
                    wrong += 1
                    print(f"{name}: {words}: {line!r}", flush=True)
            os.chdir("/")
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("commands", nargs="*")
    asked = parser.parse_args()
    asked.output.mkdir(parents=True, exist_ok=True)
    sys.exit(bool(look(asked.output.absolute(), asked.commands)))
