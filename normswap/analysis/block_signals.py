"""Signal propagation: mean and variance of the hidden activations, from residual block to block.

Signal propagation plots (SPPs) are from Brock et al. 2021, arXiv:2101.08692. They are taken here as
the ICLR 2022 blog post "Normalization is dead, long live normalization!" defines and codes them.
For an activation (N, C, H, W):

- average channel squared mean: the mean over N, H and W, squared, averaged over C (best near 0);
- average channel variance: the variance over N, H and W, averaged over C (shows explosion and
  attenuation).

The blog's code has one more point, behind the stem, which has no branch; here the first point is
that of the first block. Variances are divided by the count, not by the count less one.

Both are taken after the sum of every residual block, before an activation that follows the sum. The
third curve is the average channel variance at the end of the residual branch. In
y = skip + alpha f(x) this is the variance of f(x), before the scalar alpha of SkipInit or NF. It
shows whether f keeps the variance. `added_variance` is the average channel variance of alpha f(x).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from normswap import copying
from normswap.calibration.channel_moments import ChannelMoments
from normswap.errors import RefusedError, TraceError
from normswap.graph import channel_axes
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.recording import record_once
from normswap.graph.tracing import MULTIPLICATIONS, inputs
from normswap.models import calling
from normswap.models.calling import Example, Inputs
from normswap.models.modes import undisturbed
from normswap.sites.activations import is_identity
from normswap.sites.own_layer import GAMMA, OwnLayer, scales_branch
from normswap.sites.site import site_of, sites_of
from normswap.surgery.network import Network

# The moments of a value, by the name of the graph node that has it.
_Moments = dict[str, ChannelMoments]


@dataclass(frozen=True)
class Point:
    """The mean and variance of the activations at one residual block of a network.

    Args:
        block: The path of the block.
        stage: The path of the block's stage.
        depth: The number of the block, counted from 1.
        mean_sq: The squared mean of each channel after the block's sum, averaged over channels.
        variance: The variance of each channel after the sum, averaged over channels.
        branch_variance: The same variance at the end of the branch, before its scalar if it has
            one.
        added_variance: The same variance of what the branch adds to the sum, after its scalar.
    """

    block: str
    stage: str
    depth: int
    mean_sq: float
    variance: float
    branch_variance: float
    added_variance: float


@dataclass(frozen=True)
class _BlockNodes:
    """The nodes of the recorded graph whose values are measured in one residual block.

    The block computes y = skip + alpha f(x).

    Args:
        total: The node of y, the sum.
        branch_end: The node of f(x), the end of the branch before its scalar.
        added: The node of alpha f(x), which is added to the skip. If the branch has no scalar, it
            is the node of f(x).
    """

    total: fx.Node
    branch_end: fx.Node
    added: fx.Node

    @property
    def names(self) -> set[str]:
        """The names of the three nodes in the recorded graph."""
        return {self.total.name, self.branch_end.name, self.added.name}


def signal_propagation(
    model: nn.Module | Network, batches: Inputs = None, *, batch_statistics: bool = False
) -> list[Point]:
    """Measure the mean and variance of the activations at every residual block.

    The network is not changed.

    Args:
        model: A network, or its record.
        batches: Images (N, C, H, W), or whatever `inputs` of `convert` may be. The default is the
            input that the network is usually called with. Statistics are taken over all batches
            together. In a list of images each image is a batch of its own.
        batch_statistics: Whether BatchNorms normalize by the statistics of each batch. The running
            statistics of a fresh network say nothing.

    Returns:
        A point for each block, in order (Brock et al. 2021, arXiv:2101.08692).

    Raises:
        TraceError: The network cannot be traced.
        RefusedError: The network has no residual blocks, or does not run on these inputs.
    """
    network = Network.of(model)
    anatomy = network.anatomy
    model = network.module
    examples = network.calls if batches is None else calling.batches(batches, network.form)
    if not anatomy.blocks:
        raise RefusedError(
            "the network has no residual blocks", "the signal is measured after residual sums"
        )

    # The measured nodes of each block, and the names of all of them.
    nodes = [
        _BlockNodes(block.total, _before_scalars(anatomy, block), block.branch)
        for block in anatomy.blocks
    ]
    names: set[str] = set()
    for block_nodes in nodes:
        names |= block_nodes.names

    # `moments` is filled below.
    moments: _Moments = {}
    dims = _channel_dims(anatomy, names)
    if batch_statistics:
        model = _without_running_statistics(model)
    # The network runs in eval mode, and what its forward writes into it is undone afterwards.
    with torch.no_grad(), undisturbed(model):
        for example in examples:
            # A network that takes a list of images was recorded with one image in the list. So each
            # image is measured in a call of its own.
            singles = example.parted(1) if example.listed else [example]
            for single in singles:
                _add_moments(model, single.like(model), names, moments, dims)

    points: list[Point] = []
    for depth, (block, block_nodes) in enumerate(zip(anatomy.blocks, nodes, strict=True), 1):
        mean_sq, variance = _averages(moments[block_nodes.total.name])
        _, branch_variance = _averages(moments[block_nodes.branch_end.name])
        _, added_variance = _averages(moments[block_nodes.added.name])
        points.append(
            Point(
                block=block.path,
                stage=block.stage,
                depth=depth,
                mean_sq=mean_sq,
                variance=variance,
                branch_variance=branch_variance,
                added_variance=added_variance,
            )
        )
    return points


def _channel_dims(anatomy: Anatomy, names: set[str]) -> dict[str, int]:
    """Return the dimension of the channels of each node's value, by the node's name.

    The axis is the one that the recorded graph shows, for the value or for one of the same shape
    that it is computed from. Where it shows none, the channels of tokens (N, L, C) and of maps of a
    network that says (N, H, W, C) come last, and all others second.

    Args:
        anatomy: The recorded network.
        names: The names of the nodes.
    """
    traced = anatomy.traced
    axes = channel_axes.find_axes(traced, lambda node: is_identity(traced.module(node)))
    # timm's networks say by `output_fmt` if their maps are (N, H, W, C).
    is_last = getattr(traced.modules[""], "output_fmt", "NCHW") == "NHWC"

    dims: dict[str, int] = {}
    for node in traced.nodes:
        if node.name not in names:
            continue
        shape = node.meta["shape"]
        alike = [node, *(each for each in inputs(node) if each.meta["shape"] == shape)]
        known = [axes[each] for each in alike if each in axes]
        found = [-1 if axis.last else axis.dim for axis in known]
        usual = -1 if is_last or len(shape or ()) == 3 else 1
        dims[node.name] = next((dim for dim in found if dim is not None), usual)
    return dims


def _without_running_statistics(model: nn.Module) -> nn.Module:
    """Return a copy whose BatchNorms normalize by the batch's statistics, even in eval mode."""
    twin = copying.duplicate(model, {})
    # A BatchNorm of torch does so if it has no running statistics.
    for site in sites_of(twin):
        if site.learns_statistics:
            for name in ("running_mean", "running_var"):
                site.module.register_buffer(name, None)
            vars(site.module)["track_running_stats"] = False
    return twin


