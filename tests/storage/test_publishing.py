"""`normswap push`, and what was pushed as a MODEL: against a hub on this machine that speaks the hub's protocol."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import timm
import torch
from commands import as_documented
from hub_server import hub_server, use_hub
from lived import lived_in
from torch import nn

import normswap
from normswap.cli.app import main
from normswap.storage import checkpoint, model_card, publishing

ARGS = {"num_classes": 4, "channels": (64, 64, 64, 64)}


@pytest.fixture
def source() -> nn.Module:
    torch.manual_seed(0)
    model = checkpoint.open_model("resnet18", weights="random", arch_args=ARGS)  # older timm remembers no arguments
    return lived_in(model, torch.randn(8, 3, 64, 64)).float().eval()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """The repositories of a hub that takes everything, by name."""
    repos: dict[str, Path] = {}
    monkeypatch.chdir(tmp_path)
    with hub_server(repos, store=tmp_path / "store") as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        yield repos


def outputs(model: nn.Module) -> torch.Tensor:
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(x)


def test_there_and_back(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = normswap.convert(source, to="skipinit")
    normswap.save(done, tmp_path / "out")
    (tmp_path / "out" / "private-notes.txt").write_text("stays here")
    assert main(["push", "out", "me/small", "--json"]) == 0
    said = as_documented(capsys.readouterr().out, "push")
    assert not said["alone"]
    assert sorted(path.name for path in hub["me/small"].iterdir()) == sorted(said["files"]) == [
        "README.md", "config.json", "model.safetensors", "norms.safetensors"]  # fmt: skip
    card = (hub["me/small"] / "README.md").read_text()
    assert 'normswap.load(snapshot_download("me/small"))' in card
    assert "library_name: normswap" in card
    again = checkpoint.open_model("hf-hub:me/small")
    assert torch.equal(outputs(again), outputs(done.model))
    assert main(["convert", "hf-hub:me/small", "--to", "unfold", "-o", "bn"]) == 0
    torch.testing.assert_close(outputs(checkpoint.load("bn")), outputs(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("to", "options"),
    [("unfold", {}), ("groupnorm", {"groups": 32, "relative_eps": 0}), ("groupnorm", {"relative_eps": 0})],
)
def test_what_timm_builds_timm_loads(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path, to: str, options: dict[str, int]
) -> None:
    before = normswap.convert(source, to="folded").model if to == "unfold" else source
    done = normswap.convert(before, to=to, **options)
    normswap.save(done, tmp_path / "out")
    assert main(["push", "out", "me/plain"]) == 0
    model = timm.create_model("hf-hub:me/plain", pretrained=True).eval()
    torch.testing.assert_close(outputs(model), outputs(done.model))
    card = (hub["me/plain"] / "README.md").read_text()
    assert 'timm.create_model("hf-hub:me/plain", pretrained=True)' in card
    assert "library_name: timm" in card
    assert torch.equal(outputs(checkpoint.open_model("hf-hub:me/plain")), outputs(done.model))


def test_a_repository_that_is_there_gets_the_next_version(source: nn.Module, hub: dict[str, Path]) -> None:
    for to in ("folded", "skipinit"):
        normswap.save(normswap.convert(source, to=to), to)
        assert main(["push", to, "me/small"]) == 0
    assert (hub["me/small"] / "model.safetensors").read_bytes() == Path("skipinit/model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("mode", "repo", "says"),
    [
        ("read-only", "me/small", "a token that may write"),
        ("no-token", "me/small", "a token that may write"),
        ("500", "me/small", "answers 500"),
        ("ok", "a b/c", "not a name on the hub"),
        ("ok", "a/b/c", "'a/b/c' is not a name on the hub. Write it as owner/name"),
        ("ok", "demo", "'demo' is not a name on the hub. Write it as owner/name"),
    ],
)
def test_what_the_hub_does_not_take_is_one_line(
    source: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    mode: str,
    repo: str,
    says: str,
) -> None:
    normswap.save(normswap.convert(source, to="folded"), tmp_path / "out")
    with hub_server({}, mode=mode, store=tmp_path / "store") as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        assert main(["push", str(tmp_path / "out"), repo]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


def test_a_damaged_directory_is_not_pushed(source: nn.Module, hub: dict[str, Path], tmp_path: Path) -> None:
    normswap.save(normswap.convert(source, to="folded"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 0x10
    file.write_bytes(content)
    assert main(["push", "out", "me/small"]) == 2
    assert not hub


def test_nobody_knows_what_builds_a_network_of_ones_own() -> None:
    assert publishing._arguments(nn.Linear(2, 2), None) is None


@pytest.mark.parametrize(("alone", "library"), [(True, "timm"), (False, "normswap")])
def test_the_card_imports_what_loads_the_network(*, alone: bool, library: str) -> None:
    card = 'library_name: timm\nimport normswap\nmodel = normswap.load("path/to/this/directory")\n'
    lines = model_card.published(card, "me/net", alone=alone).splitlines()
    assert [line for line in lines if line.startswith("import")] == [f"import {library}"]
    assert ("from huggingface_hub import snapshot_download" in lines) is not alone
    assert f"library_name: {library}" in lines
