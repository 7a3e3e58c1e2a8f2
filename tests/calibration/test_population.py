"""Population statistics of a new domain: torch's own averaging, and hooks in float64, are the
oracles.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from support.lived_in_networks import batchnorms, distance, run
from support.narrow_networks import source as lived
from support.tiny_modules import net
from torch import Tensor, nn

import normswap
from normswap import provenance
from normswap.errors import NormswapError, OptionError, RefusedError, SourceError, VerificationError
from normswap.surgery.recalibration import recalibrate

SIZE = (3, 32, 32)


def network(arch: str = "resnet18") -> nn.Module:
    return copy.deepcopy(lived(arch)[0])


def shifted(count: int = 40, batch: int = 8, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Another domain: darker, with less contrast."""
    generator = torch.Generator().manual_seed(5)
    x = 0.4 * torch.randn(count, *SIZE, generator=generator, dtype=torch.float64) - 0.7
    return list(x.to(dtype).split(batch))


def torchs_own(model: nn.Module, batches: list[Tensor]) -> dict[str, Tensor]:
    """What torch averages with momentum=None, norms in training mode: cumulative, with the unbiased
    variance.
    """
    twin = copy.deepcopy(model).eval()
    for path in batchnorms(twin):
        norm: Any = twin.get_submodule(path)
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    with torch.no_grad():
        for x in batches:
            twin(x)
    return {name: t for name, t in twin.state_dict().items() if "running" in name}


@pytest.mark.parametrize("arch", ["resnet18", "resnetv2_18", "seresnet18"])
def test_statistics_are_torchs_cumulative_averages(arch: str) -> None:
    model = network(arch)
    batches = shifted()
    done = recalibrate(model, batches, input_size=SIZE)
    expected = torchs_own(model, batches)
    state = done.model.state_dict()
    before = model.state_dict()

    assert expected

    for name, tensor in state.items():
        if name in expected:
            assert distance(expected[name], tensor) <= 1e-12
            assert distance(before[name], tensor) > 1e-3
        else:
            assert torch.equal(before[name], tensor)

    assert not done.report.exact


def test_float32_and_modes() -> None:
    model = network().float().train()
    model.get_submodule("layer1").eval()
    before = copy.deepcopy(model.state_dict())
    done = recalibrate(model, shifted(dtype=torch.float32), input_size=SIZE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [m.training for m in done.model.modules()] == [m.training for m in model.modules()]
    expected = torchs_own(model.double(), shifted())
    state = done.model.state_dict()
    assert all(distance(tensor, state[name].double()) < 1e-5 for name, tensor in expected.items())
    assert all(torch.equal(before[name], state[name]) for name in before if "num_batches" in name)


@pytest.mark.parametrize("sizes", [(8, 8, 3), (3, 8, 8), (2, 12, 5)])
def test_batches_of_any_sizes_count_by_their_images(sizes: tuple[int, ...]) -> None:
    model = network()
    batches = list(torch.cat(shifted()).split([*sizes, 40 - sum(sizes)]))[: len(sizes)]

    # With momentum 1 torch keeps the statistics of the last batch alone.
    expected: dict[str, Tensor] = {}
    twin = copy.deepcopy(model).eval()
    for path in batchnorms(twin):
        norm: Any = twin.get_submodule(path)
        norm.momentum = 1.0
        norm.train()
    for batch in batches:
        with torch.no_grad():
            twin(batch)
        for name, tensor in twin.state_dict().items():
            if "running" in name:
                share = len(batch) / sum(sizes)
                expected[name] = expected.get(name, torch.zeros_like(tensor)) + share * tensor

    done = recalibrate(model, batches, input_size=SIZE)

    state = done.model.state_dict()
    assert all(distance(tensor, state[name]) <= 1e-12 for name, tensor in expected.items())
    assert f"{sum(sizes)} images in {len(sizes)} batches" in done.notes[0]


@pytest.mark.parametrize("alone", [0, 2])
def test_a_batch_of_one_value_per_channel_is_left_out(alone: int) -> None:
    flat = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.BatchNorm1d(4)).double()
    rest = shifted(count=16)
    batches = [*rest[:alone], shifted(count=17)[-1], *rest[alone:]]

    done = recalibrate(flat, batches, input_size=SIZE)

    assert "16 images in 2 batches" in done.notes[0]
    assert "1 images in batches that give one value per channel are left out" in done.notes[0]
    expected = recalibrate(flat, rest, input_size=SIZE).model.state_dict()
    for name, tensor in done.model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_it_is_a_step_like_others(tmp_path: Path) -> None:
    """Recorded, loaded, folded, unfolded: with the new statistics."""
    model = network()
    told: list[tuple[int, int]] = []
    done = recalibrate(
        model, shifted(), input_size=SIZE, data="dark", progress=lambda *at: told.append(at)
    )

    assert told == [(i + 1, 5) for i in range(5)]

    loaded = normswap.load(normswap.save(done, tmp_path / "new"))
    record = provenance.of(loaded)
    assert record is not None
    assert [(step.scheme, step.options["data"]) for step in record.plan.steps] == [
        ("recalibrate", "dark")
    ]

    x = shifted()[0]
    reference = run(done.model, x)
    assert torch.equal(reference, run(loaded, x))

    folded = normswap.convert(loaded, "folded", input_size=SIZE).model
    assert distance(reference, run(folded, x)) < 1e-12

    back = normswap.convert(folded, "unfold", input_size=SIZE).model
    assert distance(reference, run(back, x)) < 1e-12

    for name, tensor in back.state_dict().items():
        if "running" in name:
            assert torch.equal(tensor, done.model.state_dict()[name])


