"""Undress: turn every BatchNorm (and every scalar or affine layer of an earlier conversion) into plain weights.

Each site is y = act(s * x + t). In this order: fold it back into the convolutions before it; or forward into the
unpadded convolutions after it; or, before a ReLU, move |s| through the ReLU into the next convolutions' inputs and
keep a shift (`ChannelBias`); or keep it as a `ChannelAffine`, which is always exact. The algebra is in
`layers.Folded` and `affine.split`; this file only decides, from the graph, who takes in whom, and says why not.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import fx, nn

from normswap.folding import gauge, norm_free
from normswap.folding.draft import Draft
from normswap.folding.outcomes import FOLDED_FORWARD, LEFT_SHIFT, NEVER_CALLED, folded_back, left_affine, stays
from normswap.folding.overwriting import overwritten
from normswap.folding.passage import (
    Blocked,
    check_linear,
    consumers,
    distinct,
    last_linear,
    name,
    pads,
    passes_positive,
    read_directly,
)
from normswap.folding.producers import makers
from normswap.graph.inspection import LINEAR, Anatomy
from normswap.graph.tracing import inputs
from normswap.layers import affine, reparametrized
from normswap.layers.activations import is_homogeneous
from normswap.layers.own import OwnLayer
from normswap.layers.scalars import Scale
from normswap.plan import Outcome, Way


def undress(anatomy: Anatomy, *, leave: Collection[str] = ()) -> Draft:
    """Decide what happens to every affine site of the network, but those at the paths in `leave` or outside its part.

    Sites that cannot be read (no running statistics, unknown subclasses, untraceable surroundings) are in
    `refusals`; norms with per-sample statistics are left alone.
    """
    draft = Draft(anatomy)
    traced = anatomy.traced
    _bake(draft)
    norm_free.free(draft)
    reached: set[int] = set()
    for node in [*traced.nodes, *traced.hidden]:
        module = traced.module(node)
        if module is None or id(module) in reached or not affine.is_affine(module):
            continue
        reached.add(id(module))
        if str(node.target) not in leave and anatomy.takes_part(str(node.target)):
            _undress_site(draft, str(node.target), module)
    for path, module in traced.modules.items():
        if affine.is_batchnorm(module) and id(module) not in reached and anatomy.takes_part(path):
            outer = next((p for p in traced.opaque if path.startswith(f"{p}.")), None)
            read = read_directly(traced, module)
            if read:
                draft.refusals[path] = f"forward reads {read} by itself and does not call the module"
            elif outer:
                draft.refusals[path] = f"it is inside {outer}, which cannot be looked into: {traced.opaque[outer]}"
            else:
                draft.settle(path, NEVER_CALLED)
    return draft


def _bake(draft: Draft) -> None:
    """Every layer whose weight is made anew at each step becomes plain, whatever else it takes in."""
    traced = draft.anatomy.traced
    paths = [str(node.target) for node in traced.nodes if isinstance(traced.module(node), LINEAR)]
    for path in distinct(traced.modules, list(dict.fromkeys(paths))):
        conv = traced.modules[path]
        if not reparametrized.is_dressed(conv) or not draft.anatomy.takes_part(path):
            continue
        try:
            check_linear(draft, path, conv)
        except Blocked as why:
            draft.notes.append(f"{path} stays a {type(conv).__name__}: {why}")
        else:
            draft.take(path).bake = not reparametrized.is_stuck(conv)


def _undress_site(draft: Draft, path: str, module: nn.Module) -> None:
    why = affine.refusal(module)
    read = read_directly(draft.anatomy.traced, module)
    if why or read:
        draft.refusals[path] = why or f"{read} is read in forward, not only by the norm itself"
        return
    reasons = []
    for way in (_fold_back, _fold_forward, _move_scale, _fold_scalar, _fold_stream):
        try:
            way(draft, path, module)
        except Blocked as reason:
            reasons.append(str(reason))
        else:
            return
    if affine.holds_statistics(module):
        draft.seat(path, "ChannelAffine")
        draft.settle(path, left_affine(reasons[0]))
    else:
        draft.settle(path, stays(reasons[0]))


def _fold_back(draft: Draft, path: str, module: nn.Module) -> None:
    """Into the convolutions before: exact if all they ever produce goes through this very module."""
    found = makers(draft, module)
    for linear, part in found.items():
        draft.take(linear).add(path, Way.AFTER, part)
    draft.vacate(path)
    draft.settle(path, folded_back(*found))


def _fold_forward(draft: Draft, path: str, module: nn.Module) -> None:
    """Into the convolutions after it, when nothing lies between and they pad nothing."""
    if affine.activation(module) is not None:
        raise Blocked("an activation follows")
    convs = consumers(draft, module, draft.silent)
    for conv_path in convs:
        conv: Any = draft.anatomy.traced.modules[conv_path]
        if isinstance(conv, nn.Linear) or conv.transposed or pads(conv):
            raise Blocked(f"{conv_path} pads its input with zeros, which the shift would have to move")
    for call in draft.anatomy.traced.calls[id(module)]:
        later = overwritten(draft, call)
        if later is not None:
            raise Blocked(f"{name(later)} overwrites its input later")
    for conv_path in convs:
        draft.take(conv_path).add(path, Way.BEFORE)
    draft.vacate(path)
    draft.settle(path, Outcome(FOLDED_FORWARD, f"folds forward into {', '.join(convs)}"))


def _move_scale(draft: Draft, path: str, module: nn.Module) -> None:
    """|s| through the ReLU into the next convolutions' inputs; a shift per channel stays."""
    if isinstance(module, OwnLayer) and not module.SCALES:
        raise Blocked("it has no scale per channel")
    act = affine.activation(module)
    if not is_homogeneous(act):
        raise Blocked(f"it is followed by {type(act).__name__}, which a scale cannot pass")
    convs = consumers(draft, module, lambda node: passes_positive(draft, node))
    for conv_path in convs:
        draft.take(conv_path).add(path, Way.BEFORE_MAGNITUDE)
    dtype = next(draft.anatomy.traced.modules[convs[0]].parameters()).dtype
    signed = bool((affine.split(module, dtype)[1] != 1).any())
    draft.seat(path, "ChannelBias", signed=signed)
    draft.settle(path, Outcome(LEFT_SHIFT, f"scale moves to {', '.join(convs)}; a shift stays"))


