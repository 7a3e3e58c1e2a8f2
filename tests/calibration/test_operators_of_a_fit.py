"""How many operators a fit dispatches, in forward passes over the same images: on a GPU each is a
launch. Counted without a clock, on the CPU.
"""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from support.lived_in_networks import living
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import normswap
from normswap.calibration import channel_values
from normswap.surgery import carrying_out

# What a fit of each scheme may dispatch, in forward passes.
MOST = {"groupnorm": 96, "nf": 95, "dyt": 126}
IMAGES = 100


@functools.cache
def launches(operator: Any) -> bool:
    """Whether an operator computes. Views, types, and tensors without values launch nothing."""
    if any(
        word in str(operator)
        for word in ("empty", "detach", "unsafe_view", "set_", "promote_types")
    ):
        return False
    returned = [each.alias_info for each in operator._schema.returns]
    return not any(alias is not None and not alias.is_write for alias in returned)


class Operators(TorchDispatchMode):
    """Counts the operators that compute, while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += launches(func)
        return func(*args, **(kwargs or {}))


def resnet() -> nn.Module:
    """A ResNet-18 of few channels."""
    return ResNet(
        BasicBlock, [2, 2, 2, 2], num_classes=10, channels=(16, 32, 64, 128), stem_width=16
    )


def mobilenet() -> nn.Module:
    return timm.create_model("mobilenetv2_035", num_classes=10)


@pytest.mark.slow
@pytest.mark.parametrize("make", [resnet, mobilenet])
@pytest.mark.parametrize("scheme", MOST)
def test_a_fit_dispatches_few_forward_passes(
    scheme: str, make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, _ = living(make(), 3, 32, 32)
    batches = list(torch.randn(IMAGES, 3, 32, 32).split(50))
    with torch.inference_mode(), Operators() as forward:
        for batch in batches:
            model(batch)

    fits = Operators()
    fit = carrying_out.fit
    leaves = channel_values.leaves

    def counted(*arguments: Any) -> Any:
        with fits:
            return fit(*arguments)

    # Dead leaves are drawn on the CPU, wherever the network is, and once in a process.
    def uncounted(*arguments: Any) -> Tensor:
        with _disable_current_modes():
            return leaves(*arguments)

    monkeypatch.setattr(carrying_out, "fit", counted)
    monkeypatch.setattr(channel_values, "leaves", uncounted)
    normswap.convert(model, scheme, input_size=(3, 32, 32), calibrate=batches)

    assert fits.count / forward.count < MOST[scheme]
