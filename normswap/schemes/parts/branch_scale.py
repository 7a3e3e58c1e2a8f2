"""Dress: what SkipInit-like schemes add to the canonical form, as edits on a draft that `canonical_form` began."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import Any, TypeGuard

import torch
from numpy.polynomial import hermite_e
from torch import Tensor, fx, nn

from normswap.errors import RefusedError
from normswap.folding.canonical_form import undress
from normswap.folding.draft import Draft
from normswap.folding.passage import Blocked, check_linear, last_linear
from normswap.graph.inspection import Anatomy, Block
from normswap.layers import affine, reparametrized
from normswap.layers.placeholders import Dropout, Dropped, Vacant
from normswap.layers.scalars import Scale
from normswap.plan import Body, Edit, Take, Then, Way


def scale_branches(anatomy: Anatomy, value: float | None, *, bias: bool = False) -> Draft:
    """Undress the network and put one scalar at the end of every residual branch; one that is there already stays. A
    bias of it that is not asked for goes into the branch's last convolution.

    Args:
        value: what the scalars start from, or None for the standard deviation of the branch's output, which keeps
            the function. In both cases the branch's last convolution is divided by that deviation.
        bias: add a scalar bias, initially 0, where an activation follows the sum.

    Raises:
        RefusedError: no residual blocks, or a branch that ends where no module can be seated.
    """
    demand_blocks(anatomy)
    modules = anatomy.traced.modules
    scaled = {block.tail for block in anatomy.part() if block.tail and _stays(modules[block.tail], bias)}
    draft = undress(anatomy, leave=scaled)
    for block in anatomy.part():
        if block.tail is None:
            draft.refusals[block.path] = "its branch ends in a function of the block itself, where no module can sit"
            continue
        with_bias = bias and block.order == "post"
        if block.tail in scaled:
            _rescale(draft, block.tail, value, with_bias)
            continue
        old = modules[block.tail]
        if not _learns(old):
            deviation, dead = _normalize(draft, block)
            alpha = (0.0 if dead else deviation) if value is None else value
        elif draft.vacated(block.tail):
            deviation = old.alpha.item()  # gamma says no more how much the branch varies: both have learned
            _divide(draft, *last_linear(draft, block.branch, block.total), deviation)
            alpha = deviation if value is None else value
        else:
            draft.notes.append(f"{block.path} keeps the scalar bias: {draft.outcomes[block.tail]}")
            draft.seats.pop(block.tail, None)
            continue
        seat_scale(draft, block.tail, alpha, with_bias)
    return draft


def _learns(module: nn.Module) -> TypeGuard[Scale]:
    return isinstance(module, Scale) and module.learns


def _stays(module: nn.Module, bias: bool) -> bool:
    """Whether it is a scalar that learns, without a bias that has to go elsewhere, and could: not where alpha is 0."""
    return _learns(module) and (bias or module.bias is None or not (module.bias.any() and module.alpha.any()))


def demand_blocks(anatomy: Anatomy) -> None:
    """Raises:
    RefusedError: the network, or the part of it that is to be converted, has no residual blocks.
    """
    if not anatomy.blocks:
        raise RefusedError("the network has no residual blocks", remedy="`--to folded` works on any network")
    if not anatomy.part():
        examples = ", ".join(block.path for block in anatomy.blocks[:2])
        raise RefusedError("no residual block is chosen", "scalars sit on whole blocks", f"Name blocks, as {examples}")


def _rescale(draft: Draft, path: str, value: float | None, bias: bool) -> None:
    old: Any = draft.anatomy.traced.modules[path]
    alpha = old.alpha.item() if value is None else value
    bias = bias or (old.bias is not None and bool(old.bias.any()))
    if alpha != old.alpha.item() or bias != (old.bias is not None):
        draft.seats[path] = Edit(path, "Scale", {"alpha": alpha, **({"bias": True} if bias else {})})


def drop_before_classifier(draft: Draft, p: float) -> Draft:
    """Dropout with probability `p` before the classifier: where there is a seat for it, else in the classifier's own.

    Raises:
        RefusedError: the classifier cannot be found, or is no linear layer that stays as it is.
    """
    seat, classifier = draft.anatomy.dropout, draft.anatomy.classifier
    if classifier is not None and not draft.anatomy.takes_part(classifier):
        draft.notes.append(f"no dropout: {classifier} is to stay as it is")
        return draft
    if seat is not None:
        draft.seat(seat, "Dropout", p=p)
    elif classifier is not None and _can_be_wrapped(draft, classifier):
        draft.seat(classifier, "Dropped", p=p)
    else:
        raise RefusedError("no seat for a dropout before the classifier", remedy="`--to skipinit` adds none")
    return draft


def _can_be_wrapped(draft: Draft, path: str) -> bool:
    """Whether a linear layer is used once, by being called, and takes nothing in."""
    module = draft.anatomy.traced.modules[path]
    try:
        check_linear(draft, path, module)
    except Blocked:
        return False
    once = len(draft.anatomy.traced.calls[id(module)]) == 1
    return isinstance(module, nn.Linear) and once and path not in draft.takes


def drop_no_more(draft: Draft) -> Draft:
    """Take out the dropout that an earlier step of the plan seated before the classifier."""
    seat = draft.anatomy.dropout
    edits = [edit for step in draft.anatomy.provenance.plan.steps for edit in step.edits]
    ours = {edit.path for edit in edits if edit.layer == Dropout.__name__}
    ours |= {f"{edit.path}.dropout" for edit in edits if edit.layer == Dropped.__name__}
    if seat is None or seat not in ours:
        return draft
    now: Any = draft.anatomy.traced.modules.get(seat)
    if now is None:
        owner, _, name = seat.rpartition(".")
        now = getattr(draft.anatomy.traced.modules[owner], name)
    if (now.p if isinstance(now, nn.Dropout) else now) > 0:
        draft.seat(seat, "Dropout", p=0.0)
        draft.notes.append(f"{seat}: its dropout is 0 now")
    return draft


def seat_scale(draft: Draft, path: str, alpha: float, bias: bool, layer: str = "Scale") -> None:
    """Seat a scalar at `path`, after what sits there if that is not empty."""
    modules = draft.anatomy.traced.modules
    vacated = draft.vacated(path)
    empty = vacated or isinstance(modules[path], nn.Identity | Vacant)
    args: Body = {"alpha": alpha}
    args |= {"bias": True} if bias else {}
    if path in draft.takes or (path in draft.seats and not vacated):  # the seat gets its newcomer, and the scalar
        if path in draft.scalars:
            raise RefusedError(f"{path} would need two scalars", "it is the end of two branches")
        draft.scalars[path] = Then(layer, args)
        return
    args |= {"fresh": True} if vacated and isinstance(modules[path], Scale) else {}
    draft.seats[path] = Edit(path, layer, args, keep=not empty)


def _normalize(draft: Draft, block: Block) -> tuple[float, bool]:
    """Divide the branch's last convolution by the deviation of its output; returns it, and whether it was dead.

    Where that is impossible the branch stays as it is, with deviation 1, and a note says why.
    """
    try:
        conv, readers = last_linear(draft, block.branch, block.total)
        mean, deviation = _output_moments(draft.anatomy, block, conv)
    except Blocked as why:
        draft.notes.append(f"{block.path}: alpha = 1, because {why}")
        return 1.0, False
    take = draft.take(conv)
    rms = math.sqrt(float(deviation.square().mean()))
    last = (block.last or "", Take(Way.AFTER))
    if rms == 0 and not mean.any() and last in take.reads:
        draft.notes.append(f"{block.path}: its last gamma and beta are 0; alpha = 0 keeps that, and f is alive")
        take.reads[take.reads.index(last)] = (last[0], Take(Way.AFTER_UNIT))
        return 1.0, True
    if not math.isfinite(rms) or rms < 1e-12:
        draft.notes.append(f"{block.path}: alpha = 1, because the branch's output does not vary")
        return 1.0, False
    _divide(draft, conv, readers, rms)
    return rms, False


def _divide(draft: Draft, conv: str, readers: Iterable[str], by: float) -> None:
    """Let the convolution write less by a factor, and what else reads it take more."""
    draft.take(conv).gain /= by
    for reader in readers:
        draft.take(reader).in_gain *= by


def _output_moments(anatomy: Anatomy, block: Block, conv: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of the branch's output (before its gate), from the sites around `conv`.

    A BatchNorm after the convolution says it directly. A norm before it (pre-activation) gives the moments of its
    activation, by Gaussian quadrature, and the convolution adds up their variances as if its inputs were independent.
    Only the gauge depends on this, never the function.
    """
    traced = anatomy.traced
    (call,) = traced.calls[id(traced.modules[conv])]
    node: fx.Node | None = block.branch
    while node is not None and node is not call:
        known = site_moments(anatomy, node)
        if known:
            return known
        node = traced.main_input(node)
    mean, variance = _input_moments(anatomy, call)
    weight = reparametrized.weight(traced.modules[conv])
    if weight.shape[1] != mean.numel():
        mean, variance = mean[: weight.shape[1]], variance[: weight.shape[1]]  # grouped: the first group stands for all
    total = weight.flatten(2).sum(2) @ mean if weight.ndim > 2 else weight @ mean
    spread = weight.square().flatten(2).sum(2) @ variance if weight.ndim > 2 else weight.square() @ variance
    return total, spread.sqrt()


