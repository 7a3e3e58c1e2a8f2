"""Residual scaling: y = a x + b f(x), with a and b fixed per block by a published rule; no norm.

Every sequence of such factors is a rescaling. If the stream x is multiplied by g, the first
convolutions of f are divided by g, and its last convolution is multiplied by a g / b. So the
function is kept. The factor b sits at the end of the branch. The factor a sits on a ReLU module
after the sum, because relu(a z) = a relu(z).

A pre-activation network has no module there. Then the skip keeps the factor 1, and the branches
hold a: with the stream divided by a_1 ... a_l, block l adds b / (a_1 ... a_l) f(x).

With `--init reset` nothing is compensated in the weights, so that a fresh network starts as the
rule has it. A pre-activation network whose stream is divided by a_1 ... a_l then multiplies by
these again wherever a branch, or the head, reads the stream.
"""

import math
from collections.abc import Callable

from torch import fx

from normswap.errors import OptionError, spelled
from normswap.folding.canonical_form import fold_norms
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable, attempt, enlarge, propagates_scale
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.tracing import inputs
from normswap.layers.planned_layer import scales_branch
from normswap.schemes.fresh import scale_readers, without_norms
from normswap.schemes.skipinit import check_blocks, no_tail, place_scale
from normswap.sites.activations import is_homogeneous

# The published rules: (a, b) of a block, given its number from 1 and the number of all blocks. Two
# of them also take a factor, here with its default.
RULES: dict[str, Callable[..., tuple[float, float]]] = {
    "balduzzi": lambda block, depth: (math.sqrt(0.5), math.sqrt(0.5)),
    "szegedy": lambda block, depth, factor=0.2: (1.0, factor),
    "hanin": lambda block, depth, factor=0.9: (1.0, factor**block),
    "arpit": lambda block, depth: (1.0, 1 / depth),
    "rescale": lambda block, depth: (
        math.sqrt(1 - 1 / (block + depth)),
        math.sqrt(1 / (block + depth)),
    ),
}

_WITH_NUMBER = ("szegedy", "hanin")

# The largest factor of a branch. Half precision ends at 2^16, which the rule `balduzzi` reaches if
# the branches of 32 blocks hold a.
LARGEST = 2.0**15


def plan(anatomy: Anatomy, *, rule: str, factor: str | float, init: str) -> PlanBuilder:
    """Return the plan that folds the norms and makes each residual block y = a x + b f(x).

    A rule gives the constants a and b of each block.

    Args:
        anatomy: The recorded network.
        rule: The name of the rule, a key of `RULES`.
        factor: The factor that the rules `szegedy` and `hanin` take. `rule` means its default.
        init: `keep` divides the weights by the factors, so that the function is kept. `reset` does
            not, for a fresh network.

    Raises:
        OptionError: A factor is given for a rule that takes none.
    """
    check_blocks(anatomy)

    factors = _factors_of_blocks(rule, factor, depth=len(anatomy.blocks))
    resets = init == "reset"
    builder = without_norms(anatomy) if resets else fold_norms(anatomy)
    scalars: list[tuple[str, float]] = []

    # If a block's skip cannot hold its factor a, the residual stream is divided by a from the
    # block's sum on. For each such sum, this is the number by which the stream is divided there.
    divisors: dict[fx.Node, float] = {}
    for block, (a, b) in zip(anatomy.blocks, factors, strict=True):
        if not anatomy.takes_part(block.path):
            continue
        # In a fresh network (`reset`) no weights are divided by the factors. `attempt` takes back
        # what was planned for a block that is then refused.
        try:
            with attempt(builder):
                scale = _scale_freely if resets else _scale
                scalars += scale(builder, block, a, b, divisors)
        except NotFoldable as why:
            builder.refusals[block.path] = str(why)

    if resets:
        _multiply_readers(builder, divisors)

    # A plan with refusals is not carried out, so its scalars need no place.
    if builder.refusals:
        return builder
    for path, value in scalars:
        place_scale(builder, path, alpha=value, bias=False, layer="FixedScale")
    return builder


def _factors_of_blocks(rule: str, factor: str | float, *, depth: int) -> list[tuple[float, float]]:
    """Return the factors (a, b) that a rule gives to each of `depth` blocks, in order.

    Args:
        rule: The name of the rule, a key of `RULES`.
        factor: The factor that some rules take. `rule` means the rule's default.
        depth: The number of blocks.

    Raises:
        OptionError: A factor is given for a rule that takes none.
    """
    if factor != "rule" and rule not in _WITH_NUMBER:
        raise OptionError(
            f"{spelled('factor', factor)} goes with {spelled('rule', ' or '.join(_WITH_NUMBER))}"
        )

    # Without a given factor, a rule that takes one uses its default.
    factor_argument = {} if factor == "rule" else {"factor": float(factor)}
    return [RULES[rule](block, depth, **factor_argument) for block in range(1, depth + 1)]


