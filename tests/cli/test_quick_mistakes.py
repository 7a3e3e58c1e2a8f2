"""Trivial mistakes are answered before torch is imported, in under a second of processor time."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import Capture, here

from normswap.cli.app import main

__all__ = ["here"]  # a fixture

MISTAKES = (
    ("verify nothere", "nothere does not exist"),
    ("verify demo", "demo is a source: it was not converted. normswap convert demo"),
    ("verify resnet50", "resnet50 is a source"),
    ("verify nothere.onnx --against demo", "nothere.onnx does not exist"),
    ("evaluate demo.onnx --data demo", "demo.onnx does not exist"),
    ("evaluate nothere --data demo", "unknown model 'nothere'"),
    ("evaluate demo --data nothere", "nothere does not exist"),
    ("inspect resnet5", "Did you mean resnet50"),
    ("inspect models/mine", "models/mine does not exist"),
    ("convert demo", "nothing says what to convert to"),
    ("convert demo --to foldd", "Did you mean folded?"),
    ("convert demo --to folded --for opacus --for federated", "--for opacus and --for federated"),
    ("convert demo --to groupnorm --samples 9", "--samples without --calibrate"),
    ("convert gone.pth --to folded", "gone.pth does not exist"),
    ("convert demo --to groupnorm --calibrate nothere", "nothere does not exist"),
    ("export demo -o file.xyz", "'.xyz'"),
    ("export demo", "For example: normswap export"),
    ("doctor nothere", "unknown model 'nothere'"),
    ("doctor demo --data nothere", "nothere does not exist"),
    ("recalibrate demo --data nothere", "nothere does not exist"),
    ("report nothere", "nothere does not exist"),
    ("push nothere me/net", "nothere does not exist"),
    ("finetune demo --recipe nope", "no recipe is called 'nope'"),
    ("finetune demo --recipe recover_unlabelled --data nothere", "nothere does not exist"),
    ("spp nothere", "unknown model 'nothere'"),
    ("sweep recover_unlabelled", "For example: --lr 0.05,0.1"),
)
# Runs each command line of stdin; prints exit code, seconds of processor time, and whether torch
# was imported.
RUN = """
import json, sys, time
from normswap.cli.app import main
for line in json.load(sys.stdin):
    begun = time.process_time()
    code = main(line.split())
    print(code, time.process_time() - begun, 'torch' in sys.modules, flush=True)
"""


def test_trivial_mistakes_take_under_a_second_of_processor_time(tmp_path: Path) -> None:
    lines = [line for line, _ in MISTAKES]

    ran = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
    )

    errors = ran.stderr.splitlines()
    measured = [line.split() for line in ran.stdout.splitlines()]
    assert len(errors) == len(measured) == len(MISTAKES), ran.stderr
    for (line, said), error, (code, seconds, imported) in zip(
        MISTAKES, errors, measured, strict=True
    ):
        assert said in error, line
        assert (code, imported) == ("2", "False"), line
        assert float(seconds) < 1.0, line


@pytest.mark.parametrize("words", [("convert", "demo", "--to", "foldd"), ("nothing",)])
def test_an_error_with_json_is_an_object_on_stdout(
    words: tuple[str, ...], here: Path, capfd: Capture
) -> None:
    assert main([*words, "--json"]) == 2

    printed = capfd.readouterr()
    assert printed.err == f"error: {json.loads(printed.out)['error']}\n"
