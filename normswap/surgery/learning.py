"""Which parameters of a new layer are trainable: those made from frozen tensors are frozen.

The weight of a layer that absorbs its neighbours learns if the layer's own weight learned. Its bias
carries its old bias and the neighbours' betas, and learns if one of these did. A parameter that is
new, such as the scalar of a residual branch, learns if anything learned in the modules whose place
the layer takes. Where these have no parameters, the layer that absorbed them earlier decides, or
else the module around them.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from normswap import provenance
from normswap.errors import first_few
from normswap.graph.tracing import LINEAR
from normswap.plan import AbsorbMode, Edit
from normswap.sites.site import site_of

_GAMMAS = ("weight", "gamma")
_BETAS = ("bias", "beta")
# Parameters that scale the filters of a linear layer: of a weight norm, of standardized filters,
# and of a `Gain`. They carry the gammas that the layer has absorbed.
_FILTER_SCALES = ("original0", "gain", "alpha")
# A layer that absorbs a neighbour in one of these ways carries its gamma, or its beta.
_CARRIES_GAMMA = (AbsorbMode.AFTER, AbsorbMode.BEFORE)
_CARRIES_BETA = (AbsorbMode.AFTER, AbsorbMode.BEFORE, AbsorbMode.BEFORE_SHIFT, AbsorbMode.SUM)


def follow(
    model: nn.Module, edit: Edit, old: nn.Module, reads: Sequence[nn.Module], new: nn.Module
) -> None:
    """Set, in place, which parameters of a placed layer learn, and the mode of its modules.

    Args:
        model: The network before the step.
        edit: The edit that places the layer.
        old: The module that stood at the edit's path.
        reads: The modules that the edit reads.
        new: The layer that is placed.
    """
    # The path of the old module in the new layer, if it stays: each further layer is put around it.
    kept = ".".join(["inner"] * edit.depth) if edit.keep else None
    _follow_modes(old, new, kept)

    # The modules that the new layer replaces decide which of its parameters learn. If these modules
    # have no parameter, another one decides.
    replaced = [old, *reads]
    if not any(_learning(module) is not None for module in replaced):
        replaced = [_module_that_decides(model, edit.path)]

    for name, parameter in nn.Module.named_parameters(new):
        # The kept module is a copy, whose parameters have their flags.
        if kept is not None and name.startswith(f"{kept}."):
            continue
        own_name = _without_holders(name)
        if isinstance(old, LINEAR) and kept is None:
            parameter.requires_grad_(_learns_in_linear(own_name, edit, old, reads))
        else:
            parameter.requires_grad_(_learns_for_norm(own_name, old, replaced))


def notes(source: nn.Module, edits: Sequence[Edit], placed: Mapping[str, nn.Module]) -> list[str]:
    """Return a sentence about norms whose gamma was trainable and is now part of a frozen weight.

    The list that is returned has this sentence, or is empty if there are no such norms.

    Args:
        source: The network before the step.
        edits: The edits of the step.
        placed: The module that each edit placed, by the edit's path.
    """
    stopped: list[str] = []
    for edit in edits:
        learned: list[str] = []
        for read, absorption in edit.absorbed:
            gamma = _gamma_at(source, read)
            if absorption.way in _CARRIES_GAMMA and gamma is not None and gamma.requires_grad:
                learned.append(read)

        # An edit of a plain parameter places no module.
        if not learned or edit.path not in placed:
            continue
        names = dict(nn.Module.named_parameters(placed[edit.path]))
        # The gammas are in the parameters that scale, not in the biases.
        scales = [name for name in names if name.rpartition(".")[2] not in (*_BETAS, "in_bias")]
        if not any(names[name].requires_grad for name in scales):
            stopped += learned

    if not stopped:
        return []
    return [f"the gammas of {first_few(stopped)} learned, and are part of frozen weights now"]


def _gamma_at(model: nn.Module, path: str) -> nn.Parameter | Tensor | None:
    """Return the gamma of the norm at a path, or the parameter that scales channels there."""
    owner_path, _, name = path.rpartition(".")
    value = getattr(model.get_submodule(owner_path), name)
    return _tensor(value, _GAMMAS) if isinstance(value, nn.Module) else value


def _learns_in_linear(name: str, edit: Edit, old: nn.Module, reads: Sequence[nn.Module]) -> bool:
    """Return whether a parameter of a new layer is trainable, where the old layer is linear.

    Args:
        name: The parameter's name in the new layer.
        edit: The edit that places the new layer.
        old: The linear layer.
        reads: The modules that the edit reads.
    """
    old_parameters = dict(nn.Module.named_parameters(old))
    leaf = name.rpartition(".")[2]
    # Each module that the new layer absorbs, with how it is absorbed.
    absorbed = list(zip(reads, edit.takes, strict=True)) if edit.takes else []
    summed = [module for module, absorption in absorbed if absorption.way is AbsorbMode.SUM]
    weight_learns = any(_weight_learns(module) for module in (old, *summed))

    # In tune mode gamma and beta of the norm stay parameters.
    tuned = [module for module, absorption in absorbed if absorption.way is AbsorbMode.NORM]
    if tuned and leaf in ("gamma", "beta"):
        name_in_norm = {"gamma": "weight", "beta": "bias"}[leaf]
        return _learns_for_norm(name_in_norm, tuned[0], [old, *reads])

    # A bias carries the old bias and the betas of the neighbours.
    if leaf in _BETAS:
        carried = [module for module, absorption in absorbed if absorption.way in _CARRIES_BETA]
        flags: list[bool] = []
        for module in (old, *carried):
            flags += _beta_flags(module)
        return any(flags) if flags else weight_learns

    # A scale of the filters carries the gammas of the neighbours.
    if leaf in _FILTER_SCALES:
        gammas = [
            _tensor(module, _GAMMAS)
            for module, absorption in absorbed
            if absorption.way in _CARRIES_GAMMA
        ]
        is_carried = any(gamma is not None and gamma.requires_grad for gamma in gammas)
        if name in old_parameters:
            return is_carried or old_parameters[name].requires_grad
        return is_carried or weight_learns

    if name in old_parameters:
        return old_parameters[name].requires_grad
    if leaf == "in_bias":
        return any(_learning(module) for module in (old, *reads))
    return weight_learns


def _learns_for_norm(name: str, old: nn.Module, replaced: Sequence[nn.Module]) -> bool:
    """Return whether a parameter of a new layer is trainable, where the old module is a norm.

    The old module may be of any other class, too, except a linear layer. The first of these that
    exists decides: the tensor of the same name in the old module; the gamma (for a gamma or alpha)
    or the beta (for a beta) of a replaced module; whether any replaced module has a parameter that
    learns.

    Args:
        name: The parameter's name in the new layer.
        old: The module that the new layer replaces.
        replaced: The old module and those that the new layer absorbs, or the module that decides
            for them if none of them has a parameter.
    """
    # The old module's tensor of the same name decides.
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
        # A gamma that is a buffer is a constant. A new gamma is then constant, too. But it does not
        # freeze the alpha of a residual branch, so it is skipped.
        if tensor is not None and (leaf != "alpha" or isinstance(tensor, nn.Parameter)):
            return tensor.requires_grad
    return any(_learning(module) for module in replaced)


def _weight_learns(module: nn.Module) -> bool:
    """Return whether the weight of a layer learns, or what it is computed from."""
    biases = (*_BETAS, "in_bias")
    return any(
        parameter.requires_grad
        for name, parameter in nn.Module.named_parameters(module)
        if name.rpartition(".")[2] not in biases
    )


def _beta_flags(module: nn.Module) -> Iterator[bool]:
    """Yield whether the beta or bias of a module learns, or nothing if it has none."""
    beta = _tensor(module, _BETAS)
    if beta is not None:
        yield beta.requires_grad
    elif site_of(module).is_registered:
        yield bool(_learning(module))


def _tensor(module: nn.Module, names: Sequence[str]) -> Tensor | None:
    """Return the first tensor that a module has under one of the names."""
    tensors = {**module._buffers, **module._parameters}
    return next((tensors[name] for name in names if tensors.get(name) is not None), None)


def _learning(module: nn.Module) -> bool | None:
    """Return whether any parameter of a module learns, or None if it has no parameter."""
    flags = [parameter.requires_grad for parameter in nn.Module.parameters(module)]
    return any(flags) if flags else None


def _module_that_decides(model: nn.Module, path: str) -> nn.Module:
    """Return the module that decides whether the layer at `path` learns, if it has no parameters.

    It is the layer that absorbed the norm at the path in an earlier step, or else the nearest
    module around the path that has parameters. If a plain parameter absorbed the norm, it is
    returned in an `nn.ParameterList`.

    Args:
        model: The network before the step.
        path: The path of the module without parameters.
    """
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


def _follow_modes(old: nn.Module, new: nn.Module, kept: str | None) -> None:
    """Give placed modules, in place, the mode (training or eval) of what stood there.

    Args:
        old: The module that stood there.
        new: The layer that is placed.
        kept: The path of the old module inside the new layer, if it stays. It is a copy that has
            its modes.
    """
    modes = {path: (type(part), part.training) for path, part in nn.Module.named_modules(old)}
    for path, module in nn.Module.named_modules(new):
        if kept is not None and (path == kept or path.startswith(f"{kept}.")):
            continue
        kind, mode = modes.get(_without_holders(path), (None, old.training))
        module.training = mode if kind is type(module) else old.training


def _without_holders(name: str) -> str:
    """Return a name without the names that a `Chain` puts before it."""
    parts = name.split(".")
    while len(parts) > 1 and parts[0] in ("inner", "then"):
        parts = parts[1:]
    return ".".join(parts)
