"""Optimizer groups: which parameters decay, by the role of every parameter.

The policy `kim2022`: the guidelines of Kim et al. 2022, arXiv:2205.07260 (ACM TIST 2024, doi
10.1145/3643860):

- Guideline 1: gamma_last decays. It is the gamma of the last norm of a residual branch. A small one
  brings the block near the identity.
- Guideline 2: gamma_down does not decay. It is the gamma of the norm on a projection skip, or in
  pre-activation networks of the first norm of the downsampling block. It sets the variance of the
  skip path.
- Guideline 3: gamma_0 does not decay. It is the gamma of a norm in the stem. It sets the variance
  that the first stage starts from.
- Guideline 4: gamma_other decays. A norm follows, so its size changes only the effective learning
  rate, which goes as 1 / |gamma|^2 (equation 24). `gamma_head`, after the last block, decays for
  the same reason (4T).

Weights decay; betas and biases do not. The gamma of a LayerNorm is `gamma_last` if the norm ends a
branch, `gamma_0` if it stands before the first block, and `gamma_other` if it begins a branch (ViT,
Swin). A scale per channel in the place of a norm has that norm's role. A gamma whose place is not
known, as in a network that cannot be traced, does not decay. SkipInit's scalars do not decay (De &
Smith 2020, arXiv:2002.10444, the code in appendix G). The gains of NF networks do not decay either
(Brock et al. 2021, arXiv:2102.06171).

The docstring of `param_groups` says what decays under the other policies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from normswap import copying, provenance
from normswap.errors import OptionError, TraceError, spelled
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import LINEAR
from normswap.models import calling, network_input
from normswap.plan import AbsorbMode, Body
from normswap.sites.own_layer import GAMMA, OwnLayer
from normswap.sites.site import site_of
from normswap.surgery.network import Network

POLICIES = ("kim2022", "timm", "all", "weights-only")
Policy = str | Collection[str]
# The roles of parameters that are one number, whose learning rate may be scaled.
SCALARS = ("alpha", "tanh_alpha", "scalar_bias", "skipinit_gain")
# The gamma of a norm, by the norm's role in the graph.
_GAMMA = {
    "stem": "gamma_0",
    "last": "gamma_last",
    "down": "gamma_down",
    "head": "gamma_head",
    "other": "gamma_other",
}
# Whether a role decays under `kim2022`, and why.
_KIM = {
    "weight": (True, "weights decay"),
    "gamma_last": (True, "ends a residual branch: a small one brings the block near the identity"),
    "gamma_down": (False, "sets the variance of the skip path: it must not shrink"),
    "gamma_0": (False, "in the stem, before the first block"),
    "gamma_other": (True, "a small one raises the effective learning rate"),
    "gamma_head": (True, "after the last block, as the other gammas"),
    "gamma_unknown": (
        False,
        "the network cannot be traced, or does not say which norm stood there",
    ),
    "beta": (False, "shifts do not decay"),
    "bias": (False, "biases do not decay"),
    "alpha": (False, "SkipInit's scalars do not decay"),
    "tanh_alpha": (False, "the alpha of a Dynamic Tanh: how far it bends"),
    "scalar_bias": (False, "SkipInit's scalar biases do not decay"),
    "skipinit_gain": (False, "SkipInit's scalars do not decay"),
    "gain": (False, "the gains of scaled or weight normalized filters do not decay"),
    "filter_mean": (False, "the mean of a filter beside its standardized weights"),
    "embedding": (False, "the model's no_weight_decay() names it"),
    "vector": (False, "neither a weight nor a gamma; 1-D"),
}


@dataclass(frozen=True)
class Assignment:
    """The decision whether weight decay applies to a trainable parameter.

    Args:
        path: The name of the parameter in the network.
        role: What the parameter is to its layer, such as `weight`, `bias` or `gamma_last` (the
            gamma of the last norm of a residual branch).
        decay: Whether weight decay applies to it.
        reason: The reason for the decision, for the user.
    """

    path: str
    role: str
    decay: bool
    reason: str


def roles(
    model: nn.Module, policy: Policy = "kim2022", network: Network | None = None
) -> list[Assignment]:
    """Return the role of every trainable parameter, and whether weight decay applies to it.

    The order is that of `named_parameters`.

    Args:
        model: The network, or a copy of it, such as an average of its weights.
        policy: The name of a policy (`param_groups` says what decays under each), or the role or
            roles to which weight decay applies.
        network: The record of the network, if there is one already. Without it the network is
            recorded anew.

    Raises:
        OptionError: The policy or a role is unknown.
    """
    # A policy that is none of the names must be roles. The keys of `_KIM` are all roles that there
    # are.
    decaying_roles = _decaying_roles(policy)
    unknown = sorted(decaying_roles.difference(_KIM))
    if policy not in POLICIES and unknown:
        raise OptionError(
            f"unknown policy {', '.join(unknown)}", remedy=f"Known: {', '.join((*POLICIES, *_KIM))}"
        )

    trainable = [
        (path, role)
        for path, role in _roles(model, network)
        if model.get_parameter(path).requires_grad
    ]
    # `kim2022` has a reason for each role. The other policies tell only which parameters decay.
    if policy == "kim2022":
        return [Assignment(path, role, *_KIM[role]) for path, role in trainable]

    if policy == "timm":
        decaying = _decaying_by_timm(model)
    else:
        decaying = {
            id(model.get_parameter(path)) for path, role in trainable if role in decaying_roles
        }
    return [
        Assignment(path, role, id(model.get_parameter(path)) in decaying, f"by {policy}")
        for path, role in trainable
    ]


def _decaying_roles(policy: Policy) -> set[str]:
    """Return the roles to which weight decay applies under a policy.

    Args:
        policy: `all`, `weights-only`, a role or several roles. The other names of policies are no
            lists of roles, and are returned like a role.
    """
    if policy == "all":
        return set(_KIM)
    if policy == "weights-only":
        return {"weight"}
    # A text is one role. Its letters are none.
    if isinstance(policy, str):
        return {policy}
    return set(policy)


def _decaying_by_timm(model: nn.Module) -> set[int]:
    """Return the ids of the parameters to which timm applies weight decay.

    They are those that `timm.optim.param_groups_weight_decay` puts into a group with decay.
    """
    # Any weight decay above 0 will do: what is read is only which parameters timm gives it to.
    groups = param_groups_weight_decay(model, 1.0, no_weight_decay_list=_spared(model))
    decaying: set[int] = set()
    for group in groups:
        if group["weight_decay"]:
            decaying.update(id(parameter) for parameter in group["params"])
    return decaying


def by_role(model: nn.Module, assignments: Iterable[Assignment]) -> list[Body]:
    """Return a dict for each role of parameters, with counts and whether weight decay applies.

    `tensors` is the number of parameters that have the role, and `values` how many numbers they
    have together.

    Args:
        model: The network.
        assignments: The role of each parameter, and whether weight decay applies to it.
    """
    sizes_by_role: dict[tuple[str, bool, str], list[int]] = {}
    for assignment in assignments:
        key = (assignment.role, assignment.decay, assignment.reason)
        sizes_by_role.setdefault(key, []).append(model.get_parameter(assignment.path).numel())

    records: list[Body] = []
    for (role, decay, reason), sizes_of_role in sizes_by_role.items():
        records.append(
            {
                "role": role,
                "decay": decay,
                "reason": reason,
                "tensors": len(sizes_of_role),
                "values": sum(sizes_of_role),
            }
        )
    return records


def param_groups(
    model: nn.Module,
    weight_decay: float = 1e-4,
    policy: Policy = "kim2022",
    *,
    lr: float | None = None,
    layer_decay: float | None = None,
    scalar_lr_scale: float | None = None,
    network: Network | None = None,
) -> list[Body]:
    """Return parameter groups for any torch or timm optimizer.

    Every trainable parameter is in exactly one group, a frozen one in none. The policy says which
    parameters decay:

    - `kim2022` (the default): weights, and all gammas except in the stem and on projection skips.
    - `timm`: all but 1-D parameters, biases, and what the network's `no_weight_decay` names.
    - `all`: every parameter.
    - `weights-only`: weights, but no gamma, beta, bias or scalar.

    Args:
        model: The network.
        weight_decay: The weight decay of the groups that decay.
        policy: The name of a policy, or the role or roles that decay. ["weight", "gamma_last"] are
            the weights and the gamma of the last norm of each residual branch. `normswap decay`
            prints the role of each parameter.
        lr: The learning rate. With it a group's `lr` is `lr` times its scale. Without it a group
            carries its scale as `lr_scale`, by which timm's schedulers multiply. A group never has
            both.
        layer_decay: The learning rate of layer i of n is scaled by layer_decay^(n - i), by timm's
            own `param_groups_layer_decay`. None means no such scale.
        scalar_lr_scale: The scale of the learning rate of scalars, such as SkipInit's. Fixup (Zhang
            et al. 2019) trains its scalars at 1/10. None means no such scale.
        network: The record of the network, if there is one already.

    Returns:
        Dictionaries with `params`, `weight_decay`, `name`, and `lr` or `lr_scale`.

    Raises:
        OptionError: The policy is unknown, or a number is out of range.
    """
    model = network_input.unwrapped(network_input.require_module(model))
    numbers = {"weight_decay": weight_decay, "lr": lr, "scalar_lr_scale": scalar_lr_scale}
    for option, number in numbers.items():
        if number is not None and not 0 <= number < float("inf"):
            raise OptionError(f"{spelled(option, number)} is not a number >= 0")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise OptionError(f"{spelled('layer_decay', layer_decay)} is not in (0, 1]")

    layer_scales = {} if layer_decay is None else _layer_scales(model, layer_decay)
    groups: dict[tuple[bool, float], Body] = {}
    for assignment in roles(model, policy, network):
        parameter = model.get_parameter(assignment.path)
        scale = layer_scales.get(id(parameter), 1.0)
        if scalar_lr_scale is not None and assignment.role in SCALARS:
            scale *= scalar_lr_scale

        # Parameters with the same decay and the same scale are one group.
        key = (assignment.decay, scale)
        if key not in groups:
            groups[key] = _empty_group(weight_decay, decays=assignment.decay, lr=lr, scale=scale)
        groups[key]["params"].append(parameter)
    return list(groups.values())


def _layer_scales(model: nn.Module, layer_decay: float) -> dict[int, float]:
    """Return the factor of the learning rate of each parameter, by the parameter's id.

    timm computes the factors. They get smaller from the output to the input of the network.

    Args:
        model: The network.
        layer_decay: The factor of each layer is this number times the factor of the next layer.
    """
    scales: dict[int, float] = {}
    for group in param_groups_layer_decay(model, layer_decay=layer_decay):
        for parameter in group["params"]:
            scales[id(parameter)] = group["lr_scale"]
    return scales


def _empty_group(weight_decay: float, *, decays: bool, lr: float | None, scale: float) -> Body:
    """Return a parameter group without parameters.

    Args:
        weight_decay: The weight decay of a group that decays.
        decays: Whether the group decays.
        lr: The learning rate before scaling. None if the caller sets it later.
        scale: The factor by which the learning rate of this group is multiplied.
    """
    name = "decay" if decays else "no-decay"
    if scale != 1:
        name += f", lr x {scale:g}"

    group: Body = {"params": [], "weight_decay": weight_decay * decays, "name": name}
    # Without a learning rate, the group keeps the scale itself. timm's schedulers multiply the
    # learning rate by `lr_scale`.
    if lr is not None:
        group["lr"] = lr * scale
    elif scale != 1:
        group["lr_scale"] = scale
    return group


def _spared(model: nn.Module) -> tuple[str, ...]:
    """Return patterns of the names of parameters to which weight decay must not apply.

    They are what the network's own method `no_weight_decay`, as timm's networks have it, returns.
    There are none if the network has no such method.
    """
    exempt = getattr(model, "no_weight_decay", None)
    if not callable(exempt):
        return ()
    return tuple(exempt())


def _roles(model: nn.Module, network: Network | None) -> Iterator[tuple[str, str]]:
    """Yield the path and the role of every parameter. A shared parameter is yielded once.

    A role says what the parameter is to its layer, such as `weight`, `bias` or `gamma_last`.

    Args:
        model: The network.
        network: The record of the network, if there is one already.
    """
    # The roles of gammas, by the path of the module that holds the gamma.
    gammas = _norm_roles(model, network)
    spared = _spared(model)
    for path, parameter in nn.Module.named_parameters(model):
        owner_path, _, name = path.rpartition(".")
        owner = model.get_submodule(owner_path)
        role = _own_role(owner, name, gammas.get(owner_path, "gamma_unknown"))
        if role in (None, "weight") and any(fnmatch(path, pattern) for pattern in spared):
            role = "embedding"
        if role is None:
            # The module's class does not tell the role, so name and shape do. A tensor such as
            # (1, C, 1, 1), with one dimension above 1, is a vector.
            role = "vector"
            if name.endswith("bias"):
                role = "bias"
            elif parameter.ndim > 1 and parameter.numel() > max(parameter.shape):
                role = "weight"
        yield path, role


def _own_role(owner: nn.Module, name: str, gamma: str) -> str | None:
    """Return the role of a parameter, or None if the class of its module does not tell it.

    Args:
        owner: The module that has the parameter.
        name: The parameter's name in the module.
        gamma: The role of the module's gamma, if it is a norm or a layer in a norm's place.
    """
    # Layers of this package list the roles of their parameters. GAMMA marks the one that has the
    # role of the norm's gamma.
    if isinstance(owner, OwnLayer) and name in owner.ROLES:
        role = owner.ROLES[name]
        return gamma if role == GAMMA else role
    # A parameter of a norm with another name than these two gets None, as below.
    if site_of(owner).is_norm:
        return {"weight": gamma, "bias": "beta"}.get(name)
    if name in ("gain", "skipinit_gain"):
        return name
    if isinstance(owner, (*LINEAR, nn.Embedding)):
        return {"weight": "weight", "bias": "bias"}.get(name)
    # In torch's weight norm `original0` holds the norms of the filters.
    if name == "original0" and type(owner).__name__ == "ParametrizationList":
        return "gain"
    return None


def _norm_roles(model: nn.Module, network: Network | None) -> dict[str, str]:
    """Return the role of each norm's gamma, by the path of the module that holds the gamma.

    The role is a text such as `gamma_last`. If a conversion took a norm away, its gamma is held by
    the layer in its place, or by the convolution that has absorbed it. The dict is empty if the
    network cannot be traced.

    Args:
        model: The network.
        network: The record of the network, if there is one already.
    """
    # The roles are read in a copy, in which the norms are put back. It takes the same inputs.
    twin = _with_its_norms(model)
    if network is None:
        network = Network(twin)
    elif twin is not model:
        network = network.after(twin)
    try:
        anatomy = network.anatomy
    except TraceError:
        return {}

    # A norm may stand at several paths, of which the anatomy names one. All of them get its role.
    role_by_id = {
        id(twin.get_submodule(path)): role for path, role in _gammas_of_norms(anatomy).items()
    }
    gammas: dict[str, str] = {}
    for path, module in nn.Module.named_modules(twin, remove_duplicate=False):
        if id(module) in role_by_id:
            gammas[path] = role_by_id[id(module)]

    # A conversion may put two layers in the place of a norm. The gammas of both have its role.
    for path in copying.tree(model):
        original_path = anatomy.original_path(path)
        if original_path in gammas:
            gammas.setdefault(path, gammas[original_path])

    # A convolution that absorbed a norm to train its gamma (`tune`) has the role of that norm.
    convolutions: dict[str, str] = {}
    for conv_path, norm_path in _tuned_norms(model).items():
        if norm_path in gammas:
            convolutions[conv_path] = gammas[norm_path]
    return gammas | convolutions


def _gammas_of_norms(anatomy: Anatomy) -> dict[str, str]:
    """Return the role of each norm's gamma, such as `gamma_last`, by the path of the norm.

    Args:
        anatomy: The recorded network, with its norms and residual blocks.
    """
    gammas = {norm.path: _GAMMA[norm.role] for norm in anatomy.norms}
    # A LayerNorm that begins a branch may be the branch's last norm, too. If a linear layer follows
    # it, it does not end the branch, and its gamma is no `gamma_last`.
    for block in anatomy.blocks:
        for path in block.norms:
            if not anatomy.site(path).is_at_each_position:
                continue
            if gammas[path] == "gamma_last" and not _ends_branch(path, block, anatomy):
                gammas[path] = "gamma_other"
    return gammas


def _tuned_norms(model: nn.Module) -> dict[str, str]:
    """Return which norm each convolution of the scheme `tune` has absorbed.

    `tune` lets a convolution take over the norm behind it. The convolution computes with the norm's
    statistics as constants, and trains the norm's gamma and beta.

    Returns:
        The path of the norm, by the path of the convolution.
    """
    norms: dict[str, str] = {}
    for step in provenance.of(model).plan.steps:
        for edit in step.edits:
            for path, absorption in edit.absorbed:
                if absorption.way is AbsorbMode.NORM:
                    norms[edit.path] = path
    return norms


def _ends_branch(path: str, block: Block, anatomy: Anatomy) -> bool:
    """Whether no linear layer stands between a norm and the end of its residual branch.

    Args:
        path: The path of the norm.
        block: The residual block that the norm belongs to.
        anatomy: The recorded network.
    """
    # From the end of the branch upwards, the norm or a linear layer is met first.
    for node in anatomy.traced.upwards(block.branch):
        if str(node.target) == path or isinstance(anatomy.traced.module(node), LINEAR):
            return str(node.target) == path
    return False


def _with_its_norms(model: nn.Module) -> nn.Module:
    """Return a copy of a converted network with a BatchNorm wherever a norm was taken away.

    The copy is recorded to find the role that each norm had in the network. It is not used for
    anything else. `model` itself is returned if no norms were taken away, or if no layer that a
    conversion placed holds the gamma of one.
    """
    record = provenance.of(model)
    has_gammas = any(
        isinstance(module, OwnLayer) and GAMMA in module.ROLES.values()
        for module in nn.Module.modules(model)
    )
    if not (record.norms and has_gammas):
        return model

    # The copy shares the tensors, since it does not change them.
    tensors = [*nn.Module.parameters(model), *nn.Module.buffers(model)]
    twin = copying.duplicate(model, {id(tensor): tensor for tensor in tensors})
    like = calling.anchor(model)
    # A key of the record is the path of a norm and the name of a tensor, such as
    # `layer1.0.bn1.running_mean`. Each norm has one running mean. torch's `SyncBatchNorm` takes
    # maps of any dimension.
    for key, mean in record.norms.items():
        path, _, name = key.rpartition(".")
        if name == "running_mean":
            parent_path, _, child_name = path.rpartition(".")
            norm = nn.SyncBatchNorm(mean.numel()).to(like)
            twin.get_submodule(parent_path).register_module(child_name, norm)
    return twin
