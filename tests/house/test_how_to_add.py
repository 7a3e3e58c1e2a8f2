"""ARCHITECTURE's "How to add" is true: what is listed for each kind of addition is enough, and no more is needed."""

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
Change = str | tuple[str, str]  # a new file's text; or a text that is there once, and what stands there then


@dataclass(frozen=True)
class Addition:
    """Something added as the row of ARCHITECTURE's table says that begins with `row`: the changes by file, where NAME
    in the row is `name`; and a program that uses what was added.
    """

    row: str
    name: str
    changes: dict[str, Change]
    proof: str


SCHEME = '''"""Example: in the place of every norm a scale and a shift per channel."""

from __future__ import annotations

from torch import nn

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.outcomes import left_affine
from normswap.graph.inspection import Anatomy
from normswap.schemes import Scheme
from normswap.schemes.parts.norm_insertion import insert_norms


def plan(anatomy: Anatomy) -> PlanBuilder:
    return insert_norms(anatomy, "ChannelAffine", _keep)


def _keep(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    builder.replace(path, "ChannelAffine")
    builder.settle(path, left_affine("its own map"))


SCHEME = Scheme(plan, paper="none")
'''
LAYER = '''"""Example: y = 2 x per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from normswap.layers.own import OwnLayer
from normswap.layers.planned_layer import PlannedLayer


class Doubled(PlannedLayer, OwnLayer):
    """Doubles what it reads."""

    AFFINE = True

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x

    def as_affine(self) -> tuple[Tensor, Tensor]:
        return torch.full((1,), 2.0, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)

    @classmethod
    def replacing(cls, old: nn.Module, *, like: Tensor) -> nn.Module:
        return cls()
'''
OPTION_LAYER = '''"""Example: a scale and a shift per channel that do not learn."""

from __future__ import annotations

from torch import Tensor, nn

from normswap.layers.channelwise import ChannelAffine


class FixedAffine(ChannelAffine):
    """y = act(weight * x + bias), as constants."""

    def __init__(self, weight: Tensor, bias: Tensor, act: nn.Module | None = None) -> None:
        super().__init__(weight, bias, act)
        self.requires_grad_(False)
'''
COMMAND = '''"""`normswap hello`: an example."""

from __future__ import annotations

import typer

ORDER = 999


def register(app: typer.Typer) -> None:
    app.command("hello")(run)


def run() -> int:
    """Say hello."""
    print("hello")
    return 0
'''
FORMAT = '''"""Example: what safetensors files hold, under another name."""

from __future__ import annotations

from normswap.exporting.safetensors_file import GRAPH, NEEDS, NOTES, PARTS, nodes, open, write

__all__ = ["GRAPH", "NAME", "NEEDS", "NOTES", "PARTS", "nodes", "open", "write"]
NAME = "example"
'''
TABLE = "OPTIONS: dict[str, tuple[Option, ...]] = {\n"
ADDITIONS = (
    Addition(
        "scheme of existing layers", "example",
        {
            "normswap/schemes/example.py": SCHEME,
            "README.md": ("| `affine` |", "| `example` | an example | kept |\n| `affine` |"),
            "tests/scheme_rows.py": ('    Row("affine"),\n', '    Row("affine"),\n    Row("example"),\n'),
            "tests/analysis/test_weight_decay.py": ("CONVERTED = [\n",
                "CONVERTED = [\n    (\"resnet18\", \"example\", {}, TABLE[\"resnet18\"]),\n"),
        },
        "done = normswap.convert(net(), 'example', input_size=(3, 32, 32))\n"
        "assert done.report.exact and done.report.passed\n"
        "assert any(type(m).__name__ == 'ChannelAffine' for m in done.model.modules())\n"
        "assert 'example' in schemes.names()",
    ),
    Addition(
        "option of a scheme", "affine",
        {
            "normswap/schemes/parts/options.py": (
                TABLE, TABLE + '    "affine": (Option("even", bool, False, "an example"),),\n'),
            "normswap/schemes/affine.py": ("def plan(anatomy: Anatomy)", "def plan(anatomy: Anatomy, *, even: bool)"),
        },
        "done = normswap.convert(net(), 'affine', input_size=(3, 32, 32), even=True)\n"
        "assert done.plan.steps[-1].options == {'even': True}",
    ),
    Addition(
        "option that puts in another layer", "affine",
        {
            "normswap/schemes/parts/options.py": (
                TABLE, TABLE + '    "affine": (Option("fixed", bool, False, "an example"),),\n'),
            "normswap/schemes/affine.py": (
                "def plan(anatomy: Anatomy)",
                "def plan(anatomy: Anatomy, *, fixed: bool) -> PlanBuilder:\n"
                '    layer = "FixedAffine" if fixed else "ChannelAffine"\n'
                "    return insert_norms(anatomy, layer, lambda builder, path, _: builder.replace(path, layer))\n\n\n"
                "def other(anatomy: Anatomy)"),
            "normswap/layers/affine_layer.py": OPTION_LAYER,
        },
        "model = normswap.convert(net(), 'affine', input_size=(3, 32, 32), fixed=True).model\n"
        "fixed = [m for m in model.modules() if type(m).__name__ == 'FixedAffine']\n"
        "assert fixed and not any(p.requires_grad for m in fixed for p in m.parameters())",
    ),
    Addition(
        "layer", "doubled", {"normswap/layers/doubled.py": LAYER},
        "from normswap.plan import Edit, Step\nfrom normswap.surgery import applying\n"
        "doubled = applying.apply_step(net(), Step('example', {}, (Edit('act1', 'Doubled', keep=True),)))\n"
        "assert normswap.convert(doubled, 'folded', input_size=(3, 32, 32)).report.passed",
    ),
    Addition(
        "command", "hello", {"normswap/cli/commands/hello_command.py": COMMAND},
        "from normswap.cli.app import main\nassert main(['hello']) == 0",
    ),
    Addition(
        "export format", "example_file",
        {
            "normswap/exporting/example_file.py": FORMAT,
            "normswap/exporting/formats.py": (
                "_FORMATS = {\n", '_FORMATS = {\n    "example": _Row("example_file", (".example",)),\n'),
            "tests/alone.py": ("_BLOCKED = {\n", '_BLOCKED = {\n    "example": [],\n'),
        },
        "from pathlib import Path\nfrom normswap.exporting import formats\n"
        "assert formats.choose(Path('x.example'), None).NAME == 'example'",
    ),
)  # fmt: skip
PROGRAM = """
import timm, torch, normswap
from normswap import schemes
def net():
    torch.manual_seed(0)
    return timm.create_model("resnet18", channels=(4, 4, 4, 4), num_classes=3).eval()
"""


