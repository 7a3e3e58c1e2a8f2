"""Signal propagation: how mean and variance of the hidden activations change from one residual block to the next.

Brock et al. 2021, "Characterizing signal propagation to close the performance gap in unnormalized ResNets"
(arXiv:2101.08692), section 3, signal propagation plots (SPPs). For an activation (N, C, H, W):

- average channel squared mean: the mean over N, H and W, squared, averaged over C (best near 0);
- average channel variance: the variance over N, H and W, averaged over C (shows explosion and attenuation).

Both are taken after the sum of every residual block, before the activation that may follow it. The third curve is the
average channel variance at the end of the residual branch; here it is that of f in y = skip + alpha f(x), before a
scalar (SkipInit's, NF's alpha), as it tells whether f keeps the variance. `added_variance` is that of alpha f(x).

Of NF networks the expected variance is known: 1 + alpha^2 after a stage's first block, whose skip starts anew from
variance 1, and alpha^2 more after each further one (section 4).
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.errors import RefusedError, TraceError
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.recording import record_once
from normswap.graph.tracing import inputs
from normswap.layers import affine
from normswap.layers.own import GAMMA, OwnLayer, scales_branch
from normswap.layers.placeholders import Vacant
from normswap.models import calling
from normswap.models.calling import Example, Inputs
from normswap.models.modes import undisturbed
from normswap.surgery.network import Network

_MULTIPLY = (operator.mul, operator.imul, torch.mul, "mul", "mul_")


@dataclass(frozen=True)
class Point:
    """One residual block of one network.

    Args:
        block: path of the block, and `stage` that of its stage; `depth` counts blocks from 1.
        mean_sq: average channel squared mean after the sum; `variance`: average channel variance there.
        branch_variance: average channel variance at the end of the branch, before a scalar on it.
        added_variance: the same after that scalar: what the sum receives.
    """

    block: str
    stage: str
    depth: int
    mean_sq: float
    variance: float
    branch_variance: float
    added_variance: float


def signal(network: Network, batches: Inputs = None, *, batch_statistics: bool = False) -> list[Point]:
    """Measure the signal at every residual block. The network is not changed.

    Args:
        batches: images (N, C, H, W), or what `inputs` of `convert` may be; by default what the network is called with.
            Statistics are taken over all of them together. Of a list of images each is a batch of its own.
        batch_statistics: BatchNorms normalize with the statistics of each batch, as in training. Networks at
            initialization need that: their running statistics say nothing yet.

    Raises:
        TraceError: the network cannot be traced.
        RefusedError: it has no residual blocks, or does not run on such inputs.
    """
    try:
        seen = network.anatomy
    except TraceError as error:
        raise error if network.inputs is None else _does_not_run(network.calls[0], error) from None
    model = network.module
    examples = network.calls if batches is None else calling.batches(batches, network.form)
    if not seen.blocks:
        raise RefusedError("the network has no residual blocks", "the signal is measured after residual sums")
    ends = {block.path: _before_scalars(seen, block) for block in seen.blocks}
    sums = {node.name: _SignalSums() for block in seen.blocks for node in (block.total, block.branch, ends[block.path])}
    last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    with torch.no_grad(), _measuring(model, batch_statistics):
        for example in examples:
            for one in example.each() if example.listed else [example]:  # the record is one of a single image
                _run(model, sums, one.like(model), last)
    return [
        Point(
            block.path,
            block.stage,
            depth,
            *sums[block.total.name].read(),
            sums[ends[block.path].name].read()[1],
            sums[block.branch.name].read()[1],
        )
        for depth, block in enumerate(seen.blocks, 1)
    ]


def expected_nf(seen: Anatomy, alpha: float | None = None) -> list[float] | None:
    """Compute the variance after each block if all branches have 1: 1 + alpha^2 after a projection, then + alpha^2.

    Args:
        alpha: the scalar of all branches (1 for pre-activation networks with BatchNorm, De & Smith 2020); by default
            each block's own attribute `alpha`, and None is returned if a block has none.
    """
    variances: list[float] = []
    for block in seen.blocks:
        module = seen.traced.modules.get(block.path.split("+")[0])
        scale = alpha if alpha is not None else getattr(module, "alpha", None)
        if not isinstance(scale, float | int):
            return None
        starts = not variances or block.skip == "projection"
        variances.append((1.0 if starts else variances[-1]) + float(scale) ** 2)
    return variances


def _multipliers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters whose zero would put what follows to sleep."""
    if isinstance(module, OwnLayer):
        return tuple(name for name, role in module.ROLES.items() if role in (GAMMA, "alpha"))
    return ("weight",) if affine.is_norm(module) else ("gain", "skipinit_gain")


