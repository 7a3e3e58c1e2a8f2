"""SkipInit, regularized or not: no norm, one learned scalar at the end of every residual branch.

y = skip + alpha * f(x). With `--alpha match` (the default) alpha is the standard deviation of the branch's output and
the branch's last convolution is divided by it, so that f has unit variance, as the paper's analysis has it, and the
function is kept exactly. A branch whose last gamma and beta are all 0 (a fresh network) gets alpha = 0 and a live f.
`--alpha 0`, `--alpha inv-sqrt-depth`, `--alpha 1` or any number set the scalars to the paper's initial values instead:
a reset, which changes the function. Of a network in `regularized-skipinit` the scalars stay, their biases go into the
branches' last convolutions, and the dropout goes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from typing import TypeGuard, cast

import torch
from numpy.polynomial import hermite_e
from torch import Tensor, fx, nn

from normswap.errors import RefusedError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, check_linear, last_linear
from normswap.graph.inspection import Anatomy, Block
from normswap.layers import affine, reparametrized
from normswap.layers.activations import keeps_forward
from normswap.layers.own import BranchScale, scales_branch
from normswap.layers.placeholders import Dropout, Dropped, Vacant
from normswap.plan import AbsorbMode, Absorption, Body, Edit, Then


def plan(anatomy: Anatomy, *, alpha: str | float) -> PlanBuilder:
    """Plan a scalar at the end of each residual branch."""
    return drop_no_more(scale_branches(anatomy, initial(alpha, len(anatomy.blocks))))


def plan_regularized(anatomy: Anatomy, *, alpha: str | float, dropout: float) -> PlanBuilder:
    """Plan a scalar on each residual branch, a scalar bias after each v1 sum, and dropout before the classifier.

    The biases start at 0 and stand before the block's final ReLU (post-activation blocks only). The paper drops 0.2 on
    ImageNet and 0.6 on CIFAR. In eval mode nothing changes.
    """
    builder = scale_branches(anatomy, initial(alpha, len(anatomy.blocks)), bias=True)
    return drop_before_classifier(builder, dropout)


def initial(alpha: str | float, depth: int) -> float | None:
    """The value every alpha starts from, or None to match the network."""
    if alpha == "match":
        return None
    if alpha == "inv-sqrt-depth":
        return 1 / math.sqrt(max(depth, 1))
    return float(alpha)


def scale_branches(anatomy: Anatomy, value: float | None, *, bias: bool = False) -> PlanBuilder:
    """Fold the network and put one scalar at the end of every residual branch; one that is there already stays.

    A bias of it that is not asked for goes into the branch's last convolution.

    Args:
        value: what the scalars start from, or None for the standard deviation of the branch's output, which keeps
            the function. In both cases the branch's last convolution is divided by that deviation.
        bias: add a scalar bias, initially 0, where an activation follows the sum.

    Raises:
        RefusedError: no residual blocks, or a branch that ends where no module can stand.
    """
    check_blocks(anatomy)
    modules = anatomy.traced.modules
    scaled = {block.tail for block in anatomy.part() if block.tail and _stays(modules[block.tail], bias)}
    builder = fold_norms(anatomy, leave=scaled)
    for block in anatomy.part():
        if block.tail is None:
            builder.refusals[block.path] = (
                "its branch ends in a function of the block itself, where no module can stand"
            )
            continue
        with_bias = bias and block.order == "post"
        if block.tail in scaled:
            _rescale(builder, block.tail, value, with_bias)
            continue
        old = modules[block.tail]
        if not _learns(old):
            deviation, dead = _normalize(builder, block)
            alpha = (0.0 if dead else deviation) if value is None else value
        elif builder.removes(block.tail):
            deviation = old.alpha.item()  # gamma says no more how much the branch varies: both have learned
            _divide(builder, *last_linear(builder, block.branch, block.total), deviation)
            alpha = deviation if value is None else value
        else:
            builder.notes.append(f"{block.path} keeps the scalar bias: {builder.outcomes[block.tail]}")
            builder.replacements.pop(block.tail, None)
            continue
        place_scale(builder, block.tail, alpha, with_bias)
    return builder


def _learns(module: nn.Module) -> TypeGuard[BranchScale]:
    return scales_branch(module) and module.learns


def _stays(module: nn.Module, bias: bool) -> bool:
    """Whether it is a scalar that learns, without a bias that has to go elsewhere, and could: not where alpha is 0."""
    return _learns(module) and (bias or module.bias is None or not (module.bias.any() and module.alpha.any()))


def check_blocks(anatomy: Anatomy) -> None:
    """Check that there are residual blocks to convert.

    Raises:
        RefusedError: the network, or the part of it that is to be converted, has no residual blocks.
    """
    if not anatomy.blocks:
        raise RefusedError(
            "the network has no residual blocks", remedy=f"`{spelled('to', 'folded')}` works on any network"
        )
    if not anatomy.part():
        examples = ", ".join(block.path for block in anatomy.blocks[:2])
        raise RefusedError("no residual block is chosen", "scalars sit on whole blocks", f"Name blocks, as {examples}")


def _rescale(builder: PlanBuilder, path: str, value: float | None, bias: bool) -> None:
    old = cast(BranchScale, builder.anatomy.traced.modules[path])
    alpha = old.alpha.item() if value is None else value
    bias = bias or (old.bias is not None and bool(old.bias.any()))
    if alpha != old.alpha.item() or bias != (old.bias is not None):
        builder.replacements[path] = Edit(path, "Scale", {"alpha": alpha, **({"bias": True} if bias else {})})


def drop_before_classifier(builder: PlanBuilder, p: float) -> PlanBuilder:
    """Dropout with probability `p` before the classifier: where there is a place for it, else in the classifier's own.

    Raises:
        RefusedError: the classifier cannot be found, or is no linear layer that stays as it is.
    """
    path, classifier = builder.anatomy.dropout, builder.anatomy.classifier
    if classifier is not None and not builder.anatomy.takes_part(classifier):
        builder.notes.append(f"no dropout: {classifier} is to stay as it is")
        return builder
    if path is not None:
        builder.replace(path, "Dropout", p=p)
    elif classifier is not None and _can_be_wrapped(builder, classifier):
        builder.replace(classifier, "Dropped", p=p)
    else:
        raise RefusedError(
            "no place for a dropout before the classifier", remedy=f"`{spelled('to', 'skipinit')}` adds none"
        )
    return builder


def _can_be_wrapped(builder: PlanBuilder, path: str) -> bool:
    """Whether a linear layer is used once, by being called, and absorbs nothing."""
    module = builder.anatomy.traced.modules[path]
    try:
        check_linear(builder, path, module)
    except NotFoldable:
        return False
    once = len(builder.anatomy.traced.calls[id(module)]) == 1
    return isinstance(module, nn.Linear) and once and path not in builder.linears


def drop_no_more(builder: PlanBuilder) -> PlanBuilder:
    """Take out the dropout that an earlier step of the plan put before the classifier."""
    path = builder.anatomy.dropout
    edits = [edit for step in builder.anatomy.provenance.plan.steps for edit in step.edits]
    planned = {edit.path for edit in edits if edit.layer == Dropout.__name__}
    planned |= {f"{edit.path}.dropout" for edit in edits if edit.layer == Dropped.__name__}
    if path is None or path not in planned:
        return builder
    now: object = builder.anatomy.traced.modules.get(path)
    if now is None:
        owner, _, name = path.rpartition(".")
        now = getattr(builder.anatomy.traced.modules[owner], name)
    rate = now.p if isinstance(now, nn.Dropout) else now
    if isinstance(rate, float | int) and rate > 0:
        builder.replace(path, "Dropout", p=0.0)
        builder.notes.append(f"{path}: its dropout is 0 now")
    return builder


def place_scale(builder: PlanBuilder, path: str, alpha: float, bias: bool, layer: str = "Scale") -> None:
    """Place a scalar at `path`, after what stands there if that is not removed."""
    modules = builder.anatomy.traced.modules
    removed = builder.removes(path)
    empty = removed or keeps_forward(modules[path], (nn.Identity, Vacant))
    args: Body = {"alpha": alpha}
    args |= {"bias": True} if bias else {}
    if path in builder.linears or (
        path in builder.replacements and not removed
    ):  # the path gets its replacement, and the scalar
        if path in builder.scalars:
            raise RefusedError(f"{path} would need two scalars", "it is the end of two branches")
        builder.scalars[path] = Then(layer, args)
        return
    args |= {"fresh": True} if removed and scales_branch(modules[path]) else {}
    builder.replacements[path] = Edit(path, layer, args, keep=not empty)


def _normalize(builder: PlanBuilder, block: Block) -> tuple[float, bool]:
    """Divide the branch's last convolution by the deviation of its output; returns it, and whether it was dead.

    Where that is impossible the branch stays as it is, with deviation 1, and a note says why.
    """
    try:
        conv, readers = last_linear(builder, block.branch, block.total)
        mean, deviation = _output_moments(builder.anatomy, block, conv)
    except NotFoldable as why:
        builder.notes.append(f"{block.path}: alpha = 1, because {why}")
        return 1.0, False
    linear = builder.linear(conv)
    rms = math.sqrt(float(deviation.square().mean()))
    last = (block.last or "", Absorption(AbsorbMode.AFTER))
    if rms == 0 and not mean.any() and last in linear.reads:
        builder.notes.append(f"{block.path}: its last gamma and beta are 0; alpha = 0 keeps that, and f is alive")
        linear.reads[linear.reads.index(last)] = (last[0], Absorption(AbsorbMode.AFTER_UNIT))
        return 1.0, True
    if not math.isfinite(rms) or rms < 1e-12:
        builder.notes.append(f"{block.path}: alpha = 1, because the branch's output does not vary")
        return 1.0, False
    _divide(builder, conv, readers, rms)
    return rms, False


def _divide(builder: PlanBuilder, conv: str, readers: Iterable[str], by: float) -> None:
    """Let the convolution write less by a factor, and what else reads it take more."""
    builder.linear(conv).gain /= by
    for reader in readers:
        builder.linear(reader).in_gain *= by


def _output_moments(anatomy: Anatomy, block: Block, conv: str) -> tuple[Tensor, Tensor]:
    """Mean and deviation per channel of the branch's output (before its gate), from the norms around `conv`.

    A BatchNorm after the convolution says it directly. A norm before it (pre-activation) gives the moments of its
    activation, by Gaussian quadrature, and the convolution adds up their variances as if its inputs were independent.
    Only the rescaling depends on this, never the function.
    """
    traced = anatomy.traced
    (call,) = traced.calls[id(traced.modules[conv])]
    node: fx.Node | None = block.branch
    while node is not None and node is not call:
        known = norm_moments(anatomy, node)
        if known:
            return known
        node = traced.main_input(node)
    mean, variance = _input_moments(anatomy, call)
    weight = reparametrized.weight(traced.linear(conv))
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
        known = norm_moments(anatomy, node)
        if known:
            act = affine.activation(module) if module is not None else None
            return _through([*([act] if act is not None else []), *reversed(acts)], *known)
        if module is None or len(list(module.parameters())):
            break
        acts.append(module)
        node = traced.main_input(node)
    raise NotFoldable("no norm says how much its output varies")


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


def norm_moments(anatomy: Anatomy, node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """Mean and deviation of the norm that `node` calls, or that once stood there; before the activation."""
    module = anatomy.traced.module(node)
    if module is not None and affine.has_moments(module):
        return affine.moments(module)
    paths = (str(node.target), *reversed(node.meta["inside"]))
    path = next((p for p in paths if p in anatomy.provenance.original_paths), None)
    mean, deviation = (None, None) if path is None else anatomy.kept_moments(path)
    return None if mean is None or deviation is None else (mean, deviation)