def _scale(
    builder: PlanBuilder, block: Block, a: float, b: float, divisors: dict[fx.Node, float]
) -> list[tuple[str, float]]:
    """Plan that weights are divided by the factors that a block gets, so that its function is kept.

    Args:
        builder: The plan in the making.
        block: The block.
        a: The factor of the skip.
        b: The factor of the branch.
        divisors: The number by which the residual stream is divided, by the node of each sum of an
            earlier block. If the skip cannot hold a, the block's own sum is added.

    Returns:
        The factors that are still to be placed: (path, value) for each.

    Raises:
        NotFoldable: A factor has no place, or cannot pass.
    """
    # With a = 1 only the branch gets a factor, b. So its last weights are divided by b.
    tail = _tail(builder, block)
    if a == 1:
        enlarge(builder, block.branch, 1 / b, {block.total})
        return [(tail, b)]

    # The skip cannot hold a, so the stream is divided by a from here on. The branch's factor is
    # divided by all factors a so far.
    after_sum = _after_sum(builder, block)
    if after_sum is None:
        divisors[block.total] = a * _divisor_of_skip(builder, block, divisors)
        b /= divisors[block.total]
        # A larger factor comes too near the end of half precision.
        if b > LARGEST:
            raise NotFoldable(
                f"its skip cannot hold a factor, and {b:.1e} on its branch leaves half precision"
            )
        enlarge(builder, block.branch, 1 / b, {block.total})
        return [(tail, b)]

    # The activation after the sum holds a: a act(x + (b / a) f) = act(a x + b f). So the branch
    # gets b / a. The weights before the two factors are divided by them.
    activation, path = after_sum
    enlarge(builder, block.branch, a / b, {block.total})
    enlarge(builder, activation, 1 / a, set(builder.traced.users[activation]))

    return [(tail, b / a), (path, a)]


def _tail(builder: PlanBuilder, block: Block) -> str:
    """Return the path at the end of a block's branch, where a factor can stand.

    Raises:
        NotFoldable: There is no such place, or a scalar with a bias stands there and stays.
    """
    if block.tail is None:
        raise NotFoldable(no_tail(builder.anatomy, block))

    tail = builder.traced.modules[block.tail]
    if scales_branch(tail) and tail.bias is not None and block.tail not in builder.replacements:
        raise NotFoldable(f"it has a scalar that {builder.outcomes.get(block.tail, 'stays')}")
    return block.tail


def _scale_freely(
    builder: PlanBuilder, block: Block, a: float, b: float, divisors: dict[fx.Node, float]
) -> list[tuple[str, float]]:
    """Return the factors that a block y = a x + b f(x) of a fresh network gets.

    Fresh weights stay as they were drawn: none is divided by a factor to make up for it.

    Args:
        builder: The plan in the making.
        block: The block.
        a: The factor of the skip.
        b: The factor of the branch.
        divisors: The number by which the residual stream is divided, by the node of each sum of an
            earlier block. The block's own sum is added.

    Returns:
        The factors that are to be placed: (path, value) for each.

    Raises:
        NotFoldable: A factor has no place, or is too large.
    """
    tail = _tail(builder, block)
    # If the skip x is divided by d, the sum is x / d + b / (a d) f(x) = (a x + b f(x)) / (a d).
    divisor = _divisor_of_skip(builder, block, divisors)
    on_branch = b / (a * divisor)
    if on_branch > LARGEST:
        raise NotFoldable(f"a factor of {on_branch:.1e} on its branch leaves half precision")

    # A module after the sum multiplies by a, which leaves the divisor d. If there is no such
    # module, the stream is divided by a d from here on.
    after_sum = _after_sum(builder, block) if a != 1 else None
    if after_sum is not None:
        _, path = after_sum
        divisors[block.total] = divisor
        return [(tail, on_branch), (path, a)]
    divisors[block.total] = a * divisor
    return [(tail, on_branch)]


def _multiply_readers(builder: PlanBuilder, divisors: dict[fx.Node, float]) -> None:
    """Plan that what reads a divided residual sum gets it multiplied by its divisor again.

    A residual sum is divided by the factor a of its block if no module there can hold a.

    Args:
        builder: The plan in the making.
        divisors: The number by which the residual stream is divided, at each sum.
    """
    for block in builder.anatomy.included_blocks:
        factor = divisors.get(block.total, 1.0)
        if factor == 1:
            continue
        try:
            scale_readers(builder, block.total, factor)
        except NotFoldable as why:
            builder.refusals[block.path] = str(why)


def _divisor_of_skip(builder: PlanBuilder, block: Block, divisors: dict[fx.Node, float]) -> float:
    """Return the number by which the value of a block's skip connection is divided.

    It is 1 if no residual sum before the block is divided, or if a convolution on the skip stands
    between such a sum and the block's sum.

    Args:
        builder: The plan in the making.
        block: The block.
        divisors: The number by which the residual stream is divided, by the node of each sum of an
            earlier block.
    """
    # The search goes up the skip, which is the term of the sum that is not the branch.
    node: fx.Node | None = next(term for term in inputs(block.total) if term is not block.branch)
    while node is not None and node not in divisors and propagates_scale(builder, node):
        node = builder.traced.main_input(node)
    if node is None:
        return 1.0
    return divisors.get(node, 1.0)


def _after_sum(builder: PlanBuilder, block: Block) -> tuple[fx.Node, str] | None:
    """Return the node of the activation after a block's sum, and the path for a factor behind it.

    None is returned if no module there can hold the factor.

    Raises:
        NotFoldable: No factor can pass the activation, f(c x) = c f(x).
    """
    traced = builder.traced
    users = traced.users[block.total]

    # Only a module that alone reads the sum and is called once, such as a ReLU, can hold the
    # factor: act(a x) = a act(x).
    module = traced.module(users[0]) if len(users) == 1 else None
    if module is None or not is_homogeneous(module) or traced.called(module) > 1:
        # In a block with order "post" an activation follows the sum.
        if block.order == "post" and not propagates_scale(builder, users[0]):
            raise NotFoldable("a factor of the sum cannot pass the activation that follows")
        return None
    activation = users[0]

    # A scalar that an earlier conversion placed behind the activation gives its place to the new
    # one.
    readers = traced.users[activation]
    if len(readers) == 1:
        reader_path = str(readers[0].target)
        if builder.removes(reader_path) and scales_branch(traced.module(readers[0])):
            return activation, reader_path

    return activation, str(activation.target)
