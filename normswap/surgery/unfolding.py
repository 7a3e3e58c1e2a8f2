"""Unfold: back to the source's BatchNorm, from the norms that a checkpoint keeps.

The canonical form of a network is what it becomes if all its norms and scalars are folded into
their neighbours. The converted network is first brought to its canonical form C. The bare source
architecture (the skeleton), with its old norms s x + t, has the same canonical form: W_C = s W,
b_C = s b + t. So W = W_C / s, and beta takes up the change of b_C by fine-tuning. A channel with
s = 0 and W_C = 0 keeps the value t and gets fresh weights, which are multiplied by 0 and can learn.
If its W_C has learned, gamma becomes 1. A learned gamma may also have changed the sign of s where
a shift alone is left of the norm (`ChannelBias`): gamma gets that sign.
"""

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor, nn

from normswap import copying, provenance
from normswap.copying import dotted
from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.layers import reparametrized
from normswap.layers.placeholders import Holder
from normswap.layers.planned_layer import scales_branch
from normswap.models import zoo
from normswap.plan import AbsorbMode, Arch, Edit, Step
from normswap.provenance import Provenance
from normswap.sites.site import site_of
from normswap.surgery import applying, learning
from normswap.surgery.network import Network


@torch.no_grad()
def unfold(network: Network, skeleton: nn.Module | None = None) -> Network:
    """Return the network that this one was converted from, with its norms and what it has learned.

    A LayerNorm or LayerScale that was folded into another layer gets gamma 1 and beta 0.

    Args:
        network: The converted network.
        skeleton: A network of the source's class, which is written to and becomes the result. By
            default it is built as the network's provenance says.

    Raises:
        RefusedError: The network was not converted, nothing says how its source is built, or the
            source cannot compute what the network has learned.
    """
    record = network.provenance
    if not record.plan.steps:
        remedy = "`unfold` is for what `normswap convert` wrote"
        raise RefusedError(
            "nothing to unfold", "the network was not converted: its norms are its own", remedy
        )

    if record.merged_paths:
        why = "branches were merged into one convolution, which does not say what each of them was"
        remedy = f"Keep the source network, or fold it with `{spelled('branches', 'keep')}`"
        raise RefusedError("cannot unfold", why, remedy)

    if skeleton is None:
        skeleton = _built(network.module)

    # `state` has the tensors of the bare source, which are written to. They get the network's dtype
    # and device.
    skeleton.to(next(nn.Module.parameters(network.module)))
    source = bare(network, skeleton, provenance.of(skeleton).arch)
    canonical = _canonical(network)
    state = copying.tensors(source.module)
    tensors = _tensors(canonical)
    _check_shapes(state, {**record.norms, **tensors})

    # Three sources of tensors, the later ones over the earlier: the canonical form, the recorded
    # tensors of the norms that were replaced, and the norms that are still in the network. The
    # record comes after the canonical form, which may have a `bias` of a ChannelBias where the norm
    # had its own.
    _reset_norms_without_tensors(source.module, tensors.keys() | record.norms.keys())
    _copy(state, tensors)
    _copy(state, record.norms)
    _copy(state, _tensors(network.module, _is_affine_norm))

    # Folding the source has to give the canonical form. So each edit of the plan that folds it is
    # inverted: tensors of the source are set so that the edit gives the canonical form's layer.
    builder = fold_norms(source.anatomy)
    modules = builder.anatomy.traced.modules
    converted = _by_old_path(canonical)
    for edit in builder.edits():
        if edit.path not in converted:
            raise RefusedError(f"cannot unfold {edit.path}", "it is not in the converted network")
        _invert(edit, modules, converted[edit.path])
    _check_biases(state, tensors, {edit.path for edit in builder.edits() if _shifts(edit)})

    learning.resemble(network.module, source.module)
    return source


def _built(model: nn.Module) -> nn.Module:
    """Return a new network of the architecture that `model` was converted from.

    It has the weights that its builder gives it, not those of `model`.

    Raises:
        RefusedError: Nothing says how it is built.
    """
    arch = architecture(model)
    if arch is None:
        remedy = f"Give a network of the source's class, `{spelled('like', metavar='MODEL')}`"
        raise RefusedError("cannot unfold", "nobody knows how to build the source", remedy)
    return provenance.attach(zoo.create(arch), Provenance(arch))


