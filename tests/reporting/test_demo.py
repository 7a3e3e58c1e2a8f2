"""The demo: every figure agrees, it is quick, and it notices when something does not agree."""

import copy
import functools
import json
from pathlib import Path

import pytest
import torch
from support.command_line import as_documented
from torch import nn

from normswap import shipped
from normswap.cli.app import main
from normswap.cli.tables import plain
from normswap.plan import Body
from normswap.reporting import demo
from normswap.storage import checkpoint


@pytest.fixture(scope="module")
def result() -> Body:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "make_loader", functools.partial(demo.make_loader, samples=150))
        return demo.run()


def test_ships_what_it_promises() -> None:
    sizes = {file.name: file.stat().st_size for file in shipped.FOLDER.iterdir()}

    assert set(sizes) == {"config.json", "model.safetensors", "images.tar"}
    assert sizes["model.safetensors"] <= 3 << 20
    assert sizes["images.tar"] <= 1 << 20


def test_everything_agrees(result: Body) -> None:
    source, *others = result["rows"]
    assert result["passed"]
    assert result["images"] == 150
    assert source["network"] == "source"
    assert source["norms"] == sum(result["anatomy"]["norms"].values()) > 0
    assert [row["network"] for row in others] == list(demo.SCHEMES)

    for row in others:
        assert row["norms"] == 0
        assert row["top1"] == source["top1"]
        assert row["agreement"] == 1
        assert 0 < row["relative_l2"] <= 1e-5


def test_command(
    result: Body, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda say: result)
    assert main(["demo", "--json"]) == 0

    out, err = capfd.readouterr()
    assert err == ""
    assert as_documented(out, "demo") == json.loads(json.dumps(plain(result)))
    assert main(["demo"]) == 0

    out, err = capfd.readouterr()
    assert err == ""
    assert "every figure agrees" in out
    assert all(row["network"] in out for row in result["rows"])


def test_one_network_of_several_that_disagrees_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def converted(source: nn.Module, progress: object) -> dict[str, nn.Module]:
        damaged = copy.deepcopy(source)
        with torch.no_grad():
            damaged.get_parameter("layer1.0.conv1.weight").mul_(0.5)
        return {"damaged": damaged, "equal": copy.deepcopy(source)}

    monkeypatch.setattr(demo, "_converted", converted)
    monkeypatch.setattr(demo, "make_loader", functools.partial(demo.make_loader, samples=64))

    assert not demo.run()["passed"]


@pytest.mark.slow
def test_a_disagreement_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A checker must be seen to fail: one weight of every loaded network is off."""
    load = checkpoint.load

    def off(directory: Path) -> nn.Module:
        model = load(directory)
        with torch.no_grad():
            model.get_parameter("layer1.0.conv1.weight").mul_(0.5)
        return model

    monkeypatch.setattr(checkpoint, "load", off)
    monkeypatch.setattr(demo, "make_loader", functools.partial(demo.make_loader, samples=64))
    assert main(["demo"]) == 1
    assert "WRONG" in capfd.readouterr().out
