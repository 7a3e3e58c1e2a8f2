"""Parallel branches that are summed: which of them one convolution can compute.

y = conv(x) + conv'(x) + s x + t, the form in which RepVGG (Ding et al. 2021, arXiv:2101.03697,
section 3.3), MobileOne, RepViT and FastViT are trained, is one convolution: kernels of one centre,
stride and groups are added, and a scale per channel is a kernel of one tap. The branches are found
in the graph, whatever the classes of their blocks are.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import cast

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from normswap.folding.plan_builder import PlanBuilder
from normswap.graph.tracing import inputs, is_add
from normswap.layers import reparametrized
from normswap.layers.merged import tap_offsets
from normswap.layers.placeholders import Vacant
from normswap.layers.planned_layer import OwnLayer
from normswap.sites.site import Site, site_of

_SAME = ("stride", "groups", "in_channels", "out_channels")
_FORWARDS = {nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward}


@dataclass(frozen=True)
class Branches:
    """Summed branches that become one convolution.

    Args:
        main: The path of the convolution that stays, whose kernel has room for the others.
        others: Paths of the convolutions, scales and shifts that `main` absorbs.
        skips: How often the branches' input is itself a term of the sum.
        after: The path of a scale and shift of the sum, which `main` absorbs as well. None if
            nothing scales the sum.
    """

    main: str
    others: tuple[str, ...]
    skips: int = 0
    after: str | None = None


@dataclass(frozen=True)
class _Term:
    """A term of a sum.

    Args:
        path: The path of the convolution or scale that makes the term. None if the term is the
            source itself.
        source: The node that the term is computed from.
        barrier: The node between the term and the sum that fails in training if the term becomes
            the number 0, such as a DropPath. It is the one nearest to the term. None if no node
            fails.
    """

    path: str | None
    source: fx.Node
    barrier: fx.Node | None


def find(builder: PlanBuilder) -> list[Branches]:
    """Return groups of branches that are summed and that one convolution can compute together.

    One sum may have several groups. A norm counts as the scale and shift that it becomes.
    """
    # The nodes go backwards, so that a sum of sums is found before the sums in it.
    inner_sums: set[fx.Node] = set()
    merges: list[Branches] = []
    for node in reversed(builder.traced.nodes):
        if node in inner_sums or not _is_sum(node):
            continue

        # One convolution can compute only terms that have the same input.
        terms = [*_terms(builder, node, None, inner_sums)]
        for source in dict.fromkeys(term.source for term in terms):
            merged = _merged(builder, [term for term in terms if term.source is source])
            if merged is None:
                continue
            # A scale behind the sum can be absorbed only if the sum has no other terms.
            if all(term.source is source for term in terms):
                merged = replace(merged, after=_scale_after(builder, node))
            merges.append(merged)
    # The nodes went backwards, and the groups are returned in the order of the forward.
    return merges[::-1]


def _is_sum(node: fx.Node) -> bool:
    """Whether `node` adds two tensors, and does nothing more."""
    # torch.add multiplies the second tensor by its keyword argument `alpha`.
    adds_tensors = is_add(node) and all(arg in inputs(node) for arg in node.args[:2])
    return adds_tensors and not node.kwargs


def _adds_nothing(node: fx.Node) -> bool:
    """Whether `node` adds the number 0 to its input.

    An earlier merge of branches has left the number in place of a branch.
    """
    numbers = [arg for arg in node.args if not isinstance(arg, fx.Node)]
    name = getattr(node.target, "__name__", str(node.target)).strip("_")
    is_addition = name in ("add", "iadd", "radd") and len(node.args) == 2
    return is_addition and len(inputs(node)) == 1 and numbers == [0]


def _terms(
    builder: PlanBuilder, node: fx.Node, barrier: fx.Node | None, inner_sums: set[fx.Node]
) -> Iterator[_Term]:
    """Yield the terms of a sum. A term that is itself a sum yields its own terms.

    Args:
        builder: The plan in the making.
        node: The node of the sum.
        barrier: The step between this sum and the outermost one that fails in training on the
            number 0, such as a DropPath. None if there is none.
        inner_sums: The nodes of sums that are terms of other sums. This function adds to the set.
    """
    for end in inputs(node):
        # Go up through identities, which may be barriers, to the module or sum that makes the term.
        term_barrier = barrier
        while _passes(builder, end) and len(builder.traced.users[end]) == 1:
            # A removed branch gives the number 0. An Identity, a Vacant or a function passes it on.
            # Any other module, such as a DropPath, fails on it in training.
            if not isinstance(builder.traced.module(end), nn.Identity | Vacant | None):
                term_barrier = end
            (end,) = inputs(end)

        if _is_sum(end) and len(builder.traced.users[end]) == 1:
            inner_sums.add(end)
            yield from _terms(builder, end, term_barrier, inner_sums)
        else:
            yield _term(builder, end, term_barrier)


def _passes(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether `node` hands its only input on unchanged in eval mode."""
    return (builder.is_identity(node) or _adds_nothing(node)) and len(inputs(node)) == 1


