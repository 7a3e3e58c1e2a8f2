"""What is on the disk is whole, whatever happens when; files say what is done as timm does it."""

import itertools
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import save_file
from support.model_sources import small

from normswap import convert
from normswap.errors import LeftBehindNote, OutputError, SourceError
from normswap.models import weight_files
from normswap.storage import atomic_write, checkpoint, network_folder

NET = ("net.bin", "net.xml.json", "net.xml")


def write(version: str, aside: Path) -> None:
    assert aside.name == "net.xml", "a graph may name its weights' file"
    for name in NET:
        place = aside.with_name(name)
        place.touch(mode=0o600)
        place.write_text(f"{version} {name}", encoding="utf-8")


def export(folder: Path, version: str) -> None:
    with atomic_write.writing(folder / "net.xml", NET[:-1]) as aside:
        write(version, aside)


def usual_mode(file: Path) -> int:
    """The mode of a file that anybody makes here."""
    file.touch()
    return file.stat().st_mode


def versions(folder: Path) -> dict[str, str]:
    return {
        name: (folder / name).read_text(encoding="utf-8").split()[0]
        for name in NET
        if (folder / name).exists()
    }


def killed_in(monkeypatch: pytest.MonkeyPatch, at: int, work: Any) -> bool:
    """Whether a process of its own ends at the n-th renaming that it does for `work`."""
    renames = itertools.count()
    replace = os.replace

    def killed(source: Any, target: Any) -> None:
        if next(renames) == at:
            os._exit(9)
        replace(source, target)

    child = os.fork()
    if not child:
        monkeypatch.setattr(os, "replace", killed)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.one_in(3)
