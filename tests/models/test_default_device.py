"""`torch.set_default_device`: all gives what it gives without it. A tensor on "meta" by accident has no values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
import torch
from lived import lived_in
from own_networks import Branch
from scheme_rows import ROWS, Row
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import normswap
from normswap import demo_files
from normswap.analysis.advice import advise
from normswap.analysis.signal_propagation import signal
from normswap.images.accuracy import evaluate
from normswap.images.datasets import make_loader
from normswap.models import default_device
from normswap.storage.checkpoint import open_model
from normswap.surgery.recalibration import recalibrate


class Ramp(nn.Module):
    """A forward that makes a tensor where the default device is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.linspace(1, 2, x.shape[-1])


torch.manual_seed(0)
IMAGES = torch.randn(16, 3, 8, 8)
FEW = IMAGES[:2]
PLAIN = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), Branch(), Branch(), nn.AdaptiveAvgPool2d(1),
                      nn.Flatten(), nn.Linear(4, 3))  # fmt: skip
lived_in(PLAIN, IMAGES.double()).float()
NETWORK = nn.Sequential(*PLAIN[:4], Ramp(), *PLAIN[4:]).eval()
PLAIN.eval()


@pytest.fixture(autouse=True)
def _elsewhere() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def same(work: Callable[[], object]) -> None:
    """What it gives, which is what it gives without a default device."""
    there = work()
    with torch.device("cpu"):
        here = work()
    if isinstance(there, str):
        assert there == here
    else:
        torch.testing.assert_close(there, here, rtol=0, atol=0)


def answers(model: nn.Module) -> Tensor:
    """Of a network whose forward makes tensors, as without a default device."""
    with torch.device("cpu"), torch.no_grad():
        return cast(Tensor, model.eval()(IMAGES))


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_convert(row: Row) -> None:
    fits = row.scheme in ("groupnorm", "layernorm", "instancenorm", "dyt")
    for images in [None, [IMAGES]] if fits else [None]:

        def converted(images: list[Tensor] | None = images) -> Tensor:
            done = normswap.convert(NETWORK, row.scheme, inputs=FEW, calibrate=images, **row.options)
            return answers(done.model)

        same(converted)


def test_noise_and_made_images() -> None:
    """Without inputs, and with images that are made up."""
    size = (3, 8, 8)
    same(lambda: answers(normswap.convert(NETWORK, "dyt", input_size=size, calibrate="noise").model))
    same(
        lambda: answers(normswap.convert(NETWORK, "groupnorm", input_size=size, calibrate=normswap.Synthetic(4)).model)
    )


def test_a_record_that_is_read_later() -> None:
    """What a `Network` works out when it is first asked for."""
    same(lambda: normswap.Network(NETWORK, size=(3, 8, 8)).examples[0].images)
    assert len(normswap.Network(NETWORK, size=(3, 8, 8)).anatomy.norms) == 3
    assert len(normswap.inspect(NETWORK).norms) == 3


def test_verify_save_and_load(tmp_path: Path) -> None:
    folded = normswap.convert(NETWORK, "folded", inputs=FEW)
    assert normswap.verify(NETWORK, folded.model, input_size=(3, 8, 8)).passed
    normswap.save(folded, tmp_path / "n")
    assert torch.equal(answers(normswap.load(tmp_path / "n", skeleton=NETWORK)), answers(folded.model))


def test_export(tmp_path: Path) -> None:
    """Which runs the file beside the network, with inputs and on made pictures."""
    assert normswap.export(PLAIN, tmp_path / "n.ts", inputs=FEW[:1]).file.exists()
    assert normswap.export(PLAIN, tmp_path / "m.ts", input_size=(3, 8, 8)).file.exists()


def test_recalibrate_and_the_signal() -> None:
    same(lambda: answers(recalibrate(NETWORK, [IMAGES], inputs=FEW).model))
    same(lambda: [point.variance for point in signal(normswap.Network(NETWORK, FEW))])


def test_advice_diagnosis_and_groups() -> None:
    network = normswap.Network(NETWORK, FEW)
    assert advise(network, "x", 2)[0]
    same(lambda: str(normswap.diagnose(NETWORK, inputs=FEW)))
    assert len(normswap.param_groups(NETWORK)) == 2


def test_evaluate_the_demo() -> None:
    """Loading, a loader of ours that reads some of a folder, and counting."""
    demo = open_model(str(demo_files.FOLDER))
    same(lambda: evaluate(demo, make_loader(demo, str(demo_files.IMAGES), workers=0, samples=16)).top1)


def test_a_loader_of_the_users_is_read_as_the_user_would() -> None:
    """With its own default device: on a GPU its generator may be of that."""
    devices = list[torch.device]()

    def images() -> Iterator[Tensor]:
        devices.append(torch.empty(1).device)
        yield IMAGES

    normswap.convert(NETWORK, "dyt", inputs=FEW, calibrate=images)
    assert devices
    assert {device.type for device in devices} == {"meta"}


def test_nothing_is_switched_where_there_is_no_default_device() -> None:
    torch.set_default_device(None)
    with default_device.cpu_by_default():
        assert not _get_current_function_mode_stack()


def test_an_error_leaves_the_default_device_as_it_was() -> None:
    with pytest.raises(normswap.NormswapError):
        normswap.convert(NETWORK, "no-such-scheme")
    assert torch.empty(1).is_meta