def _term(builder: PlanBuilder, end: fx.Node, barrier: fx.Node | None) -> _Term:
    """Return the term that ends in the node `end`.

    The term is a convolution with norms behind it, or a scale and shift, or the source itself.

    Args:
        builder: The plan in the making.
        end: The last node of the term.
        barrier: The step between the term and the sum that fails in training on the number 0, such
            as a DropPath. None if there is none.
    """
    # Go up to a convolution. If there is none, the last scale and shift makes the term.
    node = end
    scale: fx.Node | None = None
    while len(builder.traced.users[node]) == 1:
        module = builder.traced.module(node)
        if isinstance(module, _ConvNd) and _may_join(builder, node):
            return _Term(str(node.target), _source(builder, node), barrier)
        if _is_scale(builder.traced.site_at(node)) and _may_join(builder, node):
            # The first scale on the way up is the last one in the forward.
            scale = scale or node

            # A norm may fold into a convolution before it, so the search goes on. An own layer
            # stays, so it makes the term.
            if isinstance(module, OwnLayer):
                break
        elif not _passes(builder, node):
            break
        (node,) = inputs(node)

    if scale is None:
        return _Term(None, end, barrier)
    return _Term(str(scale.target), _source(builder, scale), barrier)


def _source(builder: PlanBuilder, node: fx.Node) -> fx.Node:
    """Return the node whose value reaches `node` through identities alone."""
    (above,) = inputs(node)
    while _passes(builder, above):
        (above,) = inputs(above)
    return above


def _may_join(builder: PlanBuilder, node: fx.Node) -> bool:
    """Whether the module that `node` calls may be merged with other branches.

    It must be called once, without hooks, nothing else may read its tensors, and the user must not
    have left it out of the conversion.
    """
    traced = builder.traced
    path = str(node.target)
    module = traced.module(node)
    assert module is not None
    if traced.calls[id(module)] != [node] or len(inputs(node)) != 1:
        return False
    if not builder.anatomy.takes_part(path):
        return False

    hooks = module._forward_hooks or module._forward_pre_hooks
    # A class may have a method `parameters` of its own, so torch's is called.
    own_parameters = nn.Module.parameters(module, recurse=False)
    shared = any(traced.owners[id(tensor)] > 1 for tensor in own_parameters)
    return not hooks and not shared and traced.read_directly(module) is None


def _is_scale(site: Site | None) -> bool:
    """Whether a module is s x + t per channel, as a BatchNorm in eval mode, without activation."""
    if site is None or not site.is_affine or site.activation is not None:
        return False
    if site.refusal is not None:
        return False
    return not isinstance(site.module, OwnLayer) or site.module.PER_CHANNEL


