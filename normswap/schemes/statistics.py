"""Steps that take statistics from images.

- `measured-batchnorm` adds BatchNorms to a network that never had any, or whose record is lost.
  With gamma = sqrt(var + eps) and beta = mean they are the identity in eval mode, whatever the
  statistics are. In training mode they normalize.
- `estimate` replaces norms with statistics per sample by BatchNorms.
- `recalibrate` measures the statistics of BatchNorms anew.
"""

from math import prod
from typing import cast

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from normswap.calibration import channel_moments
from normswap.calibration.population import MOST_ERROR, estimate_population
from normswap.calibration.sequential_fit import refit
from normswap.errors import RefusedError, spelled
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph import channel_axes
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, Traced, is_add, is_mul
from normswap.layers import measured_norm
from normswap.layers.placeholders import Chain
from normswap.plan import Outcome, Step
from normswap.schemes.norm_insertion import dimensions
from normswap.schemes.replaceable_batchnorms import readers, require_no_tokenwise_norms
from normswap.schemes.scheme import FitTask
from normswap.sites.activations import is_activation, is_activation_call

# The settings of a new BatchNorm, which are those of torch.
EPS = 1e-5
MOMENTUM = 0.1


def plan_measured(anatomy: Anatomy, *, where: str = "activation") -> PlanBuilder:
    """Return the plan that places a BatchNorm after convolutions of a network without norms.

    In a network without convolutions each hidden linear layer gets one. `fit_measured` then
    measures the statistics.

    Args:
        anatomy: The recorded network.
        where: `activation` places a norm after each convolution whose values an activation reads
            next. With `conv` another convolution or linear layer may read them instead.

    Raises:
        RefusedError: The network has no place for a norm.
    """
    builder = PlanBuilder(anatomy)
    for path in norm_places(builder, where) or hidden_layers(builder):
        builder.replace(path, "MeasuredNorm", eps=EPS, momentum=MOMENTUM)
        builder.settle(
            path,
            Outcome("norms measured", "gets a norm after it, with statistics measured on images"),
        )

    if not builder.replacements:
        lacking = "there is no place for a BatchNorm"
        require_no_tokenwise_norms(anatomy, lacking)
        reaches = {"activation": "an activation", "conv": "another layer"}[where]
        why = f"no convolution that is called once and has no norm yet reaches {reaches}"
        remedy = ""
        if where == "activation":
            wider = spelled("where", "conv")
            remedy = f"'{wider}' takes every convolution that another layer reads"
        raise RefusedError(lacking, why, remedy)

    return builder


def fit_measured(task: FitTask) -> tuple[str, ...]:
    """Measure the statistics of each norm on images, and let each norm return its input unchanged.

    Its gamma and beta undo the measured statistics.

    Args:
        task: The source, the result and the images.

    Returns:
        A note that says how many norms and images there were.
    """
    assert task.batches is not None
    norms = {path: norm for path, _, norm in _added_norms(task.result, task.step)}
    measured = channel_moments.measure(task.result, norms, task.batches, task.progress)
    measured.store(norms)
    for path in measured.moments:
        # The norm gets the network's mode, because a convolution that was merged from branches may
        # be in training mode by itself.
        norms[path].train(task.source.training)

    # gamma = sqrt(var + eps) and beta = mean.
    settle_measured(task.source, task.result, task.step)
    return (f"the statistics of {len(norms)} norms were measured on {measured.images} images",)


def settle_measured(source: nn.Module, result: nn.Module, step: Step) -> None:
    """Set gamma and beta of every new norm, in place, so that they undo the norm's statistics.

    The convolution and the norm behind it then compute what the convolution of the source does.

    Args:
        source: The network before the step, whose convolutions give the outputs to keep.
        result: The network with the norms, in the precision in which they are to be the identity.
        step: The step that placed the norms.
    """
    for path, conv, norm in _added_norms(result, step):
        measured_norm.undo_after_conv(
            cast(_ConvNd | nn.Linear, source.get_submodule(path)), conv, norm
        )


def _added_norms(
    result: nn.Module, step: Step
) -> list[tuple[str, _ConvNd | nn.Linear, _BatchNorm]]:
    """Return, for each norm that the step added, its path, the layer before it, and the norm."""
    chains = [(edit.path, cast(Chain, result.get_submodule(edit.path))) for edit in step.edits]
    return [
        (path, cast(_ConvNd | nn.Linear, chain.inner), cast(_BatchNorm, chain.then))
        for path, chain in chains
    ]


# Activations that give probabilities or mix positions, as at the output of a network or in a gate.
_OF_OUTPUTS = (
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    nn.MultiheadAttention,
)


def norm_places(builder: PlanBuilder, where: str) -> list[str]:
    """Return the paths of the convolutions after which a norm may be added, in forward order.

    Such a convolution has no norm yet. Its maps have several positions; otherwise a norm would see
    one value per channel of an image. A convolution that is called more than once is left out with
    a note, because one norm would mix its outputs.

    Args:
        builder: The plan in the making, which gets the notes.
        where: What must read the convolution's values next: `activation`, or with `conv` an
            activation or another linear layer.
    """
    paths = []
    for node in builder.traced.nodes:
        conv = builder.traced.module(node)
        path = str(node.target)
        if not isinstance(conv, _ConvNd) or path in paths or not builder.anatomy.takes_part(path):
            continue
        if not _reaches_activation(builder, node, linear=where == "conv"):
            continue

        if not _can_precede_norm(builder, path):
            continue
        shape = node.meta["shape"]
        has_several_positions = isinstance(shape, torch.Size) and prod(shape[2:]) > 1
        if has_several_positions and not _is_read_by_norm(builder, node):
            paths.append(path)

    return paths


