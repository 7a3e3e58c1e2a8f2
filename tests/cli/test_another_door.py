"""Law of doors: every way to a conversion gives one result, to the last bit.

The ways are the command line, Python, a plan that is applied, and a directory that is loaded.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.command_line import MODEL, Capture, run_json
from support.model_sources import small
from support.scheme_rows import ROWS, Row

import normswap
from normswap.errors import flag
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.models import preprocessing
from normswap.provenance import Provenance, of as origin
from normswap.storage import checkpoint
from normswap.surgery.recalibration import recalibrate

OTHERS_FITTED = [
    Row(scheme, {"calibrate": "demo"}) for scheme in ("nf", "dyt", "centered-weightnorm")
]
ASKED = (
    *ROWS,
    Row("folded", {"only": ["layer2"]}),
    Row("skipinit", {"skip": ["layer1", "layer4.1"]}),
    Row("groupnorm", {"purpose": "opacus", "relative_eps": 0}),
    Row("skipinit", {"purpose": "federated"}),
    Row("groupnorm", {"calibrate": "demo"}),
    *(pytest.param(row, marks=pytest.mark.long) for row in OTHERS_FITTED),
)


def typed(options: dict[str, Any]) -> list[str]:
    words = []
    for name, value in options.items():
        for each in value if isinstance(value, list) else [value]:
            words += [{"purpose": "--for"}.get(name, flag(name)), str(each)]
    return [*words, *(["--samples", "28", "--seed", "3"] if "calibrate" in options else [])]


def assert_same(one: Any, two: Any) -> None:
    """Assert that two networks are the same in everything.

    Compared are structure, tensors, provenance, how images are prepared (in timm's own record too),
    and the answers.
    """
    assert str(one) == str(two)

    state = one.state_dict()
    other = two.state_dict()
    assert state.keys() == other.keys()
    assert all(tensor.equal(other[name]) for name, tensor in state.items())

    first, second = (origin(model) or Provenance() for model in (one, two))
    assert first.plan.digest == second.plan.digest
    assert preprocessing.data_config(one) == preprocessing.data_config(two)
    assert all(
        one.pretrained_cfg[name] == two.pretrained_cfg[name]
        for name in ("mean", "std", "input_size")
    )
    assert first.norms.keys() == second.norms.keys()
    assert all(tensor.equal(second.norms[name]) for name, tensor in first.norms.items())

    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert one.eval()(x).equal(two.eval()(x))


@pytest.mark.parametrize("row", ASKED, ids=str)
@pytest.mark.one_in(12)
def test_one_conversion_by_every_door(row: Row, here: Path, capfd: Capture) -> None:
    body = run_json(
        capfd,
        "convert",
        MODEL,
        "--to",
        row.scheme,
        *typed(row.options),
        "-o",
        "typed",
        "--plan",
        "p.json",
    )
    by_command = normswap.load("typed")
    source = checkpoint.open_model(MODEL)

    options = dict(row.options)
    if options.pop("calibrate", None):
        options["calibrate"] = make_loader(
            source, "demo", split="train", samples=28, seed=3, labelled=False
        )
        options["seed"] = 3

    done = normswap.convert(source, row.scheme, **options)

    assert_same(done.model, by_command)
    assert_same(checkpoint.open_model("typed"), by_command)

    report = body["steps"][-1]["report"]

    assert [error["relative_l2"] for error in report["logits"]] == [
        error.relative_l2 for error in done.report.logits
    ]

    if "calibrate" in row.options:
        assert done.report.kept is not None
        assert report["kept"]["agreement"] == done.report.kept.agreement
        other = normswap.convert(source, row.scheme, **{**options, "seed": 4}).model.state_dict()
        assert any(
            not tensor.equal(other[name]) for name, tensor in done.model.state_dict().items()
        )
        return

    planned = run_json(capfd, "convert", MODEL, "--from-plan", "p.json", "-o", "planned")

    assert_same(normswap.load("planned"), by_command)
    if len(body["steps"]) == 1:
        assert planned["steps"][0]["outcomes"] == body["steps"][0]["outcomes"]
        assert planned["steps"][0]["verdicts"] == body["steps"][0]["verdicts"]

    ours = checkpoint.read_header(Path("planned")).report
    theirs = checkpoint.read_header(Path("typed")).report
    assert ours == theirs


@pytest.mark.slow
def test_one_recalibration_by_both_doors(here: Path, capfd: Capture) -> None:
    some = ("--data", "demo", "--samples", "40", "--batch-size", "20", "--workers", "0")
    run_json(capfd, "recalibrate", MODEL, *some, "-o", "typed")
    source = checkpoint.open_model(MODEL)
    loader = make_loader(
        source, "demo", split="train", samples=40, batch_size=20, workers=0, labelled=False
    )
    done = recalibrate(source, loader).model
    typed_one = normswap.load("typed")

    assert all(
        tensor.equal(typed_one.state_dict()[name]) for name, tensor in done.state_dict().items()
    )


@pytest.mark.slow
def test_one_accuracy_and_one_proof_by_both_doors(here: Path, capfd: Capture) -> None:
    images = ("--data", "demo", "--samples", "60", "--workers", "0")
    body = run_json(capfd, "evaluate", MODEL, *images)
    source = checkpoint.open_model(MODEL)
    found = evaluate(source, make_loader(source, "demo", samples=60, workers=0))

    assert (body["top1"], body["top5"], body["loss"]) == (found.top1, found.top5, found.loss)

    done = normswap.convert(source, "groupnorm", relative_eps=0)
    checkpoint.save(done, Path("out"))
    proof = run_json(capfd, "verify", "out")
    report = normswap.verify(source, normswap.load("out"), exact=False)

    assert [error["relative_l2"] for error in proof["report"]["logits"]][-1] == pytest.approx(
        report.logits[-1].relative_l2
    )


@pytest.mark.slow
def test_one_file_by_both_doors(here: Path, capfd: Capture) -> None:
    checkpoint.save(normswap.convert(small(layers=(1, 1, 1, 1)), "folded"), Path("small"))
    run_json(capfd, "export", "small", "-o", "typed.pt2", "--normalize", "--softmax")
    normswap.export(
        checkpoint.open_model("small"), Path("called.pt2"), normalize=True, softmax=True
    )
    x = torch.rand(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    one, two = (torch.export.load(name).module()(x) for name in ("typed.pt2", "called.pt2"))

    assert one.equal(two)
