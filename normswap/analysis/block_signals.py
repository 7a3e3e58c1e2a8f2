"""Signal propagation: how mean and variance of the hidden activations change from one residual
block to the next.

Signal propagation plots (SPPs): Brock et al. 2021, arXiv:2101.08692, as the ICLR 2022 blog post
"Normalization is dead, long live normalization!" defines and codes them. For an activation (N, C,
H, W):

- average channel squared mean: the mean over N, H and W, squared, averaged over C (best near 0);
- average channel variance: the variance over N, H and W, averaged over C (shows explosion and
attenuation).

Both are taken after the sum of every residual block, before an activation that follows it. The
third curve is the average channel variance at the end of the residual branch: here that of f in y =
skip + alpha f(x), before a scalar (SkipInit's, NF's alpha), which shows whether f keeps the
variance. `added_variance` is that of alpha f(x).
"""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normswap.calibration.channel_moments import ChannelMoments
from normswap.errors import RefusedError, TraceError
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.recording import record_once
from normswap.graph.tracing import MULTIPLICATIONS, inputs
from normswap.layers import affine
from normswap.layers.planned_layer import GAMMA, OwnLayer, scales_branch
from normswap.models import calling
from normswap.models.calling import Example, Inputs
from normswap.models.modes import undisturbed
from normswap.surgery.network import Network

# By the name of the node whose value they are of.
_Moments = dict[str, ChannelMoments]


@dataclass(frozen=True)
class Point:
    """One residual block of one network.

    Args:
        block: path of the block, and `stage` that of its stage; `depth` counts blocks from 1.
        mean_sq: average channel squared mean after the sum; `variance`: average channel variance
            there.
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


def signal_propagation(
    model: nn.Module | Network, batches: Inputs = None, *, batch_statistics: bool = False
) -> list[Point]:
    """Measure the signal at every residual block of a network, which is not changed.

    Args:
        model: a network, or its record.
        batches: images (N, C, H, W), or what `inputs` of `convert` may be; by default what the
            network is called with. Statistics are taken over all of them together. Of a list of
            images each is a batch of its own.
        batch_statistics: BatchNorms normalize with those of each batch: running ones of a fresh
            network say nothing.

    Returns:
        A point for each block, in order: Brock et al. 2021, arXiv:2101.08692.

    Raises TraceError: it cannot be traced; RefusedError: it has no residual blocks, or does not run
    on such inputs.
    """
    network = Network.of(model)
    anatomy = network.anatomy
    model = network.module
    examples = network.calls if batches is None else calling.batches(batches, network.form)
    if not anatomy.blocks:
        raise RefusedError(
            "the network has no residual blocks", "the signal is measured after residual sums"
        )
    nodes = [
        (block.total, _before_scalars(anatomy, block), block.branch) for block in anatomy.blocks
    ]
    names = {node.name for of_block in nodes for node in of_block}
    moments: _Moments = {}
    channels_last = getattr(model, "output_fmt", "NCHW") == "NHWC"
    if batch_statistics:
        model = copy.deepcopy(model)
        for norm in (module for module in model.modules() if isinstance(module, _BatchNorm)):
            # Without running statistics it takes those of the batch.
            norm.track_running_stats = False
            norm.running_mean = None
            norm.running_var = None
    with torch.no_grad(), undisturbed(model):
        for example in examples:
            # A record of a network that takes a list of images is one of a single image.
            for single in example.parted(1) if example.listed else [example]:
                _run(model, single.like(model), names, moments, channels_last=channels_last)
    points = []
    for depth, (block, of_block) in enumerate(zip(anatomy.blocks, nodes, strict=True), 1):
        total, end, branch = (_averages(moments[node.name]) for node in of_block)
        points.append(Point(block.path, block.stage, depth, *total, end[1], branch[1]))
    return points


def _multipliers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters that zero the output where they are 0."""
    if isinstance(module, OwnLayer):
        return tuple(name for name, role in module.ROLES.items() if role in (GAMMA, "alpha"))
    if affine.is_norm(module):
        return ("weight",)
    return ("gain", "skipinit_gain")


def awake(model: nn.Module) -> nn.Module:
    """Return a copy in which gammas, gains and scalars that are 0 throughout are 1.

    timm starts each branch with a last gamma, gain or `skipinit_gain` of 0; SkipInit may start from
    alpha = 0.
    """
    twin = copy.deepcopy(model)
    for module in twin.modules():
        for name in _multipliers(module):
            value = getattr(module, name, None)
            if isinstance(value, nn.Parameter) and not bool(value.any()):
                nn.init.ones_(value)
    return twin


def _averages(moments: ChannelMoments) -> tuple[float, float]:
    """Give the average channel squared mean and the average channel variance."""
    return float(moments.mean.square().mean()), float((moments.square / moments.count).mean())


def _run(
    model: nn.Module, batch: Example, names: set[str], moments: _Moments, *, channels_last: bool
) -> None:
    missing = set(names)

    def look(name: str, x: object) -> None:
        if name in names and isinstance(x, Tensor):
            dim = x.ndim - 1 if channels_last or x.ndim == 3 else 1
            values = x.movedim(dim, 0).flatten(1).double()
            moments.setdefault(name, ChannelMoments.none(len(values), x.device)).add(values)
            missing.discard(name)

    size = tuple(batch.images.shape)
    try:
        record_once(model, batch, look)
    except TraceError as error:
        raise RefusedError(
            f"the network does not run on inputs of size {size}", error.why, "Try larger ones"
        ) from None
    if missing:
        raise RefusedError(f"inputs of size {size} take another way through the network")


def _before_scalars(anatomy: Anatomy, block: Block) -> fx.Node:
    """Return the end of the branch before drop path, learnable scalars and one constant factor."""
    node = block.branch
    constants = 1
    while True:
        module = anatomy.traced.module(node)
        sources = inputs(node)
        tensors = [source for source in sources if source.op != "get_attr"]
        times = node.target in MULTIPLICATIONS
        passes = isinstance(module, nn.Identity) or type(module).__name__ == "DropPath"
        if not (times or passes or scales_branch(module)):
            return node
        constants -= times and len(sources) == 1
        if len(tensors) != 1 or constants < 0:
            # It is a gate, or the second constant: the attention gain of NF networks belongs to f.
            return node
        node = tensors[0]