@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("at", range(7))
def test_a_process_killed_at_any_rename_leaves_no_mixture(
    at: int, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name is nothing, or what belongs together, whole; the next export replaces it."""
    if replaces:
        export(tmp_path, "old")
    died = killed_in(monkeypatch, at, lambda: export(tmp_path, "new"))
    assert died is (at < (6 if replaces else 3))
    names = versions(tmp_path)
    if "net.xml" in names:
        assert names == dict.fromkeys(NET, "new" if not died else "old")
    with pytest.warns(LeftBehindNote) if died else nullcontext():
        export(tmp_path, "next")
    assert versions(tmp_path) == dict.fromkeys(NET, "next")
    assert {(tmp_path / name).stat().st_mode for name in NET} == {usual_mode(tmp_path / "usual")}


@pytest.mark.parametrize("replaces", [False, True])
@pytest.mark.parametrize("at", range(6))
def test_where_a_file_cannot_come_the_old_ones_are_back(
    at: int, replaces: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if replaces:
        export(tmp_path, "old")
    renames = itertools.count()
    replace = os.replace

    def fails(source: Any, target: Any) -> None:
        if next(renames) == at:
            raise OSError(28, "No space left on device")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fails)
    if at >= 3 and not replaces:
        export(tmp_path, "new")
        return
    with pytest.raises(OutputError, match=r"cannot write .*net\.xml: No space left"):
        export(tmp_path, "new")
    assert versions(tmp_path) == (dict.fromkeys(NET, "old") if replaces else {})
    assert {path.name for path in tmp_path.iterdir()} == (set(NET) if replaces else set())


def package(folder: Path, version: str) -> None:
    with atomic_write.writing(folder / "net.pack", ("net.json",)) as aside:
        (aside / "weights").mkdir(parents=True)
        (aside / "weights" / "w").write_text(version, encoding="utf-8")
        (aside / "graph").write_text(version, encoding="utf-8")
        aside.with_name("net.json").write_text(version, encoding="utf-8")


def whole_version(folder: Path) -> str:
    (version,) = {
        (folder / "net.pack" / name).read_text(encoding="utf-8") for name in ("weights/w", "graph")
    }
    return version


@pytest.mark.parametrize("at", range(5))
def test_a_directory_is_replaced_whole_wherever_a_process_is_killed(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package(tmp_path, "old")
    died = killed_in(monkeypatch, at, lambda: package(tmp_path, "new"))
    assert died is (at < 4)
    if (tmp_path / "net.pack").exists():
        assert whole_version(tmp_path) == ("old" if died else "new")
    with pytest.warns(LeftBehindNote) if died else nullcontext():
        package(tmp_path, "next")
    assert (whole_version(tmp_path), (tmp_path / "net.json").read_text(encoding="utf-8")) == (
        "next",
        "next",
    )
    usual = tmp_path / "usual"
    usual.mkdir()
    assert (tmp_path / "net.pack").stat().st_mode == usual.stat().st_mode


def test_a_file_that_a_writer_forgot_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match=r"cannot write .*net\.xml: No such file"),
        atomic_write.writing(tmp_path / "net.xml", ("net.other",)) as aside,
    ):
        write("new", aside)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_force_replaces_no_folder_with_one_of_the_two_files(tmp_path: Path, name: str) -> None:
    """Somebody's folder may have a config.json, or a model.safetensors, and whatever else."""
    place = tmp_path / "mine"
    place.mkdir()
    (place / name).write_text("mine", encoding="utf-8")
    (place / "thesis.tex").write_text("years", encoding="utf-8")
    with pytest.raises(OutputError, match="not a model directory"):
        checkpoint.save(small(), place, force=True)
    assert sorted(path.name for path in place.iterdir()) == sorted([name, "thesis.tex"])
    assert (place / name).read_text(encoding="utf-8") == "mine"


def tree(folder: Path) -> dict[str, str]:
    """The text, or the target, of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path.relative_to(folder))] = path.read_text(
                errors="replace", encoding="utf-8"
            )
    return found


def test_force_replaces_the_files_of_a_network_and_nothing_that_lies_beside_them(
    tmp_path: Path,
) -> None:
    place = tmp_path / "mine"
    checkpoint.save(convert(small(), "skipinit"), place)
    assert (place / "norms.safetensors").is_file()
    (place / ".git" / "refs").mkdir(parents=True)
    (place / ".git" / "HEAD").write_text("ref: main", encoding="utf-8")
    (place / ".git" / "refs" / "main").write_text("ab12", encoding="utf-8")
    (place / "thesis.tex").write_text("years", encoding="utf-8")
    (place / "link").symlink_to("../elsewhere")
    own = {name: text for name, text in tree(place).items() if name not in network_folder.FILES}

    checkpoint.save(small(), place, force=True)

    written = {"model.safetensors", "config.json", "README.md"}
    assert {name: text for name, text in tree(place).items() if name not in written} == own
    assert not checkpoint.load(place, skeleton=small()).training


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    checkpoint.save(small(), place)
    (tmp_path / "notes.md").write_text("years", encoding="utf-8")
    (place / "README.md").unlink()
    (place / "README.md").symlink_to("../notes.md")

    checkpoint.save(small(), place, force=True)

    assert not (place / "README.md").is_symlink()
    assert (tmp_path / "notes.md").read_text(encoding="utf-8") == "years"


def test_force_replaces_no_package_that_holds_something_else(tmp_path: Path) -> None:
    package = tmp_path / "net.mlpackage"
    (package / "Data").mkdir(parents=True)
    (package / "Manifest.json").write_text("{}", encoding="utf-8")
    names = ("Manifest.json", "Data")
    atomic_write.check_writable(package, force=True, package_of=names)

    (package / ".git").mkdir()
    with pytest.raises(OutputError, match=r"net\.mlpackage holds \.git"):
        atomic_write.check_writable(package, force=True, package_of=names)


def test_no_thread_of_the_process_gets_another_umask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(mask: int) -> int:
        raise AssertionError("the umask is the whole process's")

    monkeypatch.setattr(os, "umask", forbidden)
    atomic_write.text(tmp_path / "file", "text")
    assert (tmp_path / "file").stat().st_mode == usual_mode(tmp_path / "usual")


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_label_offset_drops_the_first_classes(offset: int) -> None:
    """Weights from TensorFlow have a background class 0; timm's `load_pretrained` drops
    `label_offset` rows.
    """
    source: Any = timm.create_model("resnet18", num_classes=5 + offset, channels=(4, 4, 4, 4))
    model: Any = timm.create_model("resnet18", num_classes=5, channels=(4, 4, 4, 4))
    cfg = {
        "classifier": "fc",
        "num_classes": 5,
        "label_offset": offset,
        "input_size": (3, 224, 224),
    }
    weight_files.load_into(model, source.state_dict(), "file", cfg)
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.allclose(model.eval()(x), source.eval()(x)[:, offset:], atol=1e-6)


def test_what_exists_is_replaced_by_force_alone(tmp_path: Path) -> None:
    file = tmp_path / "there"
    file.write_text("before", encoding="utf-8")
    with pytest.raises(OutputError, match=r"exists.*force=True to replace it"):
        atomic_write.check_writable(file)
    atomic_write.check_writable(file, force=True)
    assert file.read_text(encoding="utf-8") == "before"


def test_a_header_that_is_no_record_is_one_line(tmp_path: Path) -> None:
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors", {"normswap": "[1]"})
    with pytest.raises(SourceError, match="the header cannot be read"):
        checkpoint.read_header(tmp_path)


def test_where_the_new_directory_cannot_come_the_old_one_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "out"
    rename = os.replace
    checkpoint.save(small(), place)
    before = {path.name: path.read_bytes() for path in place.iterdir()}

    def fails(source: Any, target: Any) -> None:
        if Path(target) == place / "config.json" and Path(source).parent.name != "old":
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OutputError, match="No space left"):
        checkpoint.save(convert(small(), "folded").model, place, force=True)
    assert {path.name: path.read_bytes() for path in place.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_another_process_wrote_meanwhile_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not there when the work began."""
    place = tmp_path / "out"
    model = small()
    check = network_folder.check_writable
    checkpoint.save(model, place)
    asked: list[Path] = []

    def not_yet(place: Path, *, force: bool) -> None:
        asked.append(place)
        if len(asked) > 1:
            check(place, force=force)

    monkeypatch.setattr(network_folder, "check_writable", not_yet)
    with pytest.raises(OutputError, match="exists"):
        checkpoint.save(model, place)
