"""A step of training in other people's programs; their own file comes back, by tensor.

The clients are those of tests/lab/benchmarks/clients.py, which writes clients.md.
"""

import json
from pathlib import Path

import pytest
import torch
from lab.benchmarks.clients import OTHERS, WRITERS, converted
from support import needs

import normswap
from normswap.cli.app import main

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CONVERSIONS = ("folded", "skipinit", "frozen-bn", "nf", "groupnorm")


def saved_network(scheme: str, client: str, folder: Path) -> Path:
    """Convert the network of a client that is installed, and return the directory."""
    package, _ = {**WRITERS, **OTHERS}[client]
    needs.package(package)
    return converted(client, scheme, folder)


@pytest.mark.parametrize("scheme", CONVERSIONS)
@pytest.mark.parametrize("client", WRITERS)
def test_what_a_client_wrote_comes_back(client: str, scheme: str, tmp_path: Path) -> None:
    saved = saved_network(scheme, client, tmp_path)

    _, writer = WRITERS[client]
    model, file = writer(saved, tmp_path)
    loaded = normswap.load(saved, weights=file)

    state = loaded.state_dict()
    wanted = model.state_dict()
    before = normswap.load(saved).state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    assert any(not torch.equal(state[name], before[name]) for name in wanted)


@pytest.mark.parametrize("scheme", CONVERSIONS)
@pytest.mark.parametrize("client", OTHERS)
def test_a_client_computes_what_comes_back(client: str, scheme: str, tmp_path: Path) -> None:
    saved = saved_network(scheme, client, tmp_path)

    _, compared = OTHERS[client]
    assert compared(saved, tmp_path) <= 1e-6


@pytest.mark.parametrize("client", WRITERS)
def test_commands_take_what_a_client_wrote(
    client: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    saved = saved_network("skipinit", client, tmp_path)
    _, writer = WRITERS[client]
    _, file = writer(saved, tmp_path)
    filled = [str(saved), "--weights", str(file)]
    # A detector answers with boxes, which have no agreement that could be kept.
    kept = ["--data", "demo", "--samples", "50", "--workers", "0", "--min-kept", "0.5"]
    asked = [] if client == "Ultralytics" else kept
    capfd.readouterr()

    assert main(["verify", *filled, *asked, "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["passed"]
    assert main(["export", *filled, "-o", str(tmp_path / "net.onnx")]) == 0
    assert (tmp_path / "net.onnx").is_file()
