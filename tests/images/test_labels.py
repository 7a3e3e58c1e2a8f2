"""Labels become outputs by name, WordNet id or number; labels that partly match are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from support.command_line import MODEL, refused, run_json
from timm.data import ImageNetInfo
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import normswap
from normswap.cli.app import main
from normswap.errors import SourceError
from normswap.images.accuracy import evaluate
from normswap.images.datasets import Outputs, image_record, label_map, make_loader
from normswap.models.records import class_names
from normswap.storage.checkpoint import open_model

CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
WORDNET = ImageNetInfo().label_names()


def numbered(*names: str) -> dict[str, int]:
    return {name: number for number, name in enumerate(names)}


@pytest.mark.parametrize(
    ("labels", "outputs", "expected", "note"),
    [
        (
            ("cat", "dog"),
            Outputs(10, CIFAR),
            [3, 5],
            "labels by name: 2 of the network's 10 classes",
        ),
        (
            ("Great_White-Shark", "hen"),
            Outputs(3, ("hen", "x", "great white shark")),
            [2, 0],
            "labels by name: 2 of",
        ),
        (
            (WORDNET[7], WORDNET[2]),
            Outputs(1000),
            [7, 2],
            "labels by WordNet id: 2 of the network's 1000 classes",
        ),
        ((WORDNET[7],), Outputs(1000, tuple(f"LABEL_{i}" for i in range(1000))), [7], "WordNet id"),
        (tuple(sorted(WORDNET, reverse=True)), Outputs(1000), list(range(999, -1, -1)), ""),
        (("4", "7"), Outputs(10, CIFAR), [4, 7], "labels by number: 2 of the network's 10"),
        (("10", "2"), Outputs(None), [10, 2], ""),
        (("b", "a"), Outputs(2), [0, 1], ""),
        (("",), Outputs(1), [0], ""),
    ],
)
def test_outputs_of_labels(
    labels: tuple[str, ...], outputs: Outputs, expected: list[int], note: str
) -> None:
    output_of, printed = label_map(numbered(*labels), outputs, "photos")

    assert [output_of[number] for number in range(len(labels))] == expected
    assert note in printed
    assert bool(note) == bool(printed)


@pytest.mark.parametrize(
    ("labels", "outputs", "words"),
    [
        (
            ("bird", "plane"),
            Outputs(2, CIFAR[:3]),
            ["1 of 2 labels are no classes", "(plane)", "airplane", "CSV"],
        ),
        (("", *CIFAR), Outputs(10, CIFAR), ["1 of 11 labels"]),
        ((WORDNET[0], "n00000001"), Outputs(1000), ["1 of 2 labels are no classes", "n00000001"]),
        ((WORDNET[0], "tench"), Outputs(1000), ["tench"]),
        (("a", "b"), Outputs(3), ["photos has 2 classes (a, b)", "the network has 3"]),
        (
            ("car", "plane"),
            Outputs(2, CIFAR[:2]),
            ["photos has 2 classes (car, plane)", "airplane, automobile"],
        ),
        (("1", "2", "3"), Outputs(3), ["a label 3", "outputs are 0 to 2"]),
        (("crane", "hen"), Outputs(3, ("crane", "crane", "hen")), ["1 of 2 labels", "(crane)"]),
        (("5", "6"), Outputs(2), ["a label 6", "outputs are 0 to 1"]),
        (("0", "1", "-1"), Outputs(3, CIFAR[:3]), ["1 of 3 labels", "-1"]),
        (("",), Outputs(1000), ["no class folders", "CSV"]),
        (("",), Outputs(None), ["no class folders"]),
    ],
)
def test_refused(labels: tuple[str, ...], outputs: Outputs, words: list[str]) -> None:
    with pytest.raises(SourceError) as caught:
        label_map(numbered(*labels), outputs, "photos")

    for word in words:
        assert word in str(caught.value)


def test_a_network_that_says_nothing_is_asked_by_running_it() -> None:
    bare = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    assert image_record(bare)["num_classes"] == 4
    assert image_record(bare[:1])["num_classes"] is None


CONFIG = {
    "input_size": [3, 8, 8],
    "mean": [0.5] * 3,
    "std": [0.25] * 3,
    "interpolation": "bilinear",
}
CONFIG |= {"crop_pct": 1.0, "crop_mode": "center", "num_classes": 10, "label_names": list(CIFAR)}


def photograph(file: Path, shade: int = 0) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((10, 10, 3), shade, dtype=np.uint8)).save(file)


def labels_of(data: Path, **options: object) -> list[int]:
    loader = make_loader(CONFIG, str(data), workers=0, **options)  # type: ignore[arg-type]
    return torch.cat([labels for _, labels in loader]).tolist()


@pytest.mark.parametrize(
    ("labels", "encoding"), [(("horse", "bird"), "utf-8"), (("7", "2"), "utf-8-sig")]
)
def test_csv(tmp_path: Path, labels: tuple[str, str], encoding: str) -> None:
    lines = ["file,label\n"]
    for number, label in enumerate(labels):
        photograph(tmp_path / "flat" / f"{number}.png")
        lines.append(f"flat/{number}.png,{label}\n")
    (tmp_path / "labels.csv").write_text("".join(lines), encoding=encoding)

    assert labels_of(tmp_path / "labels.csv") == [7, 2]


@pytest.mark.parametrize("names", [[*map(str, range(12))], [f"class{n}" for n in range(12)]])
@pytest.mark.parametrize("kind", ["csv", "folders"])
def test_labels_without_names_are_in_the_order_of_their_numbers(
    kind: str, names: list[str], tmp_path: Path
) -> None:
    """Sorted as words they would be 0, 1, 10, 11, 2. The network says nothing of its classes."""
    order = [7, 10, 2, 0, 11, 1, 9, 3, 8, 4, 6, 5]
    lines = ["file,label\n"]
    for number in order:
        folder = names[number] if kind == "folders" else "flat"
        photograph(tmp_path / "data" / folder / f"{names[number]}.png", shade=20 * number)
        lines.append(f"flat/{names[number]}.png,{names[number]}\n")
    data = tmp_path / "data"
    if kind == "csv":
        data = data / "labels.csv"
        data.write_text("".join(lines), encoding="utf-8")
    config = {**CONFIG, "num_classes": 12, "mean": [0.0] * 3, "std": [1.0] * 3}
    del config["label_names"]

    found: dict[int, int] = {}
    for images, labels in make_loader(config, str(data), workers=0):
        for image, label in zip(images, labels.tolist(), strict=True):
            found[label] = round(255 * float(image.mean()))

    # Each image has the shade of its number.
    assert found == {number: 20 * number for number in range(12)}


AS_WORDS = sorted(map(str, range(12)))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (None, None),
        (("b", "a"), ["b", "a"]),
        ({number: f"class{number}" for number in AS_WORDS}, [f"class{n}" for n in range(12)]),
        ({1: "a", 0: "b"}, ["b", "a"]),
        ({"0": "b", "2": "a"}, None),
        ({"n02": "b", "n01": "a"}, ["b", "a"]),
    ],
)
def test_names_of_classes_are_in_the_order_of_the_outputs(names: object, found: object) -> None:
    """Of names for some outputs alone nothing is said. timm has a list, or a dict by number."""
    assert class_names({"label_names": names}) == found


def test_a_name_is_the_output_that_it_has_by_number(tmp_path: Path) -> None:
    for number in (10, 2):
        photograph(tmp_path / f"class{number}" / "0.png")
    names = {number: f"class{number}" for number in AS_WORDS}

    loader = make_loader({**CONFIG, "num_classes": 12, "label_names": names}, str(tmp_path))

    assert sorted(torch.cat([labels for _, labels in loader]).tolist()) == [2, 10]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("path,class\n0.png,cat\n", ["no list of images", "first line is file,label"]),
        ("file;label\n0.png;cat\n", ["no list of images", "first line is file,label"]),
        ("file,label\nnone.png,cat\n", ["none.png does not exist", "relative to its folder"]),
        ("file,label\n0.png\n", ["no list of images"]),
        ("file,label\n0.png,tiger\n", ["no class"]),
        ("", ["no list of images", "first line is file,label"]),
        ("\xff", ["UTF-8"]),
    ],
)
def test_bad_csv(tmp_path: Path, text: str, words: list[str]) -> None:
    photograph(tmp_path / "0.png")
    (tmp_path / "labels.csv").write_bytes(text.encode("latin-1"))

    with pytest.raises(SourceError) as caught:
        labels_of(tmp_path / "labels.csv")

    message = str(caught.value)
    assert "labels.csv" in message
    assert all(word in message for word in words) or "tiger" in text, message


def test_the_part_is_chosen_and_said(tmp_path: Path) -> None:
    for part, count in (("train", 3), ("val", 2), ("test", 1)):
        for number in range(count):
            photograph(tmp_path / part / "cat" / f"{number}.png")

    loader = make_loader(CONFIG, str(tmp_path), workers=0)
    assert loader.count == 2  # not all parts together
    assert loader.notes[0] == f"images of {tmp_path / 'val'}"

    for split, count in {"training": 3, "val": 2, "valid": 2, "test": 1}.items():
        assert make_loader(CONFIG, str(tmp_path), workers=0, split=split).count == count

    assert "images of" not in str(make_loader(CONFIG, str(tmp_path / "test"), workers=0).notes)
    with pytest.raises(SourceError, match="no part holdout"):
        make_loader(CONFIG, str(tmp_path), split="holdout")


def test_the_class_of_trains_is_no_part(tmp_path: Path) -> None:
    for name in ("bus", "train"):
        photograph(tmp_path / name / "0.png")
    config = {**CONFIG, "num_classes": 2, "label_names": []}

    loader = make_loader(config, str(tmp_path), workers=0, split="train")

    assert loader.count == 2


def test_labels_are_not_asked_for_where_nothing_needs_them(tmp_path: Path) -> None:
    photograph(tmp_path / "0.png")
    assert labels_of(tmp_path, labelled=None) == [-1]
    assert len(labels_of(tmp_path, labelled=False)) == 1
    with pytest.raises(SourceError, match="no class folders"):
        labels_of(tmp_path)


def test_commands_say_how_labels_were_read(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("cat", "dog"):
        photograph(tmp_path / "val" / name / "0.png")

    assert main(["evaluate", MODEL, "--data", str(tmp_path), "--workers", "0"]) == 0

    printed = capfd.readouterr().err
    assert f"note: images of {tmp_path / 'val'}" in printed
    assert "note: labels by name: 2 of the network's 10 classes" in printed


@pytest.mark.slow
def test_commands_refuse_names_that_partly_match(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("bird", "plane"):
        photograph(tmp_path / "photos" / name / "0.png")
    data = ["--workers", "0", "--data", "photos"]
    words = ("photos", "1 of 2 labels", "(plane)")

    refused(("evaluate", MODEL, *data), words, tmp_path, capfd)
    refused(("export", MODEL, *data, "-o", "net.onnx"), words, tmp_path, capfd)
    assert main(["convert", MODEL, "--to", "folded", "-o", "folded"]) == 0
    refused(("verify", "folded", *data), words, tmp_path, capfd)


@pytest.mark.slow
def test_fitting_takes_any_folder(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Labels are not needed, nor as many classes as the network has."""
    for number in range(8):
        photograph(tmp_path / "photos" / f"{number}.png", 30 * number)
    for number in range(32):
        photograph(tmp_path / "classes" / "x" / f"{number}.png", 7 * number)
    out = str(tmp_path / "out")

    fit = ("--to", "groupnorm", "--only", "layer4", "--calibrate", str(tmp_path / "photos"))
    body = run_json(capfd, "convert", MODEL, *fit, "-o", out)
    assert body["steps"][0]["report"]["kept"]["count"] == 2

    data = ("--data", str(tmp_path / "classes"), "--workers", "0")
    run_json(capfd, "recalibrate", MODEL, *data, "-o", out, "--force")


