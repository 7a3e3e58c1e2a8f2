"""A file whose runtime this system has not: the folded network is proven instead, and no file is
called verified.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import normswap
from normswap.cli.app import main
from normswap.errors import OptionError, OutputError, SourceError
from normswap.exporting import checks, exported_file, formats
from normswap.exporting.exported_file import ExportedFile
from normswap.exporting.settings import FileSettings
from normswap.models import kinds


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """pt2's runtime is on another system."""
    monkeypatch.setitem(formats._FORMATS, "pt2", replace(formats._FORMATS["pt2"], system="another"))


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("given", [True, False])
def test_the_folded_network_is_proven_in_its_place(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    check = checks.check

    def seen(*args: Any, **options: Any) -> Any:
        calls.append((options["what"], check(*args, **options).count))

    monkeypatch.setattr(checks, "check", seen)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).eval()
    images = torch.randn(5, 3, 8, 8) if given else None
    done = normswap.export(model, tmp_path / "a.pt2", input_size=(3, 8, 8), images=images)
    assert (done.figures, done.noise_only) == (None, not given)
    assert calls == [("the folded network", 5 if given else 16)]
    assert json.loads(done.sidecar.read_text(encoding="utf-8"))["checked"] == "not run here"
    exported = ExportedFile.find(str(done.file))
    assert exported is not None
    for run in (exported.network, lambda: exported_file.verify(exported, model)):
        with pytest.raises(OptionError, match="does not run here: pt2 has no runtime on"):
            run()


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_the_command_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "a.pt2"
    assert main(["export", "demo", "-o", str(file)]) == 0
    said = capsys.readouterr().out
    assert "not run here: this system has no such runtime; the folded network passed" in " ".join(
        said.split()
    )
    assert not [word for word in ("relative L2", "same answer", "evaluate") if word in said]
    assert main(["inspect", str(file)]) == 0
    assert "checked    not run here" in capsys.readouterr().out


def package(place: Path) -> Path:
    place.mkdir()
    (place / "Manifest.json").write_text("{}", encoding="utf-8")
    (place / "Data").mkdir()
    (place / "Data" / "weights").write_text("12345", encoding="utf-8")
    return place


def test_a_directory_that_is_an_exported_file(tmp_path: Path) -> None:
    place = package(tmp_path / "net.mlpackage")
    assert kinds.exported(place)
    assert not kinds.exported(package(tmp_path / "net.onnx"))
    (tmp_path / "file.mlpackage").touch()
    assert not kinds.exported(tmp_path / "file.mlpackage")
    assert formats.get("pt2").size(place) == 7
    with pytest.raises(SourceError, match="is an exported file"):
        kinds.parts(str(place), "pretrained", None)
    assert main(["bench", str(place)]) == 2


def test_force_replaces_a_package_and_no_other_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "require_packages", lambda *_: None)
    place = package(tmp_path / "net.mlpackage")
    mine = tmp_path / "mine.mlpackage"
    mine.mkdir()
    formats.check(place, FileSettings(force=True))

    with pytest.raises(OutputError, match="exists"):
        formats.check(place, FileSettings())
    with pytest.raises(OutputError, match=r"mine\.mlpackage has no Manifest\.json"):
        formats.check(mine, FileSettings(force=True))
    with pytest.raises(OutputError, match="is a directory"):
        formats.check(package(tmp_path / "net.onnx"), FileSettings(force=True))
