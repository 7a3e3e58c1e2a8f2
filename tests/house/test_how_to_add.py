"""ARCHITECTURE's "How to add" is true: the files that it lists for an addition are enough."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2]
# The text of a new file; or a text that a file has once, and the text in its place.
Change = str | tuple[str, str]


@dataclass(frozen=True)
class Addition:
    """Something that is added as a row of ARCHITECTURE's table says.

    Args:
        row: The first cell of the row.
        name: The name of the addition, which stands for NAME in the row.
        changes: The changes by file.
        proof: A program that uses the addition.
        tests: The default tests of the rooms that it concerns.
    """

    row: str
    name: str
    changes: dict[str, Change]
    proof: str
    tests: str


PLAN = '''"""Example: in the place of every norm a scale and a shift per channel."""

from __future__ import annotations

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.plan_builder import left_affine
from normswap.graph.inspection import Anatomy
from normswap.schemes.norm_insertion import insert_norms
from normswap.sites.site import Site


def plan(anatomy: Anatomy) -> PlanBuilder:
    return insert_norms(anatomy, "ChannelAffine", _keep)


def _keep(builder: PlanBuilder, site: Site) -> None:
    builder.replace(site.path, "ChannelAffine")
    builder.settle(site.path, left_affine("its own map"))
'''
COMMAND = '''"""`normswap hello`: an example."""

from __future__ import annotations

from normswap.cli.terminal import say

KEYS = "nothing"
EXAMPLES = ("hello", "hello")


def run() -> int:
    """Say hello."""
    say("hello")
    return 0
'''
FORMAT = '''"""Example: what pt2 files hold, under another name."""

from __future__ import annotations

from normswap.exporting.pt2_file import metadata, nodes, open, write

__all__ = ["metadata", "nodes", "open", "write"]
'''
TABLE = "TARGETS: dict[str, Scheme] = {\n"
ADDITIONS = (
    Addition(
        "scheme of existing layers",
        "example",
        {
            "normswap/schemes/example.py": PLAN,
            "normswap/schemes/catalogue.py": (
                TABLE,
                TABLE + '    "example": Scheme(Function("schemes.example.plan"), summary="An'
                ' example."),\n',
            ),
            "docs/algebra.md": (
                "| target | algebra | exact |\n|---|---|---|\n",
                "| target | algebra | exact |\n|---|---|---|\n| `example` | an example | yes |\n",
            ),
            "README.md": ("| `affine` |", "| `example` | an example | kept |\n| `affine` |"),
            "tests/support/scheme_rows.py": (
                '    Row("affine"),\n',
                '    Row("affine"),\n    Row("example"),\n',
            ),
            "tests/analysis/test_weight_decay.py": (
                "CONVERTED = [\n",
                'CONVERTED = [\n    ("resnet18", "example", {}, TABLE["resnet18"]),\n',
            ),
        },
        "done = normswap.convert(net(), 'example', input_size=(3, 32, 32))\n"
        "assert done.report.exact and done.report.passed\n"
        "assert any(type(m).__name__ == 'ChannelAffine' for m in done.model.modules())\n"
        "assert 'example' in schemes.names()",
        "tests/house tests/schemes/test_options.py tests/schemes/test_schemes.py tests/analysis"
        " tests/cli",
    ),
    Addition(
        "option of a scheme",
        "affine",
        {
            "normswap/schemes/catalogue.py": (
                '        Function("schemes.norm_insertion.plan_affine"),\n',
                (
                    '        Function("schemes.norm_insertion.plan_affine"),\n'
                    '        options=(Option("even", int, 0, "an example", "N"),),\n'
                ),
            ),
            "normswap/schemes/norm_insertion.py": (
                "def plan_affine(anatomy: Anatomy)",
                "def plan_affine(anatomy: Anatomy, *, even: int)",
            ),
            "normswap/surgery/conversion.py": (
                "    dropout: float\n",
                "    dropout: float\n    even: int\n",
            ),
            "docs/schemes.md": (
                "<!-- options -->\n\n| option | of | default | what it does |\n|---|---|---|---|\n",
                (
                    "<!-- options -->\n\n| option | of | default | what it does"
                    " |\n|---|---|---|---|\n| `--even` | `affine` | `0` | an example |\n"
                ),
            ),
            "tests/house/test_interfaces.py": (
                '"options of convert": 43,',
                '"options of convert": 44,',
            ),
        },
        "done = normswap.convert(net(), 'affine', input_size=(3, 32, 32), even=2)\n"
        "assert done.plan.steps[-1].options == {'even': 2}",
        "tests/house tests/schemes/test_options.py tests/cli",
    ),
    Addition(
        "command",
        "hello",
        {
            "normswap/cli/commands/hello_command.py": COMMAND,
            "normswap/cli/commands/__init__.py": (
                "SUMMARIES = {\n",
                'SUMMARIES = {\n    "hello": "Say hello.",\n',
            ),
            "tests/house/test_interfaces.py": (
                '"commands": 18,',
                '"commands": 19,',
            ),
            "tests/cli/test_options_of_commands.py": ("WITHOUT = {", 'WITHOUT = {"hello", '),
            "tests/cli/test_order_and_count.py": (
                "ELSEWHERE = {\n",
                'ELSEWHERE = {\n    "hello": "it is an example",\n',
            ),
        },
        "from normswap.cli.app import main\nassert main(['hello']) == 0",
        "tests/house tests/cli",
    ),
    Addition(
        "export format",
        "example",
        {
            "normswap/exporting/example_file.py": FORMAT,
            "normswap/exporting/formats.py": (
                "    for form in (\n",
                '    for form in (\n        Format("example", ".example", "Example", "Example"),\n',
            ),
            "normswap/models/kinds.py": (
                'EXPORTED = {".onnx"',
                'EXPORTED = {".example": "example", ".onnx"',
            ),
            "tests/support/runtime_process.py": (
                "_BLOCKED = {\n",
                '_BLOCKED = {\n    "example": [],\n',
            ),
        },
        "from pathlib import Path\nfrom normswap.exporting import formats\n"
        "assert formats.choose(Path('x.example'), None).name == 'example'",
        "tests/house tests/cli tests/exporting/test_exported_file.py",
    ),
    Addition(
        "norm as source",
        "example",
        {
            "normswap/sites/known_norms.py": (
                "    nn.LocalResponseNorm:",
                "    timm_layers.FilterResponseNormTlu2d: NormKind(Statistics.SAMPLE, dim=None),\n"
                "    nn.LocalResponseNorm:",
            ),
        },
        "from torch import nn\n"
        "from timm.layers import FilterResponseNormTlu2d\n"
        "other = nn.Sequential(nn.Conv2d(3, 4, 1), FilterResponseNormTlu2d(4)).eval()\n"
        "(norm,) = normswap.inspect(other, torch.randn(2, 3, 8, 8)).norms\n"
        "assert 'per sample' in norm.site.refusal",
        "tests/house tests/sites",
    ),
)
PROGRAM = """
import timm, torch, normswap
from normswap import schemes
def net():
    torch.manual_seed(0)
    return timm.create_model("resnet18", channels=(4, 4, 4, 4), num_classes=3).eval()
