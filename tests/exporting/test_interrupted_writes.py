"""A process killed at any write of a file that replaces another, and a full disk: old files or new, no mixture."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alone import skip_without
from torch import nn

import normswap
from normswap import demo_files
from normswap.exporting.exported_file import ExportedFile

FILES = {
    "onnx": "net.onnx", "openvino": "net.xml", "pt2": "net.pt2",
    "ncnn": "net.param", "executorch": "net.pte", "litert": "net.tflite", "coreml": "net.mlpackage",
}  # fmt: skip
SIZES = (8, 9)  # of the images of the old file, and of the new


def content(folder: Path) -> dict[str, bytes]:
    """All files but those in temporary directories."""
    files = (one for one in folder.rglob("*") if one.is_file())
    inside = {str(one.relative_to(folder)): one.read_bytes() for one in files}
    return {name: held for name, held in inside.items() if not name.startswith(".")}


def exported(form: str, folder: Path, size: int) -> dict[str, bytes]:
    """A random network for images of this size, and what lies there then."""
    folder.mkdir(exist_ok=True)
    model = nn.Conv2d(3, 4, 3).eval()
    normswap.export(model, folder / FILES[form], format=form, input_size=(3, size, size), force=True)
    return content(folder)


def in_another_process(work: Callable[[], object]) -> int:
    """What it ends with: 0 when the work was done."""
    child = os.fork()
    if not child:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at(write: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End this process at the n-th of the calls that write or rename."""
    left = itertools.count(write, -1)

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def writes(*args: Any, **options: Any) -> Any:
            if next(left) == 0:
                os._exit(9)
            return call(*args, **options)

        return writes

    for owner, name in ((os, "replace"), (shutil, "copyfile"), (Path, "write_bytes"), (Path, "write_text")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:os.fork:RuntimeWarning"
)  # JAX's, which LiteRT's writer brings: the child needs no JAX
@pytest.mark.parametrize("form", FILES)
def test_a_process_killed_at_any_write(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip_without(form)
    torch.manual_seed(0)
    before, whole = (exported(form, tmp_path / f"{size}", size) for size in SIZES)
    alike = before.items() & whole.items()  # a package's list of its files
    seen = []

    def replace() -> None:
        kill_at(write, monkeypatch)
        exported(form, place, SIZES[1])

    for write in range(20):
        place = tmp_path / f"at {write}"
        shutil.copytree(tmp_path / f"{SIZES[0]}", place)
        code = in_another_process(replace)
        if (place / FILES[form]).exists():
            assert content(place).keys() == before.keys()
            files = content(place).items() - alike
            assert files <= before.items() or not files & before.items(), "some are old, some are new"
        found = ExportedFile.find(str(place / FILES[form]))
        if found is None:  # killed between two renames: nothing that was there is lost
            assert code == 9
            assert {*before.values()} <= {path.read_bytes() for path in place.rglob("*") if path.is_file()}
            continue
        files = content(place).items() - alike
        assert dict(files).keys() | dict(alike).keys() == before.keys()
        assert files <= before.items() or not files & before.items()
        seen.append(SIZES.index(found.body["input"]["size"][1]))
        assert bool(files & before.items()) is not bool(seen[-1])
        assert json.loads(found.metadata["preprocess"])["input"] == found.body["input"]
        if code == 0:
            break
        assert code == 9
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, 1)


@pytest.mark.slow
@pytest.mark.parametrize("form", FILES)
def test_a_full_disk_is_said_in_a_line(form: str, tmp_path: Path) -> None:
    """A file may not grow large; torch's own writers end the process then, so that it takes one of its own to see."""
    skip_without(form)
    file = FILES[form]
    program = "import resource, sys; from normswap.cli.app import main\n"
    program += "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000)); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "export", str(demo_files.FOLDER), "-o", file, "--format", form]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert f"cannot write {file}: " in done.stderr
    assert list(tmp_path.iterdir()) == []
