"""Everything that is read, damaged at random: opened as it was, or refused in one line.

Whatever bytes, values or structure a file has: no other error than normswap's own, no code, no
process, no socket, nothing that hangs, and no other function or preprocessing without a word.

    NORMSWAP_HOSTILE=2000 pytest tests/storage/test_hostile.py

makes so many examples in all, drawn anew.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from PIL import Image
from safetensors.torch import save_file
from support.hostile_files import (
    byte_strings,
    joined_safetensors,
    json_texts,
    mutated,
    split_safetensors,
    watched,
)
from support.model_sources import signed, write_folder
from torch import nn

from normswap import convert
from normswap.errors import NormswapError
from normswap.exporting import formats, sidecar
from normswap.exporting.exported_file import ExportedFile
from normswap.images import array_files
from normswap.images.datasets import make_loader
from normswap.models import preprocessing, weight_files
from normswap.models.zoo import open_source
from normswap.plan import Plan
from normswap.provenance import of as provenance_of
from normswap.storage import checkpoint
from normswap.surgery import applying
from normswap.training import recipe_files

TINY = {"arch": "resnet18", "channels": [4, 4, 8, 8]}
SIZE = (3, 33, 33)
# In all, over the kinds of files.
ASKED = int(os.environ.get("NORMSWAP_HOSTILE", "0"))


def tiny() -> nn.Module:
    torch.manual_seed(0)
    write = {"channels": [4, 4, 8, 8], "num_classes": 10}
    return open_source(
        "resnet18", weights="random", arch_args={"channels": write["channels"]}, num_classes=10
    )


def seen_of(model: nn.Module) -> tuple[Any, ...]:
    """What a network computes, how its images are prepared, and what its outputs are called."""
    images = torch.linspace(-1, 1, 3 * 33 * 33).reshape(1, *SIZE)
    with torch.no_grad():
        answer = model(images)
    logits = getattr(answer, "logits", answer)
    stated = preprocessing.stated(model)
    names = stated.get("label_names")
    return logits.tolist(), preprocessing.data_config(model), names, stated.get("num_classes")


@dataclass(frozen=True)
class Place:
    """Undamaged files, and a place for damaged ones.

    Args:
        good: The folder of undamaged files.
        seen: What opening the undamaged files gives.
    """

    good: Path
    seen: Any = None


Check = Callable[[st.DataObject, Place, Path], None]


def attempt(open_file: Callable[[], Any]) -> Any:
    """Return what opening gives; None where it is refused in normswap's own words."""
    with warnings.catch_warnings(), watched():
        warnings.simplefilter("ignore")
        try:
            return open_file()
        except NormswapError as error:
            sentence = str(error)

    # An error has a sentence that every terminal can show.
    assert sentence.encode("utf-8")
    return None


def copied(place: Place, folder: Path, name: str) -> Path:
    shutil.copytree(place.good / name, folder / name)
    return folder / name


# A directory that `save` wrote.


