"""Converted detectors in Ultralytics' own trainer, by the file of docs/your_loop.md."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from docs_pages import ROOT, blocks
from support.detectors import opened_detector, write_squares
from torch import Tensor

import normswap

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # Ultralytics' own
    pytest.mark.needs("ultralytics"),
]
SIDE = 64
SCHEMES: dict[str, dict[str, Any]] = {
    "folded": {},
    "skipinit": {},
    "frozen-bn": {},
    "groupnorm": {},
    "nf": {"mean": "keep"},
}
ASKED = {"imgsz": SIDE, "device": "cpu", "workers": 0, "plots": False, "verbose": False}
IMAGES = torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def boxes(model: Any) -> Tensor:
    """Return the boxes and scores that a detector finds in eval mode."""
    with torch.no_grad():
        found: Tensor = model.eval()(IMAGES)[0]
    return found


def relative_l2(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_converted_detector_goes_through_its_trainer(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ultralytics import YOLO

    monkeypatch.chdir(tmp_path)
    described = write_squares(tmp_path / "squares", SIDE, count=8)
    source = opened_detector("yolo11n.yaml", tmp_path / "source.pt")
    done = normswap.convert(source, scheme, inputs=IMAGES, **SCHEMES[scheme])
    saved = normswap.save(done, "converted")
    layers = [type(module) for module in done.model.modules()]
    before = normswap.load(saved).half().state_dict()

    # Training, with the validation after its epoch and the last one, which fuses.
    [page] = [
        block.text
        for block in blocks(ROOT / "docs" / "your_loop.md")
        if block.file == "train_converted.py"
    ]
    asked = f"epochs=1, batch=4, project={str(tmp_path / 'runs')!r}, **{ASKED}"
    page = page.replace('"data.yaml"', repr(str(described)))
    assert "epochs=10" in page
    exec(page.replace("epochs=10", asked), {})

    (weights,) = Path("runs").rglob("last.pt")
    detector: Any = YOLO(weights)
    trained = copy.deepcopy(detector.model).float()
    state = trained.state_dict()
    again = normswap.load(saved, weights=weights)
    assert [type(module) for module in trained.modules()] == layers
    assert again.state_dict().keys() == state.keys()
    assert all(torch.equal(again.state_dict()[name], state[name]) for name in state)
    assert any(not torch.equal(state[name], before[name].float()) for name in state)

    wanted = boxes(again)
    assert relative_l2(boxes(copy.deepcopy(trained).fuse(verbose=False)), wanted) < 1e-5
    assert math.isfinite(detector.val(data=str(described), **ASKED).fitness)

    [found] = detector.predict(str(tmp_path / "squares" / "images" / "0.png"), **ASKED)
    assert found.orig_shape == (SIDE, SIDE)

    exported = torch.jit.load(detector.export(format="torchscript", imgsz=SIDE, batch=2))
    assert relative_l2(exported(IMAGES), wanted) < 1e-4
