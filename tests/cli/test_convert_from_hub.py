"""The main job as a newcomer does it: `normswap convert resnet18 --to skipinit`, weights from a hub."""

from pathlib import Path

import pytest
import timm
import torch
from hub_server import hub_server, use_hub
from safetensors.torch import save_file
from torch import nn

from normswap import provenance
from normswap.cli.app import main
from normswap.storage import checkpoint


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, Path]]:
    """A full-size resnet18, and the repository it can be had from."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", zero_init_last=False).eval()
    folder = tmp_path_factory.mktemp("hub") / "resnet18"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "resnet18"}')
    return model, {"timm/resnet18.a1_in1k": folder}


def test_downloads_converts_and_verifies(
    trained: tuple[nn.Module, dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    source, repos = trained
    monkeypatch.chdir(tmp_path)
    with hub_server(repos) as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        assert main(["convert", "resnet18", "--to", "skipinit", "-o", "out"]) == 0
        assert "kept exactly" in capsys.readouterr().out
        assert main(["verify", "out"]) == 0  # the source again, by its recorded name
    result = checkpoint.load("out")
    record = provenance.of(result)
    assert record is not None
    assert record.source == "resnet18.a1_in1k"
    x = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        a, b = source(x).double(), result(x).double()
    assert (a - b).norm() <= 1e-5 * a.norm()
    assert not any(isinstance(module, nn.BatchNorm2d) for module in result.modules())


@pytest.mark.parametrize(("mode", "says"), [("404", "resnet18"), ("500", "500")])
def test_a_failing_hub_leaves_nothing(
    trained: tuple[nn.Module, dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with hub_server(trained[1], mode=mode) as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        assert main(["convert", "resnet18", "--to", "skipinit", "-o", "out"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.strip().splitlines()
    assert line.startswith("error:")
    assert says in line
    assert "Traceback" not in captured.err
    assert not (tmp_path / "out").exists()