def header_of(file: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    header, tensors = split_safetensors(file)
    return header, json.loads(header["__metadata__"]["normswap"]), tensors


def write_header(file: Path, header: dict[str, Any], record: bytes, tensors: bytes) -> None:
    text = record.decode("utf-8", "replace")
    changed = {**header, "__metadata__": {"format": "pt", "normswap": text}}
    file.write_bytes(joined_safetensors(json.dumps(changed).encode(), tensors))


def check_header(data: st.DataObject, place: Place, folder: Path) -> None:
    """A header that does not have its digest any more is never read as another one."""
    network = copied(place, folder, "net")
    header, record, tensors = header_of(network / "model.safetensors")
    write_header(network / "model.safetensors", header, data.draw(json_texts(record)), tensors)
    model = attempt(lambda: checkpoint.open_model(str(network)))
    assert model is None or seen_of(model) == place.seen


def check_signed_header(data: st.DataObject, place: Place, folder: Path) -> None:
    """Somebody who writes the digest anew may choose function and preprocessing, and no more."""
    network = copied(place, folder, "net")
    header, record, tensors = header_of(network / "model.safetensors")
    changed = resigned(data.draw(mutated(record)))
    write_header(network / "model.safetensors", header, json.dumps(changed).encode(), tensors)
    (network / "config.json").write_text('{"normswap": {}}', encoding="utf-8")
    model = attempt(lambda: checkpoint.open_model(str(network)))
    if model is not None:
        attempt(lambda: preprocessing.data_config(model))
        attempt(lambda: checkpoint.read_header(network).report)


def resigned(record: Any) -> Any:
    """The record with the digests of its plan and of itself, where it can have them."""
    try:
        plan = Plan.from_json(json.dumps(record["plan"]))
        record["plan"]["digest"] = plan.digest
        return dict(signed(record))
    except (NormswapError, KeyError, TypeError, ValueError, RecursionError):
        return record


def check_config(data: st.DataObject, place: Place, folder: Path) -> None:
    """The config.json beside the weights of a directory decides nothing."""
    network = copied(place, folder, "net")
    config = json.loads((network / "config.json").read_text(encoding="utf-8"))
    (network / "config.json").write_bytes(data.draw(json_texts(config)))
    model = attempt(lambda: checkpoint.load(network))
    assert model is None or seen_of(model) == place.seen
    attempt(lambda: checkpoint.open_model(str(network)))


def check_safetensors(data: st.DataObject, place: Place, folder: Path) -> None:
    """Bytes of the file itself, and entries of its own header."""
    network = copied(place, folder, "net")
    file = network / "model.safetensors"
    header, tensors = split_safetensors(file)
    if data.draw(st.booleans()):
        file.write_bytes(data.draw(byte_strings(file.read_bytes())))
    else:
        file.write_bytes(joined_safetensors(data.draw(json_texts(header)), tensors))
    model = attempt(lambda: checkpoint.load(network))
    assert model is None or seen_of(model) == place.seen


# Plans, recipes, sidecars.


def check_plan(data: st.DataObject, place: Place, folder: Path) -> None:
    body = json.loads((place.good / "plan.json").read_text(encoding="utf-8"))
    text = data.draw(json_texts(body)).decode("utf-8", "replace")
    plan = attempt(lambda: Plan.from_json(text))
    if plan is not None:
        network = attempt(lambda: applying.apply(tiny(), plan.steps))
        assert network is None or isinstance(network, nn.Module)


def check_recipe(data: st.DataObject, place: Place, folder: Path) -> None:
    content = (place.good / "recipe.yaml").read_bytes()
    file = folder / "recipe.yaml"
    if data.draw(st.booleans()):
        tree = json.loads((place.good / "recipe.json").read_text(encoding="utf-8"))
        content = data.draw(json_texts(tree))
    else:
        content = data.draw(byte_strings(content))
    file.write_bytes(content)
    recipe = attempt(lambda: recipe_files.load_recipe(file))
    if recipe is not None:
        attempt(lambda: recipe_files.dump(recipe))


def check_sidecar(data: st.DataObject, place: Place, folder: Path) -> None:
    file = folder / "net.onnx"
    shutil.copy(place.good / "net.onnx", file)
    body = json.loads((place.good / "sidecar.json").read_text(encoding="utf-8"))
    copy_inside = {"preprocess": json.dumps(body)} if data.draw(st.booleans()) else {}
    formats.sidecar_of(file).write_bytes(data.draw(json_texts(body)))

    found = attempt(lambda: sidecar.body_of(file, copy_inside))
    if found:
        opened = ExportedFile(file, formats.choose(file, None), copy_inside, found)
        network = attempt(lambda: NotRun.of(opened).network())
        if network is not None:
            attempt(lambda: preprocessing.data_config(network))
    if found and copy_inside:
        assert {key: found.get(key) for key in body} == body


class NotRun(ExportedFile):
    """An exported file whose runtime is not started."""

    @classmethod
    def of(cls, exported: ExportedFile) -> NotRun:
        return cls(exported.file, exported.form, exported.metadata, exported.body)

    def opened(self) -> Any:
        return lambda images: images


# Directories of other libraries.


def check_transformers(data: st.DataObject, place: Place, folder: Path) -> None:
    network = copied(place, folder, "hf")
    name = data.draw(
        st.sampled_from(["config.json", "preprocessor_config.json", "model.safetensors.index.json"])
    )
    tree = json.loads((network / name).read_text(encoding="utf-8"))
    (network / name).write_bytes(data.draw(json_texts(tree)))
    if name.endswith("index.json"):
        (network / "model.safetensors").rename(network / "part.safetensors")
    model = attempt(lambda: open_source(f"hf:{network}"))
    if model is not None:
        attempt(lambda: preprocessing.data_config(model))


def check_timm(data: st.DataObject, place: Place, folder: Path) -> None:
    network = copied(place, folder, "timm")
    tree = json.loads((network / "config.json").read_text(encoding="utf-8"))
    (network / "config.json").write_bytes(data.draw(json_texts(tree)))
    model = attempt(lambda: open_source(f"local-dir:{network}"))
    if model is not None:
        attempt(lambda: preprocessing.data_config(model))


# Tensors and images.


def check_pickle(data: st.DataObject, place: Place, folder: Path) -> None:
    file = folder / "weights.pth"
    name = data.draw(st.sampled_from(["weights.pth", "old.pth", "whole.pth"]))
    content = (place.good / name).read_bytes()
    if name == "old.pth" or data.draw(st.booleans()):
        file.write_bytes(data.draw(byte_strings(content)))
    else:
        file.write_bytes(with_entry_changed(content, data))
    attempt(lambda: weight_files.read(file))


def with_entry_changed(content: bytes, data: st.DataObject) -> bytes:
    """A zip file, whose checksums are right, with the pickle in it changed."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            inner = old.read(entry)
            if entry.filename.endswith("data.pkl"):
                inner = data.draw(byte_strings(inner))
            new.writestr(entry.filename, inner)
    return out.getvalue()


def check_array(data: st.DataObject, place: Place, folder: Path) -> None:
    name = data.draw(st.sampled_from(["array.npy", "array.safetensors"]))
    file = folder / name
    file.write_bytes(data.draw(byte_strings((place.good / name).read_bytes())))
    attempt(lambda: array_files.Arrays([file], {"": ([3, 8, 8], "float32")}))


def check_image(data: st.DataObject, place: Place, folder: Path) -> None:
    name = data.draw(st.sampled_from(["one.png", "one.jpg", "one.webp", "one.gif", "images.csv"]))
    images = copied(place, folder, "images")
    shown = images / "0" / "one.png"
    if name == "images.csv":
        shown = images / name
    content = (place.good / "originals" / name).read_bytes()
    shown.write_bytes(data.draw(byte_strings(content)))
    record = {**place.seen, "num_classes": 10}
    source = str(shown if name == "images.csv" else images)
    attempt(lambda: list(make_loader(record, source, workers=0, batch_size=2)))


KINDS: dict[str, Check] = {
    "header": check_header,
    "signed header": check_signed_header,
    "config.json": check_config,
    "safetensors": check_safetensors,
    "plan": check_plan,
    "recipe": check_recipe,
    "sidecar": check_sidecar,
    "transformers": check_transformers,
    "timm": check_timm,
    "pickle": check_pickle,
    "array": check_array,
    "image": check_image,
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One undamaged file of every kind."""
    folder = tmp_path_factory.mktemp("good")
    converted = convert(tiny(), "skipinit", input_size=SIZE)
    checkpoint.save(converted, folder / "net")
    record = header_of(folder / "net" / "model.safetensors")[1]
    (folder / "plan.json").write_text(json.dumps(record["plan"]), encoding="utf-8")

    recipe = recipe_files.load_recipe("cifar10_recover_bn")
    (folder / "recipe.yaml").write_text(recipe_files.dump(recipe), encoding="utf-8")
    (folder / "recipe.json").write_text(
        json.dumps(recipe.model_dump(mode="json")), encoding="utf-8"
    )

    body = sidecar.body(tiny(), SIZE, "logits", normalize=False, dynamic=True)
    (folder / "sidecar.json").write_text(json.dumps(body), encoding="utf-8")
    (folder / "net.onnx").write_bytes(b"")

    write_tensors(folder)
    write_images(folder)
    write_transformers(folder / "hf")
    state = tiny().state_dict()
    write_folder(folder / "timm", state, model_args={"channels": [4, 4, 8, 8]})
    return folder


def write_tensors(folder: Path) -> None:
    state = {"weight": torch.randn(4, 3), "bias": torch.zeros(4), "count": torch.tensor(3)}
    torch.save({"epoch": 3, "state_dict": state}, folder / "weights.pth")
    torch.save(state, folder / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), folder / "whole.pth")
    np.save(folder / "array.npy", np.zeros((2, 3, 8, 8), np.float32))
    save_file({"x": torch.zeros(2, 3, 8, 8)}, folder / "array.safetensors")


