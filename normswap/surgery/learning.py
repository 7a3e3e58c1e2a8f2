"""Which parameters of a new layer are trainable: those made from frozen tensors are frozen.

A parameter "learns" if its `requires_grad` is set. The weight of a layer that absorbs its
neighbours (norms folded into it) learns if the layer's own weight learned. Its bias is made of its
old bias and the neighbours' betas, and learns if one of these did. A parameter that is new, such as
the scalar of a residual branch, learns if anything learned in the modules that the new layer
replaces. If these have no parameters, the layer that absorbed them earlier decides, or else the
module around them.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from normswap import provenance
from normswap.copying import dotted, tree
from normswap.errors import first_few
from normswap.graph.tracing import LINEAR
from normswap.plan import AbsorbMode, Edit
from normswap.sites.site import site_of

_GAMMAS = ("weight", "gamma")
_BETAS = ("bias", "beta")
# The names of parameters that scale the filters of a linear layer: of torch's weight norm, of
# standardized filters, and of the layer `Gain`. The gammas that the layer absorbs go into them.
_FILTER_SCALES = ("original0", "gain", "alpha")
# In these ways of absorbing a norm, the norm's gamma goes into the layer, or its beta does.
_CARRIES_GAMMA = (AbsorbMode.AFTER, AbsorbMode.BEFORE)
_CARRIES_BETA = (AbsorbMode.AFTER, AbsorbMode.BEFORE, AbsorbMode.BEFORE_SHIFT, AbsorbMode.SUM)


def follow(
    model: nn.Module, edit: Edit, old: nn.Module, reads: Sequence[nn.Module], new: nn.Module
) -> None:
    """Set, in place, which parameters of a new layer are trainable, and the mode of its modules.

    Args:
        model: The network before the step.
        edit: The edit of the plan that places the layer.
        old: The module that stood at the edit's path.
        reads: The modules whose tensors the edit uses, such as the norms that are folded.
        new: The layer that is placed.
    """
    # If the old module stays, every layer that is put around it calls it `inner`. With two layers
    # around, its path in the new layer is `inner.inner`.
    old_path = ".".join(["inner"] * edit.depth) if edit.keep else None
    _follow_modes(old, new, old_path)

    # The modules that the new layer replaces decide which of its parameters learn. If none of these
    # modules has a parameter, another module decides.
    replaced = [old, *reads]
    if not any(_learning(module) is not None for module in replaced):
        replaced = [_module_that_decides(model, edit.path)]

    for name, parameter in nn.Module.named_parameters(new):
        # The old module stays as a copy, whose parameters have the right flags already.
        if old_path is not None and name.startswith(f"{old_path}."):
            continue
        # In the place of a linear layer, weights, biases and scales each follow what they are made
        # of. Any other new parameter follows the gamma or beta in its place.
        own_name = _without_holders(name)
        if isinstance(old, LINEAR) and old_path is None:
            parameter.requires_grad_(_learns_in_linear(own_name, edit, old, reads))
        else:
            parameter.requires_grad_(_learns_for_norm(own_name, old, replaced))


def resemble(model: nn.Module, built: nn.Module) -> None:
    """Set, in place, which parameters of a network are trainable and the modes of its modules.

    They are those of the network that it takes its tensors from. A gamma or beta that this one
    lacks, as its norm was folded, follows the weight or bias of the layer that absorbed the norm.
    Any other parameter that it lacks learns if anything learns in the module around.

    Args:
        model: The network that the tensors come from.
        built: The network that was built for them.
    """
    modules = tree(model)
    flags = {
        name: parameter.requires_grad
        for name, parameter in nn.Module.named_parameters(model, remove_duplicate=False)
    }
    for path, module in tree(built).items():
        # The module at this path, or the nearest one around it.
        nearest = path
        while nearest not in modules:
            nearest = nearest.rpartition(".")[0]
        # The mode of an identity in the place of a norm says nothing. That of the nearest module
        # with parameters does.
        with_mode = nearest
        if type(modules[nearest]) is not type(module):
            while with_mode and _learning(modules[with_mode]) is None:
                with_mode = with_mode.rpartition(".")[0]
        module.training = modules[with_mode].training

        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            learns = flags.get(dotted(path, name))
            if learns is None:
                around = _module_that_decides(model, nearest)
                learns = _learns_for_norm(name, nn.Module(), [around])
            parameter.requires_grad_(learns)


def notes(source: nn.Module, edits: Sequence[Edit], placed: Mapping[str, nn.Module]) -> list[str]:
    """Return a note about norms whose gamma was trainable and is now part of a frozen weight.

    Args:
        source: The network before the step.
        edits: The edits of the step.
        placed: The module that each edit placed, by the edit's path.

    Returns:
        A list with one sentence, or an empty list if there are no such norms.
    """
    # The paths of the norms whose gamma does not learn any more.
    frozen_now: list[str] = []
    for edit in edits:
        learned: list[str] = []
        for norm_path, absorption in edit.absorbed:
            gamma = _gamma_at(source, norm_path)
            # Only in some ways of absorbing a norm does its gamma go into the layer.
            if absorption.way in _CARRIES_GAMMA and gamma is not None and gamma.requires_grad:
                learned.append(norm_path)

        # An edit of a plain parameter places no module.
        if not learned or edit.path not in placed:
            continue
        parameters = dict(nn.Module.named_parameters(placed[edit.path]))
        # The gammas are in the weights and scales of the placed layer, not in its biases.
        biases = (*_BETAS, "in_bias")
        scales = [name for name in parameters if name.rpartition(".")[2] not in biases]
        if not any(parameters[name].requires_grad for name in scales):
            frozen_now += learned

    if not frozen_now:
        return []
    return [f"the gammas of {first_few(frozen_now)} learned, and are part of frozen weights now"]


def _gamma_at(model: nn.Module, path: str) -> nn.Parameter | Tensor | None:
    """Return the gamma of the norm at a path, or the parameter at that path.

    It is None for a norm without a gamma.
    """
    owner_path, _, name = path.rpartition(".")
    value = getattr(model.get_submodule(owner_path), name)
    return _tensor(value, _GAMMAS) if isinstance(value, nn.Module) else value


def _learns_in_linear(name: str, edit: Edit, old: nn.Module, reads: Sequence[nn.Module]) -> bool:
    """Return whether a parameter of a new layer is trainable, where the old layer is linear.

    Args:
        name: The parameter's name in the new layer.
        edit: The edit of the plan that places the new layer.
        old: The linear layer, or convolution, that is replaced.
        reads: The modules whose tensors the edit uses, such as the norms that are folded.
    """
    old_parameters = dict(nn.Module.named_parameters(old))
    # The last part of the name: `original0` of `parametrizations.weight.original0`.
    leaf = name.rpartition(".")[2]
    # Each module that the new layer absorbs, with the way in which it is absorbed. The weights of
    # layers that are merged with it (`SUM`) become part of its weight.
    absorbed = list(zip(reads, edit.takes, strict=True)) if edit.takes else []
    summed = [module for module, absorption in absorbed if absorption.way is AbsorbMode.SUM]
    weight_learns = any(_weight_learns(module) for module in (old, *summed))

    # If the norm is kept inside the layer (`NORM`, to tune it), its gamma and beta stay parameters.
    tuned = [module for module, absorption in absorbed if absorption.way is AbsorbMode.NORM]
    if tuned and leaf in ("gamma", "beta"):
        name_in_norm = {"gamma": "weight", "beta": "bias"}[leaf]
        return _learns_for_norm(name_in_norm, tuned[0], [old, *reads])

    # A bias is the sum of the old bias and what the neighbours' betas become.
    if leaf in _BETAS:
        carried = [module for module, absorption in absorbed if absorption.way in _CARRIES_BETA]
        flags: list[bool] = []
        for module in (old, *carried):
            flags += _beta_flags(module)
        return any(flags) if flags else weight_learns

    # A scale of the filters is the product of the old one, if there was one, and the gammas of the
    # neighbours.
    if leaf in _FILTER_SCALES:
        gammas = [
            _tensor(module, _GAMMAS)
            for module, absorption in absorbed
            if absorption.way in _CARRIES_GAMMA
        ]
        a_gamma_learns = any(gamma is not None and gamma.requires_grad for gamma in gammas)
        if name in old_parameters:
            return a_gamma_learns or old_parameters[name].requires_grad
        return a_gamma_learns or weight_learns

    # Any other parameter learns as the old one of its name. A new bias of the layer's input learns
    # if anything did, and another new parameter if the weight did.
    if name in old_parameters:
        return old_parameters[name].requires_grad
    if leaf == "in_bias":
        return any(_learning(module) for module in (old, *reads))
    return weight_learns


def _learns_for_norm(name: str, old: nn.Module, replaced: Sequence[nn.Module]) -> bool:
    """Return whether a parameter of a new layer is trainable, where the old one is not linear.

    The old module is a norm, most often. The first of these that exists decides:

    - the tensor of the same name in the old module
    - the gamma (for a gamma or alpha) or the beta (for a beta) of a replaced module
    - whether any parameter of a replaced module is trainable

    Args:
        name: The parameter's name in the new layer.
        old: The module that the new layer replaces.
        replaced: The old module and those that the new layer absorbs, or the module that decides
            for them if none of them has a parameter.
    """
    same = {**dict(nn.Module.named_buffers(old)), **dict(nn.Module.named_parameters(old))}.get(name)
    if same is not None:
        return same.requires_grad

    leaf = name.rpartition(".")[2]
    names: tuple[str, ...] = ()
    if leaf in (*_GAMMAS, "alpha"):
        names = _GAMMAS
    elif leaf in _BETAS:
        names = _BETAS

    for module in replaced:
        tensor = _tensor(module, names)
        # A gamma that is a buffer is a constant, and a new gamma is constant then, too. But the
        # alpha of a residual branch may learn beside a constant gamma, so that gamma is skipped.
        if tensor is not None and (leaf != "alpha" or isinstance(tensor, nn.Parameter)):
            return tensor.requires_grad
    return any(_learning(module) for module in replaced)


def _weight_learns(module: nn.Module) -> bool:
    """Return whether any parameter of a layer except its biases is trainable."""
    biases = (*_BETAS, "in_bias")
    return any(
        parameter.requires_grad
        for name, parameter in nn.Module.named_parameters(module)
        if name.rpartition(".")[2] not in biases
    )


def _beta_flags(module: nn.Module) -> Iterator[bool]:
    """Yield whether the beta or bias of a module is trainable, or nothing if it has none."""
    beta = _tensor(module, _BETAS)
    if beta is not None:
        yield beta.requires_grad
    # In a norm of a registered class (`register_norm`) the beta may have any name.
    elif site_of(module).is_registered:
        yield bool(_learning(module))


def _tensor(module: nn.Module, names: Sequence[str]) -> Tensor | None:
    """Return a parameter or buffer of a module itself, or None if it has none of the names.

    Args:
        module: The module.
        names: Names of parameters and buffers. The first one that the module has counts.
    """
    tensors = {**module._buffers, **module._parameters}
    return next((tensors[name] for name in names if tensors.get(name) is not None), None)


def _learning(module: nn.Module) -> bool | None:
    """Return whether any parameter of a module is trainable, or None if it has no parameter."""
    flags = [parameter.requires_grad for parameter in nn.Module.parameters(module)]
    return any(flags) if flags else None


def _module_that_decides(model: nn.Module, path: str) -> nn.Module:
    """Return the module whose flags count for a new layer at the place of one without parameters.

    The flags (`requires_grad`) decide which parameters of the new layer are trainable. The module
    is the layer that absorbed the norm at the path in an earlier step, or else the nearest module
    around the path that has parameters. If a plain parameter absorbed the norm, that parameter is
    returned in an `nn.ParameterList`.

    Args:
        model: The network before the step.
        path: The path of the module without parameters.
    """
    # The latest earlier edit that absorbed the module at the path. It may have placed a layer, or
    # set a plain parameter.
    for edit in reversed(provenance.of(model).plan.edits):
        if path not in edit.reads or edit.path == path:
            continue
        parent, _, name = edit.path.rpartition(".")
        absorbed_in = getattr(model.get_submodule(parent), name)
        if isinstance(absorbed_in, nn.Parameter):
            return nn.ParameterList([absorbed_in])
        if isinstance(absorbed_in, nn.Module):
            return absorbed_in

    # The modules around the path, the outermost first.
    module = model
    around = [model]
    for name in path.split(".")[:-1]:
        module = module.get_submodule(name)
        around.append(module)
    for module in reversed(around):
        if _learning(module) is not None:
            return module
    return model


def _follow_modes(old: nn.Module, new: nn.Module, old_path: str | None) -> None:
    """Give each module of a new layer, in place, the mode (training or eval) of the old module.

    A submodule that has the path and class of one of the old module's submodules gets the mode of
    that one.

    Args:
        old: The module that stood at the path.
        new: The layer that is placed.
        old_path: The path inside `new` of the copy of the old module, or None if the old module
            does not stay. The copy has the right modes already, and is left as it is.
    """
    modes = {path: (type(part), part.training) for path, part in nn.Module.named_modules(old)}
    for path, module in nn.Module.named_modules(new):
        if old_path is not None and (path == old_path or path.startswith(f"{old_path}.")):
            continue
        kind, mode = modes.get(_without_holders(path), (None, old.training))
        module.training = mode if kind is type(module) else old.training


def _without_holders(name: str) -> str:
    """Return a name or path without the `inner` and `then` that a `Chain` puts before it.

    A `Chain` runs two layers, which it calls `inner` and `then`: `inner.then.weight` is the
    `weight` of a layer in two chains.
    """
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("inner", "then"):
        parts = parts[1:]
    return ".".join(parts)
