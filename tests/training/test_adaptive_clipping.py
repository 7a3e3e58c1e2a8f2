"""Adaptive clipping gives what timm's gives, with fewer launches."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from timm.utils import adaptive_clip_grad
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap.training.optimizing import clip_adaptively

SHARE = 0.01
VIEWS = {"view", "split_with_sizes", "alias", "detach", "unbind", "split", "_unsafe_view"}  # nothing is launched


class Launches(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name == "_foreach_mul_":  # by broadcasting: one for each, on a GPU
            self.count += len(args[0])
        elif name not in VIEWS:
            self.count += 1
        return func(*args, **(kwargs or {}))


class Odd(nn.Module):
    """Tensors of every rank, a filter at zero, one parameter that has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar, self.gain = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.randn(7))
        self.conv, self.linear, self.signal = nn.Conv2d(3, 5, 3), nn.Linear(4, 6), nn.Conv1d(2, 4, 3, groups=2)
        self.unused = nn.Parameter(torch.randn(3))
        nn.init.zeros_(self.conv.weight[1])


def graded(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """With gradients of very different sizes, some of them zero: some are clipped, some are not."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).to(dtype)
    for name, parameter in model.named_parameters():
        if name != "unused":
            rows = torch.logspace(-6, 3, max(len(parameter), 1) if parameter.ndim else 1, dtype=dtype)
            sizes = rows.view(-1, *[1] * (parameter.ndim - 1)) if parameter.ndim > 1 else rows[-1]
            parameter.grad = torch.randn_like(parameter) * sizes
            if parameter.ndim > 1:
                parameter.grad[0] = 0
    return model


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("make", [Odd, lambda: timm.create_model("resnet18", num_classes=5)], ids=["odd", "resnet18"])
def test_the_gradients_are_timms(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = make()
    ours, theirs, before = (graded(model, dtype) for _ in range(3))
    clip_adaptively(ours.parameters(), SHARE)
    adaptive_clip_grad([p for p in theirs.parameters() if p.grad is not None], SHARE)
    torch.testing.assert_close(
        gradients(ours), gradients(theirs), rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0
    )
    changed = [not torch.equal(a, b) for a, b in zip(gradients(ours), gradients(before), strict=True)]
    assert any(changed)


def test_broken_gradients_stay_broken() -> None:
    """What is not finite is found by who looks at the weights; it is not hidden."""
    made = Odd()
    ours, theirs = (graded(made) for _ in range(2))
    for model in (ours, theirs):
        assert isinstance(model, Odd)
        assert model.linear.weight.grad is not None
        model.linear.weight.grad[2, 1], model.linear.weight.grad[3, 1] = float("nan"), float("inf")
    clip_adaptively(ours.parameters(), SHARE)
    adaptive_clip_grad([p for p in theirs.parameters() if p.grad is not None], SHARE)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-12, atol=0, equal_nan=True)


def test_three_launches_a_parameter_at_most() -> None:
    model = graded(timm.create_model("resnet18", num_classes=5), torch.float32)
    count = len(list(model.parameters()))
    with Launches() as ours:
        clip_adaptively(model.parameters(), SHARE)
    with Launches() as theirs:
        adaptive_clip_grad(model.parameters(), SHARE)
    assert ours.count <= 3 * count
    assert theirs.count >= 9 * count


def test_parameters_of_two_dtypes_are_clipped_each_in_its_own() -> None:
    odd = Odd()
    model, ours = graded(odd), graded(odd)
    for module in (model, ours):
        module.get_submodule("linear").float()  # its gradients, too
    adaptive_clip_grad(model.parameters(), SHARE)
    clip_adaptively(ours.parameters(), SHARE)
    for a, b in zip(model.parameters(), ours.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None and b.grad is not None:
            assert a.grad.dtype == b.grad.dtype
            assert torch.allclose(a.grad, b.grad, rtol=1e-6 if a.grad.dtype == torch.float32 else 1e-12)