def _fold_scalar(draft: Draft, path: str, module: nn.Module) -> None:
    """A scalar after a gate: through the gate into the convolution before it."""
    if not isinstance(module, Scale):
        raise Blocked("it is no scalar")
    alpha = module.alpha.item()
    if not alpha >= 0 or (module.bias is not None and module.bias.any()):
        raise Blocked("only a scalar that is not negative, without a bias, can pass a gate")
    calls = draft.anatomy.traced.calls[id(module)]
    if len(calls) > 1:
        raise Blocked("it is called more than once")
    (above,) = inputs(calls[0])
    conv, readers = last_linear(draft, above, calls[0])
    if not alpha and any(_escapes(draft, reader, calls[0]) for reader in readers):
        raise Blocked("it is 0, and the branch is read elsewhere too")
    draft.take(conv).gain *= alpha
    for reader in readers if alpha else ():  # what a gate makes of a dead branch does not matter
        draft.take(reader).in_gain /= alpha
    draft.vacate(path)
    draft.settle(path, folded_back(conv, reason="through the gate"))


def _escapes(draft: Draft, path: str, end: fx.Node) -> bool:
    """Whether what the module at `path` computes reaches the model's output by a way that avoids `end`."""
    traced = draft.anatomy.traced
    seen = set(traced.calls[id(traced.modules[path])])
    ahead = list(seen)
    while ahead:
        fresh = {user for user in traced.users[ahead.pop()] if user is not end} - seen
        seen |= fresh
        ahead += fresh
    return any(node.op == "output" for node in seen)


def _fold_stream(draft: Draft, path: str, module: nn.Module) -> None:
    """A factor of a residual stream: through sums and gates into all that makes it (`gauge`)."""
    if not isinstance(module, Scale) or module.bias is not None:
        raise Blocked("it is no scalar without a bias")
    calls = draft.anatomy.traced.calls[id(module)]
    if len(calls) > 1:
        raise Blocked("it is called more than once")
    (above,) = inputs(calls[0])
    with gauge.attempt(draft):
        gauge.enlarge(draft, above, module.alpha.item(), {calls[0]})
    draft.vacate(path)
    draft.settle(path, folded_back("what makes the stream"))