def _can_precede_norm(builder: PlanBuilder, path: str) -> bool:
    """Whether a norm can stand behind a layer. If none can, a note says why.

    Args:
        builder: The plan in the making, which gets the note.
        path: The path of the layer.
    """
    traced = builder.traced
    layer = traced.modules[path]
    if traced.called(layer) > 1:
        builder.notes.append(f"{path} gets no norm: it is called more than once")
        return False

    tensor_path = traced.read_directly(layer)
    if tensor_path:
        builder.notes.append(f"{path} gets no norm: forward reads {tensor_path} by itself")
        return False
    return True


def hidden_layers(builder: PlanBuilder) -> list[str]:
    """Return the paths of the hidden linear layers of a network without convolutions.

    Such a layer gives (N, C), and an activation stands between it and a later linear layer, as in
    the network of section 4.1 of Ioffe & Szegedy 2015.

    Args:
        builder: The plan in the making, which gets the notes.
    """
    traced = builder.traced
    calls = [node for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    if any(isinstance(traced.module(node), _ConvNd) for node in calls):
        return []

    paths: list[str] = []
    for node in calls:
        path = str(node.target)
        if path in paths or not builder.anatomy.takes_part(path):
            continue

        # What reads the layer's value, directly or through identities such as dropout.
        reading = readers(builder, node, builder.is_identity)
        activates = any(_is_activation(traced, reader) for reader in reading)
        feeds_another = any(traced.depends(later, on=node) for later in calls if later is not node)
        is_flat = len(node.meta["shape"]) == 2
        if activates and feeds_another and is_flat and _can_precede_norm(builder, path):
            paths.append(path)
    return paths


def _is_activation(traced: Traced, node: fx.Node) -> bool:
    """Whether a node is an activation. The functions sigmoid and tanh count, too."""
    module = traced.module(node)
    if module is not None:
        return is_activation(module)
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return is_activation_call(node.target) or name in ("sigmoid", "tanh")


def _reaches_activation(builder: PlanBuilder, node: fx.Node, *, linear: bool) -> bool:
    """Whether a convolution's values reach an activation past sums, products and similar steps.

    Identities, and steps that treat all channels alike (`channel_axes`), may stand between, too.

    Args:
        builder: The plan in the making.
        node: The node of the convolution.
        linear: Whether a convolution or linear layer counts as well as an activation.
    """
    traced = builder.traced

    def passes(reader: fx.Node) -> bool:
        """Whether a node is a sum, product or similar step, whose own readers count as well."""
        treats_alike = is_add(reader) or is_mul(reader) or channel_axes.is_step(traced, reader)
        return builder.is_identity(reader) or treats_alike

    reached = readers(builder, node, passes)
    return any(
        _is_hidden_activation(traced, each) or (linear and isinstance(traced.module(each), LINEAR))
        for each in reached
    )


def _is_hidden_activation(traced: Traced, node: fx.Node) -> bool:
    """Whether a node is an activation, or a product x g(x) such as x sigmoid(x).

    Activations that give probabilities (`_OF_OUTPUTS`) do not count.
    """
    module = traced.module(node)
    if module is not None:
        return is_activation(module) and not isinstance(module, _OF_OUTPUTS)
    return is_activation_call(node.target) or (is_mul(node) and traced.main_input(node) is not None)


def _is_read_by_norm(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether a norm reads the value of a node, directly or through identities."""
    reading = readers(builder, node, builder.is_identity)
    sites = [builder.traced.site_at(reader) for reader in reading]
    return any(site is not None and site.is_norm for site in sites)


def plan_estimate(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that places a BatchNorm where norms take statistics per sample or position.

    `fit_estimate` sets the tensors of the new norms.
    """
    builder = PlanBuilder(anatomy)
    for norm in anatomy.norms:
        if norm.averages and anatomy.takes_part(norm.path):
            builder.replace(norm.path, "EmptyNorm", **dimensions(anatomy, norm.path))
            builder.settle(norm.path, Outcome("estimated", "becomes what it does on average"))
    return builder


def fit_estimate(task: FitTask) -> None:
    """Fit each new BatchNorm to the norm that stood at its path, by least squares per channel.

    Args:
        task: The source, the result and the images.
    """
    assert task.batches is not None
    # Only the new norms are fitted, and no mirror images are added.
    norms = {edit.path for edit in task.step.edits}
    refit(
        task.source,
        task.result,
        task.batches,
        only=lambda path: path in norms,
        mirrored=0,
        progress=task.progress,
    )


def plan_recalibrate(anatomy: Anatomy, **record: object) -> PlanBuilder:
    """Return a plan without edits: `fit_recalibrate` sets the statistics of the BatchNorms.

    Args:
        anatomy: The recorded network.
        record: The options of the recalibration. The step of the plan stores them.
    """
    return PlanBuilder(anatomy)


def fit_recalibrate(task: FitTask) -> tuple[str, ...]:
    """Estimate the running statistics of every BatchNorm anew, from all images.

    Args:
        task: The source, the result and the images.

    Returns:
        A note for the user that says how many norms and images there were.
    """
    assert task.batches is not None
    return (estimate_population(task.result, task.batches, task.progress, most_error=MOST_ERROR),)
