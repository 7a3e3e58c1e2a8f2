"""GroupNorm and its kin as sources: the best affine map per channel, by numpy; then on to any other
scheme.
"""

import copy
import functools
from typing import Any

import numpy as np
import pytest
import timm
import torch
from support.lived_in_networks import batchnorms, distance, run
from support.sampled_tables import crossed
from timm import layers as timm_layers
from torch import Tensor, nn

import normswap
from normswap.errors import NormswapError, RefusedError, SourceError

SIZE = (3, 33, 33)
NORMS: dict[str, Any] = {
    "GroupNorm": lambda: nn.GroupNorm(2, 8),
    "one group": lambda: timm_layers.GroupNorm1(8),
    "GroupNormAct": lambda: timm_layers.GroupNormAct(8, 4),
    "InstanceNorm": lambda: nn.InstanceNorm2d(8),
    "LayerNorm2d": lambda: timm_layers.LayerNorm2d(8),
    "LayerNormAct2d": lambda: timm_layers.LayerNormAct2d(8),
}


def images(count: int = 32, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return list(torch.randn(count, *SIZE, generator=generator, dtype=torch.float64).split(8))


def randomized(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(1 + 0.3 * noise if name.endswith("weight") else 0.3 * noise)
    return model.double().eval()


@pytest.mark.parametrize("kind", NORMS)
def test_numpys_least_squares_per_channel(kind: str) -> None:
    torch.manual_seed(0)
    net = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), NORMS[kind](), nn.Conv2d(8, 4, 1)))
    batches = images()
    result: Any = normswap.convert(net, "batchnorm", calibrate=batches, input_size=SIZE).model
    plain: Any = copy.deepcopy(net[1])
    if hasattr(plain, "act"):
        plain.act = nn.Identity()

    with torch.no_grad():
        # Every fourth image is held out.
        x = net[0](torch.cat(batches)[torch.arange(32) % 4 != 3])
        y = plain(x.clone())

    norm = result[1]
    for c in range(8):
        a = x[:, c].flatten().numpy()
        b = y[:, c].flatten().numpy()
        (slope, offset), *_ = np.linalg.lstsq(np.stack([a, np.ones_like(a)], 1), b, rcond=None)
        assert np.isclose(norm.running_mean[c].item(), a.mean())
        assert np.isclose(norm.running_var[c].item(), a.var(ddof=1))
        scale = norm.weight[c].item() / (norm.running_var[c].item() + norm.eps) ** 0.5
        assert np.isclose(scale, slope)
        assert np.isclose(norm.bias[c].item() - scale * norm.running_mean[c].item(), offset)

    assert distance(run(net, batches[0]), run(result, batches[0])) < 0.5


def test_norms_are_counted_one_by_one() -> None:
    """The norms that are estimated are the only layers that are counted."""
    norms = [nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1), nn.InstanceNorm2d(4)]
    network = nn.Sequential(nn.Conv2d(3, 8, 3), *norms, nn.Conv2d(4, 2, 1)).double().eval()
    told: list[tuple[int, int]] = []

    normswap.convert(
        network,
        "batchnorm",
        calibrate=images(),
        input_size=SIZE,
        progress=lambda *at: told.append(at),
    )

    assert told == [(1, 2), (2, 2)]


@crossed(
    "arch, to",
    ["resnet26", "resnetv2_50"],
    ["folded", "skipinit", "batchnorm", "groupnorm"],
)
@pytest.mark.one_in(2)
def test_on_to_other_schemes(arch: str, to: str) -> None:
    torch.manual_seed(0)
    v2 = (
        {"stem_chs": 8, "conv_layer": timm_layers.StdConv2d} if "v2" in arch else {}
    )  # weight standardization too
    small: dict[str, Any] = {
        "channels": (32, 32, 64, 64),
        "layers": (1, 1, 1, 1),
        "num_classes": 5,
        **v2,
    }
    norm = (
        functools.partial(timm_layers.GroupNormAct, num_groups=2) if v2 else timm_layers.GroupNorm1
    )
    net = randomized(timm.create_model(arch, norm_layer=norm, **small))

    assert batchnorms(net) == []

    done = normswap.convert(net, to, calibrate=iter(images()), input_size=SIZE)
    steps = [step.scheme for step in done.plan.steps]
    assert steps == (["estimate"] if to == "batchnorm" else ["estimate", to])
    assert not done.report.exact

    left = [m for m in done.model.modules() if isinstance(m, nn.GroupNorm)]
    assert bool(left) == (to == "groupnorm")

    if to != "batchnorm":
        assert (
            not any(isinstance(m, timm_layers.StdConv2d) for m in done.model.modules())
            or to == "groupnorm"
        )

    x = images(8, seed=7)[0]
    error = distance(run(net, x), run(done.model, x))
    assert error < 0.8

    if to in ("folded", "skipinit"):  # exactly what the estimated network computes
        bn = normswap.convert(net, "batchnorm", calibrate=images(), input_size=SIZE).model
        assert distance(run(bn, x), run(done.model, x)) < 1e-10


@pytest.mark.parametrize(
    ("to", "data", "kind", "message"),
    [
        ("folded", None, RefusedError, "GroupNorm.*calibrate=DATA"),
        ("batchnorm", None, NormswapError, "calibrate=DATA"),
        ("folded", images(1), SourceError, "1 calibration images"),
    ],
)
def test_without_data_it_says_how(
    to: str, data: Any, kind: type[NormswapError], message: str
) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)).double().eval()
    with pytest.raises(kind, match=message):
        normswap.convert(net, to, calibrate=data, input_size=SIZE)


def test_images_that_can_be_read_once_are_kept_for_each_step() -> None:
    """Two steps that are both fitted: the same result from a list and from what gives its batches
    once.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).eval()
    batches = [torch.randn(8, 3, 10, 10) for _ in range(3)]
    listed, once = (
        normswap.convert(net, "dyt", inputs=batches[0], calibrate=images)
        for images in (batches, iter(batches))
    )

    assert [step.scheme for step in listed.plan.steps] == ["estimate", "dyt"]
    assert listed.report.kept is not None
    assert listed.report.kept.count == 6, "every fourth of 24, from end to end"
    assert listed.report.kept == once.report.kept

    folded = normswap.convert(net, "folded", inputs=batches[0], calibrate=batches)
    assert folded.report.kept is not None
    assert folded.report.kept.count == 6, "every fourth of 24, and the other step is exact"
    assert all(
        value.equal(once.model.state_dict()[name])
        for name, value in listed.model.state_dict().items()
    )
