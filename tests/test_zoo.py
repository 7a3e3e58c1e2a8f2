"""Model sources: every kind opens to the same tensors, every bad one gives one clear line."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import timm
import torch
import torchvision
from hub_server import hub_server, use_hub
from safetensors.torch import save_file
from torch import nn

from normswap import provenance, zoo
from normswap.errors import NormswapError, OptionError, SourceError
from normswap.plan import Arch
from normswap.provenance import Provenance
from normswap.zoo import create, hash_tensors, identify, open_source

CHECKPOINTS = Path(__file__).parents[2] / "shared" / "checkpoints"
ARGS: dict[str, Any] = {"channels": [8, 16, 32, 64]}
SMALL = {"arch": "resnet18", "arch_args": ARGS, "num_classes": 10}
State = dict[str, torch.Tensor]


def small(**kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model("resnet18", **{**ARGS, "num_classes": 10, **kwargs}).eval()


def origin(model: nn.Module) -> Provenance:
    record = provenance.of(model)
    assert record is not None
    return record


def same(model: nn.Module, state: State) -> bool:
    own = model.state_dict()
    return own.keys() == state.keys() and all(torch.equal(own[key], state[key]) for key in own)


@pytest.fixture
def state() -> State:
    return dict(small().state_dict())


@pytest.fixture
def folder(tmp_path: Path, state: State) -> Path:
    """A directory in timm's hub layout."""
    folder = tmp_path / "model"
    write_folder(folder, state)
    return folder


def write_folder(folder: Path, state: State, **config: Any) -> None:
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    names = [f"class{i}" for i in range(10)]
    cfg = {"input_size": [3, 48, 48], "mean": [0.5, 0.4, 0.3], "crop_pct": 1.0, "label_names": names}
    layout = {"architecture": "resnet18", "num_classes": 10, "model_args": ARGS, "pretrained_cfg": cfg}
    (folder / "config.json").write_text(json.dumps({**layout, **config}))


