"""What `--for` adds after a scheme: the needs of private or federated training, as one more step.

`opacus` (Abadi et al. 2016, arXiv:1607.00133): no statistics of the batch, no buffers in a layer
that learns (`GradSampleModule.validate`), and nothing written in place to what such a layer
returns. `federated` (McMahan et al. 2017, arXiv:1602.05629): no statistics of the batch and no
buffer that training changes.
"""

import importlib
from dataclasses import replace

from torch import fx, nn
from torch.nn.utils import parametrizations, parametrize

from normswap.copying import tree
from normswap.errors import first_line
from normswap.folding.overwriting import overwrites, shares
from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.inspection import Anatomy
from normswap.graph.tracing import LINEAR, Traced, inputs
from normswap.layers.channelwise import ChannelBias
from normswap.layers.placeholders import Copy
from normswap.plan import Edit, Outcome, Then
from normswap.sites.site import Site, site_of

# Layers of torch that compute everything in one call, where no hook sees each weight's input, and
# the layers that Opacus has in their place.
_OPACUS_LAYERS: dict[type[nn.Module], str] = {
    nn.LSTM: "DPLSTM",
    nn.GRU: "DPGRU",
    nn.RNN: "DPRNN",
    nn.LSTMCell: "DPLSTMCell",
    nn.GRUCell: "DPGRUCell",
    nn.RNNCell: "DPRNNCell",
    nn.MultiheadAttention: "DPMultiheadAttention",
}


