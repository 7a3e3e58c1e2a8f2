"""The files that README.md, ARCHITECTURE.md and the other documents name exist; a conversion goes
the way they say.
"""

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
PLACES = (
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
# A name to choose, or of what is written.
FREE = re.compile(r"[A-Z]{3}|[*<(]|^r\d|\.(preprocess|safetensors)|config\.json")

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
    if event != "call" or not file.startswith(root) or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
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
# Networks that run call what was hung on them: by way of models and layers, whatever their room. So
# do hooks that are registered one after the other, from the caller's generator.
RUNNING = {"models/calling.py", "models/modes.py", "layers/scalars.py"}


def flow() -> list[tuple[str, str]]:
    """(caller, file) of every line of the list in ARCHITECTURE.md."""
    (block,) = re.findall(
        r"^```flow\n(.*?)^```", (HERE / "ARCHITECTURE.md").read_text(), re.M | re.S
    )
    found: list[tuple[str, str]] = []
    above: list[str] = []
    for line in block.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        above[depth:] = [line.split()[0]]
        found.append((above[depth - 1] if depth else "", above[depth]))
    return found


def reached(start: str, calls: set[tuple[str, str]]) -> set[str]:
    """Every file that a call from this one leads to, by way of others."""
    seen: set[str] = set()
    ahead = [start]
    while ahead:
        one = ahead.pop()
        new = {other for above, other in calls if above == one} - seen
        seen |= new
        ahead += new
    return seen


def room(file: str) -> int:
    return FLOOR[file.split("/")[0].removesuffix(".py")]


def test_files_that_are_named_exist() -> None:
    missing = []
    for document in DOCUMENTS:
        text = (HERE / document).read_text()
        named = re.findall(r"`([\w./*-]+\.(?:py|md|yaml|toml|json))`", text) + re.findall(
            r"\]\(([^)#:]+)[)#]", text
        )
        missing += [
            (document, name)
            for name in named
            if not FREE.search(name) and not any((HERE / at / name).exists() for at in PLACES)
        ]

    assert missing == []


def test_rooms_and_schemes_are_all_there() -> None:
    text, algebra = ((HERE / name).read_text() for name in ("ARCHITECTURE.md", "docs/algebra.md"))
    assert [one for one in FLOOR if f"| `{one}" not in text and f", `{one}" not in text] == []
    rows = [
        line.split("|")[1]
        for line in algebra.split("### Insert")[1].splitlines()
        if line.startswith("| `")
    ]
    assert [one for one in schemes.names() if not any(f"`{one}`" in row for row in rows)] == []


def test_the_list_only_goes_down() -> None:
    assert [pair for pair in flow() if pair[0] and room(pair[1]) > room(pair[0])] == []


@pytest.mark.slow
def test_the_list_is_the_way(tmp_path: Path) -> None:
    words = [
        "convert",
        "resnet50",
        "--to",
        "skipinit",
        "--weights",
        "random",
        "-o",
        str(tmp_path / "r50"),
    ]
    ran = subprocess.run(
        [sys.executable, "-c", FOLLOWED, *words], capture_output=True, text=True, check=True
    )
    said = json.loads(ran.stderr.splitlines()[-1])

    assert said["code"] == 0

    calls = {(one, other) for one, other in said["calls"]}
    listed = list(dict.fromkeys(file for _, file in flow()))
    assert listed == [file for file in said["first"] if file in listed]
    assert [(one, other) for one, other in flow() if one and other not in reached(one, calls)] == []

    up = [
        (one, other)
        for one, other in calls
        if one and one not in RUNNING and room(other) > room(one)
    ]

    assert up == []
