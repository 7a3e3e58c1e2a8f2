"""BatchNorm over all processes, of which there is one here: torch's own BatchNorm. Two processes: `test_resume.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lived import distance
from timm.layers import BatchNormAct2d
from torch import nn
from trained import network, recipe, train, write_images

from normswap.training import assembly
from normswap.training.synced_batchnorm import synchronize

NORMS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(6),
    "BatchNorm1d": lambda: nn.BatchNorm1d(6),
    "BatchNorm3d": lambda: nn.BatchNorm3d(6, eps=0.1),
    "without gamma and beta": lambda: nn.BatchNorm2d(6, affine=False),
    "without statistics": lambda: nn.BatchNorm2d(6, track_running_stats=False),
    "the mean of all updates": lambda: nn.BatchNorm2d(6, momentum=None),
    "with an activation": lambda: BatchNormAct2d(6),
}
SHAPES = {"BatchNorm1d": (5, 6), "BatchNorm3d": (5, 6, 2, 3, 2)}


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.usefixtures("alone")
def test_one_process_alone_has_torchs(name: str) -> None:
    torch.manual_seed(0)
    norm = NORMS[name]().double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    model = nn.Sequential(norm)
    ours = copy.deepcopy(model)
    assert synchronize(ours) == 1
    for _ in range(3):
        x = torch.randn(SHAPES.get(name, (5, 6, 4, 3)), dtype=torch.float64)
        one, two = x.clone().requires_grad_(), x.clone().requires_grad_()
        expected, found = model(one), ours(two)
        weights = torch.randn_like(expected)
        (expected * weights).sum().backward()
        (found * weights).sum().backward()
        assert distance(expected.detach(), found.detach()) < 1e-12
        assert one.grad is not None
        assert two.grad is not None
        assert distance(one.grad, two.grad) < 1e-9
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        assert distance(a.grad, b.grad) < 1e-12
    for one, two in zip(model.buffers(), ours.buffers(), strict=True):
        assert distance(one.double(), two.double()) < 1e-12
    with torch.no_grad():
        assert distance(model.eval()(x), ours.eval()(x)) < 1e-12


def test_a_process_by_itself_has_nothing_to_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly.synced_batchnorm, "synchronize", lambda model: pytest.fail("there is one process"))
    images = write_images(tmp_path / "images", 2)
    train(network(), recipe(images, train={"epochs": 0.5, "sync_bn": True}), tmp_path / "out")