def plan_federated(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that makes a network fit for federated training.

    A buffer of fixed signs becomes a learnable scale. A module that takes statistics of the batch,
    or that holds buffers which training changes, such as running statistics, is refused.
    """
    builder = PlanBuilder(anatomy)
    for path, module in anatomy.traced.modules.items():
        _refuse_statistics(builder, path, anatomy.site(path))
        if isinstance(module, ChannelBias) and module.sign is not None:
            builder.replace(path, "ChannelAffine")
            builder.settle(path, Outcome("learn", "learns", "its signs become a scale"))
    return builder


def plan_opacus(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan that makes a network fit for training with Opacus.

    It has the edits and refusals of `plan_federated`. In addition, nothing may write in place into
    the output of a layer that learns, because Opacus puts backward hooks on the layer. A layer is
    refused if Opacus cannot compute its gradients per sample, or if it learns and holds buffers.
    """
    builder = plan_federated(anatomy)
    traced = anatomy.traced
    for path, module in traced.modules.items():
        if getattr(module, "inplace", False) is True:
            _plan_out_of_place(builder, path)
        _refuse_layers(builder, path, module)
        if path not in builder.refusals and path not in builder.replacements:
            _refuse_buffers(builder, path, module)

    # Functions may write in place, too. They get a copy of a learning layer's output to write into.
    for node in traced.nodes:
        if overwrites(traced, node):
            _copy_before(builder, node)

    for path, reason in traced.opaque.items():
        builder.notes.append(
            f"{path} cannot be looked into ({reason}): whether it writes in place is not known"
        )
    return builder


def refused_by_opacus(model: nn.Module) -> dict[str, str]:
    """Return the layers that Opacus' own validator refuses, by path, with its reason.

    Args:
        model: The network, in training mode.

    Returns:
        One reason for each layer. The path is empty for a reason that concerns the whole network.
        The dict is empty if Opacus refuses nothing, or is not installed.
    """
    try:
        validators = importlib.import_module("opacus.validators")
    except ModuleNotFoundError:
        return {}

    # The validator does not say the path of what it refuses, so its checks are called one by one.
    refused = {}
    for path, module in tree(model).items():
        validate = validators.ModuleValidator.VALIDATORS.get(type(module))
        if validate is None or not site_of(module).learns:
            continue
        for error in validate(module):
            refused[path] = f"Opacus refuses a {type(module).__name__}: {first_line(error)}"

    # An error of the whole network belongs to no layer, so it has the empty path.
    remaining = validators.ModuleValidator.validate(model, strict=False)
    if remaining and not refused:
        refused[""] = f"Opacus refuses the network: {first_line(remaining[0])}"
    return refused


def _refuse_statistics(builder: PlanBuilder, path: str, site: Site) -> None:
    """Refuse a layer that in training mixes samples or changes buffers.

    These are norms with statistics of the batch or running ones, and spectral normalization.
    """
    if site.refusal_in_training is not None:
        builder.refusals[path] = site.refusal_in_training
    elif isinstance(site.module, parametrizations._SpectralNorm):
        builder.refusals[path] = (
            "spectral normalization keeps buffers that training changes; weightnorm has none"
        )


def _refuse_layers(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Note in the plan that a recurrent or attention layer of torch is refused, if it learns.

    Opacus cannot compute its gradients per sample. The reason names the layer of Opacus that can
    take its place.

    Args:
        builder: The builder of the plan, whose `refusals` get the reason.
        path: The path of the layer.
        module: The layer. Any other module is left alone.
    """
    if not any(parameter.requires_grad for parameter in nn.Module.parameters(module)):
        return
    for kind, layer in _OPACUS_LAYERS.items():
        if isinstance(module, kind):
            builder.refusals[path] = (
                f"Opacus has no gradients per sample of a {type(module).__name__};"
                f" opacus.layers.{layer} takes its weights"
            )
            return


def _refuse_buffers(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Refuse a layer with learning parameters that holds buffers, because Opacus refuses it.

    A linear layer that makes its weight in a hook, of parameters that learn, is refused, too.

    A layer whose weight is parametrized, as by weight normalization, may have no learning parameter
    of its own, since the parametrization holds them. It gets a bias.
    """
    if not site_of(module).learns:
        if parametrize.is_parametrized(module):
            _plan_bias(builder, path, module)
        return

    kind = type(module).__name__
    buffers = [name for name, _ in nn.Module.named_buffers(module)]
    if buffers:
        builder.refusals[path] = (
            f"a {kind} learns and holds buffers ({', '.join(buffers[:3])}), which"
            " Opacus refuses; groupnorm, skipinit, folded and frozen-bn have none"
        )
        return

    # A hook sets `weight` to a tensor that it computes of parameters with other names.
    own = nn.Module.named_parameters(module, recurse=False)
    learning = [name for name, parameter in own if parameter.requires_grad]
    hooked = [name for name in learning if name not in ("weight", "bias")]
    if isinstance(module, LINEAR) and "weight" not in module._parameters and hooked:
        builder.refusals[path] = (
            f"a {kind} makes its weight of {' and '.join(hooked)} in a hook, and Opacus has no"
            " gradients per sample of these; torch.nn.utils.parametrizations.weight_norm uses none"
        )


def _plan_bias(builder: PlanBuilder, path: str, module: nn.Module) -> None:
    """Plan a bias for a parametrized layer that has no learning parameter of its own.

    Without one Opacus would hook the parametrization. That reads a weight, from which no gradients
    per sample can be computed. Nothing is planned for a layer of which nothing learns. A layer that
    cannot get a bias is refused.
    """
    if not any(parameter.requires_grad for parameter in nn.Module.parameters(module)):
        return
    if not isinstance(module, LINEAR) or module.bias is not None:
        builder.refusals[path] = (
            f"the parametrized weight of a {type(module).__name__} learns but no bias does, and"
            " Opacus has no gradients per sample of it; torch.nn.utils.parametrize has"
            " remove_parametrizations"
        )
        return
    builder.replace(path, "WithBias")
    builder.settle(path, Outcome("learn", "learns", "it gets a bias"))


def _plan_out_of_place(builder: PlanBuilder, path: str) -> None:
    """Plan that the activation at a path does not write in place.

    If the activation is part of a layer that is replaced, the edit of that layer says it.
    """
    for parent, edit in builder.replacements.items():
        if path.startswith(f"{parent}."):
            builder.replacements[parent] = replace(edit, out_of_place=True)
            return
    builder.replace(path, "OutOfPlace")


def _copy_before(builder: PlanBuilder, node: fx.Node) -> None:
    """Plan a copy of the output of a layer that learns, if `node` writes into that output."""
    # A writer that is planned to work out of place changes nothing.
    traced = builder.traced
    if node.op == "call_module":
        planned = builder.replacements.get(str(node.target))
        if planned is not None and planned.layer == "OutOfPlace":
            return

    # A view shares the memory of what it looks at, so the layer is looked for behind all views.
    value = inputs(node)[0]
    while not _learning_owners(traced, value) and shares(traced, value) and inputs(value):
        value = inputs(value)[0]
    owners = _learning_owners(traced, value)
    if not owners:
        return
    # An earlier conversion may have placed the copy already.
    if any(isinstance(traced.modules[path], Copy) for path in traced.outputs[value]):
        return

    # The copy stands behind the outermost layer that returns the value.
    path = owners[-1]
    edit = builder.replacements.get(path)
    if edit is None:
        builder.replacements[path] = Edit(path, "Copy", keep=True)
    elif not _ends_in_copy(edit):
        builder.replacements[path] = replace(edit, then=(*edit.then, Then("Copy")))


def _ends_in_copy(edit: Edit) -> bool:
    """Whether a copy is planned already, because another step writes into the same output."""
    last = edit.then[-1].layer if edit.then else edit.layer
    return last == "Copy"


def _learning_owners(traced: Traced, node: fx.Node) -> list[str]:
    """Return the paths of the modules that return the value of `node` and have learning parameters.

    The innermost module is the first.
    """
    return [path for path in traced.outputs.get(node, ()) if traced.site(path).learns]
