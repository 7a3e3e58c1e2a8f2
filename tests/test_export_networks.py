"""Exports of timm's networks, and of the trained ones on all 10,000 test images. Minutes each.

    pytest -m slow tests/test_export_networks.py

Node counts beside a plain export, and the figures: tests/benchmarks/export.py writes them as tables.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from alone import run_alone
from lived import distance, lived_in, run
from torch import Tensor

import normswap
from normswap import data
from normswap.checkpoint import open_model
from normswap.ship import formats

SHARED = Path(__file__).resolve().parents[2] / "shared"
IMAGES = SHARED / "data" / "cifar10" / "test.tar.xz"
TRAINED = {
    "resnet18_narrow": SHARED / "checkpoints" / "resnet18_narrow",
    "resnetv2_18_narrow": SHARED / "checkpoints" / "resnetv2_18_narrow",
    "demo": Path(normswap.__file__).parent / "demo_data",
}
ENDINGS = {"onnx": "onnx", "pt2": "pt2", "torchscript": "ts", "safetensors": "safetensors"}
DEEP = ("resnet18", "resnet50", "resnetv2_50", "seresnet50", "nf_resnet50", "resnext50_32x4d")
NFNETS = ("eca_nfnet_l0", "dm_nfnet_f0")
SIZE = (3, 64, 64)
# the fraction of images with the source's answer. Where the arithmetic is bfloat16, too, rounding the activations alone
# changes more answers of these narrow networks than 1 in 1000 (tests/benchmarks/export.md)
AGREEMENT = {"fp32": 1.0, "fp16": 0.999, "bf16": 0.996}
STORED_BF16 = 0.999

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "form"), [(name, form) for name in DEEP for form in ENDINGS] + [(name, "onnx") for name in NFNETS]
)
def test_a_deep_network_alone(name: str, form: str, tmp_path: Path) -> None:
    """No norm in the file, and the source's logits to 1e-5, or to twice what float32 itself costs the source.

    With random gammas, some negative, the signal of a deep network is chaotic enough for that to be 2e-5.
    """
    torch.manual_seed(0)
    x = torch.randn(4, *SIZE)
    source = lived_in(timm.create_model(name), x)
    precise = run(source, x.double())
    expected = run(source.float(), x)
    stray = distance(precise, expected.double())
    file = tmp_path / f"net.{ENDINGS[form]}"
    done = normswap.export(source, file, input_size=SIZE)
    assert not [kind for kind in done.nodes if "norm" in kind.lower()]
    assert distance(expected, run_alone(file, form, x)) <= max(1e-5, 2 * stray)


@pytest.mark.skipif(not IMAGES.is_file(), reason=f"the images are not there: {IMAGES}")
@pytest.mark.parametrize("name", TRAINED)
def test_every_test_image_gets_the_sources_answer(name: str, tmp_path: Path) -> None:
    if not TRAINED[name].is_dir():
        pytest.skip(f"the checkpoint is not there: {TRAINED[name]}")
    source = open_model(str(TRAINED[name]))
    runs = {}
    for form, ending in ENDINGS.items():
        for dtype in AGREEMENT:
            file = tmp_path / f"{dtype}.{ending}"
            normswap.export(source, file, dtype=dtype, dynamic_batch=True)
            runs[form, dtype] = formats.get(form).open(file)
    same = dict.fromkeys(runs, 0)
    off, whole = dict.fromkeys(runs, 0.0), 0.0
    with torch.inference_mode():
        for x, _ in data.make_loader(source, str(IMAGES), batch_size=100, workers=0):
            expected: Tensor = source(x)
            whole += float(expected.double().square().sum())
            for key, answer in runs.items():
                got = answer(x)
                same[key] += int((expected.argmax(1) == got.argmax(1)).sum())
                off[key] += float((expected - got).double().square().sum())
    for form, dtype in runs:
        wanted = STORED_BF16 if (form, dtype) == ("onnx", "bf16") else AGREEMENT[dtype]
        assert same[form, dtype] >= wanted * 10_000, (form, dtype, same[form, dtype])
        assert dtype != "fp32" or (off[form, dtype] / whole) ** 0.5 <= 1e-5
