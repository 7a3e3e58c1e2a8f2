"""What the README shows runs: its Python blocks, and its shell commands, on a network without
weights.
"""

import itertools
import shlex
from pathlib import Path

import pytest
from docs_pages import blocks_in
from readme_commands import README, blocks, command

from normswap import schemes
from normswap.cli.app import main
from normswap.version import __version__


def test_python_blocks_print_what_they_show(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks are one program, in the order of the page."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    story = blocks_in(README.read_text(encoding="utf-8"))
    pairs = [pair for pair in itertools.pairwise(story) if pair[0].language == "python"]
    assert len(pairs) == 2

    for code, shown in pairs:
        exec(compile(code.text, str(README), "exec"), names)
        assert shown.language == "text"
        assert capsys.readouterr().out == shown.text

    assert (tmp_path / "demo-skipinit" / "model.safetensors").is_file()


@pytest.mark.slow
def test_shell_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lines = "\n".join(blocks("bash")).splitlines()
    lines = [line for line in lines if line.startswith("normswap ")]

    ran = 0
    for line in lines:
        words = shlex.split(line, comments=True)
        # These need images.
        if "path/to/images" in words or words[1] == "finetune":
            continue
        # A network of the same family, small and without weights.
        if "resnet50" in words:
            words[words.index("resnet50")] = "resnet18"
            words += ["--weights", "random", "--arch-arg", "channels=8,16,24,32"]
        if "--calibrate" in words:
            words += ["--samples", "40"]
        assert main(words[1:]) == 0, line
        ran += 1

    assert ran >= 6


@pytest.mark.long
def test_the_first_screen_prints_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each output stands under its command."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    before_python, _, _ = README.read_text(encoding="utf-8").partition("```python")
    first_screen = blocks_in(before_python)[1:]
    assert [block.language for block in first_screen] == ["bash", "text"] * 4

    for shell, shown in zip(first_screen[::2], first_screen[1::2], strict=True):
        (line,) = shell.lines()
        capfd.readouterr()
        assert main(shlex.split(line, comments=True)[1:]) == 0, line

        printed = iter(capfd.readouterr().out.splitlines())
        # Each line is looked for behind the last one, so the order is the same, too.
        assert [line for line in shown.text.splitlines() if line not in printed] == []


def test_setup_commands() -> None:
    assert command("demo") == "pip install -e . && normswap demo"
    assert command("tests") == "pip install -e '.[test]' && pytest -n 2 --dist worksteal"


@pytest.mark.parametrize("name", schemes.names())
def test_every_scheme_is_in_the_table(name: str) -> None:
    rows = [
        line.split("|")[1]
        for line in README.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    assert any(f"`{name}`" in first for first in rows)


def test_the_citation_has_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (README.parent / "CITATION.cff").read_text(
        encoding="utf-8"
    )
