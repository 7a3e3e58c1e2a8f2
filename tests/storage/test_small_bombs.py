"""Small files that would take hours, all memory, or another place of the disk: refused at once."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from support.hostile_files import StartedError, places, watched
from support.model_sources import record_of, rewrite, write_folder
from torch import nn

from normswap import convert
from normswap.errors import NormswapError, OptionError, SourceError
from normswap.exporting import sidecar
from normswap.images import array_files
from normswap.images.datasets import make_loader
from normswap.models import building, records, weight_files
from normswap.models.zoo import open_source
from normswap.plan import Arch, Edit, Plan, Step
from normswap.storage import checkpoint, header
from normswap.surgery import applying
from normswap.training import recipe_files

SECONDS = 20
CHANNELS = {"channels": [4, 4, 8, 8]}
SIZE = (3, 33, 33)


def tiny() -> nn.Module:
    torch.manual_seed(0)
    return open_source("resnet18", weights="random", arch_args=CHANNELS, num_classes=10)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted network, which tests copy before they damage it."""
    converted = convert(tiny(), "skipinit", input_size=SIZE)
    return checkpoint.save(converted, tmp_path_factory.mktemp("saved") / "net")


def refused(open_file: Callable[[], Any], *words: str) -> str:
    """The sentence with which something is refused, which has these words."""
    with warnings.catch_warnings(), watched(SECONDS):
        warnings.simplefilter("ignore")
        with pytest.raises(NormswapError) as caught:
            open_file()
    sentence = str(caught.value)
    assert all(word in sentence for word in words), sentence
    return sentence


# Weights.


def repeated() -> dict[str, torch.Tensor]:
    return {"weight": torch.zeros(1).expand(10**6, 10**6)}


def within_itself() -> dict[str, Any]:
    state: dict[str, Any] = {"epoch": 1}
    state["state_dict"] = state
    return state


def nested() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that nested tensors are new
        return {"weight": torch.nested.nested_tensor([torch.ones(3)])}


def quantized() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that they are deprecated
        return {"weight": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}


class Block(nn.Module):
    pass


def without_end() -> nn.Module:
    network = nn.Sequential(Block(), nn.Linear(1, 1))
    network._modules["0"]._modules["again"] = network
    return network


def twice_as_many() -> nn.Module:
    inner: nn.Module = nn.Sequential(nn.Linear(1, 1))
    for _ in range(50):
        inner = nn.Sequential(inner, inner)
    return inner


WEIGHTS: dict[str, tuple[Callable[[], Any], str]] = {
    "a number repeated a trillion times": (repeated, "more than the file can hold"),
    "a meta tensor": (lambda: {"weight": torch.empty(3, device="meta")}, "without values"),
    "a state dict within itself": (within_itself, "no tensors under"),
    "a network within itself": (without_end, "pickle of Python objects"),
    "a network of 2**50 layers": (twice_as_many, "pickle of Python objects"),
    "a sparse tensor": (lambda: {"weight": torch.eye(3).to_sparse()}, "sparse"),
    "a nested tensor": (nested, "holds a sparse or quantized tensor: weight"),
    "a quantized tensor": (quantized, "holds a sparse or quantized tensor: weight"),
    "keys that are no names": (lambda: {(1, 2): torch.zeros(1)}, "a tuple"),
}


@pytest.mark.parametrize("case", WEIGHTS)
def test_weights(case: str, tmp_path: Path) -> None:
    make, words = WEIGHTS[case]
    file = tmp_path / "weights.pth"
    torch.save(make(), file)

    refused(lambda: weight_files.read(file), "weights.pth", words)


