"""Which parameters decay: optimizer groups by the role of every parameter.

The policy `kim2022`: the guidelines of Kim et al. 2022, arXiv:2205.07260 (ACM TIST 2024, doi
10.1145/3643860):

- Guideline 1: gamma_last, of the last norm of a residual branch, decays: small, the block is near
the identity.
- Guideline 2: gamma_down, of the norm on a projection skip, in pre-activation networks the first
  norm of the downsampling block, does not: it sets the variance of the skip path.
- Guideline 3: gamma_0, of a norm in the stem, does not: it sets the variance that the first stage
starts from.
- Guideline 4: gamma_other decays. A norm follows, so its size changes nothing but the effective
  learning rate, which goes as 1 / |gamma|^2 (equation 24). `gamma_head`, after the last block,
  likewise (4T).

Weights decay; betas and biases do not. A LayerNorm that ends a branch has a `gamma_last`, one
before the first block a `gamma_0`, one that begins a branch (ViT, Swin) a `gamma_other`. A scale
per channel in the place of a norm has that norm's role. SkipInit's scalars do not decay (De & Smith
2020, arXiv:2002.10444, appendix G: its code), nor do the gains of NF networks (Brock et al. 2021,
arXiv:2102.06171).
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch

from timm.optim import param_groups_layer_decay, param_groups_weight_decay
from torch import nn

from normswap import provenance
from normswap.errors import OptionError, TraceError, spelled
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import LINEAR
from normswap.layers import affine
from normswap.layers.channel_norm import is_at_each_position
from normswap.layers.planned_layer import GAMMA, OwnLayer
from normswap.models import network_input
from normswap.plan import AbsorbMode, Body
from normswap.surgery.network import Network

POLICIES = ("kim2022", "timm", "all", "weights-only")
Policy = str | Collection[str]
SCALARS = ("alpha", "tanh_alpha", "scalar_bias", "skipinit_gain")
_GAMMA = {
    "stem": "gamma_0",
    "last": "gamma_last",
    "down": "gamma_down",
    "head": "gamma_head",
    "other": "gamma_other",
}
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
    """The role of a trainable parameter, such as `weight`, `bias` or `gamma_last`; whether it
    decays, and why.
    """

    path: str
    role: str
    decay: bool
    reason: str


def roles(
    model: nn.Module, policy: Policy = "kim2022", network: Network | None = None
) -> list[Assignment]:
    """Assign every trainable parameter its role and whether it decays, in the order of
    `named_parameters`.

    Args:
        policy: one of `POLICIES`, or the roles that decay.
        network: its record, or that of the network of which it is a copy, if any.

    Raises OptionError: unknown policy or role.
    """
    if policy not in POLICIES and not set(policy) <= set(_KIM):
        unknown = [policy] if isinstance(policy, str) else sorted(set(policy) - set(_KIM))
        raise OptionError(
            f"unknown policy {', '.join(unknown)}", remedy=f"Known: {', '.join((*POLICIES, *_KIM))}"
        )
    named = [
        (path, role)
        for path, role in _roles(model, network)
        if model.get_parameter(path).requires_grad
    ]
    if policy == "kim2022":
        return [Assignment(path, role, *_KIM[role]) for path, role in named]
    if policy == "timm":
        groups = param_groups_weight_decay(model, 1.0, no_weight_decay_list=_spared(model))
        decaying = {
            id(parameter)
            for group in groups
            if group["weight_decay"]
            for parameter in group["params"]
        }
    else:
        classes = ("weight",) if policy == "weights-only" else policy
        decaying = {
            id(model.get_parameter(path))
            for path, role in named
            if policy == "all" or role in classes
        }
    return [
        Assignment(path, role, id(model.get_parameter(path)) in decaying, f"by {policy}")
        for path, role in named
    ]


def by_role(model: nn.Module, assignments: Iterable[Assignment]) -> list[Body]:
    """How many tensors and values there are of each role, and whether they decay."""
    sizes: dict[tuple[str, bool, str], list[int]] = {}
    for assignment in assignments:
        key = assignment.role, assignment.decay, assignment.reason
        sizes.setdefault(key, []).append(model.get_parameter(assignment.path).numel())
    return [
        {
            "role": role,
            "decay": decay,
            "reason": reason,
            "tensors": len(values),
            "values": sum(values),
        }
        for (role, decay, reason), values in sizes.items()
    ]


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
    """Groups for any torch or timm optimizer: every trainable parameter in exactly one, frozen ones
    in none.

    Args:
        policy: `kim2022`, `timm` (none for 1-D parameters, as
            `timm.optim.param_groups_weight_decay`), `all`, `weights-only` (no gamma), or the roles
            that decay, such as ["weight", "gamma_last"].
        lr: given, a group's `lr` is `lr` times its scale. Without it a group carries its scale as
            `lr_scale`, which timm's schedulers multiply by; the two are never combined.
        layer_decay: the learning rate of layer i of n is scaled by layer_decay^(n - i), by timm's
            own `param_groups_layer_decay`.
        scalar_lr_scale: scale for scalars, such as SkipInit's (Fixup, Zhang et al. 2019, trains its
            scalars at 1/10).

    Returns:
        Dictionaries with `params`, `weight_decay`, `name`, and `lr` or `lr_scale`.

    Raises OptionError: unknown policy, or a number out of range.
    """
    network_input.require_module(model)
    for option, number in (
        ("weight_decay", weight_decay),
        ("lr", lr),
        ("scalar_lr_scale", scalar_lr_scale),
    ):
        if number is not None and not 0 <= number < float("inf"):
            raise OptionError(f"{spelled(option, number)} is not a number >= 0")
    if layer_decay is not None and not 0 < layer_decay <= 1:
        raise OptionError(f"{spelled('layer_decay', layer_decay)} is not in (0, 1]")
    by_layer = (
        [] if layer_decay is None else param_groups_layer_decay(model, layer_decay=layer_decay)
    )
    scales = {
        id(parameter): group["lr_scale"] for group in by_layer for parameter in group["params"]
    }
    groups: dict[tuple[bool, float], Body] = {}
    for assignment in roles(model, policy, network):
        parameter = model.get_parameter(assignment.path)
        scale = scales.get(id(parameter), 1.0)
        if scalar_lr_scale is not None and assignment.role in SCALARS:
            scale *= scalar_lr_scale
        key = assignment.decay, scale
        if key not in groups:
            name = ("decay" if assignment.decay else "no-decay") + (
                f", lr x {scale:g}" if scale != 1 else ""
            )
            groups[key] = {
                "params": [],
                "weight_decay": weight_decay * assignment.decay,
                "name": name,
            }
            if lr is not None:
                groups[key]["lr"] = lr * scale
            elif scale != 1:
                groups[key]["lr_scale"] = scale
        groups[key]["params"].append(parameter)
    return list(groups.values())


def _spared(model: nn.Module) -> tuple[str, ...]:
    ask = getattr(model, "no_weight_decay", None)
    if not callable(ask):
        return ()
    return tuple(ask())


def _roles(model: nn.Module, network: Network | None) -> Iterator[tuple[str, str]]:
    """Yield (path, role) of every parameter, a shared one once."""
    of_norms = _norm_roles(model, network)
    spared = _spared(model)
    for path, parameter in model.named_parameters():
        home, _, name = path.rpartition(".")
        role = _own_role(model.get_submodule(home), name, of_norms.get(home, "gamma_unknown"))
        if role is None:
            role = "vector"
            if any(fnmatch(path, pattern) for pattern in spared):
                role = "embedding"
            elif name.endswith("bias"):
                role = "bias"
            elif parameter.ndim > 1 and parameter.numel() > max(parameter.shape):
                role = "weight"
        yield path, role


def _own_role(owner: nn.Module, name: str, gamma: str) -> str | None:
    if isinstance(owner, OwnLayer) and name in owner.ROLES:
        if owner.ROLES[name] == GAMMA:
            return gamma
        return owner.ROLES[name]
    if affine.is_norm(owner):
        return {"weight": gamma, "bias": "beta"}.get(name)
    if name in ("gain", "skipinit_gain"):
        return name
    if isinstance(owner, (*LINEAR, nn.Embedding)):
        return {"weight": "weight", "bias": "bias"}.get(name)
    if name == "original0" and type(owner).__name__ == "ParametrizationList":
        return "gain"
    return None


def _norm_roles(model: nn.Module, network: Network | None) -> dict[str, str]:
    """Return the gamma's role of every norm, also of norms that are gone, by module path."""
    twin = _with_its_norms(model)
    if network is None or twin is not model:
        network = Network(twin)
    try:
        anatomy = network.anatomy
    except TraceError:
        return {}
    gammas = {norm.path: _GAMMA[norm.role] for norm in anatomy.norms}
    for block in anatomy.blocks:
        for path in block.norms:
            at_each_position = is_at_each_position(anatomy.traced.modules[path])
            if (
                at_each_position
                and gammas[path] == "gamma_last"
                and not _ends_in(path, block, anatomy)
            ):
                gammas[path] = "gamma_other"
    by_norm = {id(twin.get_submodule(path)): role for path, role in gammas.items()}
    gammas = {
        path: by_norm[id(m)]
        for path, m in twin.named_modules(remove_duplicate=False)
        if id(m) in by_norm
    }
    # In tune mode a convolution has absorbed the norm after it, with its gamma.
    steps = provenance.of(model).plan.steps
    absorbed = [
        (edit.path, *read) for step in steps for edit in step.edits for read in edit.absorbed
    ]
    tuned = {conv: norm for conv, norm, absorption in absorbed if absorption.way is AbsorbMode.NORM}
    return gammas | {conv: gammas[norm] for conv, norm in tuned.items() if norm in gammas}


def _ends_in(path: str, block: Block, anatomy: Anatomy) -> bool:
    for node in anatomy.traced.upwards(block.branch):
        if str(node.target) == path or isinstance(anatomy.traced.module(node), LINEAR):
            return str(node.target) == path
    return False


def _with_its_norms(model: nn.Module) -> nn.Module:
    """Return `model`, or, where it has gammas of norms that are gone, a copy with these norms."""
    record = provenance.of(model)
    affines = any(
        isinstance(module, OwnLayer) and GAMMA in module.ROLES.values()
        for module in model.modules()
    )
    if not (record.norms and affines):
        return model
    tensors = [*model.parameters(), *model.buffers()]
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    for key, mean in record.norms.items():
        path, _, name = key.rpartition(".")
        if name == "running_mean":
            home, _, name = path.rpartition(".")
            twin.get_submodule(home).register_module(name, nn.BatchNorm2d(mean.numel()))
    return twin