"""


def listed(row: str, name: str) -> set[str]:
    """The files that a row of the table names, from the repository's root."""
    lines = (HERE / "ARCHITECTURE.md").read_text(encoding="utf-8").splitlines()
    line = next(line for line in lines if line.startswith(f"| {row} |"))
    cell = line.split("|")[2].replace("NAME", name)

    files = set()
    for file in re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|md))`", cell):
        is_whole = file.startswith(("tests/", "docs/")) or "/" not in file
        files.add(file if is_whole else f"normswap/{file}")
    return files


def apply(change: Change, file: Path) -> None:
    if isinstance(change, str):
        assert not file.exists()
        file.write_text(change, encoding="utf-8")
        return

    old, new = change
    text = file.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{file} has {old!r} not once"
    file.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.row)
def test_what_is_listed_is_enough(addition: Addition, tmp_path: Path) -> None:
    assert listed(addition.row, addition.name) == addition.changes.keys()
    changed = run_in_a_copy(addition, tmp_path, "-c", PROGRAM + addition.proof)
    assert changed.returncode == 0, changed.stderr


@pytest.mark.long
@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.row)
def test_nothing_else_has_to_be_touched(addition: Addition, tmp_path: Path) -> None:
    """The default tests of the rooms concerned pass on the copy."""
    changed = run_in_a_copy(addition, tmp_path, "-m", "pytest", "-q", *addition.tests.split())
    assert changed.returncode == 0, changed.stdout[-3000:]


def run_in_a_copy(
    addition: Addition, tmp_path: Path, *program: str
) -> subprocess.CompletedProcess[str]:
    copy = tmp_path / "normswap"
    shutil.copytree(
        HERE, copy, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache", "runs")
    )
    for file, change in addition.changes.items():
        apply(change, copy / file)
    environment = {**os.environ, "PYTHONPATH": str(copy)}
    command = [sys.executable, *program]

    return subprocess.run(
        command, cwd=copy, env=environment, check=False, capture_output=True, text=True
    )