def write_images(folder: Path) -> None:
    image = Image.fromarray(np.arange(3 * 12 * 12, dtype=np.uint8).reshape(12, 12, 3))
    originals = folder / "originals"
    originals.mkdir()
    (folder / "images" / "0").mkdir(parents=True)
    for name in ("one.png", "one.jpg", "one.webp", "one.gif"):
        image.save(originals / name)
    image.save(folder / "images" / "0" / "two.png")
    (originals / "images.csv").write_text(
        "file,label\n0/two.png,0\n0/two.png,3\n", encoding="utf-8"
    )


def write_transformers(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=4
    )
    transformers.utils.logging.disable_progress_bar()
    model = transformers.ResNetForImageClassification(config)
    model.save_pretrained(folder)
    names = model.state_dict()
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "part.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    processor = {
        "do_resize": True,
        "size": {"shortest_edge": 40},
        "crop_size": {"height": 32, "width": 32},
        "do_center_crop": True,
        "resample": 3,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.2, 0.2],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")


@pytest.fixture(scope="module")
def place(good: Path) -> Place:
    return Place(good, seen_of(checkpoint.load(good / "net")))


def fuzz(kind: str, place: Place, root: Path, examples: int) -> None:
    """Damage files of a kind so many times, and open them."""
    check = KINDS[kind]
    if kind == "image":
        place = replace(place, seen=preprocessing.data_config(checkpoint.load(place.good / "net")))

    @settings(max_examples=examples, derandomize=not ASKED, database=None, deadline=None)
    @given(st.data())
    def run(data: st.DataObject) -> None:
        folder = root / "damaged"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        check(data, place, folder)

    run()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(4)
def test_a_damaged_file_opens_as_it_was_or_is_refused(
    kind: str, place: Place, tmp_path: Path
) -> None:
    fuzz(kind, place, tmp_path, max(8, ASKED // len(KINDS)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_500_damaged_files(kind: str, place: Place, tmp_path: Path) -> None:
    fuzz(kind, place, tmp_path, 500 // len(KINDS) + 1)


@pytest.mark.parametrize("kind", ["net", "hf", "timm"])
def test_undamaged_files_open(kind: str, good: Path) -> None:
    model = attempt(
        lambda: (
            open_source(f"hf:{good / kind}")
            if kind == "hf"
            else checkpoint.open_model(str(good / kind))
        )
    )
    assert model is not None
    assert provenance_of(model).source
