"""Where matplotlib and jinja2 are not installed: all works but pictures and pages, which say so in one line."""

import subprocess
import sys
from pathlib import Path

import pytest

import normswap

ROOM = {"normswap.reporting.figures", "normswap.reporting.page"}
BLOCK = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("matplotlib", "jinja2"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in ("matplotlib", "jinja2") else real(name, *rest)
"""


def without(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which neither package can be imported."""
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.slow
def test_the_core_imports_neither(tmp_path: Path) -> None:
    home = Path(normswap.__file__).parent
    names = {"normswap." + ".".join(file.relative_to(home).with_suffix("").parts) for file in home.rglob("*.py")}
    rooms = {name for name in names if not name.endswith("__init__")} - ROOM
    done = without(f"import importlib\nfor name in {sorted(rooms)}: importlib.import_module(name)", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("figures", "page"):  # the list says no more than is so
        assert "No module named" in without(f"import normswap.reporting.{name}", tmp_path).stderr


@pytest.mark.parametrize(
    ("command", "what"),
    [
        ("report demo -o a.html", "the report"),
        pytest.param("spp demo -o a.png", "a picture (a.png)", marks=pytest.mark.slow),
    ],
)
def test_commands_that_draw_say_what_is_missing(command: str, what: str, tmp_path: Path) -> None:
    words = command.split()
    done = without(f"from normswap.cli.app import main; sys.exit(main({words}))", tmp_path)
    assert done.returncode == 2
    assert done.stderr == f"error: {what} needs the package matplotlib: it is not installed. " \
        "In the clone of normswap: pip install -e '.[plots]'\n"  # fmt: skip
    assert done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_rest_works(tmp_path: Path) -> None:
    words = [["convert", "demo", "--to", "folded", "-o", "folded"], ["verify", "folded"], ["spp", "folded"]]
    done = without(f"from normswap.cli.app import main; sys.exit(max(main(one) for one in {words}))", tmp_path)
    assert done.returncode == 0, done.stderr
