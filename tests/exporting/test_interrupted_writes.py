"""A full disk, whatever the format: one line, and nothing is left."""

import subprocess
import sys
from pathlib import Path

import pytest
from alone import skip_without

from normswap import demo_files

FILES = {
    "onnx": "net.onnx", "openvino": "net.xml", "pt2": "net.pt2",
    "ncnn": "net.param", "executorch": "net.pte", "litert": "net.tflite", "coreml": "net.mlpackage",
}  # fmt: skip


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
