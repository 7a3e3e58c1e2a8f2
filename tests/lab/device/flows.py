"""What normswap does with a network on the second device, beside the same on the CPU: run in a process of its own.

Prints a JSON object: of each flow "as on the CPU", or what is wrong; the waits of conversions fitted to images.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import second_device
import torch
import training
from lived import lived_in
from own_networks import Branch
from scheme_rows import ROWS, Row
from torch import Tensor, nn

import normswap
from normswap import demo_files
from normswap.cli.app import main as normswap_command
from normswap.surgery import recalibration

NAME = second_device.NAME


torch.manual_seed(0)
HERE = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Branch(), Branch(), nn.AdaptiveAvgPool2d(1),
                     nn.Flatten(), nn.Linear(4, 3))  # fmt: skip
IMAGES = torch.randn(32, 3, 12, 12)
FEW = IMAGES[:4]
lived_in(HERE, IMAGES.double()).float()
THERE = copy.deepcopy(HERE).to(NAME)


def same(there: nn.Module, here: nn.Module) -> None:
    """Their outputs are the same; not their weights: a device adds in another order."""
    output = there(IMAGES.to(NAME))
    assert output.device.type == NAME
    torch.testing.assert_close(output.cpu(), here(IMAGES), rtol=1e-3, atol=1e-4)


def converted(row: Row, calibrate: list[Tensor] | None, images: Tensor = FEW) -> None:
    here = normswap.convert(HERE, row.scheme, inputs=FEW, calibrate=calibrate, **row.options)
    there = normswap.convert(THERE, row.scheme, inputs=images, calibrate=calibrate, **row.options)
    assert there.report.passed == here.report.passed
    same(there.model, here.model)


def folded() -> tuple[nn.Module, nn.Module]:
    """The network folded, on the device, and with an error of a thousandth in its filters."""
    right = copy.deepcopy(normswap.convert(HERE, "folded", inputs=FEW).model).to(NAME)
    wrong = copy.deepcopy(right)
    with torch.no_grad():
        next(wrong.parameters()).mul_(1.001)
    return right, wrong


def verified() -> None:
    right, wrong = folded()
    assert normswap.verify(THERE, right, inputs=FEW).passed
    assert not normswap.verify(THERE, wrong, inputs=FEW).passed


def inspected() -> None:
    assert len(normswap.inspect(THERE, inputs=FEW).norms) == 3
    assert len(normswap.param_groups(THERE)) == len(normswap.param_groups(HERE))
    assert normswap.diagnose(THERE, inputs=FEW) == normswap.diagnose(HERE, inputs=FEW)


def recalibrated() -> None:
    there, here = (recalibration.recalibrate(model, [IMAGES], inputs=FEW) for model in (THERE, HERE))
    same(there.model, here.model)


def exported(ending: str, images: Tensor) -> None:
    with tempfile.TemporaryDirectory() as folder:
        normswap.export(THERE, Path(folder) / f"x.{ending}", inputs=images)  # which runs it beside the network


def saved() -> None:
    with tempfile.TemporaryDirectory() as folder:
        done = normswap.convert(THERE, "skipinit", inputs=FEW)
        normswap.save(done, Path(folder) / "s")
        assert (Path(folder) / "s" / "model.safetensors").exists()
        restored = normswap.convert(done, "batchnorm", inputs=FEW).model
        same(restored, HERE)


def random_numbers_go_on() -> None:
    torch.manual_seed(3)
    before = second_device._generator.get_state(), torch.get_rng_state()
    normswap.convert(THERE, "spectralnorm", inputs=FEW)
    normswap.convert(THERE, "groupnorm", inputs=FEW, calibrate=[IMAGES])
    assert torch.equal(before[0], second_device._generator.get_state())
    assert torch.equal(before[1], torch.get_rng_state())


def in_tf32() -> None:
    with second_device.tf32():
        off = (THERE(IMAGES.to(NAME)).cpu() - HERE(IMAGES)).norm() / HERE(IMAGES).norm()
        assert off > 1e-5, "the device computes in TF32"
        verified()
        fitted = normswap.convert(THERE, "groupnorm", inputs=FEW, calibrate=[IMAGES]).model
    same(fitted, normswap.convert(HERE, "groupnorm", inputs=FEW, calibrate=[IMAGES]).model)


def without_float64() -> None:
    with second_device.without_double():
        for row in ROWS:
            converted(row, [IMAGES] if row.scheme == "dyt" else None)
        converted(Row("groupnorm", exact=False), [IMAGES])


def said(*words: str, device: str) -> Any:
    """The JSON of a command that runs on a device; the device has done some of it."""
    out = io.StringIO()
    second_device.uploads.clear()
    with contextlib.redirect_stdout(out):
        assert normswap_command([*words, "--json", f"--device={device}"]) == 0
    assert bool(second_device.uploads) == (device == NAME)
    return json.loads(out.getvalue())


def commands() -> None:
    """Each that takes --device says on the device and on the CPU the same of the demo's network."""
    with tempfile.TemporaryDirectory() as folder:
        demo, data, said_on = str(demo_files.FOLDER), f"--data={demo_files.IMAGES}", {}
        for device in ("cpu", NAME):
            result, file = f"{folder}/{device}", f"{folder}/{device}.ts"
            fit = ["--only", "layer1.*", "--calibrate", str(demo_files.IMAGES), "--samples", "32"]
            kept = said("convert", demo, "--to", "groupnorm", *fit, "-o", result, device=device)["steps"][0]["report"]
            said("report", result, data, "--samples=16", "-o", f"{result}.html", device=device)
            said("recalibrate", demo, data, "--samples=16", "-o", f"{result}-again", device=device)
            said("export", demo, "-o", file, device=device)
            said_on[device] = [
                kept["passed"],
                said("evaluate", result, data, "--samples=32", device=device)["top1"],
                said("verify", result, data, "--samples=32", device=device)["data"],
                [
                    [p["stage"] for p in points]
                    for points in said("spp", demo, "--samples=4", device=device)["curves"].values()
                ],
            ]
        assert said_on["cpu"] == said_on[NAME], said_on


