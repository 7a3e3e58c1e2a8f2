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
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import normswap
from normswap.surgery import carrying_out

# What a fit may dispatch, in forward passes. 30 of them draw dead leaves, once in a process.
MOST = 250
IMAGES = 100


@functools.cache
def launches(operator: Any) -> bool:
    """Whether an operator computes. Views, and tensors without values, launch nothing."""
    if any(word in str(operator) for word in ("empty", "detach", "unsafe_view", "set_")):
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
@pytest.mark.parametrize("scheme", ["groupnorm", "nf", "dyt"])
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
    original = carrying_out.fit

    def counted(*arguments: Any) -> Any:
        with fits:
            return original(*arguments)

    monkeypatch.setattr(carrying_out, "fit", counted)
    normswap.convert(model, scheme, input_size=(3, 32, 32), calibrate=batches)

    assert fits.count / forward.count < MOST
