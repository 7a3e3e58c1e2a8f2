"""Every scheme trains: on real images a few SGD steps lower the loss, every parameter moves, and
its state survives.
"""

import functools
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from support.lived_in_networks import lived_in
from support.sampled_tables import crossed
from support.scheme_rows import ROWS, Row
from torch import Tensor, nn

import normswap
from normswap import shipped
from normswap.images import datasets
from normswap.storage.checkpoint import open_model
from normswap.surgery import applying

NARROW: dict[str, dict[str, Any]] = {
    "resnet18": {"channels": (8, 16, 24, 32), "layers": (1, 2, 1, 1)},
    "resnetv2_18": {"channels": (8, 16, 24, 32), "stem_chs": 8, "layers": (1, 2, 1, 1)},
}
NOISE = 1e-13  # a gradient below is rounding; fixup's zeroed layers let little through at first


@functools.cache
def images(stride: int = 2) -> tuple[Tensor, Tensor]:
    loader = datasets.make_loader(
        open_model(str(shipped.FOLDER)), str(shipped.FOLDER / "images.tar"), workers=0, samples=32
    )
    batches = list(loader)
    return torch.cat([x for x, _ in batches])[:, :, ::stride, ::stride], torch.cat(
        [y for _, y in batches]
    )


@functools.cache
def source(arch: str) -> nn.Module:
    """Its statistics are those of the images, as if it had been trained on them."""
    torch.manual_seed(0)
    return lived_in(timm.create_model(arch, num_classes=10, **NARROW[arch]), images()[0])


@crossed("arch, row", NARROW, ROWS)
@pytest.mark.one_in(4)
def test_every_scheme_trains(arch: str, row: Row) -> None:
    x, y = images(
        1 if row.scheme == "instancenorm" else 2
    )  # which needs more than a pixel everywhere
    x = x.double()
    done = normswap.convert(source(arch), row.scheme, inputs=x[:2], **row.options)

    model: Any = done.model.train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0

    model.drop_rate = 0.0
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    moved: set[str] = set()

    losses = []
    for _ in range(6):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        losses.append(loss.item())
        loss.backward()
        moved |= {
            name
            for name, p in model.named_parameters()
            if p.grad is not None and p.grad.abs().max() > NOISE
        }
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    assert losses[-1] < losses[0]

    frozen = row.scheme == "frozen-bn"
    assert moved == set(before), sorted(set(before) - moved)
    assert frozen or len(moved) > 30
    assert not [name for name, p in model.named_parameters() if torch.equal(p, before[name])]

    _round_trip(model.eval(), source(arch), done, x)


def _round_trip(model: nn.Module, bare: nn.Module, done: normswap.Conversion, x: Tensor) -> None:
    """What was learned goes into the same plan on other weights, and out again."""
    fresh = applying.apply(bare, done.plan.steps).eval()
    state = model.state_dict()
    assert any(not torch.equal(state[name], tensor) for name, tensor in fresh.state_dict().items())
    fresh.load_state_dict(state, strict=True)
    with torch.no_grad():
        assert torch.equal(fresh(x[:2]), model(x[:2]))
