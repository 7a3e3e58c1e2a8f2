"""How often each layer runs while values are fitted: what a calibration costs, without a clock."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import zoo_networks
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from normswap.calibration import checked_batches, sequential_fit
from normswap.calibration.checked_batches import parts
from normswap.models.calling import Example
from normswap.surgery import conversion

IMAGES, LOOKS = 16, 8  # and the images with which a network is looked at before it is run


def images_through_layers(monkeypatch: pytest.MonkeyPatch, parts: int) -> dict[str, list[int]]:
    """By path, how many images went through each layer of the source and of the result."""
    images = torch.randn(IMAGES, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    model = zoo_networks.trained("preact")
    result = conversion.convert(model, "groupnorm", relative_eps=0, inputs=images[:2]).model
    monkeypatch.setattr(checked_batches, "NUMBERS", images.numel() // parts)
    seen: Counter[nn.Module] = Counter()
    largest = 0

    def look(module: nn.Module, args: tuple[Tensor, ...], _output: object) -> None:
        nonlocal largest
        seen[module] += len(args[0])
        largest = max(largest, len(args[0]))

    handle = register_module_forward_hook(look)
    try:
        sequential_fit.refit(model, result, [images])
    finally:
        handle.remove()
    assert largest == IMAGES // parts
    kinds = (nn.Conv2d, nn.Linear, nn.BatchNorm2d, nn.GroupNorm)
    return {
        path: [seen[module], seen[result.get_submodule(path)]]
        for path, module in model.named_modules()
        if isinstance(module, kinds)
    }


@pytest.mark.parametrize("parts", [1, 4])
def test_a_fit_runs_each_layer_once_over_the_images_and_their_mirror_images(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both networks, in however many parts."""
    through = images_through_layers(monkeypatch, parts)
    assert len(through) > 20
    for path, counts in through.items():
        assert max(counts) <= 2 * IMAGES + LOOKS, path


def test_large_batches_are_parted_for_the_cpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, each part with what belongs to its samples; what cannot be parted stays whole."""
    monkeypatch.setattr(checked_batches, "NUMBERS", 12)
    images = torch.arange(21.0).view(7, 3)
    batch = Example((images,), {"y": list(-images[:, 0]), "gain": 2.0})
    cpu = torch.device("cpu")
    assert parts(batch, torch.device("cuda")) == [batch]
    parted = parts(Example((images,), {"y": -images}), cpu)
    assert [part.count for part in parted] == [4, 3]
    assert torch.equal(torch.cat([part.images for part in parted]), images)
    assert torch.equal(torch.cat([part.kwargs["y"] for part in parted]), -images)
    table = Example((images, torch.zeros(3)))
    assert parts(table, cpu) == [table]
    assert parts(batch, cpu) == [batch]  # a list, each of its own size
    assert [part.count for part in parts(Example((images.view(7, 1, 3).expand(7, 9, 3),)), cpu)] == [1] * 7
