"""Round weights to bfloat16 so that the errors of one filter cancel, where the whole signal does not pass.

A value of bfloat16 has 8 bits, and 2^-9 of each weight is lost. Rounding each weight for itself, the errors of a filter
add up to a shift of its output, as what it reads is mostly positive, and alike at neighbouring places. Here what one
weight loses is handed to the next one of the filter before that is rounded (error diffusion, Floyd & Steinberg 1976),
so that each filter keeps its sum, which is what data-free quantization aims at, too (SQuant, arXiv:2202.07471).

Stem, projections on the skip path and classifier keep float32: they make up half of the error and a small part of the
weights. Activations stay in float32, too: convolutions in bfloat16 change more than 1 answer in 1000, even on the
residual branches alone. Measured in tests/lab/benchmarks/export.md.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from normswap.errors import TraceError
from normswap.graph.inspection import Anatomy
from normswap.graph.node_reader import LINEAR
from normswap.graph.tracing import inputs


@torch.no_grad()
def to_bfloat16_(network: nn.Module, anatomy: Callable[[], Anatomy]) -> None:
    """Let the weights of convolutions and linear layers be values of bfloat16; they keep their dtype.

    Stem, projections and classifier keep their values, too. Float16 has three bits more, and needs none of this.

    Args:
        anatomy: of the network, or of one that it is a copy of.
    """
    kept = main_path(network, anatomy)
    for path, module in network.named_modules():
        if isinstance(module, LINEAR) and path not in kept:
            module.weight.copy_(diffused(module.weight, torch.bfloat16))


@torch.no_grad()
def to_nearest(network: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy that computes in float32 with weights, and what layers give, rounded to `dtype`, each number for itself.

    This is what the precision costs by itself, to hold a file to; of bfloat16, which is for weights, only those.
    """
    twin = copy.deepcopy(network)
    for tensor in twin.parameters():
        tensor.copy_(tensor.to(dtype))
    for module in twin.modules():
        if dtype == torch.float16 and not list(module.children()):
            module.register_forward_hook(lambda _module, _args, output: _rounded(output))
    return twin


def _rounded(output: object) -> object:
    return output.half().float() if isinstance(output, Tensor) and output.is_floating_point() else output


def is_bfloat16(tensor: Tensor) -> bool:
    """Whether these are weights (of two dimensions or more) that bfloat16 holds exactly."""
    return tensor.ndim > 1 and tensor.dtype == torch.float32 and torch.equal(tensor.bfloat16().float(), tensor)


def main_path(network: nn.Module, anatomy: Callable[[], Anatomy]) -> set[str]:
    """The convolutions and linear layers that the whole signal passes.

    All before the first residual block, those on skip paths, and the classifier; of a network without blocks, the first
    and the last.
    """
    linear = [path for path, module in network.named_modules() if isinstance(module, LINEAR)]
    try:
        seen = anatomy()
    except TraceError:
        return {*linear[:1], *linear[-1:]}
    traced = seen.traced
    calls = [node for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    if not seen.blocks:
        return {str(node.target) for node in (*calls[:1], *calls[-1:])}
    first = inputs(seen.blocks[0].total)
    paths = {str(node.target) for node in calls if all(traced.depends(arm, on=node) for arm in first)}
    for block in seen.blocks:
        skip = next(arm for arm in inputs(block.total) if arm is not block.branch)
        for node in calls:
            if traced.depends(skip, on=node) and not traced.depends(block.branch, on=node):
                paths.add(str(node.target))
    return paths | ({seen.classifier} if seen.classifier else set())


def diffused(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(O, ...) in float64, values of `dtype`: filter by filter, what one value loses the next one gains."""
    columns = weight.detach().double().flatten(1).T.contiguous()
    rounded = torch.empty_like(columns)
    lost = torch.zeros_like(columns[0])
    for i, column in enumerate(columns):
        wanted = column + lost
        rounded[i] = wanted.to(dtype).double()
        lost = wanted - rounded[i]
    return rounded.T.reshape(weight.shape)