def with_nan() -> list[Tensor]:
    batches = shifted()
    batches[1][0, 0, 0, 0] = float("nan")
    return batches


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(2 * input)


@pytest.mark.parametrize(
    ("make", "batches", "kind", "message"),
    [
        (network, with_nan(), SourceError, "batch 1 has values that are not finite"),
        (network, [], SourceError, "0 calibration images"),
        (
            lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4), nn.BatchNorm1d(4)),
            shifted(count=8, batch=1),
            SourceError,
            "2 sees one value per channel",
        ),
        (
            network,
            [torch.randn(4, 1, 32, 32).double()],
            SourceError,
            "does not run on these images",
        ),
        (network, [*shifted(), torch.randn(8, 3, 40, 40).double()], SourceError, "size"),
        (network, "noise", OptionError, "neither batches of images nor"),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)),
            shifted(),
            RefusedError,
            "no BatchNorm",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
            shifted(),
            RefusedError,
            "no BatchNorm with running statistics",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Doubled(4)),
            shifted(),
            RefusedError,
            "cannot estimate 1",
        ),
        (
            net(lambda m, x: m.bn(1e200 * x), bn=nn.BatchNorm2d(3)),
            shifted(),
            VerificationError,
            "not finite",
        ),
    ],
)
def test_what_cannot_be(make: Any, batches: Any, kind: type[NormswapError], message: str) -> None:
    model = make().double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(kind, match=message):
        recalibrate(model, batches, input_size=SIZE)
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )


def test_one_value_per_channel_is_too_few() -> None:
    """m = 1: the variance of one value is not defined."""
    flat = nn.Sequential(nn.Conv2d(3, 4, 32), nn.BatchNorm2d(4)).eval()
    alone = normswap.convert(flat, "batchnorm", ghost_batch=1, input_size=SIZE).model
    with pytest.raises(SourceError, match="1 sees one value per channel"):
        recalibrate(alone, shifted(dtype=torch.float32), input_size=SIZE)


def test_too_few_images_are_refused_by_their_own_sampling_error() -> None:
    """Of one value per channel and image the error is 1 / sqrt(N): 0.35 of a deviation for 8
    images, 0.27 for 14.
    """
    torch.manual_seed(0)
    flat = nn.Sequential(nn.Conv2d(3, 64, 32), nn.BatchNorm2d(64)).eval()
    few, many = (torch.randn(count, *SIZE) for count in (8, 14))
    error = r"8 different images are too few: at 1 .* 0\.3[3-6] deviations.*Give 1[0-3] or"
    with pytest.raises(SourceError, match=error):
        recalibrate(flat, [few], input_size=SIZE)
    assert "14 images" in recalibrate(flat, [many], input_size=SIZE).notes[0]
    # Copies are no evidence, wherever they stand.
    for batches in ([few] * 4, [few.repeat(4, 1, 1, 1)], [few.flip(0), few]):
        with pytest.raises(SourceError, match="8 different images are too few: at 1 "):
            recalibrate(flat, batches, input_size=SIZE)
    with pytest.raises(SourceError, match="1 image is too few"):
        recalibrate(flat, [few[:1].repeat(9, 1, 1, 1)] * 3, input_size=SIZE)


@pytest.mark.parametrize("flat", [2, 3])
def test_the_median_channel_decides_whether_the_images_are_enough(flat: int) -> None:
    """Of five channels, some have one value per image: their error is 1 deviation, of 2 images."""
    torch.manual_seed(0)
    images = torch.randn(2, 5, 32, 32)
    images[:, :flat] = torch.tensor([1.0, -1.0]).view(2, 1, 1, 1)
    model = nn.Sequential(nn.BatchNorm2d(5), nn.Conv2d(5, 3, 3)).eval()

    if flat == 2:
        assert "2 images" in recalibrate(model, [images], input_size=(5, 32, 32)).notes[0]
    else:
        with pytest.raises(SourceError, match=r"at 0 .* 1\.00 deviations"):
            recalibrate(model, [images], input_size=(5, 32, 32))
