"""Detectors that Ultralytics fused, by the files of the page: unfused, trained by its own trainer,
fused again.
"""

import copy
import csv
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import ROOT, blocks
from support.detectors import write_squares
from support.model_sources import same
from torch import nn

import normswap
from normswap.cli.app import main
from normswap.sites import affine

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # its own
    pytest.mark.needs("ultralytics"),
]
SIDE = 128
COUNT = 16
TRAINING = (
    f"epochs=4, imgsz={SIDE}, batch=8, device='cpu', workers=0, plots=False, val=False, project="
)


@torch.no_grad()
def boxes(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.eval()(x)[0]


@pytest.mark.parametrize("name", ["yolov8n", "yolo11n"])
def test_a_fused_detector_is_trained_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics import YOLO
    from ultralytics.nn.tasks import DetectionModel

    monkeypatch.chdir(tmp_path)
    write_squares(tmp_path, SIDE, COUNT)
    page = {
        block.file: block.text for block in blocks(ROOT / "docs" / "your_loop.md") if block.file
    }
    torch.manual_seed(0)
    detector = YOLO(f"{name}.yaml")
    detector.model = DetectionModel(f"{name}.yaml", nc=3, verbose=False)
    for norm in filter(affine.is_batchnorm, detector.model.modules()):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        norm.momentum = 0.5
    for _ in range(8):
        detector.model.train()(torch.randn(4, 3, SIDE, SIDE))
    detector.model.eval()
    detector.model.fuse()
    detector.save("best.pt")
    theirs = YOLO("best.pt").model.float()

    assert same(normswap.open("ultralytics:best.pt"), theirs.state_dict())

    x = torch.rand(1, 3, SIDE, SIDE)
    wanted = boxes(theirs, x)
    words = shlex.split(page["unfuse.sh"].replace("yolo11n", name).replace("IMAGES", "images"))
    assert main([*words[1:], "--input-size", f"3,{SIDE},{SIDE}"]) == 0

    before = page["train.py"].rsplit("\n", 2)[0]
    train = page["train.py"].strip().rsplit("\n", 1)[1]
    names: dict[str, Any] = {}
    exec(before, names)
    assert (boxes(names["detector"].model, x) - wanted).abs()[:, :4].max() < 0.05  # pixels

    exec(train.replace("epochs=10", f"{TRAINING}{str(tmp_path / 'runs')!r}"), names)

    (rows,) = [
        list(csv.DictReader(file.open(encoding="utf-8")))
        for file in Path("runs").rglob("results.csv")
    ]
    losses = [sum(float(row[key]) for key in row if key.startswith("train/")) for row in rows]
    assert losses[-1] < losses[0]
    (last,) = Path("runs").rglob("last.pt")
    trained = YOLO(last).model.float()
    wanted = boxes(trained, x)
    theirs = boxes(copy.deepcopy(trained).fuse(), x)
    folded = boxes(normswap.convert(trained, "folded", inputs=x).model, x)
    for found in (folded, theirs):
        assert (found - wanted).abs()[:, :4].max() < 0.05