def bare(network: Network, module: nn.Module, arch: Arch | None) -> Network:
    """Return a `Network` of another module, with the inputs and the origin of a given network.

    Args:
        network: The network whose inputs and origin are taken.
        module: The other module. Provenance is attached to it in place, without a plan, as it is
            not converted.
        arch: How the other module is built, if known.
    """
    # The other module gets what timm records of the images and classes (`pretrained_cfg`), and
    # provenance that names the same source.
    attributes = network.module.__dict__
    record = network.provenance
    module.__dict__.update(
        {name: attributes[name] for name in ("pretrained_cfg", "default_cfg") if name in attributes}
    )
    origin = Provenance(arch, record.source, record.sha256, record.pretrained_cfg)
    return network.after(provenance.attach(module, origin))


def architecture(model: nn.Module) -> Arch | None:
    """Return how to build the network that `model` was converted from, or None if unknown.

    The network's provenance may say it, but for a head that the network got since. Otherwise an
    architecture is searched that becomes this network if the plan is applied to it.
    """
    record = provenance.of(model)
    if record.arch:
        return zoo.with_present_head(record.arch, model)
    # `identify` compares the model with each architecture after the plan is applied to it.
    return zoo.identify(model, lambda skeleton: applying.apply(skeleton, record.plan.steps))


def _canonical(network: Network) -> nn.Module:
    """Return the network's canonical form: its norms and scalars are folded into their neighbours.

    Raises:
        RefusedError: The source cannot have the same canonical form. For instance, the network has
            a norm with statistics per sample where the source had a BatchNorm.
    """
    # The plan that folds the network's own norms. It also lists what cannot be folded.
    builder = fold_norms(network.anatomy)
    anatomy = network.anatomy
    # If the source had a BatchNorm where a norm with statistics per sample is now, no values of the
    # BatchNorm make it compute the same.
    for norm in anatomy.norms:
        if norm.averages and anatomy.original_path(norm.path) in network.provenance.original_paths:
            why = f"a {norm.kind} sits there now, which no BatchNorm computes"
            calibrate = spelled("calibrate", metavar="DATA")
            remedy = f"Keep the source network; or first convert to folded with `{calibrate}`"
            raise RefusedError(f"cannot unfold {norm.path}", why, remedy)

    # A convolution may have learned a bias of its input, which it pads with zeros. No BatchNorm
    # computes that.
    for path, module in anatomy.traced.modules.items():
        if reparametrized.keeps_input_bias(module):
            why = (
                "it has learned a bias of its input, which it pads with zeros: no BatchNorm"
                " computes that"
            )
            raise RefusedError(f"cannot unfold {path}", why, "Keep the network as it is")

    # The error names the first module that cannot be folded. A scalar that the plan leaves in place
    # is such a module, too.
    scalars = [path for path, module in anatomy.traced.modules.items() if scales_branch(module)]
    staying_scalars = [path for path in scalars if path not in builder.replacements]
    for path in (*builder.refusals, *staying_scalars):
        why = builder.refusals.get(path) or str(builder.outcomes.get(path, ""))
        raise RefusedError(f"cannot unfold {path}", why)

    return applying.apply_step(network.module, Step("folded", {}, builder.edits()))


