"""The hub: downloads through the real client from a local server, and every way it can fail."""

from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
import timm
import torch
from safetensors.torch import save_file
from support.hub_server import hub_server, use_hub
from support.model_sources import origin, small, write_folder
from torch import nn

from normswap import provenance
from normswap.cli.app import main
from normswap.errors import SourceError
from normswap.models import hub
from normswap.models.zoo import open_source
from normswap.storage import checkpoint


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hub with timm's resnet18 (random values), a small network of someone's, and a repository
    without weights.
    """
    root = tmp_path_factory.mktemp("hub")
    full = timm.create_model("resnet18").state_dict()
    write_folder(root / "full", full, num_classes=1000, model_args={})
    write_folder(root / "small", small().state_dict())
    write_folder(root / "bare", {})
    (root / "bare" / "model.safetensors").unlink()

    return {
        "timm/resnet18.a1_in1k": root / "full",
        "some/small": root / "small",
        "some/bare": root / "bare",
    }


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses between the client's attempts, and no socket left open."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    yield
    getattr(huggingface_hub, "close_session", lambda: None)()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("source", ["resnet18", "hf-hub:some/small", "hf_hub:some/small@main"])
def test_hub(
    repos: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
    source: str,
) -> None:
    with hub_server(repos) as url:
        use_hub(monkeypatch, url, tmp_path)
        model = open_source(source)

    folder = repos["timm/resnet18.a1_in1k" if source == "resnet18" else "some/small"]

    assert origin(model).sha256 == origin(open_source(str(folder))).sha256
    assert origin(model).source == {"resnet18": "resnet18.a1_in1k"}.get(
        source, source.replace("hf_hub", "hf-hub")
    )

    again = open_source(source)  # the server is gone: from the cache
    assert origin(again) == origin(model)


@pytest.mark.parametrize(
    ("mode", "source", "said"),
    [
        ("404", "resnet18", "timm/resnet18.a1_in1k cannot be had"),
        ("plain-404", "resnet18", "timm/resnet18.a1_in1k cannot be had"),
        ("404", "hf-hub:some/small", "some/small cannot be had"),
        ("ok", "hf-hub:some/bare", "has no model.safetensors or pytorch_model.bin"),
        ("ok", "hf-hub:some/small@v9", "some/small cannot be had"),
        ("ok", "hf-hub:a b", "'a b' is not a hub repository"),
        ("500", "resnet18", "answers 500"),
        ("stall", "hf-hub:some/small", "the transfer of model.safetensors"),
        (
            "garbage",
            "hf-hub:some/small",
            "model.safetensors of hub repository some/small is damaged",
        ),
    ],
)
@pytest.mark.one_in(3)
def test_hub_fails(
    repos: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
    mode: str,
    source: str,
    said: str,
) -> None:
    with hub_server(repos, mode) as url:
        use_hub(monkeypatch, url, tmp_path)
        with pytest.raises(SourceError) as caught:
            open_source(source)

    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_damaged_download_does_not_stay_in_the_cache(
    repos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    with hub_server(repos, "garbage") as url:
        use_hub(monkeypatch, url, tmp_path)
        with pytest.raises(SourceError, match="damaged"):
            open_source("hf-hub:some/small")

    with hub_server(repos) as url:
        use_hub(monkeypatch, url, tmp_path)
        model = open_source("hf-hub:some/small")

    assert origin(model).sha256 == origin(open_source(str(repos["some/small"]))).sha256


@pytest.mark.parametrize("online", [True, False])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_cached_file_that_was_damaged_is_removed(
    repos: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick: None,
    online: bool,
    name: str,
) -> None:
    with hub_server(repos) as url:
        use_hub(monkeypatch, url, tmp_path)
        open_source("hf-hub:some/small")
        (cached,) = tmp_path.rglob(f"snapshots/*/{name}")
        cached.resolve().write_bytes(bytes(cached.stat().st_size))
        if online:
            with pytest.raises(SourceError, match=f"{name} of .* is damaged"):
                open_source("hf-hub:some/small")
            open_source("hf-hub:some/small")
    if not online:
        with pytest.raises(SourceError, match=f"{name} of .* is damaged"):
            open_source("hf-hub:some/small")
        assert not cached.is_symlink()


def test_a_name_in_a_repository_that_a_terminal_would_obey_is_refused(
    repos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    with hub_server(repos, seen=seen) as url:
        use_hub(monkeypatch, url, tmp_path)
        with pytest.raises(SourceError, match="is no name"):
            hub.fetch("some/small", ["\x1b]0;title\x07.safetensors"])

    assert seen == []


@pytest.mark.parametrize(
    "config", [b"", b"not JSON", b'"normswap"', b"null", b"\xff\xfe{", b'{"normswap": 3}']
)
@pytest.mark.one_in(2)
def test_a_config_that_nobody_can_read_is_said_in_a_line(
    config: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    """Of a MODEL that normswap might have pushed."""
    write_folder(tmp_path / "odd", small().state_dict())
    (tmp_path / "odd" / "config.json").write_bytes(config)
    with hub_server({"some/odd": tmp_path / "odd"}) as url:
        use_hub(monkeypatch, url, tmp_path / "home")
        with pytest.raises(SourceError) as caught:
            checkpoint.open_model("hf-hub:some/odd")

    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["resnet18", "hf-hub:some/small"])
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, source: str) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)

    with pytest.raises(SourceError) as caught:
        open_source(source)
    assert all(
        way in str(caught.value)
        for way in ('weights="random"', "local-dir:", "arch=", "HF_ENDPOINT")
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, dict[str, Path]]:
    """A full-size resnet18, and the repository it can be had from."""
    torch.manual_seed(0)
    model = timm.create_model("resnet18", zero_init_last=False).eval()
    folder = tmp_path_factory.mktemp("hub") / "resnet18"
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text('{"architecture": "resnet18"}', encoding="utf-8")
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
        a = source(x).double()
        b = result(x).double()

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
