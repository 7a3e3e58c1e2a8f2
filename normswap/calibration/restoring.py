"""Give each layer's output the mean and variance per channel that it has in a reference network.

Weights and biases are changed. With m and d the mean and deviation of a channel on the images, and
m', d' those of the reference:

    r = d' / d,      W <- r W,      b <- r (b - m) + m'

Each layer is measured on the outputs of the corrected layers before it. Moments of several
references are averaged (Jordan et al. 2023, arXiv:2211.08403, section 3). Correcting the means
alone is from Nagel et al. 2019, arXiv:1906.04721, section 4.2.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from normswap.calibration.channel_moments import ChannelMoments
from normswap.calibration.lockstep import Interpreter, Lockstep
from normswap.calibration.sampling import fits
from normswap.errors import RefusedError, SourceError
from normswap.graph.tracing import inputs
from normswap.layers import standardized
from normswap.layers.planned_layer import Linearity
from normswap.models.calling import Example, named_tensors
from normswap.models.modes import Progress, evaluating, undisturbed

# If the outputs of a network that is run node by node differ from those of the network itself by
# more than this relative L2, that is no rounding.
_ROUNDING = 1e-3
# A channel's variance is left alone if it is below _CONSTANT times the reference's variance, or if
# the reference's deviation is below _EQUAL times the reference's mean.
_CONSTANT = 1e-10
_EQUAL = 1e-12


@dataclass(frozen=True)
class _SharedLayer:
    """A layer that the network and all references have, and whose output is corrected.

    Args:
        path: The path of the layer.
        layer: The layer in the network.
        nodes: The layer's node in each reference and, last, in the network itself.
    """

    path: str
    layer: Linearity
    nodes: tuple[fx.Node, ...]


@torch.no_grad()
def restore(
    model: nn.Module,
    references: Sequence[nn.Module],
    batches: Iterable[object],
    *,
    means_only: bool = False,
    progress: Progress | None = None,
) -> tuple[str, ...]:
    """Set weights and biases, in place, so that layers' outputs have the references' moments.

    Moments are the mean and variance per channel.

    Args:
        model: The network whose weights and biases are set.
        references: Networks with the same layers at the same paths. The moments of several are
            averaged.
        batches: Images as the networks take them. See `checked`.
        means_only: Whether only the biases change.
        progress: Called with the number of layers that are done, and the number of all layers.

    Returns:
        Notes for the user: what was set, and how many layers have no bias.

    Raises:
        SourceError: The images are unusable or too few.
        RefusedError: The networks share no layer, a weight is made of other tensors, or the network
            computes what its modules do not show (another library's hooks).
    """
    with evaluating(model), undisturbed(*references):
        lockstep = Lockstep([*references, model], batches)
        shared_layers = list(_shared_layers(lockstep.interpreters))
        if not shared_layers:
            why = (
                "its convolutions and linear maps are other ones, at other paths, or are called"
                " more than once"
            )
            raise RefusedError("the reference has no layer of the network's", why)

        # The network, which is the last in the lockstep, is checked on two images.
        two_images = lockstep.first.first(2)
        _require_nodes_compute_network(lockstep.interpreters[-1], two_images)

        # Each layer is set before the next one is measured. So a layer is measured on the outputs
        # of the corrected layers before it.
        for number, shared in enumerate(shared_layers, 1):
            *targets, current = _moments(lockstep, shared)
            if current.count < 2:
                raise SourceError(
                    f"{shared.path} sees one value per channel", "its variance is not defined"
                )
            _set(shared.layer, current, targets, means_only=means_only)
            if progress is not None:
                progress(number, len(shared_layers))

    moments = "mean" if means_only else "mean and variance"
    note = f"{moments} per channel of {len(shared_layers)} layers, {lockstep.images} images"
    without_bias = sum(shared.layer.bias is None for shared in shared_layers)
    if not without_bias:
        return (note,)

    return note, f"{without_bias} layers have no bias: their means stay as they are"


def _shared_layers(recorded: list[Interpreter]) -> Iterator[_SharedLayer]:
    """Yield the layers that every reference has at the same path with a weight of the same shape.

    Each layer must be called once in every network.

    Args:
        recorded: The references and, last, the network.

    Raises:
        RefusedError: A weight is made of other tensors.
    """
    *references, network = [interpreter.traced for interpreter in recorded]
    for node in network.nodes:
        layer = network.module(node)
        # Only convolutions and linear maps (`fits`) that are called once are corrected.
        if layer is None or not fits(layer) or len(network.calls[id(layer)]) != 1:
            continue

        # The layer's node in each reference that has the layer, and calls it once.
        nodes = []
        for reference in references:
            counterpart = reference.modules.get(str(node.target))
            calls = reference.calls.get(id(counterpart), [])
            if (
                len(calls) == 1
                and getattr(counterpart, "weight", torch.empty(0)).shape == layer.weight.shape
            ):
                nodes += calls

        if len(nodes) != len(references):
            continue
        # A weight that is computed from other tensors is no parameter of the layer.
        if type(layer._parameters.get("weight")) is not nn.Parameter:
            raise RefusedError(
                f"the weight of {node.target} is made of other tensors, by a pruning hook or a"
                " parametrization",
                "moments cannot be set through them",
                "Bake them first: torch.nn.utils.prune.remove, or"
                " parametrize.remove_parametrizations",
            )

        yield _SharedLayer(str(node.target), cast(Linearity, layer), (*nodes, node))


def _require_nodes_compute_network(interpreter: Interpreter, example: Example) -> None:
    """Raise RefusedError if the recorded nodes compute something else than the network itself.

    Another library may have put hooks on modules, such as fake quantizers. No node shows these.

    Args:
        interpreter: The network that is run node by node.
        example: The call on which both are compared.
    """
    # The last node returns the outputs. The nodes that it reads compute them. The network itself is
    # the module with the empty path.
    values = interpreter.run(interpreter.start(example), 0, len(interpreter.nodes) - 1)
    outputs = dict(named_tensors(example.call_on_copies(interpreter.traced.modules[""])))

    recorded = [values.get(node.name) for node in interpreter.nodes[-1].all_input_nodes]
    for whole, by_nodes in zip(outputs.values(), recorded, strict=False):
        # Outputs that cannot be compared are left out.
        if (
            not isinstance(by_nodes, Tensor)
            or whole.shape != by_nodes.shape
            or not whole.is_floating_point()
        ):
            continue

        if float((whole - by_nodes).norm()) > _ROUNDING * float(whole.norm()):
            why = (
                "another library hooks something in, such as fake quantizers, that no module shows"
            )
            raise RefusedError(
                "the network computes something else than its modules",
                why,
                "Restore it before that",
            )


def _moments(lockstep: Lockstep, shared: _SharedLayer) -> list[ChannelMoments]:
    """Return the moments of a layer's output in each reference and, last, in the network.

    Args:
        lockstep: The references and the network, run side by side.
        shared: The layer, with its node in each of them.
    """
    moments = [ChannelMoments.none(len(shared.layer.weight)) for _ in shared.nodes]
    for batch in lockstep.run_to([*shared.nodes]):
        for interpreter, values, node, layer_moments in zip(
            lockstep.interpreters, batch, shared.nodes, moments, strict=True
        ):
            layer = interpreter.traced.linear(str(node.target))
            source = inputs(node)[0]
            output = layer(values[source.name])
            # The value of a reference is stored, so that the run to the next layer need not compute
            # it. The network's own is not stored, as it changes when the layer is corrected.
            if interpreter is not lockstep.interpreters[-1]:
                values[node.name] = output
            # The channels of a linear map's output come last, those of a convolution's second.
            by_channel = (
                output.flatten(0, -2).T
                if isinstance(layer, nn.Linear)
                else output.transpose(0, 1).flatten(1)
            )
            layer_moments.add(by_channel.detach().double().cpu())

    return moments


def _set(
    layer: Linearity,
    current: ChannelMoments,
    targets: Sequence[ChannelMoments],
    *,
    means_only: bool,
) -> None:
    """Set weight and bias of a layer, in place, so that its output has the targets' moments.

    Args:
        layer: The layer.
        current: The moments of its output now.
        targets: The moments of its output in each reference, which are averaged.
        means_only: Whether only the bias changes.
    """
    mean = torch.stack([target.mean for target in targets]).mean(0)
    factor = torch.ones_like(mean)
    if not means_only:
        deviation = torch.stack([target.variance.sqrt() for target in targets]).mean(0)
        # A channel that is constant, now or in the references, keeps its scale.
        varies = (current.variance > _CONSTANT * deviation.square()) & (
            deviation > _EQUAL * mean.abs()
        )
        factor = torch.where(varies, deviation / current.variance.sqrt(), factor)
        standardized.scale_filters(layer, factor)

    # With its filters scaled, the layer without its bias has the mean factor * (mean now - bias).
    # The new bias adds what is missing to the targets' mean.
    if layer.bias is not None:
        layer.bias.copy_(factor * (layer.bias.detach().double().cpu() - current.mean) + mean)