def _by_old_path(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a converted network by the paths that they have in the source.

    A `Holder` is a layer of normswap that is put around a layer of the source. The source's layer
    is then at `PATH.inner`, and was at `PATH`. The holders themselves are left out.
    """
    holders = [
        path for path, module in nn.Module.named_modules(model) if isinstance(module, Holder)
    ]
    modules = {}
    for path, module in nn.Module.named_modules(model):
        old_path = path
        # A holder in another one comes later in the list. Its `inner` is taken out of the path
        # first, while the path before it is still that of the converted network.
        for holder in reversed(holders):
            inside = f"{holder}.inner"
            if old_path == inside or old_path.startswith(f"{inside}."):
                old_path = holder + old_path[len(inside) :]
        if path not in holders:
            modules[old_path] = module
    return modules


def _tensors(
    model: nn.Module, among: Callable[[nn.Module], bool] = lambda module: True
) -> dict[str, Tensor]:
    """Return tensors of a converted network by the names that they have in the source.

    Args:
        model: The converted network.
        among: A function of a module that tells whether its tensors are returned. By default the
            tensors of all modules are.
    """
    tensors = {}
    for path, module in _by_old_path(model).items():
        if among(module):
            own = {
                **dict(nn.Module.named_parameters(module, recurse=False)),
                **dict(nn.Module.named_buffers(module, recurse=False)),
            }
            tensors.update({dotted(path, name): tensor for name, tensor in own.items()})

    return tensors


def _is_affine_norm(module: nn.Module) -> bool:
    return site_of(module).is_affine_norm


def _copy(state: dict[str, Tensor], tensors: dict[str, Tensor]) -> None:
    """Write tensors, in place, into those of `state` that have the same name and shape."""
    for name, tensor in tensors.items():
        if name in state and state[name].shape == tensor.shape:
            state[name].copy_(tensor)


def _check_shapes(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Check that the tensors of the rebuilt source have the shapes of the converted network's.

    Args:
        state: The tensors of the rebuilt source, by name.
        tensors: The tensors of the converted network after its norms are folded into their
            neighbours, and the recorded tensors of the source's norms, by name.

    Raises:
        RefusedError: A tensor has another shape in the source.
    """
    for name, tensor in tensors.items():
        if name in state and state[name].shape != tensor.shape:
            why = f"{name} is {tuple(tensor.shape)} here, and {tuple(state[name].shape)} there"
            raise RefusedError("cannot unfold: the class given is not the source's", why)


def _reset_norms_without_tensors(source: nn.Module, names: Collection[str]) -> None:
    """Set gamma 1 and beta 0, in place, in LayerNorms and LayerScales whose tensors are gone.

    They were folded into another layer, and nothing has recorded their tensors.

    Args:
        source: The rebuilt source.
        names: The names of the tensors that are known.
    """
    for path, module in nn.Module.named_modules(source):
        site = site_of(module)
        if site.is_layernorm or site.scaled_dim is not None:
            for name, parameter in nn.Module.named_parameters(module, recurse=False):
                if f"{path}.{name}" not in names:
                    parameter.fill_(0.0 if name == "bias" else 1.0)


def _check_biases(
    state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], inverted: Collection[str]
) -> None:
    """Check that the rebuilt source has a place for every learned bias.

    Args:
        state: The tensors of the rebuilt source, by name.
        tensors: The tensors of the converted network after its norms are folded into their
            neighbours, by name.
        inverted: The paths of the layers whose bias goes into the beta of a norm of the source.

    Raises:
        RefusedError: A layer has learned a bias, and its layer in the source has none.
    """
    for name, tensor in tensors.items():
        path, _, own_name = name.rpartition(".")
        has_no_place = own_name == "bias" and f"{path}.weight" in state and name not in state
        if has_no_place and path not in inverted and tensor.any():
            raise RefusedError(
                f"cannot unfold {name}", "it was learned, and no norm of the source can hold it"
            )


def _shifts(edit: Edit) -> bool:
    """Whether a layer absorbs a norm behind it, whose beta can hold what its bias has learned."""
    return any(absorption.way is AbsorbMode.AFTER for _, absorption in edit.absorbed)


def _invert(edit: Edit, modules: Mapping[str, nn.Module], now: nn.Module) -> None:
    """Set tensors of the rebuilt source, in place, so that folding it would give the present layer.

    Args:
        edit: An edit that folds norms of the source into the layer at its path.
        modules: The modules of the rebuilt source, by path.
        now: The layer at the edit's path in the converted network, after its norms are folded.

    Raises:
        RefusedError: The source's layers cannot compute what the present layer does.
    """
    # The class of the placed layer can set the tensors of the source. The error that it raises does
    # not name the layer, so another one is raised in its place.
    reads = tuple(modules[path] for path in edit.reads)
    try:
        applying.layer_of(edit).invert(modules[edit.path], now, reads, **edit.arguments)
    except RefusedError as refused:
        raise RefusedError(f"cannot unfold {edit.path}", refused.why) from None