@pytest.mark.slow
def test_an_archive_that_unpacks_to_gigabytes(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, tmp_path / "good.pth")
    with (
        zipfile.ZipFile(tmp_path / "good.pth") as old,
        zipfile.ZipFile(tmp_path / "bomb.pth", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for entry in old.infolist():
            bomb.writestr(entry.filename, old.read(entry))
        with bomb.open("good/data/1", "w") as large:
            for _ in range(300):
                large.write(bytes(2**20))

    refused(lambda: weight_files.read(tmp_path / "bomb.pth"), "bomb.pth", "unpacks to")


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "uint16", "complex64"])
def test_rare_numbers_are_read_or_refused(dtype: str, tmp_path: Path) -> None:
    file = tmp_path / "weights.pth"
    torch.save({"weight": torch.zeros(3).to(getattr(torch, dtype))}, file)

    with watched(SECONDS):
        state = weight_files.read(file)

    assert state["weight"].shape == (3,)


# Plans and architectures.


def test_a_plan_of_20000_steps() -> None:
    step = {"scheme": "folded", "options": {}, "edits": []}
    text = json.dumps({"version": 2, "steps": [step] * 20_000})

    refused(lambda: Plan.from_json(text, "plan.json"), "plan.json", "20000 steps")


def test_a_chain_of_20000_layers() -> None:
    edit = {"path": "bn1", "layer": "Vacant", "then": [{"layer": "Vacant"}] * 20_000}
    step = {"scheme": "folded", "options": {}, "edits": [edit]}
    text = json.dumps({"version": 2, "steps": [step]})

    refused(lambda: Plan.from_json(text, "plan.json"), "plan.json", "bn1", "20000 layers")


PATHS = (
    "__class__",
    "__class__.dump_patches",
    "bn1.__dict__",
    "training",
    "bn1.training",
    "forward",
)
PATHS += (
    "bn1.eps.real",
    "pretrained_cfg.num_classes",
    "bn1.num_features.__class__",
    "dump_patches",
)


@pytest.mark.parametrize("path", PATHS)
def test_a_path_leads_through_modules_alone(path: str) -> None:
    plan = Plan((Step("mine", {}, (Edit(path, "Number", {"value": 1}),)),))

    refused(lambda: applying.apply(tiny(), plan.steps), path)


ARGUMENTS: dict[str, dict[str, Any]] = {
    "a million blocks": {"layers": [10**6] * 4},
    "as many channels": {"channels": [10**6] * 4},
    "more classes than numbers": {"num_classes": 10**12},
    "a digit too many": {"num_classes": 10**50},
    "weights": {"pretrained": True},
    "a record with a repository": {"pretrained_cfg": {"hf_hub_id": "evil/tracker"}},
    "a record with a file": {"pretrained_cfg_overlay": {"file": "evil/x.pth"}},
    "a checkpoint": {"checkpoint_path": "evil/x.pth"},
    "a cache": {"cache_dir": "evil"},
    "a repository as a layer": {"norm_layer": "hf-hub:evil/tracker"},
    "a path as a layer": {"norm_layer": "../evil"},
    "an address": {"act_layer": "http://evil/x"},
    "not finite": {"drop_rate": float("nan")},
}


# Some ten thousand layers are built before it is refused, which takes half a minute.
SLOW = {"a million blocks"}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow) if case in SLOW else pytest.param(case)
        for case in ARGUMENTS
    ],
)
def test_arguments_of_timm(case: str, saved: Path, tmp_path: Path) -> None:
    """In the header of a saved network, and in a directory of timm's layout."""
    name = next(iter(ARGUMENTS[case]))
    shutil.copytree(saved, tmp_path / "net")
    arch = {"name": "resnet18", "kwargs": {**CHANNELS, **ARGUMENTS[case]}, "builder": "timm"}
    rewrite(tmp_path / "net", header={"arch": arch})
    write_folder(tmp_path / "timm", tiny().state_dict(), model_args=ARGUMENTS[case])

    sentence = refused(lambda: checkpoint.open_model(str(tmp_path / "net")))
    refused(lambda: open_source(str(tmp_path / "timm")))

    assert any(word in sentence for word in (name, "cannot be built", "header cannot be read"))


