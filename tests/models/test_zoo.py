"""Model sources: every kind opens to the same tensors, and what cannot be opened says why in one
line.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from support import needs
from support.model_sources import ARGS, SMALL, State, origin, same, small, write_folder
from torch import nn

import normswap
from normswap.errors import NormswapError, OptionError, SourceError, WeightsNote
from normswap.models import building, network_input, zoo
from normswap.models.zoo import create, hash_tensors, identify, open_source
from normswap.plan import Arch

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"


@pytest.fixture
def state() -> State:
    return dict(small().state_dict())


@pytest.fixture
def folder(tmp_path: Path, state: State) -> Path:
    """A directory in timm's hub layout."""
    folder = tmp_path / "model"
    write_folder(folder, state)
    return folder


@pytest.mark.parametrize(
    ("arch", "said"),
    [
        (Arch("renset50"), ["unknown model 'renset50'", "resnet50"]),
        (Arch("zzzzzz"), ["unknown model 'zzzzzz'"]),
        (Arch("resnet50.a1_ink"), ["no weights 'a1_ink'", "resnet50.a1_in1k"]),
        (Arch("resnet50x.a1_in1k"), ["unknown model", "resnet50.a1_in1k"]),
        (Arch("hf-hub:timm/resnet18"), ["unknown model"]),
        (Arch("local-dir:/tmp"), ["unknown model"]),
        (Arch("resnet18", {"chanels": [1]}), ["resnet18", "chanels"]),
        (Arch("resnet18", {"block_args": 3}), ["resnet18", "block_args=3"]),
        (Arch("resnet18", {"pretrained": True}), ["pretrained"]),
        (Arch("resnet18", {"checkpoint_path": "/x"}), ["checkpoint_path"]),
        (
            Arch("resnet18", {"features_only": True, "cache_dir": "x"}),
            ["features_only", "cache_dir"],
        ),
        (Arch("resnet18", {"a": [[{"checkpoint_path": "x"}]]}), ["checkpoint_path"]),
        (Arch("resnet18", {"a": [[[{"b": "/x"}]]]}), ["a file or an address"]),
    ],
)
def test_create_refuses(arch: Arch, said: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        create(arch)
    assert all(word in str(caught.value) for word in said)
    assert "\n" not in str(caught.value)


def test_a_network_that_is_too_large_is_found_before_values_are_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(building, "_MOST_MODULES", 4)
    devices: list[str] = []

    def build(count: int) -> nn.Module:
        layers = [nn.Linear(2, 2) for _ in range(count)]
        devices.append(layers[0].weight.device.type)
        return nn.Sequential(*layers)

    building.check_size(lambda: building.make("net", build, {"count": 4}))
    with pytest.raises(building.TooLargeError, match="net"):
        building.check_size(lambda: building.make("net", build, {"count": 5}))
    # Whatever else is wrong with a network, the real build says so.
    building.check_size(lambda: building.make("net", build, {"width": 5}))

    assert devices == ["meta", "meta"]


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
    assert network_input.size(model) == (3, 48, 48)
    assert zoo.data_config(model)["crop_pct"] == 1.0
    assert same(open_source(record.source), state)
    assert same(create(record.arch), state) is False


def test_flat_config(folder: Path, state: State) -> None:
    flat = {
        "architecture": "resnet18",
        "num_classes": 10,
        "input_size": [3, 40, 40],
        "model_args": ARGS,
    }
    (folder / "config.json").write_text(json.dumps(flat), encoding="utf-8")

    assert network_input.size(open_source(str(folder))) == (3, 40, 40)


@pytest.mark.parametrize(
    ("stated", "implied"),
    [([3, 32, 48], {"img_size": [32, 48]}), ([3, 224, 224], {})],
)
def test_a_network_of_a_fixed_size_is_built_for_the_size_of_its_images(
    stated: list[int], implied: dict[str, Any], tmp_path: Path
) -> None:
    args = {"depth": 1, "embed_dim": 24, "num_heads": 2}
    name = "vit_tiny_patch16_224"
    source = timm.create_model(name, num_classes=10, img_size=tuple(stated[1:]), **args).eval()
    place = tmp_path / "vit"
    cfg = {"input_size": stated, "fixed_input_size": True}
    write_folder(place, source.state_dict(), architecture=name, model_args=args, pretrained_cfg=cfg)

    model = open_source(str(place))

    assert same(model, dict(source.state_dict()))
    assert origin(model).arch == Arch(name, {**implied, "num_classes": 10, **args})
    assert network_input.size(model) == tuple(stated)


def test_another_head_and_stem(folder: Path, state: State) -> None:
    model = open_source(str(folder), num_classes=4, in_chans=1)
    own = model.state_dict()
    record = origin(model)

    assert model(torch.zeros(1, 1, 48, 48)).shape == (1, 4)
    assert torch.allclose(own["conv1.weight"], state["conv1.weight"].sum(1, keepdim=True))
    assert all(
        torch.equal(own[key], state[key])
        for key in state
        if key not in ("conv1.weight", "fc.weight", "fc.bias")
    )
    assert record.arch == Arch("resnet18", {**ARGS, "num_classes": 4, "in_chans": 1})
    assert record.pretrained_cfg["input_size"] == [1, 48, 48]
    assert len(zoo.data_config(model)["mean"]) == 1
    assert "label_names" not in record.pretrained_cfg


def test_a_result_says_that_its_head_is_new(folder: Path) -> None:
    model = open_source(str(folder), num_classes=4)
    kept = open_source(str(folder))

    done = normswap.convert(model, "folded", inputs=torch.randn(2, 3, 48, 48))

    assert any(note.startswith("fc: new, random") for note in done.notes)
    assert origin(kept).remarks == ()


def test_safetensors_file(folder: Path, state: State) -> None:
    file = folder / "model.safetensors"
    model = open_source(str(file), **SMALL)

    assert same(model, state)
    assert origin(model).arch == Arch("resnet18", {**ARGS, "num_classes": 10})
    assert origin(model).source == str(file)
    assert origin(model).sha256 == hash_tensors(state)


def test_the_hash_is_of_the_network_s_tensors_not_of_the_file_s(folder: Path, state: State) -> None:
    file = folder / "half.safetensors"
    floats = [name for name, tensor in state.items() if tensor.is_floating_point()]
    save_file({**state, **{name: state[name].half() for name in floats}}, file)

    with pytest.warns(WeightsNote, match="float16, and becomes float32"):
        model = open_source(str(file), **SMALL)
    assert model.state_dict()["conv1.weight"].dtype == torch.float32
    assert origin(model).sha256 == hash_tensors(model.state_dict())


def _densenet(num_classes: int) -> nn.Module:
    return torchvision.models.DenseNet(4, (1, 2), num_init_features=8, num_classes=num_classes)


@pytest.mark.parametrize(
    ("theirs", "arch", "args", "rename"),
    [
        (torchvision.models.resnet18, "resnet18", {}, ("", "")),
        # the keys of torchvision's early densenet files, which timm's own filter translates
        (
            _densenet,
            "densenet121",
            {"growth_rate": 4, "block_config": [1, 2]},
            (".norm1.weight", ".norm.1.weight"),
        ),
    ],
)
def test_torchvision_file(
    tmp_path: Path,
    theirs: Callable[..., nn.Module],
    arch: str,
    args: dict[str, Any],
    rename: tuple[str, str],
) -> None:
    model = theirs(num_classes=5).eval()
    torch.save(
        {key.replace(*rename): value for key, value in model.state_dict().items()},
        tmp_path / "tv.pth",
    )
    ours = open_source(str(tmp_path / "tv.pth"), arch=arch, arch_args=args, num_classes=5)
    image = torch.randn(2, 3, 64, 64)

    assert torch.allclose(ours(image), model(image), atol=1e-5)


def test_the_users_arguments_replace_those_of_a_tag() -> None:
    source = "mobilenetv3_large_100.miil_in21k"

    arch = origin(open_source(source, weights="random", num_classes=7)).arch

    assert arch == Arch("mobilenetv3_large_100", {"num_classes": 7})


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("source", "options", "name", "kwargs"),
    [
        ("resnet18", {"arch_args": ARGS}, "resnet18.a1_in1k", ARGS),
        (
            "resnet18.fb_swsl_ig1b_ft_in1k",
            {"num_classes": 5},
            "resnet18.fb_swsl_ig1b_ft_in1k",
            {"num_classes": 5},
        ),
        ("resnet10t", {"in_chans": 1}, "resnet10t.c3_in1k", {"in_chans": 1}),
        (
            "mobilenetv3_large_100.miil_in21k",
            {},
            "mobilenetv3_large_100.miil_in21k",
            {"num_classes": 11221},
        ),
        ("gluon_resnet18_v1b", {}, "resnet18.gluon_in1k", {}),  # a deprecated name
        ("resnet50_mlp", {}, "resnet50_mlp.untrained", {}),
        (
            "vit_tiny_patch16_384",
            {},
            "vit_tiny_patch16_384.augreg_in21k_ft_in1k",
            {},
        ),  # its own size is no argument
    ],
)
def test_random_weights(
    source: str, options: dict[str, Any], name: str, kwargs: dict[str, Any]
) -> None:
    model = open_source(source, weights="random", **options)
    record = origin(model)

    assert (record.source, record.sha256) == (name, None)
    assert record.arch == Arch(name.partition(".")[0], kwargs)
    assert record.pretrained_cfg["num_classes"] == model.num_classes

    shapes = {key: value.shape for key, value in create(record.arch).state_dict().items()}
    assert shapes == {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("name", ["resnet18_narrow", "resnetv2_18_narrow"])
def test_shared_checkpoints(name: str) -> None:
    needs.need("shared files", (CHECKPOINTS / name).is_dir())
    model = open_source(str(CHECKPOINTS / name))
    assert origin(model).pretrained_cfg["label_names"][0] == "airplane"
    assert identify(model) == (origin(model).arch if hasattr(model, "_model_args") else None)


def _config(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / "config.json").write_text(text, encoding="utf-8") and None


BAD_FOLDERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), ["no config.json"]),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        ["has no model.safetensors"],
    ),
    "not json": (_config("{"), ["config.json cannot be read"]),
    "not an object": (_config("[1]"), ["config.json holds no object"]),
    "transformers": (
        _config('{"architectures": ["ViT"], "model_type": "vit"}'),
        ["no timm 'architecture'"],
    ),
    "unknown": (_config('{"architecture": "renset18"}'), ["renset18", "resnet18"]),
    "hub inside": (_config('{"architecture": "hf-hub:timm/resnet18"}'), ["unknown model"]),
    "args": (_config('{"architecture": "resnet18", "model_args": {"x": 1}}'), ["resnet18", "x=1"]),
    "pickle": (
        _config('{"architecture": "resnet18", "model_args": {"checkpoint_path": "x"}}'),
        ["checkpoint_path"],
    ),
    "size": (_config('{"architecture": "resnet18", "input_size": 224}'), ["input_size"]),
    "cfg": (_config('{"architecture": "resnet18", "pretrained_cfg": 3}'), ["pretrained_cfg"]),
    "classes": (
        _config('{"architecture": "resnet18", "model_args": {"channels": [8, 16, 32, 64]}}'),
        ["fc.weight is"],
    ),
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
        ("timm/resnet18", {}, SourceError, "hf-hub:OWNER/NAME"),
        ("/nowhere/at/all", {}, SourceError, "neither a file nor a directory"),
        ("local-dir:/nowhere", {}, SourceError, "/nowhere is no directory"),
        ("none.pth", {"arch": "resnet18"}, SourceError, "none.pth does not exist"),
        ("resnet18", {"arch": "resnet34"}, OptionError, "goes with a weights file"),
        ("resnet18", {"weights": "best"}, OptionError, "'pretrained' or 'random'"),
    ],
)
def test_bad_source(
    source: str, options: dict[str, Any], kind: type[NormswapError], said: str
) -> None:
    with pytest.raises(kind, match=re.escape(said)):
        open_source(source, **options)


