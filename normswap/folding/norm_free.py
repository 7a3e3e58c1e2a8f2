"""Fold timm's normalizer-free networks: their scalars move into the convolutions around them.

A block is y = skip + alpha f(beta act(x)) (Brock et al. 2021, arXiv:2101.08692; timm's names).

- beta, and the gamma of an activation, scale the inputs of the next convolutions.
- alpha, the attention's gain and SkipInit's gain scale the branch. They move through its gate into
  its last convolution.
- The standardized weights are baked (`reparametrized`).
- A factor that cannot move stays a number in the block.
- The last activation keeps its gamma, because without it the network's features would change.
"""

import operator
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from timm.models.nfnet import GammaAct, NormFreeBlock
from torch import Tensor, fx

from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, attempt, enlarge, scalar_readers, shrink_input
from normswap.graph.anatomy import Anatomy, Block
from normswap.graph.tracing import constant, inputs, is_constant_mul


def free(builder: PlanBuilder) -> None:
    """Fold the scalars of every normalizer-free block of the network.

    These are the gammas of its activations and the factors of its blocks. A factor that cannot move
    stays, and a note says why.
    """
    traced = builder.traced
    for node in traced.nodes:
        module = traced.module(node)
        if not isinstance(module, GammaAct) or not builder.anatomy.takes_part(str(node.target)):
            continue
        # If the module is called in several places, its one gamma cannot move into all of them.
        if module.gamma != 1 and traced.called(module) == 1:
            with _or_note(builder, str(node.target)):
                _move_forward(builder, node, module.gamma, f"{node.target}.gamma")

    # A block that could not be looked into (`opaque`) has no products in the graph.
    for path, module in traced.modules.items():
        if not isinstance(module, NormFreeBlock) or path in traced.opaque:
            continue
        if builder.anatomy.takes_part(path):
            _free_block(builder, path, module)


def ends_in_own_factor(anatomy: Anatomy, block: Block) -> bool:
    """Tell whether a residual block's branch ends in a factor of the block's own forward.

    No module returns the branch's value then, so nothing can be placed at its end.
    """
    # A block of several sums has the path of its module, a plus sign and a number.
    module = anatomy.traced.modules[block.path.partition("+")[0]]
    return block.tail is None and isinstance(module, NormFreeBlock)


@contextmanager
def _or_note(builder: PlanBuilder, path: str) -> Iterator[None]:
    """Turn a NotFoldable inside a `with` block into a note that `path` keeps its factor.

    What the block changed in the plan is undone then.
    """
    try:
        with attempt(builder):
            yield
    except NotFoldable as why:
        builder.notes.append(f"{path} keeps its factor: {why}")


def _free_block(builder: PlanBuilder, path: str, block: NormFreeBlock) -> None:
    """Fold the factors of timm's `NormFreeBlock` into its convolutions, or note why they stay.

    The factors are beta at the block's start, and in its branch the gain of the attention,
    SkipInit's gain and alpha.

    Args:
        builder: The plan in the making.
        path: The path of the block.
        block: The block.
    """
    # These are the steps of the block's own forward, without those of the modules inside. `inside`
    # has the paths of the modules around a node, and the innermost is the last.
    nodes = [node for node in builder.traced.nodes if node.meta["inside"][-1:] == (path,)]
    # The products with numbers, in order, must be those of a NormFreeBlock's forward. Otherwise it
    # would not be known which product is by which factor.
    products = [node for node in nodes if is_constant_mul(node)]
    factors = _factors(block)
    if [constant(node) for node in products] != list(factors.values()):
        builder.notes.append(f"{path} keeps its factors: they are not those of a NormFreeBlock")
        return

    # beta stands behind an activation, so the layers after it take it. The other factors stand at
    # the branch's end, where the layers before them take them.
    for (name, factor), node in zip(factors.items(), products, strict=True):
        move = _move_forward if name == "beta" else _move_back
        with _or_note(builder, path):
            move(builder, node, factor, f"{path}.{name}")

    if isinstance(block.skipinit_gain, Tensor):
        with _or_note(builder, path):
            _fold_skipinit_gain(builder, path, float(block.skipinit_gain.detach()), nodes)


def _factors(block: NormFreeBlock) -> dict[str, float]:
    """Return the block's factors by name, in the order in which its forward multiplies by them.

    Factors of 1 are left out, because the recorder leaves their products out of the graph.
    """
    factors = {"beta": block.beta}
    if block.attn is not None or block.attn_last is not None:
        factors["attn_gain"] = block.attn_gain
    factors["alpha"] = block.alpha
    return {name: factor for name, factor in factors.items() if factor != 1}


def _fold_skipinit_gain(builder: PlanBuilder, path: str, gain: float, nodes: list[fx.Node]) -> None:
    """Fold SkipInit's gain, by which forward multiplies the branch in place, into the branch.

    Args:
        builder: The plan in the making.
        path: The path of the block.
        gain: The value of the gain.
        nodes: The nodes of the block's own forward.

    Raises:
        NotFoldable: The graph has no such product, or the gain cannot pass a step.
    """
    product = next((node for node in nodes if _is_in_place(node)), None)
    if product is None:
        raise NotFoldable("it is not in the graph")
    # All readers of the branch's value are to see it scaled, so none of them has to undo the gain.
    # With None in place of the gain, the block's forward leaves out the product.
    source = inputs(product)[0]
    enlarge(builder, source, gain, set(builder.traced.users[source]))
    builder.replace(f"{path}.skipinit_gain", "Number", value=None)


def _move_forward(builder: PlanBuilder, node: fx.Node, factor: float, path: str) -> None:
    """Move a factor into the convolutions that read the product with it.

    Args:
        builder: The plan in the making.
        node: The node of the product.
        factor: The factor.
        path: The path of the attribute that holds the factor. It becomes 1.

    Raises:
        NotFoldable: The classifier reads the product, whose features would change, or the factor
            cannot pass a step.
    """
    # To divide an input by 1 / factor is to multiply it by the factor.
    for reader in scalar_readers(builder, node, set()):
        if reader == builder.anatomy.classifier:
            raise NotFoldable("the features of the network would change")
        shrink_input(builder, reader, 1 / factor)
    builder.replace(path, "Number", value=1.0)


def _move_back(builder: PlanBuilder, node: fx.Node, factor: float, path: str) -> None:
    """Move a factor into the last convolution before the product with it, through gates.

    Args:
        builder: The plan in the making.
        node: The node of the product.
        factor: The factor.
        path: The path of the attribute that holds the factor. It becomes 1.

    Raises:
        NotFoldable: A factor cannot pass a step.
    """
    (above,) = inputs(node)
    # alpha is the factor of a product behind the one with SkipInit's gain, which is in place. The
    # search goes on above that product, since one number passes another.
    while _is_in_place(above):
        node = above
        above = inputs(above)[0]
    enlarge(builder, above, factor, {node})
    builder.replace(path, "Number", value=1.0)


def _is_in_place(node: fx.Node) -> bool:
    """Whether `node` multiplies its first input in place."""
    if node.op == "call_method" and node.target == "mul_":
        return True
    return node.target in (operator.imul, torch.Tensor.mul_)
