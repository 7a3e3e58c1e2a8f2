"""The script for a GPU runs: on the CPU with tiny sizes."""

import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.long
def test_every_part_ends_well_in_a_dry_run(tmp_path: Path) -> None:
    run = subprocess.run(
        [HERE / "run.sh", tmp_path, "--dry"], capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout

    for part in (
        "calibration",
        "group_norms",
        "exact_speed",
        "speed",
        "schemes",
        "training",
        "clipping",
    ):
        rows = [
            line
            for line in (tmp_path / f"{part}.md").read_text(encoding="utf-8").splitlines()
            if line.startswith("| ")
        ]
        assert len(rows) > 1, part
        assert not any(re.search(r"\b(nan|inf)\b|Error", row) for row in rows), part