@pytest.mark.parametrize(
    ("options", "said"), [({}, "arch=NAME"), ({"weights": "random", **SMALL}, "exclude")]
)
def test_file_options(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        open_source(str(folder / "model.safetensors"), **options)


def _converted() -> nn.Module:
    model = small()
    model.bn1 = nn.Identity()
    return model


def _new_head(classes: int) -> nn.Module:
    model = small()
    model.reset_classifier(classes)
    return model


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (small, Arch("resnet18", {**ARGS, "num_classes": 10})),
        (lambda: small(num_classes=1000), Arch("resnet18", {**ARGS, "num_classes": 1000})),
        (lambda: small(in_chans=1), Arch("resnet18", {**ARGS, "num_classes": 10, "in_chans": 1})),
        (
            lambda: small(output_stride=8),
            Arch("resnet18", {**ARGS, "num_classes": 10, "output_stride": 8}),
        ),
        (
            lambda: timm.create_model("resnet10t", num_classes=7),
            Arch("resnet10t", {"num_classes": 7}),
        ),
        (lambda: timm.create_model("resnet10t"), Arch("resnet10t")),
        (lambda: _new_head(3), Arch("resnet18", {**ARGS, "num_classes": 3})),
        (lambda: _new_head(1000), Arch("resnet18", {**ARGS, "num_classes": 1000})),
        (lambda: small(act_layer=nn.SiLU), None),  # a class cannot be written down
        (lambda: small(features_only=True), None),
        (_converted, None),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 1)), None),
    ],
)
def test_identify(build: Callable[[], nn.Module], expected: Arch | None) -> None:
    model = build()
    if not hasattr(model, "_model_args") and expected and "channels" in expected.kwargs:
        expected = None  # older timm does not remember the arguments
    before = torch.get_rng_state()

    assert identify(model) == expected
    assert torch.equal(torch.get_rng_state(), before)

    recorded = getattr(model, "pretrained_cfg", {}).get(
        "input_size", (3, 224, 224)
    )  # timm's own word
    assert network_input.size(model)[1:] == recorded[1:]