def _multipliers(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of a module that multiply its whole output.

    They are gammas of norms, gains of convolutions, and scalars of residual branches. If one of
    them is 0, the output does not depend on the input. A name is returned even if the module has no
    parameter of that name.
    """
    if isinstance(module, OwnLayer):
        return tuple(name for name, role in module.ROLES.items() if role in (GAMMA, "alpha"))
    if site_of(module).is_norm:
        return ("weight",)
    return ("gain", "skipinit_gain")


def awake(model: nn.Module) -> nn.Module:
    """Return a copy of a network in which no residual branch is multiplied by 0.

    Every gamma, gain or scalar that is all zeros is set to ones. Otherwise a plot of the signal
    would not show its branch. timm begins training with a last gamma, gain or `skipinit_gain` of 0
    in each branch. SkipInit may begin with alpha = 0.
    """
    twin = copying.duplicate(model, {})
    for module in nn.Module.modules(twin):
        for name in _multipliers(module):
            value = getattr(module, name, None)
            if isinstance(value, nn.Parameter) and not bool(value.any()):
                nn.init.ones_(value)
    return twin


def bare(model: nn.Module) -> nn.Module:
    """Return a copy of a network in which every norm is replaced by the identity.

    It shows how the signal grows or decays without normalization. If a norm also applies an
    activation, the activation stays. No activation of the copy works in place: it may now read the
    residual stream itself, which the skip reads as well.
    """
    twin = copying.duplicate(model, {})
    norms = {path: site_of(module) for path, module in twin.named_modules()}
    for path, site in norms.items():
        # The network itself, whose path is "", cannot be replaced.
        if site.is_norm and path:
            twin.set_submodule(path, site.activation or nn.Identity())

    for module in nn.Module.modules(twin):
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return twin


def _averages(moments: ChannelMoments) -> tuple[float, float]:
    """Return two averages over channels: of the squared mean, and of the variance.

    Args:
        moments: The moments of each channel of a node's value.
    """
    # `moments.square` is the sum of squared distances from the mean.
    mean_sq = moments.mean.square().mean()
    variance = (moments.square / moments.count).mean()
    return float(mean_sq), float(variance)


def _add_moments(
    model: nn.Module,
    batch: Example,
    names: set[str],
    moments: _Moments,
    dims: Mapping[str, int],
) -> None:
    """Run a network on a batch, and add the values of some nodes to the statistics of each node.

    Args:
        model: The network.
        batch: The input.
        names: The names of the nodes in the recorded graph.
        moments: The mean and variance of each channel so far, by the node's name. They are changed
            in place.
        dims: The dimension of the channels of each node's value, by the node's name.

    Raises:
        RefusedError: The network does not run on the batch, or takes another path through its code.
    """
    # A name is taken out as soon as the network has computed the node's value. If names are left in
    # the end, the network took a path without these nodes.
    missing = set(names)

    def add(name: str, x: object) -> None:
        """Add the value of a node to the moments of that node, if it is one to be measured.

        Args:
            name: The name of the node.
            x: Its value in this run.
        """
        if name not in names or not isinstance(x, Tensor):
            return
        values = x.movedim(dims[name], 0).flatten(1).double()
        moments.setdefault(name, ChannelMoments.none(len(values), x.device)).add(values)
        missing.discard(name)

    size = tuple(batch.images.shape)
    try:
        record_once(model, batch, add)
    except TraceError as error:
        raise RefusedError(
            f"the network does not run on inputs of size {size}", error.why, "Try larger ones"
        ) from None
    if missing:
        raise RefusedError(f"inputs of size {size} take another way through the network")


def _before_scalars(anatomy: Anatomy, block: Block) -> fx.Node:
    """Return the node of f(x) in a residual block y = skip + alpha f(x).

    The search goes up from the end of the branch, past drop path, identities, learnable scalars and
    one constant factor. f(x) is the first value that is none of these.

    Args:
        anatomy: The recorded network.
        block: The block.
    """
    node = block.branch
    constants_left = 1
    while True:
        # Stop at the first node that is no product, identity, drop path or learnable scalar.
        module = anatomy.traced.module(node)
        multiplies = node.target in MULTIPLICATIONS
        passes = isinstance(module, nn.Identity) or type(module).__name__ == "DropPath"
        if not (multiplies or passes or scales_branch(module)):
            return node

        # The other factor of a product is a number, a parameter (`get_attr`) or another tensor.
        sources = inputs(node)
        tensors = [source for source in sources if source.op != "get_attr"]
        if multiplies and len(sources) == 1:
            constants_left -= 1
        # A product of two tensors is a gate, such as squeeze-and-excitation. NF networks multiply
        # the result by a constant, the attention gain, and then by alpha. The gate and the
        # attention gain belong to f, so the search stops at them.
        if len(tensors) != 1 or constants_left < 0:
            return node
        node = tensors[0]