@pytest.mark.slow
def test_an_encoder_is_compared_by_its_features(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its images may lie in class folders; they have no meaning to it."""
    monkeypatch.chdir(tmp_path)
    for number in range(6):
        file = tmp_path / "photos" / ("cat", "dog")[number % 2] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(number)
        pixels = generator.integers(0, 255, (64, 64, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(file)

    data = ("--data", "photos", "--workers", "0")
    assert main(["convert", MODEL, "--num-classes", "0", "--to", "groupnorm", "-o", "encoder"]) == 0

    result = normswap.load("encoder")
    source = open_model(MODEL, num_classes=0)

    images = next(iter(make_loader(source, "photos", workers=0, labelled=False)))[0]
    with torch.no_grad():
        features = source(images)
        others = result(images)

    off = float((features - others).norm() / features.norm())
    capfd.readouterr()
    known = run_json(capfd, "verify", "encoder", *data)["data"]

    assert known == {
        "agreement": None,
        "relative_l2": pytest.approx(off, rel=1e-4),
        "count": 6,
        "answer": "",
        "axis": None,
    }
    assert main(["export", "encoder", "-o", "encoder.onnx", *data]) == 0
    assert main(["verify", "encoder.onnx", "--against", "encoder", *data]) == 0
    assert main(["report", "encoder", "-o", "encoder.html", *data]) == 0
    assert f"{off:.1e}" in (tmp_path / "encoder.html").read_text(encoding="utf-8")

    why = "the network has no classifier: features have no accuracy"
    refused(("evaluate", "encoder", *data), (why,), tmp_path, capfd)


class Table(nn.Module):
    """Looks its logits up by the value of the first pixel; drops out in training mode."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.frozen = nn.BatchNorm2d(3).eval()
        self.drop = nn.Dropout(0.9)

    def forward(self, images: Tensor) -> Tensor:
        return self.drop(self.logits[images[:, 0, 0, 0].long()])


def batches(labels: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    images = torch.arange(float(len(labels)))[:, None, None, None].expand(-1, 3, 2, 2)
    return list(zip(images.split(size), labels.split(size), strict=True))


@pytest.mark.parametrize("classes", [2, 3, 5, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_evaluate(classes: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, classes, generator=generator, dtype=dtype)
    labels = torch.randint(classes, (40,), generator=generator)
    model = Table(logits).train()
    model.frozen.eval()
    calls: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        calls.append((done, total))

    found = evaluate(model, batches(labels, 15), progress=progress)

    rank = (logits > logits.gather(1, labels[:, None])).sum(1)
    assert found.top1 == pytest.approx(100 * (rank == 0).float().mean().item())
    assert found.top5 == pytest.approx(100 * (rank < 5).float().mean().item())
    assert found.loss == pytest.approx(cross_entropy(logits, labels).item(), rel=1e-6)
    assert (found.count, calls) == (40, [(15, 0), (30, 0), (40, 0)])
    assert found.images_per_s > 0
    assert model.training
    assert model.drop.training
    assert not model.frozen.training


@pytest.mark.parametrize(
    ("labels", "token"), [([0, 3], "label 3 is no class"), ([0, -1], "label -1"), ([], "no images")]
)
def test_evaluate_refuses(labels: list[int], token: str) -> None:
    model = Table(torch.zeros(4, 3)).train()
    data = batches(torch.tensor(labels), 2) if labels else []

    with pytest.raises(SourceError, match=token):
        evaluate(model, data)

    assert model.training
