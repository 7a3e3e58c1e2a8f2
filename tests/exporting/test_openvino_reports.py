"""OpenVINO and NNCF send reports of their use. Where normswap imports them, they do not."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Stands for the package that sends: it notes that it was imported, and what it would send.
_REPORTER = """
from pathlib import Path
import sys

sent = Path(__file__).with_name("sent.txt")


class Telemetry:
    def __init__(self, *args, **kwargs):
        pass

    def send_event(self, *args, **kwargs):
        sent.open("a").write(f"{args} {kwargs}\\n")

    start_session = end_session = force_shutdown = send_event
    send_error = send_stack_trace = send_event
"""
_PROGRAM = """
import sys, torch, normswap
from torch import nn
if "--first" in sys.argv:
    import openvino
layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(1568, 4)
net = nn.Sequential(*layers).eval()
images = [torch.randn(8, 3, 16, 16)]
normswap.export(net, "net.xml", images=images, input_size=(3, 16, 16))
more = {"dtype": "int8", "calibrate": images}
normswap.export(net, "int8.xml", images=images, input_size=(3, 16, 16), **more)
"""


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_nothing_is_sent(tmp_path: Path, first: bool) -> None:
    """If the user has imported OpenVINO before, that import reports as it does without normswap."""
    package = tmp_path / "openvino_telemetry"
    (package / "backend").mkdir(parents=True)
    (package / "__init__.py").write_text(_REPORTER, encoding="utf-8")
    (package / "backend" / "__init__.py").write_text("backend_ga4 = None\n", encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if name != "NNCF_CI"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), *sys.path])

    finished = subprocess.run(
        [sys.executable, "-c", _PROGRAM, *(["--first"] if first else [])],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert not finished.returncode, finished.stderr
    assert (tmp_path / "int8.xml").is_file()
    assert (package / "sent.txt").is_file() == first