def listed(row: str, name: str) -> set[str]:
    """The files that a row of the table names, from the repository's root."""
    lines = [line for line in (HERE / "ARCHITECTURE.md").read_text().splitlines() if line.startswith(f"| {row} |")]
    files = re.findall(r"`((?:[\w-]+/)*\w+\.(?:py|md))`", lines[0].split("|")[2].replace("NAME", name))
    return {file if file.startswith("tests/") or "/" not in file else f"normswap/{file}" for file in files}


def apply(change: Change, file: Path) -> None:
    if isinstance(change, str):
        assert not file.exists()
        file.write_text(change)
        return
    text = file.read_text()
    assert text.count(change[0]) == 1, f"{file} has {change[0]!r} not once"
    file.write_text(text.replace(*change))


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.row)
def test_the_files_of_an_addition_are_those_that_are_listed(addition: Addition) -> None:
    assert listed(addition.row, addition.name) == addition.changes.keys()


def test_a_norm_of_somebody_else_needs_no_file_of_ours() -> None:
    assert listed("norm as source, another affine map, or third party's", "") == set()


@pytest.mark.slow
@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.row)
def test_what_is_listed_is_enough(addition: Addition, tmp_path: Path) -> None:
    for folder in ("normswap", "tests"):
        shutil.copytree(
            HERE / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "lab", "pictures")
        )
    shutil.copy(HERE / "README.md", tmp_path)
    for file, change in addition.changes.items():
        apply(change, tmp_path / file)
    command = [sys.executable, "-c", PROGRAM + addition.proof]
    done = subprocess.run(command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, check=False,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
