"""`normswap push`, and what was pushed as a MODEL: against a hub on this machine that speaks the
hub's protocol.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
from huggingface_hub import HfApi, ModelCard, constants
from support.command_line import as_documented
from support.hub_server import hub_server, use_hub
from support.lived_in_networks import lived_in
from support.model_sources import write_folder
from support.sampled_tables import crossed
from torch import nn

import normswap
from normswap import reading
from normswap.cli.app import main
from normswap.cli.commands import push_command
from normswap.errors import OptionError, SourceError
from normswap.plan import Arch, Plan, Step
from normswap.provenance import Provenance
from normswap.storage import checkpoint, model_card, publishing
from normswap.storage.network_folder import FILES

ARGS = {"num_classes": 4, "channels": (64, 64, 64, 64)}


@pytest.fixture(scope="module")
def source() -> nn.Module:
    torch.manual_seed(0)
    model = checkpoint.open_model(
        "resnet18", weights="random", arch_args=ARGS
    )  # older timm remembers no arguments
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


def by_its_card(card: ModelCard) -> nn.Module:
    """The network that the card's own code loads."""
    names: dict[str, Any] = {}
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    exec(code, names)
    return names["model"]


@pytest.mark.slow
def test_there_and_back(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = normswap.convert(source, to="skipinit")
    normswap.save(done, tmp_path / "out")
    (tmp_path / "out" / "private-notes.txt").write_text("stays here", encoding="utf-8")

    assert main(["push", "out", "me/small"]) == 2
    assert (
        "nobody knows the license of the weights in out. Give --license NAME"
        in capsys.readouterr().err
    )
    assert main(["push", "out", "me/small", "--license", "mit", "--json"]) == 0

    said = as_documented(capsys.readouterr().out, "push")
    assert not said["alone"]
    assert (
        sorted(path.name for path in hub["me/small"].iterdir())
        == sorted(said["files"])
        == ["README.md", "config.json", "model.safetensors", "norms.safetensors"]
    )

    card = ModelCard.load("me/small")
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "mit",
        None,
        "normswap",
    )

    assert card.data.eval_results is None, "noise is no dataset"
    assert f"{done.report.worst.relative_l2:.1e}" in card.text
    assert torch.equal(outputs(by_its_card(card)), outputs(done.model))

    again = checkpoint.open_model("hf-hub:me/small")
    assert torch.equal(outputs(again), outputs(done.model))
    assert main(["convert", "hf-hub:me/small", "--to", "unfold", "-o", "bn"]) == 0
    torch.testing.assert_close(
        outputs(checkpoint.load("bn")), outputs(source), rtol=1e-4, atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("to", "options"),
    [
        ("unfold", {}),
        pytest.param("groupnorm", {"groups": 32, "relative_eps": 0}, marks=pytest.mark.slow),
        ("groupnorm", {"relative_eps": 0}),
    ],
)
def test_what_timm_builds_timm_loads(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path, to: str, options: dict[str, int]
) -> None:
    before = normswap.convert(source, to="folded").model if to == "unfold" else source
    done = normswap.convert(before, to=to, **options)
    normswap.save(done, tmp_path / "out")

    assert main(["push", "out", "me/plain", "--license", "mit"]) == 0

    model = timm.create_model("hf-hub:me/plain", pretrained=True).eval()
    torch.testing.assert_close(outputs(model), outputs(done.model))

    card = ModelCard.load("me/plain")
    assert card.data.library_name == "timm"
    torch.testing.assert_close(outputs(by_its_card(card)), outputs(done.model))
    assert torch.equal(outputs(checkpoint.open_model("hf-hub:me/plain")), outputs(done.model))


@pytest.mark.slow
def test_a_repository_that_is_there_gets_the_next_version(
    source: nn.Module, hub: dict[str, Path]
) -> None:
    for to in ("folded", "skipinit"):
        normswap.save(normswap.convert(source, to=to), to)
        assert main(["push", to, "me/small", "--license", "mit"]) == 0
    assert (hub["me/small"] / "model.safetensors").read_bytes() == Path(
        "skipinit/model.safetensors"
    ).read_bytes()


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
@pytest.mark.one_in(2)
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
        assert main(["push", str(tmp_path / "out"), repo, "--license", "mit"]) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line


