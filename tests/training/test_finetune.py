"""`normswap finetune` as a user meets it: from a name to a recovered checkpoint, and what is said
of bad input.
"""

import csv
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.command_line import as_documented
from support.hand_written_networks import Answers
from support.lived_in_networks import lived_in
from support.small_trainings import CLASSES, network, recipe, train, write_images
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

import normswap
from normswap import provenance
from normswap.cli.app import main
from normswap.errors import NormswapError, OptionError, SourceError
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.storage import checkpoint
from normswap.training import assembly, recipe_files
from normswap.training.run_folder import COLUMNS


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_images(folder / "train")
    write_images(folder / "val", 2)
    return folder


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(network(), tmp_path_factory.mktemp("models") / "source")


def write(file: Path, **parts: Any) -> Path:
    plan = recipe("nowhere", **parts).model_dump(mode="json")
    plan["data"].update(root=None, validation=None)
    file.write_text(yaml.safe_dump(plan), encoding="utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["maps", "two outputs", "features", "two heads"])
def test_any_network_learns_again_from_its_source(
    answer: str, images: Path, tmp_path: Path
) -> None:
    """On other images of the kind, it ends at most two thirds as far from the source as before."""
    answers: dict[str, Any] = {"maps": lambda y: {"out": y}, "features": lambda y: y.mean((2, 3))}
    answers["two outputs"] = lambda y: (y, y.sigmoid()[:, :1])
    answers["two heads"] = lambda y: {"policy": y.mean((2, 3)), "value": y.amax((1, 2, 3))}
    torch.manual_seed(0)
    mean, std = (
        torch.tensor(each).view(3, 1, 1) for each in (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD)
    )
    x = (torch.rand(16, 3, 32, 32) - mean) / std
    source = lived_in(Answers(answers[answer]), x.double()).float()
    if answer == "features":
        source.__dict__["num_classes"] = 0
    convert: dict[str, Any] = {"to": "groupnorm", "options": {"groups": 4, "relative_eps": 0}}
    start = normswap.convert(source, convert["to"], **convert["options"]).model
    how: dict[str, Any] = {"distill": {"weight": 1}, "train": {"epochs": 12}, "convert": convert}
    how["data"] = {"input_size": 32, "augment": {"scale": [1, 1]}}
    plan = recipe(images / "train", optim={"lr": 0.003, "name": "adamw", "weight_decay": 0}, **how)
    result = train(source, plan, tmp_path / "run")
    before, after = (
        normswap.verify(source, m, x, exact=False).worst.relative_l2 for m in (start, result.model)
    )

    assert after < before * 2 / 3


@pytest.mark.slow
def test_one_command_from_a_name_to_a_recovered_checkpoint(
    images: Path, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "r.yaml", convert={"to": "skipinit"}, distill={})
    words = [
        "finetune",
        str(source),
        "train.epochs=1",
        "--recipe",
        str(file),
        "--data",
        str(images),
    ]
    words += ["-o", str(tmp_path / "run"), "--device", "cpu"]

    assert main(words) == 0

    shown = capsys.readouterr()
    assert "top-1:" in shown.out
    assert "epoch 1.00/1" in shown.err  # a log has a line per epoch

    last = normswap.load(tmp_path / "run/last")
    origin = provenance.of(last)
    assert origin is not None
    assert [step.scheme for step in origin.plan.steps] == ["skipinit"]

    rows = list(
        csv.DictReader((tmp_path / "run/metrics.csv").read_text(encoding="utf-8").splitlines())
    )
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert tuple(rows[0]) == COLUMNS
    assert recipe_files.load_recipe(tmp_path / "run/recipe.yaml").train.epochs == 1

    found = evaluate(
        last, make_loader(last, str(images / "val"), workers=0)
    )  # what `normswap evaluate` says

    assert float(rows[-1]["top1"]) == pytest.approx(found.top1)
    assert float(rows[-1]["val_loss"]) == pytest.approx(found.loss, rel=1e-5)
    assert main(words) == 2
    assert "holds a run. --resume auto continues it" in capsys.readouterr().err
    # As docs/train.md has it: the folder knows network, recipe and images.
    assert (
        main(
            [
                "finetune",
                "--resume",
                "auto",
                "-o",
                str(tmp_path / "run"),
                "--device",
                "cpu",
                "--json",
            ]
        )
        == 0
    )

    body = as_documented(capsys.readouterr().out, "finetune")
    assert body["finished"]
    assert body["updates"] == 5
    assert (
        main(
            [
                "convert",
                str(tmp_path / "run/best"),
                "--to",
                "folded",
                "-o",
                str(tmp_path / "folded"),
            ]
        )
        == 0
    )


@pytest.mark.slow
def test_without_validation_images_it_says_so_and_what_best_means(tmp_path: Path) -> None:
    photos = write_images(tmp_path / "photos")
    said: list[str] = []
    plan = recipe(photos, data={"validation": None}, train={"epochs": 3})
    result = train(network("skipinit"), plan, tmp_path / "out", say=said.append)

    assert said == list(result.notes)
    assert "no validation images" in said[0]
    assert "lowest loss on inputs that are held out" in said[0]

    losses = {row["epoch"]: row["val_loss"] for row in result.rows}
    assert len(losses) == 4

    assert result.best_epoch == min(losses, key=lambda epoch: losses[epoch] or 0.0)


def test_public_names_are_enough(images: Path, tmp_path: Path) -> None:
    """What a user's script does: nothing that is not a name of `normswap` itself."""
    (tmp_path / "mine.yaml").write_text(
        "summary: mine\ndata: {batch_size: 8, workers: 0}\ntrain: {epochs: 1}\n", encoding="utf-8"
    )
    given = [f"data.root={images}", "optim.lr=0.01"]
    read = normswap.load_recipe(tmp_path / "mine.yaml", given)
    same = normswap.Recipe.model_validate(read.model_dump())

    assert isinstance(read, normswap.Recipe)
    assert same == read

    result = normswap.finetune(
        network("skipinit"), read, tmp_path / "run", device="cpu", track="none"
    )

    assert isinstance(result, normswap.Result)
    assert (result.updates, result.finished) == (5, True)
    assert not normswap.inspect(normswap.load(result.best)).norms
    assert normswap.param_groups(result.model)
    assert normswap.load_recipe(result.best.parent / "recipe.yaml").optim.lr == 0.01
    with pytest.raises(normswap.NormswapError, match=r"unknown key optim\.lrr"):
        normswap.load_recipe("demo_train", ["optim.lrr=1"])


@pytest.mark.slow
def test_the_given_network_is_not_changed_and_no_random_number_is_lost(
    images: Path, tmp_path: Path
) -> None:
    model = network("skipinit")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    result = train(model, recipe(images), tmp_path / "out")

    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not model.training
    assert not result.model.training
    assert result.model is not model


def test_mixed_precision_compiled_layout_and_average(images: Path, tmp_path: Path) -> None:
    train_part = {
        "precision": "bf16",
        "channels_last": True,
        "ema": {"decay": 0.9},
        "smoothing": 0.1,
    }
    result = train(network("skipinit"), recipe(images, train=train_part), tmp_path / "out")
    assert next(result.model.parameters()).dtype == torch.float32
    assert result.rows[-1]["ema_top1"] is not None


@pytest.mark.slow
def test_trackers(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(network("skipinit"), recipe(images), tmp_path / "out", track="tensorboard")
    events = EventAccumulator(str(tmp_path / "out/trackers/normswap")).Reload()
    assert [event.step for event in events.Scalars("top1")] == [0, 5, 10]
    assert len(events.Scalars("loss")) == 10
    assert assembly.trackers("auto") == ["tensorboard"]
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["wandb", "dvclive"])
    assert assembly.trackers("wandb,dvclive") == ["wandb", "dvclive"]
    assert assembly.trackers("auto") == []
    assert assembly.trackers("none") == []
    with pytest.raises(OptionError, match="tracker 'wand' is unknown"):
        assembly.trackers("wand")


def test_without_accelerate_the_way_to_get_it_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(
        OptionError, match=r"needs the package accelerate.*pip install -e '\.\[train\]'"
    ):
        normswap.finetune(network(), recipe(tmp_path), tmp_path / "out")


Bad = tuple[str, Callable[[Path], Any], str]
BAD: list[Bad] = [
    ("no data", lambda p: recipe(p, data={"root": None}), r"no images to train on.*--data PATH"),
    ("no such data", lambda p: recipe(p / "x", data={"validation": None}), r"x does not exist"),
    (
        "no images",
        lambda p: recipe(p / "empty", data={"validation": None}),
        r"empty is not a dataset of images",
    ),
    (
        "other classes",
        lambda p: recipe(p / "three"),
        r"has 3 classes \(a, b, c\): the network has 10",
    ),
    (
        "other classes to validate",
        lambda p: recipe(p / "ten", data={"validation": str(p / "three")}),
        r"three has 3",
    ),
    (
        "a large batch",
        lambda p: recipe(p / "ten", data={"batch_size": 64}),
        r"batch_size 64 is too large.*10 images",
    ),
    (
        "odd mixup",
        lambda p: recipe(p / "ten", data={"batch_size": 5, "augment": {"mixup": 0.2}}),
        r"even number.*not 5",
    ),
    (
        "fp16 on a CPU",
        lambda p: recipe(p / "ten", train={"precision": "fp16"}),
        r"fp16 needs a GPU.*bf16",
    ),
    (
        "an optimizer",
        lambda p: recipe(p / "ten", optim={"name": "sdg"}),
        r"optim.name 'sdg' cannot be used",
    ),
    (
        "its argument",
        lambda p: recipe(p / "ten", optim={"args": {"betta": 1}}),
        r"optim.args .*'betta'.* cannot",
    ),
    (
        "a teacher",
        lambda p: recipe(p / "ten", distill={"teacher": "resnet19"}),
        r"unknown model 'resnet19'",
    ),
    (
        "a scheme",
        lambda p: recipe(p / "ten", convert={"to": "skipint"}),
        r"unknown scheme 'skipint'.*skipinit",
    ),
]


def test_that_no_images_are_named_is_said_before_anything_is_converted(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(NormswapError, match="no images to train on"):
        normswap.finetune(
            network(),
            recipe(tmp_path, data={"root": None}, convert={"to": "skipinit"}),
            tmp_path / "out",
            say=said.append,
        )
    assert not any("converting" in one for one in said)


@pytest.mark.parametrize(("name", "plan", "problem"), BAD, ids=[name for name, *_ in BAD])
def test_bad_input(tmp_path: Path, name: str, plan: Callable[[Path], Any], problem: str) -> None:
    (tmp_path / "empty").mkdir()
    write_images(tmp_path / "ten", 1)
    write_images(tmp_path / "three", 1, ["a", "b", "c"])
    with pytest.raises(NormswapError, match=problem):
        train(network(), plan(tmp_path), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_more_bad_input(images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path / "r.yaml"))
    model = str(checkpoint.save(network(), tmp_path / "m"))
    table: list[tuple[list[str], str]] = [
        ([model], "no recipe is given. Give --recipe NAME"),
        (["--recipe", file], "nothing to train"),
        ([model, "--recipe", file, "optim.rate=1"], "unknown key optim.rate"),
        ([model, "--recipe", file, "train.epochs=-1"], "train.epochs"),
        ([model, "other", "--recipe", file], "'other' is neither the MODEL"),
        ([model, "--recipe", "no_such_recipe"], "no recipe is called 'no_such_recipe'"),
        ([model, "--recipe", file, "--data", str(images), "--device", "tpu"], "device 'tpu'"),
        (
            [model, "--recipe", file, "--data", str(images), "--resume", "elsewhere"],
            "resume 'elsewhere' is not auto",
        ),
        (
            [str(tmp_path / "none"), "--recipe", file, "--data", str(images)],
            "is neither a file nor a directory",
        ),
    ]

    if not torch.cuda.is_available():
        table.append(
            (
                [model, "--recipe", file, "--data", str(images), "--device", "cuda"],
                "cuda is not available",
            )
        )

    for words, problem in table:
        assert main(["finetune", *words, "-o", str(tmp_path / "out")]) == 2, words
        shown = capsys.readouterr()
        assert problem in shown.err, (words, shown.err)
        assert shown.err.count("error:") == 1
        assert not shown.out
        assert not (tmp_path / "out").exists()


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    folder = write_images(tmp_path / "images")
    (folder / CLASSES[3] / "1.png").write_bytes(b"no image")
    plan = recipe(folder, data={"validation": str(write_images(tmp_path / "val", 1))})
    with pytest.raises(SourceError, match=r"class3/1.png cannot be read"):
        train(network("skipinit"), plan, tmp_path / "out")


def test_a_disk_that_cannot_be_written(images: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(NormswapError, match="cannot write to"):
        train(network(), recipe(images), tmp_path / "file" / "out")