def flows() -> Iterator[tuple[str, Callable[[], None]]]:
    for row in ROWS:
        yield str(row), lambda row=row: converted(row, None)  # type: ignore[misc]
        if not row.exact and row.scheme in ("groupnorm", "layernorm", "instancenorm", "dyt"):
            yield f"{row} fitted", lambda row=row: converted(row, [IMAGES])  # type: ignore[misc]
    yield "nf fitted", lambda: converted(Row("nf"), [IMAGES])
    yield "images on the device", lambda: converted(Row("dyt"), [IMAGES.to(NAME)], FEW.to(NAME))
    yield "verify", verified
    yield "inspect, param_groups, diagnose", inspected
    yield "recalibrate", recalibrated
    for ending in ("onnx", "pt2", "ts"):
        yield f"export {ending}", lambda ending=ending: exported(ending, FEW[:1])  # type: ignore[misc]
    yield "export, images on the device", lambda: exported("ts", FEW[:1].to(NAME))
    yield "save, and back", saved
    yield "random numbers", random_numbers_go_on
    yield "finetune", training.as_on_the_cpu
    yield "TF32", in_tf32
    yield "no float64", without_float64


def waits(blocks: int) -> int:
    """How often groupnorm, fitted to images, waits for the device in a network of so many residual blocks."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), *(Branch() for _ in range(blocks)), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(4, 3)).eval().to(NAME)  # fmt: skip
    second_device.waits.clear()
    normswap.convert(model, "groupnorm", inputs=FEW, calibrate=[IMAGES])
    return second_device.waits.total()


def main() -> None:
    """`flows.py`: all but the commands; `flows.py commands`: these."""
    said, only = {}, sys.argv[1:] == ["commands"]
    for name, flow in [("commands", commands)] if only else flows():
        try:
            with torch.no_grad():
                flow()
            said[name] = "as on the CPU"
        except Exception as error:
            said[name] = f"{type(error).__name__}: {error}"
    counted = {} if only else {"waits": [waits(2), waits(4)], "training": [training.waits(3), training.waits(6)]}
    print(json.dumps({"flows": said, **counted}))


if __name__ == "__main__":
    main()
