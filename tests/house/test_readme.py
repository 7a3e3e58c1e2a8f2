"""What the README shows runs: its Python block, and its shell commands, on a network without weights."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from readme_commands import README, blocks, command

from normswap import schemes
from normswap.cli.app import main


def test_python_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("python")
    exec(compile(block, str(README), "exec"), {})
    assert (tmp_path / "r18-skipinit" / "model.safetensors").is_file()


def test_shell_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = [block for block in blocks("bash") if "normswap convert" in block]
    ran = 0
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "normswap"
        if "--data" in words:  # needs images
            continue
        if "resnet50" in words:  # the same architecture family, small and without weights
            words[words.index("resnet50")] = "resnet18"
            words += ["--weights", "random", "--arch-arg", "channels=8,16,24,32"]
        assert main(words[1:]) == 0, line
        ran += 1
    assert ran >= 4


def test_setup_commands() -> None:
    assert command("demo") == "pip install -e . && normswap demo"
    assert command("tests") == "pip install -e '.[test]' && pytest -n 2 --dist worksteal"


@pytest.mark.parametrize("name", schemes.names())
def test_every_scheme_is_in_the_table(name: str) -> None:
    rows = [line.split("|")[1] for line in README.read_text().splitlines() if line.startswith("| `")]
    assert any(f"`{name}`" in first for first in rows)