def _input_moments(anatomy: Anatomy, call: fx.Node) -> tuple[Tensor, Tensor]:
    """Mean and variance per channel of a convolution's input, if a norm and elementwise activations made it."""
    traced = anatomy.traced
    acts: list[nn.Module] = []
    node: fx.Node | None = traced.main_input(call)
    while node is not None:
        module = traced.module(node)
        known = site_moments(anatomy, node)
        if known:
            act = affine.activation(module) if module is not None else None
            return _through([*([act] if act is not None else []), *reversed(acts)], *known)
        if module is None or len(list(module.parameters())):
            break
        acts.append(module)
        node = traced.main_input(node)
    raise Blocked("no norm says how much its output varies")


def _through(acts: list[nn.Module], mean: Tensor, deviation: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of act(N(mean, deviation^2)), by 40-point Gauss-Hermite quadrature."""
    points, weights = (torch.from_numpy(array).to(mean) for array in hermite_e.hermegauss(40))
    weights = weights / weights.sum()
    x = mean + deviation * points[:, None]
    with torch.no_grad():
        for act in acts:
            x = copy.deepcopy(act).eval().to(x)(x[:, :, None, None].clone())[:, :, 0, 0]
    first = weights @ x
    return first, weights @ (x - first).square()


def site_moments(anatomy: Anatomy, node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the norm that `node` calls, or that once stood in its seat; before the activation."""
    module = anatomy.traced.module(node)
    if module is not None and affine.has_moments(module):
        return affine.moments(module)
    record = anatomy.provenance
    seats = (str(node.target), *reversed(node.meta["inside"]))
    path = next((p for p in seats if f"{p}.running_mean" in record.norms), None)
    if path is None:
        return None
    return record.moments(path)
