"""The files that the documents name exist, and a conversion calls the files that they list."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs_pages import PAGES
from support.room_order import FLOOR

from normswap import schemes

HERE = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    *(f"docs/{page.name}" for page in PAGES),
)
# Names of files are relative to one of these.
FOLDERS = (
    "",
    "normswap",
    "tests",
    "normswap/cli/commands",
    "normswap/exporting",
    "normswap/layers",
    "normswap/models",
    "normswap/schemes/purposes",
    "normswap/training",
    "tests/lab/benchmarks",
    "docs",
)
# Names that a reader chooses, and names of files that normswap writes.
FREE = re.compile(r"[A-Z]{3}|[*<(]|^r\d|\.(preprocess|safetensors)|config\.json|^folds\.json")
# Scripts of timm's repository.
TIMMS = {"train.py", "validate.py", "avg_checkpoints.py"}

FOLLOWED = """
import collections, importlib, inspect, json, pkgutil, sys
import normswap
from normswap.cli import app
for module in pkgutil.walk_packages(normswap.__path__, "normswap."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
from normswap.cli.commands import SUMMARIES
[app.load(name) for name in SUMMARIES]
root, first, calls = normswap.__path__[0] + "/", [], set()
def watch(frame, event, arg):
    file, above = frame.f_code.co_filename, frame.f_back
    if event != "call" or not file.startswith(root):
        return
    if not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        return
    while above is not None and not above.f_code.co_filename.startswith(root):
        above = above.f_back
    calls.add((above.f_code.co_filename[len(root):] if above else "", file[len(root):]))
    if file[len(root):] not in first:
        first.append(file[len(root):])
sys.setprofile(watch)
code = app.main(sys.argv[1:])
sys.setprofile(None)
print(json.dumps({"code": code, "first": first, "calls": sorted(calls)}), file=sys.stderr)
"""
# These call upwards: a network that runs calls the hooks and forwards that other rooms put on it,
# and `network_input.require_module` asks a conversion for its module.
RUNNING = {
    "layers/scalars.py",
    "models/calling.py",
    "models/modes.py",
    "models/network_input.py",
}
# These run what a caller brings, and no import goes up: the proof asks a `Source` for its calls and
# builds results by the functions that it is given; copying and reading call the methods of the
# records that they copy and read.
BROUGHT = {
    ("proof/comparison.py", "surgery/network.py"),
    ("proof/doubles.py", "surgery/network.py"),
    ("proof/doubles.py", "surgery/carrying_out.py"),
    ("proof/running.py", "surgery/applying.py"),
    ("copying.py", "plan.py"),
    ("reading.py", "plan.py"),
    ("reading.py", "models/records.py"),
    ("reading.py", "storage/header.py"),
}


def flow() -> list[tuple[str, str]]:
    """(caller, file) of every line of the list in ARCHITECTURE.md."""
    (block,) = re.findall(
        r"^```flow\n(.*?)^```", (HERE / "ARCHITECTURE.md").read_text(encoding="utf-8"), re.M | re.S
    )
    found: list[tuple[str, str]] = []
    above: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.split()[0]]
        found.append((above[depth - 1] if depth else "", above[depth]))
    return found


def reached(start: str, calls: set[tuple[str, str]]) -> set[str]:
    """Every file that calls from `start` lead to, directly or through other files."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        caller = ahead.pop()
        new = {file for above, file in calls if above == caller} - seen
        seen |= new
        ahead += new
    return seen


def room(file: str) -> int:
    return FLOOR[file.split("/")[0].removesuffix(".py")]


def test_files_that_are_named_exist() -> None:
    missing = []
    for document in DOCUMENTS:
        text = (HERE / document).read_text(encoding="utf-8")
        named = re.findall(r"`([\w./*-]+\.(?:py|md|yaml|toml|json))`", text)
        named += re.findall(r"\]\(([^)#:]+)[)#]", text)
        for name in named:
            is_there = any((HERE / folder / name).exists() for folder in FOLDERS)
            if not is_there and not FREE.search(name) and name not in TIMMS:
                missing.append((document, name))

    assert missing == []


def test_rooms_and_schemes_are_all_there() -> None:
    text = (HERE / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert [name for name in FLOOR if f"| `{name}" not in text and f", `{name}" not in text] == []

    algebra = (HERE / "docs/algebra.md").read_text(encoding="utf-8")
    lines = algebra.split("### Insert")[1].splitlines()
    first_cells = "".join(line.split("|")[1] for line in lines if line.startswith("| `"))
    assert [name for name in schemes.names() if f"`{name}`" not in first_cells] == []


def test_the_list_only_goes_down() -> None:
    assert [pair for pair in flow() if pair[0] and room(pair[1]) > room(pair[0])] == []


@pytest.mark.slow
def test_the_list_is_the_way(tmp_path: Path) -> None:
    command = ["convert", "resnet50", "--to", "skipinit", "--weights", "random"]
    program = [sys.executable, "-c", FOLLOWED, *command, "-o", str(tmp_path / "r50")]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    record = json.loads(done.stderr.splitlines()[-1])
    assert record["code"] == 0

    # The files are listed in the order in which they are first called, each below its caller.
    calls = {(caller, file) for caller, file in record["calls"]}
    listed = list(dict.fromkeys(file for _, file in flow()))
    assert listed == [file for file in record["first"] if file in listed]
    unreached = [(above, file) for above, file in flow() if file not in reached(above, calls)]
    assert [(above, file) for above, file in unreached if above] == []

    # No call goes up.
    own = calls - BROUGHT
    callers = [(caller, file) for caller, file in own if caller and caller not in RUNNING]
    assert [(caller, file) for caller, file in callers if room(file) > room(caller)] == []