def _merged(builder: PlanBuilder, terms: list[_Term]) -> Branches | None:
    """Return the branches that one convolution can compute, or None if there are not several.

    Args:
        builder: The plan in the making.
        terms: Terms of one sum that have the same source.
    """
    modules = builder.traced.modules

    # A barrier is a step between a term and the sum that fails in training on the number 0, such as
    # a DropPath. Merging leaves the number 0 in place of each branch that is absorbed. So terms
    # behind different barriers cannot be merged: only those behind the first barrier, and those
    # without one, are considered. The convolution that stays must be behind the barrier, too, so
    # that the barrier still reads a tensor.
    barriers = [
        term.barrier for term in terms if term.barrier is not None and term.path is not None
    ]
    first_barrier = barriers[0] if barriers else None
    terms = [term for term in terms if term.barrier in (None, first_barrier)]
    convs = [term for term in terms if term.path is not None and _is_plain(modules[term.path])]
    candidates = [term for term in convs if first_barrier is None or term.barrier is first_barrier]
    if not candidates:
        return None

    def taps(term: _Term) -> int:
        """Return the number of taps of the kernel of a convolution."""
        sides = tap_offsets(cast(_ConvNd, modules[str(term.path)]))
        return math.prod(len(side) for side in sides)

    # The convolution with the largest kernel stays, since it has room for the other kernels.
    main = max(candidates, key=taps)
    conv = cast(_ConvNd, modules[str(main.path)])
    others = [term.path for term in terms if term.path is not None and term is not main]
    absorbed = tuple(path for path in others if _fits(conv, modules[path]))
    if not absorbed:
        return None

    # A term without a path is the branches' input itself.
    skips = sum(term.path is None and _fits(conv, None) for term in terms)
    return Branches(str(main.path), absorbed, skips)


def _is_plain(module: nn.Module) -> bool:
    """Whether a module is torch's own convolution, padded with zeros by given widths."""
    if not isinstance(module, _ConvNd) or type(module).forward not in _FORWARDS:
        return False
    if "forward" in vars(module) or reparametrized.is_reparametrized(module):
        return False
    return not isinstance(module.padding, str) and module.padding_mode == "zeros"


def _fits(main: _ConvNd, other: nn.Module | None) -> bool:
    """Whether the kernel of `main` has room for another term of the sum.

    Args:
        main: The convolution that stays.
        other: The module of the term: a convolution, or a scale per channel. None says that the
            term is the input itself.
    """
    taps = tap_offsets(main)
    if isinstance(other, _ConvNd):
        alike = all(getattr(main, name) == getattr(other, name) for name in _SAME)
        if not (_is_plain(other) and alike and type(main).forward is type(other).forward):
            return False
        pairs = zip(taps, tap_offsets(other), strict=True)
        return all(_holds(main_side, side) for main_side, side in pairs)

    # A scale per channel is a kernel with one tap, at the centre. So `main` must have that tap, and
    # an output of its input's size: as many channels, stride 1, and as many taps on both sides.
    keeps_channels = main.in_channels == main.out_channels
    keeps_sides = set(main.stride) == {1} and all(side[0] == -side[-1] for side in taps)
    has_centre = all(0 in side for side in taps)
    if not (keeps_channels and keeps_sides and has_centre):
        return False
    return other is None or site_of(other).channels == main.out_channels


def _holds(main_side: range, side: range) -> bool:
    """Whether, in one dimension, a kernel has the centre and all positions of another kernel.

    Args:
        main_side: The positions that the larger kernel reads in one dimension (`tap_offsets`).
        side: The positions that the other kernel reads in that dimension.
    """
    same_centre = main_side[0] + main_side[-1] == side[0] + side[-1]
    return same_centre and set(side) <= set(main_side)


def _scale_after(builder: PlanBuilder, node: fx.Node) -> str | None:
    """Return the path of a layer that scales and shifts the whole sum, or None if there is none.

    Only a layer of normswap's own counts, such as a `ChannelAffine`.
    """
    while len(builder.traced.users[node]) == 1:
        (node,) = builder.traced.users[node]
        site = builder.traced.site_at(node)
        is_own = site is not None and isinstance(site.module, OwnLayer)
        if is_own and _is_scale(site) and _may_join(builder, node):
            return str(node.target)
        if not _passes(builder, node):
            break
    return None
