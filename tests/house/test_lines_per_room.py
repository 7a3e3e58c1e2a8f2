"""The tables at the end of CI: lines of each room beside an earlier commit's, and core seconds."""

import json
import subprocess
from pathlib import Path

import lines_per_room
import pytest


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree with one file of three lines in the room `cli`."""
    monkeypatch.setattr(lines_per_room, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    file = tmp_path / "normswap" / "cli" / "app.py"
    file.parent.mkdir(parents=True)
    file.write_text("a\nb\nc\n", encoding="utf-8")
    return tmp_path


def git(tree: Path, *words: str) -> None:
    author = ("-c", "user.name=nobody", "-c", "user.email=nobody@localhost")
    subprocess.run(["git", *author, *words], cwd=tree, check=True, capture_output=True)


def test_without_history_there_are_the_lines_of_today(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines_per_room.main([])

    title, whole, room = capsys.readouterr().out.splitlines()
    assert title == "Lines per room"
    assert whole.split() == ["normswap", "3"]
    assert room.split() == ["normswap/cli/", "3"]


def test_they_stand_beside_the_last_tag(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "one")
    git(tree, "tag", "v1")
    (tree / "normswap" / "cli" / "app.py").write_text("a\nb\nc\nd\n", encoding="utf-8")
    git(tree, "commit", "-a", "-m", "two")

    lines_per_room.main([])

    title, _, room = capsys.readouterr().out.splitlines()
    assert title == "Lines per room, beside v1"
    assert room.split() == ["normswap/cli/", "4", "3", "+1"]


def test_core_seconds_stand_below(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tree / "default.json"
    file.write_text(json.dumps({"rooms": {"cli": 3.0, "start": 1.5}}), encoding="utf-8")

    lines_per_room.main([str(file), str(tree / "missing.json")])

    *_, title, room, start, total = capsys.readouterr().out.splitlines()
    assert title.split() == ["Core", "seconds", "per", "room", "default"]
    assert room.split() == ["cli", "3.0"]
    assert start.split() == ["start", "1.5"]
    assert total.split() == ["in", "all", "4.5"]