TRANSFORMERS: dict[str, dict[str, Any]] = {
    "a repository as architecture": {
        "model_type": "timm_wrapper",
        "architecture": "hf-hub:evil/tracker",
    },
    "a directory as architecture": {"model_type": "timm_wrapper", "architecture": "local-dir:evil"},
    "a backbone": {"model_type": "timm_backbone", "backbone": "evil/tracker"},
    "a backbone without a slash": {"model_type": "timm_backbone", "backbone": "evil"},
    "a backbone of a detector": {
        "model_type": "detr",
        "backbone": "evil",
        "use_timm_backbone": False,
    },
    "pretrained backbone": {"model_type": "detr", "use_pretrained_backbone": True},
    "a kernel": {"model_type": "vit", "attn_implementation": "evil/kernel"},
    "a kernel of a package": {"model_type": "vit", "attn_implementation": "flash_attention_2"},
    "a kernel set by hand": {"model_type": "vit", "_attn_implementation_internal": "evil/kernel"},
    "quantized": {"model_type": "vit", "quantization_config": {"quant_method": "awq"}},
    "code": {"model_type": "vit", "auto_map": {"AutoModel": "evil/tracker--x.Y"}},
    "inside another config": {
        "model_type": "detr",
        "backbone_config": {"model_type": "timm_backbone", "backbone": "hf-hub:evil/tracker"},
    },
    "arguments of timm": {
        "model_type": "timm_wrapper",
        "architecture": "resnet18",
        "model_args": {"checkpoint_path": "evil/x.pth"},
    },
}


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_arguments_of_transformers(case: str, saved: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    kinds = {
        "timm_wrapper": "TimmWrapperForImageClassification",
        "timm_backbone": "TimmBackbone",
        "detr": "DetrForObjectDetection",
        "vit": "ViTForImageClassification",
    }
    kwargs = TRANSFORMERS[case]
    shutil.copytree(saved, tmp_path / "net")
    arch = {"name": kinds[kwargs["model_type"]], "kwargs": kwargs, "builder": "transformers"}
    rewrite(tmp_path / "net", header={"arch": arch})

    sentence = refused(lambda: checkpoint.open_model(str(tmp_path / "net")), "cannot be built with")
    names = {str(key) for place in places(kwargs) for key in place} - {"model_type"}
    assert any(f" {name}=" in sentence for name in names), sentence


USUAL: dict[str, dict[str, Any]] = {
    "a backbone of timm": {
        "backbone": "resnet18",
        "use_timm_backbone": True,
        "use_pretrained_backbone": False,
    },
    "torch's own attention": {"attn_implementation": "sdpa"},
    "names of classes": {
        "id2label": {"0": "either/or", "1": "~none"},
        "label2id": {"either/or": 0},
    },
    "a record of images": {"pretrained_cfg": {"mean": [0.5], "custom_load": False}},
    "large numbers": {"rope_theta": 1e6, "vocab_size": 250_000},
}


@pytest.mark.parametrize("case", USUAL)
def test_usual_arguments_pass(case: str) -> None:
    building.check_arguments(Arch("DetrForObjectDetection", USUAL[case], "transformers"))


@pytest.mark.parametrize(
    "shard",
    ["../evil/model.safetensors", "/evil/x", "evil/x.safetensors", "..", 5, None, "x" * 300],
)
def test_shards_lie_in_the_directory(shard: object) -> None:
    index = {"weight_map": {"weight": shard}}

    refused(lambda: records.checked(records.ShardIndex, index, "index.json"), "index.json")


def test_a_hub_is_not_asked_while_a_network_is_built() -> None:
    """Also where a builder has a way that no argument's name tells."""
    import huggingface_hub

    def build() -> nn.Module:
        huggingface_hub.hf_hub_download("evil/tracker", "config.json")
        return nn.Identity()

    refused(lambda: building.make("mine", build, {}), "mine")


# Records.


def test_emptied_hashes_do_not_let_weights_pass(saved: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(saved, tmp_path / "net"))
    state = {"fc.bias": torch.ones(10)}
    rewrite(place, header={"hashes": {}, "tensors": {}}, tensors=state)

    refused(lambda: checkpoint.load(place), "there is no hash of model.safetensors")


def test_norms_without_a_hash_are_refused(saved: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(saved, tmp_path / "net"))
    hashes = record_of(place)["hashes"]
    rewrite(place, header={"hashes": {"model.safetensors": hashes["model.safetensors"]}})

    refused(lambda: checkpoint.load(place), "norms.safetensors")


@pytest.mark.parametrize("key", ["mean", "label_names", "input_size"])
def test_a_header_without_its_digest_is_noticed(key: str, saved: Path, tmp_path: Path) -> None:
    """Its config.json has a copy."""
    place = Path(shutil.copytree(saved, tmp_path / "net"))
    config = (place / "config.json").read_bytes()
    record = record_of(place)
    record["pretrained_cfg"][key] = {"mean": [0.1], "label_names": ["x"], "input_size": [3, 9, 9]}[
        key
    ]
    del record["digest"]
    rewrite(place, header=record, dropped=["digest"])
    (place / "config.json").write_bytes(config)

    refused(lambda: checkpoint.load(place), "not the one that was saved")


def test_a_directory_of_before_has_no_digest_and_opens(saved: Path, tmp_path: Path) -> None:
    place = Path(shutil.copytree(saved, tmp_path / "net"))
    rewrite(place, dropped=["digest"])

    assert header.read_header(place).digest is None
    assert isinstance(checkpoint.load(place), nn.Module)


@pytest.mark.parametrize("key", ["normalize", "resize", "output"])
def test_a_sidecar_is_compared_with_the_copy_in_its_file(key: str, tmp_path: Path) -> None:
    file = tmp_path / "net.onnx"
    body = sidecar.body(tiny(), SIZE, "logits", normalize=False, dynamic=True)
    changed = json.loads(json.dumps(body))
    changes: dict[str, Any] = {"mean": [0.1, 0.1, 0.1], "to": [9, 9], "labels": ["x"]}
    changed[key] |= {name: value for name, value in changes.items() if name in changed[key]}
    sidecar.write(file, changed)

    assert sidecar.body_of(file, {}) == changed
    refused(lambda: sidecar.body_of(file, {"preprocess": json.dumps(body)}), key, "net.onnx")


# Recipes.

LEVELS = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12))
RECIPES = {
    "aliases": f"a0: &a0 [x]\n{LEVELS}\n",
    "merged aliases": "a: &a {x: 1}\nb: &b {<<: [*a, *a]}\n",
    "an alias of itself": "a: &a [*a]\n",
    "depth": "summary: " + "[" * 50_000,
    "400 digits": "optim: {lr: " + "9" * 400 + "}",
    "5000 digits": "optim: {lr: " + "9" * 5000 + "}",
    "no date": "summary: 2001-99-99",
    "a list as a key": "? [a, b]\n: c",
    "another document": "a: 1\n---\nb: 2",
    "an object": "a: !!python/object/apply:os.system [touch evil]",
    "a set": "optim: {args: !!set {a, b}}",
    "not a number": "summary: x\noptim: {args: {eps: .nan}}",
}