MISTAKES: dict[str, tuple[str, list[str], str]] = {
    "no owner": ("demo", [], "'demo' is not a name on the hub. Write it as owner/name"),
    "a blank": ("a b/c", [], "'a b/c' is not a name on the hub"),
    "a tag": ("me/small@v2", [], "'me/small@v2' is not a name on the hub"),
    "a prefix": ("hf-hub:me/small", [], "'hf-hub:me/small' is not a name on the hub"),
    "no license": ("me/small", [], "nobody knows the license"),
    "no token": ("me/small", ["--license", "mit"], "a token that may write"),
    "a public repository": ("me/open", ["--license", "mit", "--private"], "and public"),
    "a link": ("me/small", ["--license", "mit"], "README.md is not published: it is a link"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_not_pushed_is_not_measured_before(
    mistake: str,
    source: nn.Module,
    hub: dict[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Top-1 on a set of images may take an hour."""
    repo, options, says = MISTAKES[mistake]
    normswap.save(normswap.convert(source, to="folded"), "out")
    HfApi().create_repo("me/open")
    there = {*hub}
    if mistake == "no token":
        monkeypatch.setattr(huggingface_hub, "get_token", lambda: None)
    if mistake == "a link":
        _link_to_the_same(Path("out/README.md"))
    measured: list[object] = []
    monkeypatch.setattr(push_command, "_measured", lambda *args, **_: measured.append(args))

    assert main(["push", "out", repo, "--data", "demo", *options]) == 2

    (line,) = capsys.readouterr().err.strip().splitlines()
    assert says in line
    assert measured == []
    assert {*hub} == there


def test_a_damaged_directory_is_not_pushed(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path
) -> None:
    normswap.save(normswap.convert(source, to="folded"), tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 0x10
    file.write_bytes(content)
    assert main(["push", "out", "me/small"]) == 2
    assert not hub


def _link_out(file: Path) -> None:
    secret = file.parent.parent / "secret.json"
    secret.write_text('{"auths": "TOPSECRET"}', encoding="utf-8")
    file.unlink(missing_ok=True)
    file.symlink_to("../secret.json")


def _link_to_the_same(file: Path) -> None:
    file.rename(file.parent.parent / "moved")
    file.symlink_to("../moved")


def _dangling_link(file: Path) -> None:
    file.unlink()
    file.symlink_to("nowhere")


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.one_in(3)
@crossed(
    "replace, name",
    [_link_out, _link_to_the_same, _dangling_link, _pipe, _directory],
    FILES,
    ids=lambda row: row if isinstance(row, str) else row.__name__,
)
def test_what_is_no_file_of_the_directory_itself_is_not_pushed(
    source: nn.Module,
    hub: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    replace: Callable[[Path], None],
) -> None:
    normswap.save(normswap.convert(source, to="skipinit"), tmp_path / "out")
    replace(tmp_path / "out" / name)

    assert main(["push", "out", "me/small", "--license", "mit"]) == 2

    assert f"out/{name} is not published" in capsys.readouterr().err
    assert not hub


def test_the_config_and_the_card_are_written_anew_from_the_weights(
    source: nn.Module, hub: dict[str, Path], tmp_path: Path
) -> None:
    """A hard link cannot be told from a file; what it holds is not read."""
    normswap.save(normswap.convert(source, to="skipinit"), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "secret").write_text('{"auths": "TOPSECRET", "normswap": {}}', encoding="utf-8")
    for name in ("config.json", "README.md"):
        (tmp_path / "out" / name).unlink()
        os.link(tmp_path / "secret", tmp_path / "out" / name)

    assert main(["push", "out", "me/small", "--license", "mit"]) == 0

    pushed = {path.name: path.read_bytes() for path in hub["me/small"].iterdir()}
    assert json.loads(pushed["config.json"]) == config
    assert not any(b"TOPSECRET" in content for content in pushed.values())


def test_a_refusal_to_read_a_directory_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SourceError, match="nowhere") as missing:
        normswap.push(tmp_path / "nowhere", "me/small")
    assert missing.value.remedy

    (tmp_path / "model.safetensors").write_bytes(b"weights")
    moments = itertools.count()
    monkeypatch.setattr(publishing, "_identity_of", lambda status: (next(moments),))
    with pytest.raises(SourceError, match="was changed while it was read") as changed:
        normswap.push(tmp_path, "me/small")
    assert changed.value.remedy


def test_the_license_is_that_of_the_source(hub: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: bsd-3-clause\n---\n", encoding="utf-8"
    )
    hub["some/base"] = tmp_path / "base"
    on_record = Provenance(Arch("resnet18"), "hf-hub:some/base", "ab12", {"license": "mit"})
    on_card = replace(on_record, pretrained_cfg={})
    random = replace(on_record, sha256=None)
    unknown = replace(on_card, source="/home/me/net.pth")

    assert publishing._license_of_source(on_record, tmp_path) == "mit"
    assert publishing._license_of_source(on_card, tmp_path) == "bsd-3-clause"
    for record in (random, unknown):
        with pytest.raises(OptionError, match="license="):
            publishing._license_of_source(record, tmp_path)


def test_a_file_that_changes_while_it_is_checked_is_not_pushed(
    source: nn.Module,
    hub: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    normswap.save(normswap.convert(source, to="skipinit"), tmp_path / "out")
    normswap.save(normswap.convert(source, to="folded"), tmp_path / "other")
    load = checkpoint.load

    def swapped_after(directory: Path, **options: Any) -> nn.Module:
        network = load(directory, **options)
        os.replace(tmp_path / "other/model.safetensors", directory / "model.safetensors")
        return network

    monkeypatch.setattr(checkpoint, "load", swapped_after)
    assert main(["push", "out", "me/small", "--license", "mit"]) == 2

    assert "model.safetensors was changed while it was read" in capsys.readouterr().err
    assert not hub


def test_private_reaches_the_hub_and_a_public_repository_is_refused(
    source: nn.Module, hub: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    normswap.save(normswap.convert(source, to="folded"), "out")
    push = ["push", "out", "me/mine", "--license", "mit"]

    assert main([*push, "--private"]) == 0
    assert HfApi().repo_info("me/mine").private
    assert main([*push, "--private"]) == 0  # it is private already

    assert main(["push", "out", "me/open", "--license", "mit"]) == 0
    assert not HfApi().repo_info("me/open").private
    before = (hub["me/open"] / "README.md").read_bytes()
    assert main(["push", "out", "me/open", "--license", "other", "--private"]) == 2
    error = capsys.readouterr().err
    assert "me/open is there already, and public" in error
    assert constants.ENDPOINT in error, "where it can be made private"
    assert (hub["me/open"] / "README.md").read_bytes() == before


MEASURED = model_card.Accuracy(
    top1=79.125,
    count=50000,
    images="ImageNet-1k",
    split="validation",
    dataset="ILSVRC/imagenet-1k",
    source_top1=79.5,
)


def test_the_card_has_the_top1_that_was_measured_with_split_and_number_of_images() -> None:
    record = Provenance(Arch("resnet18"), "resnet18.a1_in1k", "ab12", {"num_classes": 1000})

    card = ModelCard(model_card.render(record, None, license="mit", accuracy=MEASURED))

    assert card.data.datasets == ["ILSVRC/imagenet-1k"]
    assert card.data.metrics == ["accuracy"]
    assert card.data.pipeline_tag == "image-classification"
    assert card.data.base_model == "timm/resnet18.a1_in1k"
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.dataset_split) == ("ILSVRC/imagenet-1k", "validation")
    assert result.dataset_args == {"images": 50000}
    assert (result.metric_type, result.metric_value) == ("accuracy", 79.125)
    line = "**79.12 %** of 50000 labelled images (ImageNet-1k, validation); the source has 79.50 %"
    assert line in card.text


def test_images_of_no_hub_are_in_the_text_alone() -> None:
    record = Provenance(Arch("resnet18"), "demo", "ab12", {"num_classes": 10})
    measured = replace(MEASURED, dataset=None, images="my [photos](x)", split="")

    card = ModelCard(model_card.render(record, None, license="mit", accuracy=measured))

    assert (card.data.datasets, card.data.eval_results) == (None, None)
    assert model_card.eval_results(measured) == {}
    assert r"(my \[photos\](x))" in card.text


def test_the_hub_finds_the_figure_in_its_own_format() -> None:
    ((name, content),) = model_card.eval_results(MEASURED).items()

    assert name == ".eval_results/imagenet-1k.yaml"
    (entry,) = reading.parse_yaml(content.decode())
    assert entry == {
        "dataset": {"id": "ILSVRC/imagenet-1k", "task_id": "default"},
        "value": 79.125,
        "notes": "top-1 in percent, 50000 images of validation",
    }
    # Older clients cannot read the format.
    if hasattr(huggingface_hub, "parse_eval_result_entries"):
        (parsed,) = huggingface_hub.parse_eval_result_entries([entry])
        assert (parsed.dataset_id, parsed.value) == ("ILSVRC/imagenet-1k", 79.125)


@pytest.mark.slow
def test_push_measures_on_the_images_that_are_named(
    hub: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    normswap.save(normswap.convert(normswap.open("demo"), to="folded"), "out")
    options = ["--license", "other", "--samples", "50", "--workers", "0"]

    assert main(["push", "out", "me/local", *options, "--data", "demo"]) == 0

    text = ModelCard.load("me/local").text
    assert re.search(r"Top-1: \*\*8\d\.00 %\*\* of 50 labelled images \(demo\)", text)
    assert not (hub["me/local"] / ".eval_results").exists()

    # A dataset of the hub has a name there.
    loader = push_command.Images.loader
    demo = push_command.Images(data="demo", samples=50, workers=0)
    monkeypatch.setattr(push_command.Images, "loader", lambda _, model: loader(demo, model))
    assert main(["push", "out", "me/known", *options, "--data", "hfds/me/photos"]) == 0
    assert ModelCard.load("me/known").data.datasets == ["me/photos"]
    assert (hub["me/known"] / ".eval_results/photos.yaml").is_file()


@pytest.mark.parametrize("kind", ["a file", "a folder"])
def test_no_folder_of_this_machine_is_published(
    kind: str, source: nn.Module, hub: dict[str, Path], tmp_path: Path
) -> None:
    """Its name may be that of a client. The tensors are the same, and the header is whole."""
    secret = tmp_path / "secret client"
    secret.mkdir()
    if kind == "a file":
        torch.save(source.state_dict(), secret / "best.pth")
        opened = checkpoint.open_model(str(secret / "best.pth"), arch="resnet18", arch_args=ARGS)
    else:
        opened = checkpoint.open_model(str(normswap.save(source, secret / "best")))
    done = normswap.convert(opened, "skipinit")
    normswap.save(done, tmp_path / "out")

    normswap.push(tmp_path / "out", "me/named", license="mit")

    for file in hub["me/named"].iterdir():
        assert b"secret" not in file.read_bytes()
    again = checkpoint.open_model("hf-hub:me/named")
    assert torch.equal(outputs(again), outputs(done.model))


@pytest.mark.parametrize(
    ("schemes", "builder", "thaws"),
    [
        ((), "timm", False),
        (("frozen-bn",), "timm", True),
        (("skipinit", "frozen-bn"), "timm", True),
        (("frozen-bn", "groupnorm"), "timm", False),
        (("frozen-bn",), "torchvision", False),
    ],
)
def test_the_card_warns_of_norms_that_only_timm_would_thaw(
    schemes: tuple[str, ...], builder: str, thaws: bool
) -> None:
    plan = Plan(tuple(Step(scheme, {}, ()) for scheme in schemes))
    record = Provenance(Arch("resnet18", {}, builder), "resnet18.a1_in1k", "ab12", plan=plan)

    assert ("timm opens it with BatchNorms" in model_card.render(record, None)) is thaws


@pytest.mark.parametrize(
    ("arch", "trusts"),
    [
        (None, False),
        (Arch("resnet18"), False),
        (Arch("resnet18", {}, "torchvision"), False),
        (Arch("nets:make", {}, "factory"), True),
    ],
)
def test_the_code_of_a_card_trusts_a_users_own_function_alone(
    arch: Arch | None, trusts: bool
) -> None:
    code = model_card.loading_code("me/net", Provenance(arch))

    assert 'normswap.open("me/net"' in code
    assert ("trust_factory=True" in code) is trusts


BASES = {
    "resnet18.a1_in1k": "timm/resnet18.a1_in1k",
    "hf-hub:me/net@v2": "me/net",
    "hf:microsoft/resnet-18": "microsoft/resnet-18",
    "local-dir:/home/me/net": None,
    "/home/me/net.pth": None,
    "demo": None,
}


def test_the_card_of_weights_of_timms_names_the_repository_that_timm_loads_them_from() -> None:
    """Authors keep some in repositories of their own, and some are not on the hub."""
    elsewhere = 0
    for name in timm.list_models(pretrained=True):
        cfg: Any = timm.get_pretrained_cfg(name)
        base = model_card.base_model(Provenance(Arch(name.partition(".")[0]), name, "ab12"))
        assert base == (cfg.hf_hub_id or None)
        elsewhere += base != f"timm/{name}"

    assert elsewhere > 0
    unknown = Provenance(Arch("resnet18"), "resnet18.of_a_later_timm", "ab12")
    assert model_card.base_model(unknown) == "timm/resnet18.of_a_later_timm"


@pytest.mark.parametrize("source", BASES)
def test_the_card_names_the_repository_of_the_source_and_no_path(source: str) -> None:
    record = Provenance(Arch("resnet18"), source, "ab12", {"license": "apache-2.0"})
    card = ModelCard(model_card.render(record, None, license="apache-2.0"))
    assert (card.data.base_model, card.data.license) == (BASES[source], "apache-2.0")
    assert "/home" not in card.content
    assert model_card.base_model(replace(record, sha256=None)) is None  # random weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv2_035"])
def test_a_folded_network_is_loaded_by_timm_alone_and_its_card_has_what_the_sources_card_has(
    name: str, hub: dict[str, Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    args = ARGS if name == "resnet18" else {"num_classes": 4}
    source = lived_in(
        checkpoint.open_model(name, weights="random", arch_args=args), torch.randn(8, 3, 64, 64)
    ).float()
    write_folder(
        tmp_path / "base",
        source.eval().state_dict(),
        architecture=name,
        num_classes=4,
        model_args=args,
    )
    (tmp_path / "base" / "README.md").write_text(
        "---\nlicense: bsd-3-clause\n---\n", encoding="utf-8"
    )
    hub["some/base"] = tmp_path / "base"
    folded = normswap.convert(normswap.open("hf-hub:some/base"), to="folded")

    assert not normswap.push(normswap.save(folded, tmp_path / "out"), "me/folded").alone

    card = ModelCard.load("me/folded")
    assert (card.data.license, card.data.base_model, card.data.library_name) == (
        "bsd-3-clause",
        "some/base",
        "timm",
    )

    assert card.data.eval_results is None
    assert f"{folded.report.worst.relative_l2:.1e}" in card.text

    torch.save(outputs(folded.model), "wanted.pt")
    (code,) = re.findall(r"```python\n(.*?)```", card.text, re.DOTALL)
    alone = f"""import sys, torch
sys.modules["normswap"] = None
{code}
assert type(model) is type(timm.create_model("{name}"))
x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
assert torch.equal(model(x), torch.load("wanted.pt"))
"""

    environment = {
        **os.environ,
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HOME": str(tmp_path / "fresh"),
    }
    subprocess.run([sys.executable, "-I", "-c", alone], env=environment, check=True)