# --- building ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (Arch("renset50"), ["unknown model 'renset50'", "resnet50"]),
        (Arch("zzzzzz"), ["unknown model 'zzzzzz'"]),
        (Arch("resnet50.a1_ink"), ["no weights 'a1_ink'", "resnet50.a1_in1k"]),
        (Arch("hf-hub:timm/resnet18"), ["unknown model"]),
        (Arch("local-dir:/tmp"), ["unknown model"]),
        (Arch("resnet18", {"chanels": [1]}), ["resnet18", "chanels"]),
        (Arch("resnet18", {"block_args": 3}), ["resnet18", "block_args=3"]),
        (Arch("resnet18", {"pretrained": True}), ["pretrained"]),
        (Arch("resnet18", {"checkpoint_path": "/x"}), ["checkpoint_path"]),
    ],
)
def test_create_refuses(arch: Arch, said: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        create(arch)
    assert all(word in str(caught.value) for word in said)
    assert "\n" not in str(caught.value)


def test_create_builds_in_eval_mode() -> None:
    model = create(Arch("resnet18", {**ARGS, "num_classes": 3}))
    assert not model.training
    assert model.num_classes == 3


# --- opening ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "local-dir:"])
def test_directory(folder: Path, state: State, prefix: str) -> None:
    model = open_source(f"{prefix}{folder}")
    record = origin(model)
    assert same(model, state)
    assert not model.training
    assert record.arch == Arch("resnet18", {**ARGS, "num_classes": 10})
    assert record.sha256 == hash_tensors(state)
    assert record.pretrained_cfg["input_size"] == [3, 48, 48]
    assert record.pretrained_cfg["label_names"][3] == "class3"
    assert json.loads(json.dumps(record.pretrained_cfg)) == record.pretrained_cfg
    assert zoo.input_size(model) == (3, 48, 48)
    assert zoo.data_config(model)["crop_pct"] == 1.0
    assert same(open_source(record.source), state)
    assert same(create(record.arch), state) is False


def test_flat_config(folder: Path, state: State) -> None:
    flat = {"architecture": "resnet18", "num_classes": 10, "input_size": [3, 40, 40], "model_args": ARGS}
    (folder / "config.json").write_text(json.dumps(flat))
    assert zoo.input_size(open_source(str(folder))) == (3, 40, 40)


def test_another_head_and_stem(folder: Path, state: State) -> None:
    model = open_source(str(folder), num_classes=4, in_chans=1)
    own, record = model.state_dict(), origin(model)
    assert model(torch.zeros(1, 1, 48, 48)).shape == (1, 4)
    assert torch.allclose(own["conv1.weight"], state["conv1.weight"].sum(1, keepdim=True))
    assert all(
        torch.equal(own[key], state[key]) for key in state if key not in ("conv1.weight", "fc.weight", "fc.bias")
    )
    assert record.arch == Arch("resnet18", {**ARGS, "num_classes": 4, "in_chans": 1})
    assert record.pretrained_cfg["input_size"] == [1, 48, 48]
    assert len(zoo.data_config(model)["mean"]) == 1
    assert "label_names" not in record.pretrained_cfg


WRAPPERS: dict[str, Callable[[State], Any]] = {
    "plain": lambda state: state,
    "state_dict": lambda state: {"epoch": 3, "state_dict": state, "args": argparse.Namespace(lr=0.1)},
    "model": lambda state: {"model": state, "optimizer": {"state": {}}},
    "ddp": lambda state: {"state_dict": {f"module.{key}": value for key, value in state.items()}},
    "compiled": lambda state: {f"_orig_mod.{key}": value for key, value in state.items()},
    "both": lambda state: {f"module._orig_mod.{key}": value for key, value in state.items()},
    "ema first": lambda state: {"state_dict": _noise(state), "state_dict_ema": state},
    "model_ema": lambda state: {"model": _noise(state), "model_ema": state},
    "ema": lambda state: {"model": _noise(state), "ema": {"decay": 0.9, "module": state}},
    "no ema": lambda state: {"state_dict": state, "state_dict_ema": None},
    "averaged": lambda state: {"n_averaged": torch.tensor(3), **{f"module.{k}": v for k, v in state.items()}},
    "old torch": lambda state: {k: v for k, v in state.items() if not k.endswith("num_batches_tracked")},
}


def _noise(state: State) -> State:
    return {key: value + 1 for key, value in state.items()}


@pytest.mark.parametrize(
    ("wrapper", "suffix"),
    [*((wrapper, ".pth") for wrapper in WRAPPERS), *(("ddp", suffix) for suffix in (".pt", ".bin", ".pth.tar"))],
)
def test_torch_file(tmp_path: Path, state: State, wrapper: str, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    torch.save(WRAPPERS[wrapper](state), file)
    assert same(open_source(str(file), **SMALL), state)


def test_safetensors_file(folder: Path, state: State) -> None:
    file = folder / "model.safetensors"
    model = open_source(str(file), **SMALL)
    assert same(model, state)
    assert origin(model).arch == Arch("resnet18", {**ARGS, "num_classes": 10})
    assert origin(model).source == str(file)


def _densenet(num_classes: int) -> nn.Module:
    return torchvision.models.DenseNet(4, (1, 2), num_init_features=8, num_classes=num_classes)


@pytest.mark.parametrize(
    ("theirs", "arch", "args", "rename"),
    [
        (torchvision.models.resnet18, "resnet18", {}, ("", "")),
        # the keys of torchvision's early densenet files, which timm's own filter translates
        (_densenet, "densenet121", {"growth_rate": 4, "block_config": [1, 2]}, (".norm1.weight", ".norm.1.weight")),
    ],
)
def test_torchvision_file(
    tmp_path: Path, theirs: Callable[..., nn.Module], arch: str, args: dict[str, Any], rename: tuple[str, str]
) -> None:
    model = theirs(num_classes=5).eval()
    torch.save({key.replace(*rename): value for key, value in model.state_dict().items()}, tmp_path / "tv.pth")
    ours = open_source(str(tmp_path / "tv.pth"), arch=arch, arch_args=args, num_classes=5)
    image = torch.randn(2, 3, 64, 64)
    assert torch.allclose(ours(image), model(image), atol=1e-5)


@pytest.mark.parametrize(
    ("source", "options", "name", "kwargs"),
    [
        ("resnet18", {"arch_args": ARGS}, "resnet18.a1_in1k", ARGS),
        ("resnet18.fb_swsl_ig1b_ft_in1k", {"num_classes": 5}, "resnet18.fb_swsl_ig1b_ft_in1k", {"num_classes": 5}),
        ("resnet10t", {"in_chans": 1}, "resnet10t.c3_in1k", {"in_chans": 1}),
        ("mobilenetv3_large_100.miil_in21k", {}, "mobilenetv3_large_100.miil_in21k", {"num_classes": 11221}),
        ("gluon_resnet18_v1b", {}, "resnet18.gluon_in1k", {}),  # a deprecated name
        ("resnet50_mlp", {}, "resnet50_mlp.untrained", {}),
    ],
)
def test_random_weights(source: str, options: dict[str, Any], name: str, kwargs: dict[str, Any]) -> None:
    model = open_source(source, weights="random", **options)
    record = origin(model)
    assert (record.source, record.sha256) == (name, None)
    assert record.arch == Arch(name.partition(".")[0], kwargs)
    assert record.pretrained_cfg["num_classes"] == model.num_classes
    shapes = {key: value.shape for key, value in create(record.arch).state_dict().items()}
    assert shapes == {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["resnet18_narrow", "resnetv2_18_narrow"])
def test_shared_checkpoints(name: str) -> None:
    if not (CHECKPOINTS / name).is_dir():
        pytest.skip("no shared checkpoints here")
    model = open_source(str(CHECKPOINTS / name))
    assert origin(model).pretrained_cfg["label_names"][0] == "airplane"
    assert identify(model) == origin(model).arch


# --- refusing ---------------------------------------------------------------------------------------------------------


class Evil:
    """Makes a directory when unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _poison(state: State, name: str, value: float) -> State:
    broken = {key: tensor.clone() for key, tensor in state.items()}
    broken[name].view(-1)[3] = value
    return broken


def _pickled(content: Callable[[State, Path], Any], zipped: bool = True) -> Callable[[State, Path], Path]:
    def write(state: State, folder: Path) -> Path:
        torch.save(content(state, folder), folder / "w.pth", _use_new_zipfile_serialization=zipped)
        return folder / "w.pth"

    return write


def _cut(name: str, share: float) -> Callable[[State, Path], Path]:
    def write(state: State, folder: Path) -> Path:
        file = folder / name
        save_file(state, file) if name.endswith(".safetensors") else torch.save(state, file)
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        return file

    return write


def _raw(name: str, content: bytes) -> Callable[[State, Path], Path]:
    def write(_: State, folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def _without(state: State) -> State:
    return {key: value for key, value in state.items() if not key.startswith("layer1.0.")}


BAD_FILES: dict[str, tuple[Callable[[State, Path], Path], list[str]]] = {
    "missing": (lambda _, folder: folder / "none.safetensors", ["none.safetensors does not exist"]),
    "directory": (lambda _, folder: folder.with_suffix(".pth"), ["does not exist"]),
    "truncated": (_cut("w.safetensors", 0.5), ["not a readable safetensors", "truncated"]),
    "truncated header": (_cut("w.safetensors", 0.001), ["not a readable safetensors"]),
    "empty": (_cut("w.safetensors", 0), ["not a readable safetensors"]),
    "garbage": (_raw("w.safetensors", b"\x07" * 999), ["not a readable safetensors"]),
    "html": (_raw("w.pth", b"<!DOCTYPE html><html>not found</html>"), ["not a readable torch file"]),
    "garbage pth": (_raw("w.pth", bytes(range(256))), ["not a readable torch file"]),
    "empty pth": (_raw("w.pth", b""), ["not a readable torch file"]),
    "truncated pth": (_cut("w.pth", 0.5), ["not a readable torch file"]),
    "evil": (_pickled(lambda _, folder: Evil(str(folder / "ran"))), ["never executes", "mkdir"]),
    "evil legacy": (_pickled(lambda _, f: Evil(str(f / "ran")), zipped=False), ["never executes", "mkdir"]),
    "bare pickle": (_raw("w.pth", pickle.dumps({"a": 1})), ["never executes", "torch.save"]),
    "evil inside": (_pickled(lambda s, folder: {**s, "x": Evil(str(folder / "ran"))}), ["never executes", "mkdir"]),
    "module": (_pickled(lambda *_: small()), ["never executes", "ResNet", "state_dict()"]),
    "list": (_pickled(lambda s, _: list(s.values())), ["a list, not a state dict"]),
    "tensorless": (_pickled(lambda *_: {"lr": 0.1}), ["no tensors", "lr"]),
    "strangers": (_pickled(lambda s, _: {**s, "lr": 0.1}), ["not a state dict", "lr"]),
    "nan": (_pickled(lambda s, _: _poison(s, "layer2.0.bn1.bias", float("nan"))), ["NaN", "layer2.0.bn1.bias"]),
    "inf": (_pickled(lambda s, _: _poison(s, "fc.weight", float("inf"))), ["inf", "fc.weight"]),
    "missing keys": (_pickled(lambda s, _: _without(s)), ["15 missing: layer1.0.conv1.weight", "and 10 more"]),
    "unexpected": (_pickled(lambda s, _: {**s, "head.a": s["fc.bias"]}), ["1 unexpected: head.a"]),
    "shapes": (_pickled(lambda s, _: {**s, "fc.bias": s["fc.bias"][:4]}), ["fc.bias is (4,)", "(10,) in the network"]),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_file(tmp_path: Path, state: State, case: str) -> None:
    write, said = BAD_FILES[case]
    file = write(state, tmp_path)
    with pytest.raises(SourceError) as caught:
        open_source(str(file), **SMALL)
    assert all(word in str(caught.value) for word in said), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "ran").exists()


def _config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text) and None


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["no weights", "model.safetensors"]),
    "not json": (_config("{"), ["config.json cannot be read"]),
    "not an object": (_config("[1]"), ["no timm 'architecture'"]),
    "transformers": (_config('{"architectures": ["ViT"], "model_type": "vit"}'), ["no timm 'architecture'"]),
    "unknown": (_config('{"architecture": "renset18"}'), ["renset18", "resnet18"]),
    "hub inside": (_config('{"architecture": "hf-hub:timm/resnet18"}'), ["unknown model"]),
    "args": (_config('{"architecture": "resnet18", "model_args": {"x": 1}}'), ["resnet18", "x=1"]),
    "pickle": (_config('{"architecture": "resnet18", "model_args": {"checkpoint_path": "x"}}'), ["checkpoint_path"]),
    "size": (_config('{"architecture": "resnet18", "input_size": 224}'), ["input_size"]),
    "cfg": (_config('{"architecture": "resnet18", "pretrained_cfg": 3}'), ["pretrained_cfg"]),
    "classes": (_config('{"architecture": "resnet18", "model_args": {"channels": [8, 16, 32, 64]}}'), ["fc.weight is"]),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_bad_folder(folder: Path, case: str) -> None:
    spoil, said = BAD_FOLDERS[case]
    spoil(folder)
    with pytest.raises(SourceError) as caught:
        open_source(str(folder))
    assert all(word in str(caught.value) for word in said), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "options", "kind", "said"),
    [
        ("renset50", {}, SourceError, "resnet50"),
        ("resnet50.nope", {}, SourceError, "no weights 'nope'"),
        ("resnet50_mlp", {}, SourceError, "timm has no pretrained weights for resnet50_mlp"),
        ("timm/resnet18", {}, SourceError, "hf-hub:timm/resnet18"),
        ("/nowhere/at/all", {}, SourceError, "neither a file nor a directory"),
        ("local-dir:/nowhere", {}, SourceError, "/nowhere does not exist"),
        ("none.pth", {"arch": "resnet18"}, SourceError, "none.pth does not exist"),
        ("resnet18", {"arch": "resnet34"}, OptionError, "goes with a weights file"),
        ("resnet18", {"weights": "best"}, OptionError, "'pretrained' or 'random'"),
    ],
)
def test_bad_source(source: str, options: dict[str, Any], kind: type[NormswapError], said: str) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        open_source(source, **options)


@pytest.mark.parametrize(("options", "said"), [({}, "--arch"), ({"weights": "random", **SMALL}, "exclude")])
def test_file_options(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_source(str(folder / "model.safetensors"), **options)


# --- hashing and identifying ------------------------------------------------------------------------------------------


def test_hash_tensors() -> None:
    base = {"a": torch.arange(4.0), "b": torch.ones(2, dtype=torch.bfloat16), "n": torch.tensor(3), "e": torch.ones(0)}
    digest = hash_tensors(base)
    assert digest == hash_tensors(dict(reversed(base.items())))
    assert digest == hash_tensors({**base, "a": torch.arange(4.0).reshape(2, 2).T.T.reshape(4)})
    changed: list[State] = [
        {**base, "a": torch.arange(4.0).reshape(2, 2)},
        {**base, "a": torch.arange(4.0).double()},
        {**base, "b": torch.full((2,), 1.0078125, dtype=torch.bfloat16)},
        {**base, "n": torch.tensor(4)},
        {("c" if key == "a" else key): value for key, value in base.items()},
    ]
    assert len({digest, *map(hash_tensors, changed)}) == len(changed) + 1


def _converted() -> nn.Module:
    model = small()
    model.bn1 = nn.Identity()
    return model


def _new_head() -> nn.Module:
    model = small()
    model.reset_classifier(3)
    return model


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (small, Arch("resnet18", {**ARGS, "num_classes": 10})),
        (lambda: small(num_classes=1000), Arch("resnet18", {**ARGS, "num_classes": 1000})),
        (lambda: small(in_chans=1), Arch("resnet18", {**ARGS, "num_classes": 10, "in_chans": 1})),
        (lambda: small(output_stride=8), Arch("resnet18", {**ARGS, "num_classes": 10, "output_stride": 8})),
        (lambda: timm.create_model("resnet10t", num_classes=7), Arch("resnet10t", {"num_classes": 7})),
        (lambda: timm.create_model("resnet10t"), Arch("resnet10t")),
        (_new_head, Arch("resnet18", {**ARGS, "num_classes": 3})),
        (lambda: small(act_layer=nn.SiLU), None),  # a class cannot be written down
        (lambda: small(features_only=True), None),
        (_converted, None),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), None),
    ],
)
def test_identify(build: Callable[[], nn.Module], expected: Arch | None) -> None:
    model = build()
    assert identify(model) == expected
    assert zoo.input_size(model)[1:] == ((224, 224) if "resnet10t" not in str(expected) else (176, 176))


# --- the hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hub with timm's resnet18 (random values), a small network of someone's, and a repository without weights."""
    root = tmp_path_factory.mktemp("hub")
    full = timm.create_model("resnet18").state_dict()
    write_folder(root / "full", full, num_classes=1000, model_args={})
    write_folder(root / "small", small().state_dict())
    write_folder(root / "bare", {})
    (root / "bare" / "model.safetensors").unlink()
    return {"timm/resnet18.a1_in1k": root / "full", "some/small": root / "small", "some/bare": root / "bare"}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No pauses between the client's attempts, and no socket left open."""
    monkeypatch.setattr("time.sleep", lambda _: None)
    yield
    huggingface_hub.close_session()


@pytest.mark.parametrize("source", ["resnet18", "hf-hub:some/small", "hf_hub:some/small@main"])
def test_hub(repos: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, source: str) -> None:
    with hub_server(repos) as url:
        use_hub(monkeypatch, url, tmp_path)
        model = open_source(source)
    folder = repos["timm/resnet18.a1_in1k" if source == "resnet18" else "some/small"]
    assert origin(model).sha256 == origin(open_source(str(folder))).sha256
    assert origin(model).source == {"resnet18": "resnet18.a1_in1k"}.get(source, source.replace("hf_hub", "hf-hub"))
    again = open_source(source)  # the server is gone: from the cache
    assert origin(again) == origin(model)


@pytest.mark.parametrize(
    ("mode", "source", "said"),
    [
        ("404", "resnet18", "timm/resnet18.a1_in1k does not exist"),
        ("plain-404", "resnet18", "timm/resnet18.a1_in1k does not exist"),
        ("404", "hf-hub:some/small", "some/small does not exist"),
        ("ok", "hf-hub:some/bare", "has no model.safetensors or pytorch_model.bin"),
        ("ok", "hf-hub:some/small@v9", "some/small has no such revision"),
        ("ok", "hf-hub:a b", "'a b' is not a hub repository"),
        ("500", "resnet18", "answers 500"),
        ("break", "resnet18", "broke: the server keeps closing the connection"),
        ("stall", "hf-hub:some/small", "the transfer of model.safetensors"),
        ("garbage", "hf-hub:some/small", "not a readable safetensors file"),
    ],
)
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


@pytest.mark.parametrize("source", ["resnet18", "hf-hub:some/small"])
def test_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None, source: str) -> None:
    use_hub(monkeypatch, "http://127.0.0.1:9", tmp_path)
    with pytest.raises(SourceError) as caught:
        open_source(source)
    assert all(way in str(caught.value) for way in ("--weights random", "local-dir:", "--arch", "HF_ENDPOINT"))


def test_hub_from_the_environment(repos: dict[str, Path], tmp_path: Path) -> None:
    code = "import sys; from normswap.zoo import open_source; open_source(sys.argv[1]); print('opened')"
    with hub_server(repos) as url:
        env = {**os.environ, "HF_ENDPOINT": url, "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-W", "error", "-c", code, "hf-hub:some/small"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("opened\n", "", 0)