@pytest.mark.parametrize("case", RECIPES)
def test_recipes(case: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPES[case], encoding="utf-8")

    refused(
        lambda: recipe_files.load_recipe(file),
        "recipe.yaml",
        "are not read" if "alias" in case else "",
    )


# Images and arrays.


def png_of(width: int, height: int) -> bytes:
    """A PNG of black pixels, compressed."""

    def chunk(name: bytes, body: bytes) -> bytes:
        checksum = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + checksum

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + (width + 7) // 8)) for _ in range(height))
    size = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    body = chunk(b"IHDR", size) + chunk(b"IDAT", rows + packer.flush()) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


IMAGES: dict[str, bytes] = {
    "400 million pixels": png_of(20_000, 20_000),
    "a line of pixels": png_of(60_000, 1),
    "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n(%pipe%touch evil) (w) file\n",
    "text": b"no image",
    "nothing": b"",
}


@pytest.mark.parametrize("case", IMAGES)
def test_images(case: str, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "one.png").write_bytes(IMAGES[case])
    model = tiny()

    def read() -> list[object]:
        return list(make_loader(model, str(tmp_path), workers=0, labelled=False))

    refused(read, "one.png")


def test_a_pipe_among_images(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    os.mkfifo(tmp_path / "0" / "one.png")
    model = tiny()

    refused(lambda: list(make_loader(model, str(tmp_path), workers=0, labelled=False)), "one.png")


def test_links_that_lead_round(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    Image.new("RGB", (9, 9)).save(tmp_path / "0" / "one.png")
    for name in ("a", "b", "c"):
        (tmp_path / "0" / name).symlink_to(tmp_path)
    model = tiny()

    refused(lambda: make_loader(model, str(tmp_path), workers=0, labelled=False), "a folder above")


def test_folders_that_links_multiply(tmp_path: Path) -> None:
    for i in range(30):
        folder = tmp_path / f"level{i}"
        folder.mkdir()
        for name in ("a", "b"):
            (folder / name).symlink_to(tmp_path / f"level{i + 1}")
    (tmp_path / "level30").mkdir()
    model = tiny()

    refused(lambda: make_loader(model, str(tmp_path / "level0"), workers=0), "links show")


SHAPES = ("(49539595901075456,)", "(100000, 100000)", "(-1,)", "(2, 3, 8, 9)")


@pytest.mark.parametrize("shape", SHAPES)
def test_an_array_of_petabytes(shape: str, tmp_path: Path) -> None:
    np.save(tmp_path / "array.npy", np.zeros((2, 3, 8, 8), np.float32))
    content = (tmp_path / "array.npy").read_bytes()
    changed = content[10:128].replace(b"(2, 3, 8, 8)", shape.encode()).ljust(118)[:118]
    (tmp_path / "array.npy").write_bytes(content[:10] + changed + content[128:])

    refused(
        lambda: array_files.Arrays([tmp_path / "array.npy"], {"": ([3, 8, 8], "float32")}),
        "array.npy",
        "bytes of numbers",
    )


# Pipes in the place of every file.

PIPES: dict[str, Callable[[Path], Any]] = {
    "weights.pth": weight_files.read,
    "weights.safetensors": weight_files.read,
    "recipe.yaml": recipe_files.load_recipe,
    "images.csv": lambda pipe: make_loader(tiny(), str(pipe), workers=0),
    "images.tar": lambda pipe: make_loader(tiny(), str(pipe), workers=0),
    "array.npy": lambda pipe: make_loader(tiny(), str(pipe), workers=0),
    "config.json": lambda pipe: open_source(str(pipe.parent)),
    "model.safetensors": lambda pipe: checkpoint.load(pipe.parent),
}


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)

    refused(lambda: PIPES[name](tmp_path / name))


def test_a_pipe_beside_the_weights(saved: Path, tmp_path: Path) -> None:
    for name in ("config.json", "norms.safetensors"):
        place = Path(shutil.copytree(saved, tmp_path / name))
        (place / name).unlink()
        os.mkfifo(place / name)
        sentence = name
        with watched(SECONDS):
            try:
                checkpoint.load(place)
            except (SourceError, OptionError) as error:
                sentence = str(error)
        assert name in sentence


def spin() -> None:
    """Run until the watch ends it."""
    with watched(0.2):
        while True:
            pass


def test_the_watch_notices() -> None:
    """What the other tests rely on."""
    with watched(), pytest.raises(StartedError, match=r"os\.system"):
        os.system("true")
    with watched(), pytest.raises(StartedError, match="open"):
        Path("evil/config.json").read_text(encoding="utf-8")
    with pytest.raises(StartedError, match="seconds"):
        spin()
    assert Arch("resnet18").builder == "timm"