def awake(model: nn.Module) -> nn.Module:
    """Return a copy whose branches are alive: where a last gamma, gain or scalar is 0 throughout, it becomes 1.

    timm zeroes the last gamma, gain or `skipinit_gain` of every fresh branch; SkipInit may start from alpha = 0.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name in _multipliers(module):
            value = getattr(module, name, None)
            if isinstance(value, nn.Parameter) and not bool(value.any()):
                nn.init.ones_(value)
    return twin


def unnormalized(model: nn.Module) -> nn.Module:
    """Return a copy without its norms: in their places stands nothing but the activation that some carry."""
    twin = copy.deepcopy(model)
    for path, module in list(twin.named_modules(remove_duplicate=False)):
        if affine.is_norm(module) and path:
            home, _, name = path.rpartition(".")
            act = affine.activation(module)
            setattr(twin.get_submodule(home), name, Vacant(copy.deepcopy(act)))
    return twin


class _SignalSums:
    """Sums per channel, in float64, of everything seen at one place."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, Tensor, Tensor]] = []

    def add(self, x: Tensor, last: bool) -> None:
        dim = x.ndim - 1 if last or x.ndim == 3 else 1
        values = x.movedim(dim, 0).flatten(1).double()
        variance, mean = torch.var_mean(values, 1, correction=0)
        self.batches.append((values.shape[1], mean, variance))

    def read(self) -> tuple[float, float]:
        """Give the average channel squared mean and the average channel variance."""
        counts, means, variances = zip(*self.batches, strict=True)
        share = (torch.tensor(counts, dtype=torch.float64) / sum(counts))[:, None].to(means[0].device)
        mean = (share * torch.stack(means)).sum(0)
        variance = (share * (torch.stack(variances) + (torch.stack(means) - mean).square())).sum(0)
        return float(mean.square().mean()), float(variance.mean())


def _run(model: nn.Module, sums: dict[str, _SignalSums], batch: Example, last: bool) -> None:
    """Look at some values, by the names of their nodes, as they are made, before anything can overwrite them."""
    left = dict.fromkeys(sums)

    def look(name: str, value: object) -> None:
        if name in sums and isinstance(value, Tensor):
            sums[name].add(value, last)
            left.pop(name, None)

    try:
        record_once(model, batch, look)
    except TraceError as error:
        raise _does_not_run(batch, error) from None
    if left:
        raise RefusedError(f"inputs of size {tuple(batch.images.shape)} take another way through the network")


def _does_not_run(batch: Example, error: TraceError) -> RefusedError:
    size = tuple(batch.images.shape)
    return RefusedError(f"the network does not run on inputs of size {size}", error.why, "Try larger ones")


def _before_scalars(seen: Anatomy, block: Block) -> fx.Node:
    """Return the end of the branch, with drop path, learnable scalars and one constant factor peeled off."""
    node, constants = block.branch, 1
    while True:
        module, sources = seen.traced.module(node), inputs(node)
        tensors = [source for source in sources if source.op != "get_attr"]
        times = node.target in _MULTIPLY
        if not (
            times or isinstance(module, nn.Identity) or scales_branch(module) or type(module).__name__ == "DropPath"
        ):
            return node
        constants -= times and len(sources) == 1
        if len(tensors) != 1 or constants < 0:
            return node  # a gate, or the second constant (the attention gain of NF networks belongs to f)
        node = tensors[0]


@contextmanager
def _measuring(model: nn.Module, batch_statistics: bool) -> Iterator[None]:
    """Eval mode, but BatchNorms may take the statistics of the batch, and forget them again."""
    norms = [m for m in model.modules() if batch_statistics and isinstance(m, _BatchNorm)]
    kept = [(norm, norm.track_running_stats, norm.running_mean, norm.running_var) for norm in norms]
    with undisturbed(model):
        for norm in norms:
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
        try:
            yield
        finally:
            for norm, track, mean, var in kept:
                norm.track_running_stats, norm.running_mean, norm.running_var = track, mean, var
