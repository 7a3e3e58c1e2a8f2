"""What a killed process left is put back, or named with the command that removes it."""

import os
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from normswap.cli.app import main
from normswap.errors import LeftBehindNote, OutputError, SourceError
from normswap.storage import atomic_write, left_behind, network_folder

NET = ("net.bin", "net.xml.json", "net.xml")


def export(folder: Path, version: str, names: tuple[str, ...] = NET) -> None:
    with atomic_write.writing(folder / names[-1], names[:-1]) as aside:
        for name in names:
            aside.with_name(name).write_text(f"{version} {name}", encoding="utf-8")


def killed_at(renaming: int, work: Callable[[], None]) -> bool:
    """Whether a process of its own dies before that renaming in `work`."""
    child = os.fork()
    if not child:
        rename = os.replace
        done = []

        def replace(source: Any, target: Any) -> None:
            if len(done) == renaming:
                os._exit(9)
            done.append(source)
            rename(source, target)

        os.replace = replace
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@contextmanager
def notes() -> Iterator[list[str]]:
    """What the user is told."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(each.message) for each in caught if each.category is LeftBehindNote]


def found(folder: Path) -> dict[str, str]:
    return {
        path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()
    }


def hidden(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith(".")]


def old_files() -> dict[str, str]:
    return {name: f"old {name}" for name in NET}


@pytest.mark.parametrize("renaming", range(6))
def test_the_next_run_puts_the_old_files_back_and_names_the_rest(
    renaming: int, tmp_path: Path
) -> None:
    export(tmp_path, "old")
    assert killed_at(renaming, lambda: export(tmp_path, "new"))
    (left,) = hidden(tmp_path)

    with notes() as told:
        atomic_write.check_writable(tmp_path / "net.xml", force=True)

    assert found(tmp_path) == old_files()
    assert any("was put back" in note for note in told) is (renaming > 0)
    (command,) = [note.partition("To remove it: ")[2] for note in told if "remove" in note]
    subprocess.run(shlex.split(command), check=True)
    assert not left.exists()
    assert found(tmp_path) == old_files()


def test_a_new_file_that_had_no_old_one_does_not_stay_beside_the_old_files(tmp_path: Path) -> None:
    export(tmp_path, "old", ("net.bin", "net.xml"))
    assert killed_at(4, lambda: export(tmp_path, "new"))
    assert "net.xml.json" in found(tmp_path)

    with notes():
        left_behind.put_back(tmp_path / "net.xml")

    assert found(tmp_path) == {name: f"old {name}" for name in ("net.bin", "net.xml")}


def test_what_was_written_whole_stays_and_the_old_files_are_named(tmp_path: Path) -> None:
    export(tmp_path, "old")

    def dies_before_it_cleans() -> None:
        shutil.rmtree = lambda *_, **__: os._exit(9)
        export(tmp_path, "new")

    assert killed_at(99, dies_before_it_cleans)
    with notes() as told:
        left_behind.put_back(tmp_path / "net.xml")

    assert found(tmp_path) == {name: f"new {name}" for name in NET}
    (note,) = told
    assert str(hidden(tmp_path)[0]) in note


def test_a_file_that_is_there_by_now_is_not_replaced(tmp_path: Path) -> None:
    export(tmp_path, "old")
    assert killed_at(3, lambda: export(tmp_path, "new"))
    (tmp_path / "net.bin").write_text("somebody's", encoding="utf-8")

    with notes() as told:
        left_behind.put_back(tmp_path / "net.xml")

    assert found(tmp_path) == {"net.bin": "somebody's"}
    (note,) = told
    assert "net.bin is there" in note
    assert "mv -n" in note


@pytest.mark.parametrize("name", ["old", "old_"])
def test_a_file_may_have_the_name_of_the_folder_for_old_ones(name: str, tmp_path: Path) -> None:
    for version in ("first", "second"):
        with atomic_write.writing(tmp_path / name, ("old__",)) as aside:
            aside.mkdir()
            (aside / "version").write_text(version, encoding="utf-8")
            aside.with_name("old__").write_text(version, encoding="utf-8")
    assert (tmp_path / name / "version").read_text(encoding="utf-8") == "second"
    assert hidden(tmp_path) == []


def test_an_old_file_called_old_is_put_back_like_any_other(tmp_path: Path) -> None:
    names = ("old", "net.xml")
    export(tmp_path, "first", names)
    assert killed_at(2, lambda: export(tmp_path, "second", names))
    assert found(tmp_path) == {}

    with notes():
        left_behind.put_back(tmp_path / "net.xml")

    assert found(tmp_path) == {name: f"first {name}" for name in names}


def test_the_command_that_puts_back_does_so(tmp_path: Path) -> None:
    export(tmp_path, "old")
    assert killed_at(3, lambda: export(tmp_path, "new"))

    with pytest.raises(SourceError, match="To put it back") as caught:
        left_behind.check_not_moved_aside(tmp_path / "net.xml")
    command = caught.value.remedy.partition(": ")[2]
    subprocess.run(command, shell=True, check=True)

    assert found(tmp_path) == old_files()
    left_behind.check_not_moved_aside(tmp_path / "net.xml")


def test_a_process_that_still_writes_is_left_alone(tmp_path: Path) -> None:
    ready, write = os.pipe()
    go, proceed = os.pipe()
    child = os.fork()
    if not child:
        with atomic_write.writing(tmp_path / "file") as aside:
            aside.write_text("new", encoding="utf-8")
            os.write(write, b".")
            os.read(go, 1)
        os._exit(0)
    os.read(ready, 1)

    try:
        with notes() as told:
            left_behind.put_back(tmp_path / "file", removes=True)
            atomic_write.check_writable(tmp_path / "file")
    finally:
        os.write(proceed, b".")

    assert told == []
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert found(tmp_path) == {"file": "new"}
    assert hidden(tmp_path) == []


def test_the_folder_of_another_user_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether that user's process still writes cannot be asked: its lock may not be opened."""
    export(tmp_path, "old")
    assert killed_at(0, lambda: export(tmp_path, "new"))
    ours = os.open

    def of_another(path: Any, *how: Any, **more: Any) -> int:
        if Path(path).name == ".normswap":
            raise PermissionError(13, "Permission denied")
        return ours(path, *how, **more)

    monkeypatch.setattr(os, "open", of_another)
    with notes() as told:
        left_behind.put_back(tmp_path / "net.xml")

    assert not told
    assert len(hidden(tmp_path)) == 1


