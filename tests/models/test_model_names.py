"""MODEL names of every kind: torchvision, transformers, factories; from end to end."""

import json
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import timm
import torch
import torchvision
from PIL import Image
from safetensors.torch import load_file, save_file
from support.hub_server import hub_server, use_hub
from support.lived_in_networks import calm
from support.model_sources import ARGS, hugging_face, origin, small
from torch import nn

import normswap
from normswap import provenance
from normswap.cli.app import main
from normswap.errors import OptionError, SourceError, WeightsNote
from normswap.models import hub, kinds, network_input, zoo
from normswap.plan import Arch
from normswap.storage import checkpoint

FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width, classes, twice):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width)
        self.head, self.twice = nn.Linear(width, classes), twice
        nn.init.uniform_(self.bn.weight, 0.5, 1.5)

    def forward(self, x):
        scores = self.head(self.bn(self.conv(x)).relu().mean((2, 3))) * ONE
        return {"a": scores, "b": scores + 1} if self.twice else scores

def make(width=8, num_classes=4, twice=False):
    return Net(width, num_classes, twice)

def broken():
    net = make()
    net.conv.weight.data[0] = float("nan")
    return net

constant = 5
ONE = torch.ones(1)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with a user's module, images, and nothing of it imported yet."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "users_nets.py").write_text(FACTORY, encoding="utf-8")
    (tmp_path / "users_broken.py").write_text(
        "import torch\nraise RuntimeError('no licence\\nat all')\n", encoding="utf-8"
    )

    for label in "abcd":
        (tmp_path / "images" / label).mkdir(parents=True)
        for i in range(2):
            Image.effect_noise((48, 48), 60).convert("RGB").save(
                tmp_path / "images" / label / f"{i}.png"
            )

    for name in ("users_nets", "users_broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


Run = Callable[..., Any]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command that works: what it says on stderr."""

    def call(*words: object) -> str:
        code = main([str(word) for word in words])
        said = capsys.readouterr().err
        assert code == 0, said
        return said

    return call


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Run:
    """A command that does not: its one line, behind what it had to assume of the images."""

    def call(*words: object) -> str:
        assert main([str(word) for word in words]) == 2
        *notes, said = capsys.readouterr().err.splitlines(keepends=True)
        assert said.startswith("error: ")
        assert all(note.startswith("note: assumed, ") for note in notes)
        return said

    return call


@pytest.mark.slow
def test_a_factory(here: Path, run: Run, fails: Run, undrawn: None) -> None:
    words = ("--arch-arg", "width=6", "--num-classes", 4, "--input-size", "3,48,48")
    run("convert", "users_nets:make", *words, "--to", "folded", "-o", "a")
    trusted = ("a", "--trust-factory")

    for command in (
        ("verify", "a"),
        ("report", "a"),
        ("inspect", "a"),
        ("convert", "a", "--to", "unfold", "-o", "b"),
    ):
        assert "--trust-factory" in fails(*command)

    with pytest.raises(SourceError, match="trust_factory=True"):
        normswap.load("a")

    del sys.modules["users_nets"]  # as in another process
    model = normswap.load("a", trust_factory=True)
    assert origin(model).arch == Arch("users_nets:make", {"width": 6, "num_classes": 4}, "factory")

    run("verify", *trusted)
    run("convert", *trusted, "--to", "unfold", "-o", "b")
    run(
        "convert",
        "b",
        "--trust-factory",
        "--to",
        "groupnorm",
        "--relative-eps",
        0,
        "--calibrate",
        "images",
        "-o",
        "c",
    )
    run("export", *trusted, "-o", "a.pt2")
    run("report", *trusted, "-o", "a.html")
    run("evaluate", *trusted, "--data", "images")


def test_a_directory_cannot_have_a_factory_imported(here: Path, fails: Run) -> None:
    done = normswap.convert(small(), "folded", input_size=(3, 32, 32))
    known = Arch("resnet18", {**ARGS, "num_classes": 10})
    evil = provenance.Provenance(known, "users_nets:make", "0", {}, origin(done.model).plan)
    normswap.save(provenance.attach(done.model, evil), "a")

    assert "Python code on this machine" in fails("verify", "a")
    assert "users_nets" not in sys.modules


@pytest.mark.slow
def test_torchvision_with_a_weights_file(here: Path, run: Run) -> None:
    source = torchvision.models.get_model("mobilenet_v3_small", num_classes=4).eval()
    torch.save(
        {"epoch": 3, "state_dict": {f"module.{k}": v for k, v in source.state_dict().items()}},
        "w.pth",
    )
    words = ("--weights", "w.pth", "--num-classes", 4, "--input-size", "3,64,64")
    run("convert", "torchvision:mobilenet_v3_small", *words, "--to", "folded", "-o", "a")
    x = torch.randn(2, 3, 64, 64)

    assert torch.allclose(normswap.load("a")(x), source(x), atol=1e-4)

    run("verify", "a")
    run("convert", "a", "--to", "unfold", "-o", "b")
    restored = load_file("b/model.safetensors")

    assert restored.keys() == source.state_dict().keys()

    run("evaluate", "a", "--data", "images")


@pytest.mark.slow
def test_outputs_in_a_dict(here: Path, run: Run, fails: Run) -> None:
    # As it is made, its main output is the same for every image, so that nothing would be proved.
    build = torchvision.models.get_model_builder("deeplabv3_mobilenet_v3_large")
    torch.manual_seed(0)
    model = build(weights=None, weights_backbone=None, aux_loss=True)
    calm(model, torch.randn(3, 3, 64, 64))
    torch.save(model.float().state_dict(), "w.pth")
    run(
        "convert",
        "torchvision:deeplabv3_mobilenet_v3_large@DEFAULT",
        "--weights",
        "w.pth",
        "--to",
        "folded",
        "-o",
        "a",
    )
    run("verify", "a")
    run("export", "a", "-o", "a.onnx", "--input-size", "3,64,64")
    run("report", "a", "-o", "a.html")

    assert "does not classify images" in fails("evaluate", "a", "--data", "images")

    run("convert", "users_nets:make", "--arch-arg", "twice=true", "--to", "folded", "-o", "b")
    assert "same answer" not in run("export", "b", "--trust-factory", "-o", "b.onnx")
    assert "does not give one tensor" in fails(
        "export", "b", "--trust-factory", "-o", "c.onnx", "--softmax"
    )


@pytest.mark.slow
def test_hugging_face(here: Path, run: Run) -> None:
    hugging_face(here / "hf")
    run("convert", "hf:hf", "--to", "folded", "-o", "a")
    run("verify", "a")
    model = normswap.load("a")

    assert network_input.size(model) == (3, 40, 40)
    assert zoo.data_config(model)["mean"] == [0.5, 0.4, 0.3]
    assert type(model).__name__ == "ResNetForImageClassification"

    run("convert", "a", "--to", "groupnorm", "--calibrate", "images", "-o", "b")
    run("convert", "a", "--to", "unfold", "-o", "c")
    assert load_file("c/model.safetensors").keys() == load_file("hf/model.safetensors").keys()

    run("export", "a", "-o", "a.pt2")
    run("report", "a", "-o", "a.html")
    run("evaluate", "b", "--data", "images")
    run("convert", "hf:hf", "--num-classes", 7, "--to", "folded", "-o", "d")
    run("verify", "d")  # its new head is drawn again


def test_hugging_face_in_memory(here: Path) -> None:
    """A network of transformers that the user made needs no skeleton either."""
    import transformers

    own = transformers.ResNetForImageClassification.from_pretrained(
        hugging_face(here / "hf"), local_files_only=True
    ).eval()
    done = normswap.convert(own, "folded", input_size=(3, 40, 40))
    again = normswap.load(normswap.save(done, "a"))
    x = torch.randn(1, 3, 40, 40)

    assert torch.equal(again(x).logits, done.model(x).logits)


@pytest.mark.slow
def test_a_source_is_recorded_so_that_it_opens_from_another_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hugging_face(here / "hf")
    torch.save(timm.create_model("resnet18").state_dict(), "weights.pth")
    (here / "elsewhere").mkdir()
    for name, arch in (("hf:hf", None), ("weights.pth", "resnet18")):
        source = provenance.of(checkpoint.open_model(name, arch=arch)).source

        monkeypatch.chdir(here / "elsewhere")
        again = checkpoint.open_model(source, arch=arch)
        monkeypatch.chdir(here)

        assert provenance.of(again).source == source


def test_a_class_of_transformers_is_built_from_the_users_arguments() -> None:
    arguments = {
        "model_type": "resnet",
        "depths": [1, 2],
        "hidden_sizes": [8, 16],
        "embedding_size": 8,
        "layer_type": "basic",
        "image_size": 40,
    }
    name = "hf:ResNetForImageClassification"

    model = zoo.open_source(name, weights="random", arch_args=arguments, num_classes=7, in_chans=2)

    kwargs = {**arguments, "num_labels": 7, "num_channels": 2}
    assert origin(model) == provenance.Provenance(
        arch=Arch("ResNetForImageClassification", kwargs, "transformers"),
        source=name,
        sha256=None,
        pretrained_cfg={"input_size": [2, 40, 40], "num_classes": 7},
    )
    assert model(torch.zeros(1, 2, 40, 40)).logits.shape == (1, 7)


def test_a_stored_config_names_no_file_and_no_weights_to_fetch() -> None:
    images = {"input_size": [3, 48, 32], "mean": [0.1, 0.2, 0.3]}
    backbone = {"_name_or_path": "me/net", "depths": [1, 2], "use_pretrained_backbone": True}
    stated = {
        "_name_or_path": "/home/me",
        "architectures": ["Net"],
        "torch_dtype": "float16",
        "auto_map": {"AutoModel": "code.Net"},
        "model_type": "detr",
        "use_pretrained_backbone": True,
        "backbone_config": {**backbone, "pretrained_cfg": {**images, "url": "https://x"}},
        "pretrained_cfg": {**images, "hf_hub_id": "timm/", "dtype": "float16"},
        "id2label": {"0": "cat"},
        "sizes": [{"url": "kept"}],
    }

    assert hub.bare(stated) == {
        "model_type": "detr",
        "use_pretrained_backbone": False,
        "backbone_config": {
            "depths": [1, 2],
            "use_pretrained_backbone": False,
            "pretrained_cfg": images,
        },
        "pretrained_cfg": {**images, "dtype": "float16"},
        "id2label": {"0": "cat"},
        "sizes": [{"url": "kept"}],
    }


@pytest.mark.parametrize("named", [None, [], ["CodeOfTheRepository"], [3]])
def test_a_config_without_a_class_that_nobody_can_choose_is_one_line(
    named: object, here: Path
) -> None:
    backbone = {"model_type": "resnet", "hidden_sizes": [8, 8], "depths": [1, 1]}
    config = {"model_type": "upernet", "backbone_config": backbone, "architectures": named}
    (here / "net").mkdir()
    (here / "net/config.json").write_text(json.dumps(config), encoding="utf-8")

    with pytest.raises(SourceError) as caught:
        zoo.open_source(f"hf:{here / 'net'}")

    assert "architectures" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_of_classes_are_in_the_order_of_their_numbers(here: Path) -> None:
    """In a config.json they may be sorted as words: 0, 1, 10, 11, 2."""
    names = {number: f"class {number}" for number in range(12)}
    place = hugging_face(here / "hf", id2label=names, num_labels=12)
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    config["id2label"] = dict(sorted(config["id2label"].items()))
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")

    assert provenance.of(zoo.open_source(f"hf:{place}")).pretrained_cfg["label_names"] == [
        *names.values()
    ]  # type: ignore[union-attr]


def test_weights_in_several_files_are_all_fetched(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = hugging_face(here / "hf")
    zoo.open_source(f"hf:{whole}").save_pretrained(here / "parts", max_shard_size="20KB")
    (here / "parts/preprocessor_config.json").write_bytes(
        (whole / "preprocessor_config.json").read_bytes()
    )

    assert len([*(here / "parts").glob("*.safetensors")]) > 1

    with hub_server({"own/net": here / "parts"}) as url:
        use_hub(monkeypatch, url, here / "cache")
        found = zoo.open_source("hf:own/net").state_dict()

    assert network_input.size(zoo.open_source("hf:own/net")) == (3, 40, 40)  # from the cache
    assert all(
        torch.equal(found[name], value)
        for name, value in load_file(whole / "model.safetensors").items()
    )


@pytest.mark.slow
def test_a_network_of_another_library_is_named_as_a_factory(here: Path, run: Run) -> None:
    arguments = ["--input-size", "1,64,64"]
    for pair in ("encoder_name=resnet18", "encoder_weights=None", "classes=3", "in_channels=1"):
        arguments += ["--arch-arg", pair]

    run("convert", "segmentation_models_pytorch:Unet", *arguments, "--to", "folded", "-o", "a")
    arch = origin(normswap.load("a", trust_factory=True)).arch

    assert arch is not None
    assert (arch.name, arch.kwargs["classes"], arch.builder) == (
        "segmentation_models_pytorch:Unet",
        3,
        "factory",
    )


BAD = {
    "torchvision:resnet51": ["no model 'resnet51'", "resnet50"],
    "torchvision:resnet18@IMAGENET1K_V9": ["no weights 'IMAGENET1K_V9'", "IMAGENET1K_V1"],
    "torchvison:resnet18": ["No module named 'torchvison'", "Did you mean torchvision?"],
    "hf:nothing": ["hf:nothing is no directory"],
    "hf:images": ["images has no config.json"],
    "hf:ResNetModel": ["no model_type"],
    "users_nets:mkae": ["users_nets has no mkae", "make"],
    "users_nets:constant": ["of type int"],
    "users_nets:broken": ["NaN or inf in conv.weight"],
    "users_broken:make": ["RuntimeError: no licence"],
    "users_nets:make --arch-arg size=3": ["cannot be built with size=3", "unexpected keyword"],
    "users_nets:make --weights wrong.safetensors": ["does not fit", "missing", "unexpected: other"],
    "users_nets:make --weights pickled.pth": ["never executes"],
    "torchvision:resnet18 --weights random --arch-arg depth=3": ["cannot be built with depth=3"],
    "torchvision:resnet18 --weights random --arch-arg weights_backbone=x": [
        "not part of an architecture"
    ],
}


@pytest.mark.parametrize("words", BAD)
def test_bad_names(here: Path, fails: Run, words: str) -> None:
    save_file({"other": torch.zeros(2)}, "wrong.safetensors")
    torch.save({"state_dict": {"a": torch.zeros(1)}, "model": nn.ReLU()}, "pickled.pth")
    said = fails("inspect", *words.split())
    assert all(word in said for word in BAD[words]), said


@pytest.mark.parametrize("change", ["keys", "shape", "nan", "type", "value", "argument"])
def test_bad_hugging_face_directories(here: Path, fails: Run, change: str) -> None:
    place = hugging_face(here / "hf")
    state = load_file(place / "model.safetensors")
    config = json.loads((place / "config.json").read_text(encoding="utf-8"))
    weight = "classifier.1.weight"
    extra = []

    said = ["do not fit", "missing: classifier.1.weight", "unexpected: other"]
    if change == "keys":
        state["other"] = state.pop(weight)
    elif change == "shape":
        state[weight] = torch.zeros(3, 16)
        said = ["of another shape: classifier.1.weight"]
    elif change == "nan":
        state[weight] = torch.full((4, 16), math.nan)
        said = ["NaN or inf in classifier.1.weight"]
    elif change == "type":
        config |= {"model_type": "resnett", "auto_map": {"AutoModel": "evil.Net"}}
        said = ["no model_type 'resnett'", "resnet"]
    elif change == "value":
        config |= {"layer_type": "wide"}
        said = ["error: hf:hf cannot be built", "layer_type"]
    else:
        extra = ["--arch-arg", "depthz=3"]
        said = ["ResNetConfig has no argument depthz", "depths"]

    save_file(state, place / "model.safetensors", {"format": "pt"})
    (place / "config.json").write_text(json.dumps(config), encoding="utf-8")
    line = fails("inspect", "hf:hf", *extra)

    assert all(word in line for word in said), line


def test_no_weights_without_a_connection(
    here: Path, fails: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def offline(*_: Any, **__: Any) -> Any:
        raise OSError("no route")

    monkeypatch.setattr(torch.hub, "download_url_to_file", offline)
    monkeypatch.setenv("TORCH_HOME", str(here / "torch"))
    said = fails("inspect", "torchvision:resnet18")

    assert all(
        word in said
        for word in ("no route", "--weights random", "--weights FILE", "resnet18-f37072fd.pth")
    )


def test_a_damaged_download_of_torch_does_not_stay(
    here: Path, fails: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_HOME", str(here / "torch"))
    file = here / "torch" / "hub" / "checkpoints" / "resnet18-f37072fd.pth"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"half of it")
    said = fails("inspect", "torchvision:resnet18")

    assert "resnet18-f37072fd.pth is damaged" in said
    assert not file.exists()


def test_a_package_that_is_not_installed(
    here: Path, fails: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = kinds.importlib.util.find_spec
    monkeypatch.setattr(
        kinds.importlib.util,
        "find_spec",
        lambda name: None if name == "transformers" else found(name),
    )

    assert "pip install transformers" in fails("inspect", "hf:a/b")


def test_an_unknown_builder(here: Path) -> None:
    with pytest.raises(SourceError, match="does not know the builder 'keras'"):
        zoo.create(Arch("x", {}, "keras"))


def test_torchvision_builds_as_the_weights_want_it() -> None:
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    load = nn.Module.load_state_dict
    kinds_of = [
        {type(m).__name__ for m in zoo.create(Arch(name, kwargs, "torchvision")).modules()}
        for kwargs in ({}, {"weights": "COCO_V1"})
    ]

    assert "FrozenBatchNorm2d" in kinds_of[1] - kinds_of[0]
    assert nn.Module.load_state_dict is load
    assert "_unfilled" not in torchvision.models.WeightsEnum.get_state_dict.__qualname__


def test_torchvision_with_another_head(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torchvision.models.get_model("squeezenet1_1").state_dict()
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", lambda *_, **__: state)
    whole, other = (zoo.open_source("torchvision:squeezenet1_1", num_classes=n) for n in (None, 3))

    assert all(torch.equal(value, state[key]) for key, value in whole.state_dict().items())
    assert other.classifier[1].weight.shape[0] == 3

    record = origin(other)
    assert record.arch is not None

    again = zoo.open_source(record.source, arch_args=record.arch.kwargs)
    assert zoo.hash_tensors(again.state_dict()) == record.sha256
    assert origin(whole).pretrained_cfg["num_classes"] == 1000
    assert zoo.data_config(whole)["mean"] == [0.485, 0.456, 0.406]


@pytest.mark.parametrize(
    ("crop", "resize"), [(224, 256), (224, 232), (299, 342), (384, 384), (480, 480), (288, 320)]
)
def test_timm_resizes_as_the_others_do(crop: int, resize: int) -> None:
    assert math.floor(crop / hub.crop_share(crop, resize)) == resize


@pytest.mark.parametrize(
    ("stated", "seen"),
    [
        ({}, {"input_size": [3, 32, 32]}),
        (
            {"size": 64, "crop_pct": 0.5},
            {"input_size": [3, 64, 64], "crop_pct": 0.5, "crop_mode": "center"},
        ),
        (
            {"size": {"height": 20, "width": 30}},
            {"input_size": [3, 20, 30], "crop_pct": 1.0, "crop_mode": "squash"},
        ),
        (
            {"do_normalize": False, "resample": 3},
            {
                "input_size": [3, 32, 32],
                "mean": [0.0] * 3,
                "std": [1.0] * 3,
                "interpolation": "bicubic",
            },
        ),
    ],
)
def test_image_processors(stated: dict[str, Any], seen: dict[str, Any]) -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(num_channels=3, image_size=32))
    assert hub.of_image_processor(stated, model) == seen


# Image processors of transformers that do more than subtract a mean and divide by a deviation.
STATISTICS: dict[str, Any] = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
SIDES = {"height": 24, "width": 24}
VIT = "ViTImageProcessor"
EFFICIENTNET = "EfficientNetImageProcessor"
PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "as usual": (VIT, {**STATISTICS, "size": SIDES}),
    "another factor": (VIT, {**STATISTICS, "rescale_factor": 1 / 127.5, "size": SIDES}),
    "not scaled": (VIT, {**STATISTICS, "do_rescale": False, "size": SIDES}),
    "divided twice": (EFFICIENTNET, {**STATISTICS, "size": SIDES}),
    "divided once": (EFFICIENTNET, {**STATISTICS, "include_top": False, "size": SIDES}),
    "an offset": (
        EFFICIENTNET,
        {**STATISTICS, "rescale_factor": 1 / 127.5, "rescale_offset": True, "size": SIDES},
    ),
    "not normalized": (
        "MobileViTImageProcessor",
        {"size": SIDES, "do_center_crop": False, "do_flip_channel_order": False},
    ),
    "squashed": ("ConvNextImageProcessor", {**STATISTICS, "size": {"shortest_edge": 384}}),
}


@pytest.mark.parametrize("case", PROCESSORS)
def test_an_image_is_prepared_as_its_processor_prepares_it(case: str, tmp_path: Path) -> None:
    """The processor itself says what the pixels become."""
    import transformers

    name, options = PROCESSORS[case]
    processor = getattr(transformers, name)(**options)
    processor.save_pretrained(tmp_path)
    stated = json.loads((tmp_path / "preprocessor_config.json").read_text(encoding="utf-8"))
    model: Any = SimpleNamespace(config=SimpleNamespace(num_channels=3, image_size=24))

    seen = hub.of_image_processor(stated, model)

    side = seen["input_size"][1]
    # Where proportions are not kept, the image is wider than high, and of one colour a row.
    pixels = torch.randint(256, (side, 1, 3)).expand(side, 2 * side, 3).to(torch.uint8)
    if seen["crop_mode"] != "squash":
        pixels = torch.randint(256, (side, side, 3)).to(torch.uint8)
    image = Image.fromarray(pixels.numpy())
    expected = processor(image, return_tensors="pt")["pixel_values"][0].double()
    own = pixels[:, :side].permute(2, 0, 1) / 255.0
    mean, std = (torch.tensor(seen[key]).view(3, 1, 1) for key in ("mean", "std"))
    assert expected.shape == own.shape
    assert ((own - mean) / std - expected).abs().max() < 1e-4 * expected.abs().max()


def test_that_a_network_takes_bgr_is_said() -> None:
    model: Any = SimpleNamespace(config=SimpleNamespace(num_channels=3, image_size=32))
    with pytest.warns(WeightsNote, match="BGR"):
        hub.of_image_processor({"do_flip_channel_order": True}, model)


@pytest.mark.parametrize(
    "output", [{"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)}, [torch.zeros(2, 3)], None, "no"]
)
def test_no_answer(output: Any) -> None:
    with pytest.raises(OptionError, match="does not give one tensor"):
        network_input.answer(output)


def test_kinds_are_told_apart() -> None:
    timm = dict.fromkeys(("resnet18", "hf-hub:a/b", "local-dir:x", "a/b", "torchvision"), "timm")
    names = {**timm, "torchvision:x": "torchvision", "hf:a/b": "transformers", "a.b:c": "factory"}

    assert {name: kinds.of(name).builder for name in names} == names

    for arch in (Arch("a"), Arch("a", builder="torchvision"), Arch("a:b", builder="factory")):
        assert kinds.of(kinds.named(arch)).builder == arch.builder
    assert re.fullmatch(
        r"a\(x = 1, y = \[.{60,70} \.\.\.\)", str(Arch("a", {"x": 1, "y": [1] * 99}))
    )