def test_this_process_does_not_take_itself_for_a_killed_one(tmp_path: Path) -> None:
    with notes() as told, atomic_write.writing(tmp_path / "file") as aside:
        left_behind.put_back(tmp_path / "file", removes=True)
        aside.write_text("new", encoding="utf-8")
    assert told == []
    assert found(tmp_path) == {"file": "new"}


def test_a_temporary_folder_of_a_killed_process_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "normswap-demo-mine").mkdir()
    child = os.fork()
    if not child:
        with left_behind.temporary_folder("normswap-demo-"):
            os._exit(9)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 2

    with (
        notes() as told,
        left_behind.temporary_folder("normswap-demo-") as first,
        left_behind.temporary_folder("normswap-demo-") as second,
    ):
        assert first.is_dir()
        assert first != second

    assert [path.name for path in tmp_path.iterdir()] == ["normswap-demo-mine"]
    assert len(told) == 1


@pytest.mark.parametrize(
    "name",
    [
        ".net.abcdefgh/notes.txt",
        ".net.abcdefgh/net.xml",
        ".net.abcdefgh/old",
        ".net.abc/net.xml",
        ".net.abcdefghi/net.xml",
        ".nets/old",
    ],
)
def test_somebody_elses_folder_is_no_left_one(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("somebody's", encoding="utf-8")
    with notes() as told:
        left_behind.put_back(tmp_path / "net.xml", removes=True)
    assert told == []
    assert (tmp_path / name).read_text(encoding="utf-8") == "somebody's"


def test_a_folder_that_cannot_be_emptied_says_whose_it_is_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path, "old")
    assert killed_at(0, lambda: export(tmp_path, "new"))
    with monkeypatch.context() as patched, notes():
        patched.setattr(Path, "unlink", lambda _: os.listdir(tmp_path / "nowhere"))
        left_behind.put_back(tmp_path / "net.xml", removes=True)
    assert len(hidden(tmp_path)) == 1

    with notes():
        left_behind.put_back(tmp_path / "net.xml", removes=True)

    assert hidden(tmp_path) == []
    assert found(tmp_path) == old_files()


@pytest.mark.parametrize("names", ['["..", "precious", "net.xml"]', '["a/b", 3, "net.xml"]', "{}"])
def test_a_forged_folder_moves_nothing_of_others(names: str, tmp_path: Path) -> None:
    folder = tmp_path / ".net.abcdefgh"
    (folder / "old").mkdir(parents=True)
    (folder / ".normswap").write_text(names, encoding="utf-8")
    (folder / "old" / "precious").write_text("forged", encoding="utf-8")
    (folder / "old" / "net.xml").write_text("forged", encoding="utf-8")
    (tmp_path / "kept").write_text("mine", encoding="utf-8")

    with notes():
        left_behind.put_back(tmp_path / "net.xml")

    assert (tmp_path / "kept").read_text(encoding="utf-8") == "mine"


def test_an_interrupt_between_two_renames_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export(tmp_path, "old")
    rename = os.replace
    done: list[object] = []

    def interrupted(source: Any, target: Any) -> None:
        done.append(source)
        if len(done) == 4:
            raise KeyboardInterrupt
        rename(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path, "new")
    assert found(tmp_path) == old_files()
    assert hidden(tmp_path) == []


def test_a_killed_exchange_inside_a_networks_directory(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    for name in network_folder.FILES:
        (place / name).write_text(f"old {name}", encoding="utf-8")
    names = (*network_folder.FILES[1:], network_folder.WEIGHTS)
    assert killed_at(5, lambda: export(place, "new", names))
    with pytest.raises(SourceError, match="To put it back"):
        network_folder.check_not_moved_aside(place)

    with notes() as told:
        network_folder.check_writable(place, force=True)

    assert found(place) == {name: f"old {name}" for name in network_folder.FILES}
    assert len(told) == 2
    with pytest.raises(OutputError, match="exists"), notes():
        network_folder.check_writable(place, force=False)


@pytest.mark.slow
def test_the_command_line_says_what_a_killed_run_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once, with the command; and a network that was moved aside is no unknown one."""
    monkeypatch.chdir(tmp_path)
    convert = ["convert", "demo", "--to", "folded", "-o", "net"]
    assert main(convert) == 0
    half = tmp_path / ".net.abcdefgh"
    (half / "old").mkdir(parents=True)
    (half / ".normswap").write_text('["net"]', encoding="utf-8")
    (tmp_path / "net").rename(half / "old" / "net")
    capsys.readouterr()

    assert main(["inspect", "net"]) == 2
    assert "To put it back: mv -n .net.abcdefgh/old/* ./" in capsys.readouterr().err

    assert main([*convert, "--force", "--json"]) == 0
    told = capsys.readouterr().err.splitlines()
    assert told == [
        "note: net was put back: a run that replaced it was killed",
        "note: a run that was killed left .net.abcdefgh behind. To remove it: rm -r .net.abcdefgh",
    ]
