"""The start of a fresh normalizer-free ResNet: `nf --init reset` (Brock et al. 2021).

Block l adds alpha f(x / beta_l) with alpha = 0.2, where beta_l^2 is the variance that x has at the
start by the formula: 1 before the first block, 1 + alpha^2 after a block whose skip is a
convolution, and alpha^2 more after any other block. The filters are standardized, without means,
their gains are 1, and a convolution that reads an activation multiplies its filters by the
activation's gamma, so that it keeps a variance of 1. A learned scalar of 0 ends each branch
(SkipInit), before alpha.
"""

import copy
import math
from dataclasses import replace

import numpy as np
import torch
from torch import fx, nn

from normswap.errors import RefusedError
from normswap.folding.plan_builder import PlanBuilder
from normswap.folding.propagation import NotFoldable
from normswap.graph.inspection import Anatomy, Block
from normswap.plan import Then
from normswap.schemes.fresh import scale_readers, without_norms
from normswap.schemes.skipinit import no_tail, place_scale
from normswap.sites.activations import RELU_FUNCTIONS, is_pool

ALPHA = 0.2


def plan_start(anatomy: Anatomy) -> PlanBuilder:
    """Return the plan of a fresh normalizer-free network, except for its filters.

    The network is that of Brock et al. 2021 (arXiv:2101.08692). The plan removes the norms, and
    places factors and a scalar in each residual block.

    Args:
        anatomy: The recorded network, whose blocks are pre-activation ones.

    Raises:
        RefusedError: A block has an activation after its sum, for which the paper has no formula.
    """
    builder = without_norms(anatomy)
    for block in anatomy.included_blocks:
        if block.order == "post":
            raise RefusedError(
                f"{block.path} has an activation after its sum",
                "the paper's blocks begin with the activation",
                "timm's resnetv2_50 is resnet50 with such blocks",
            )

    # Each block adds alpha f(x / beta) to its skip x, where beta^2 is the variance of x by the
    # paper's formula. `stream` is the node of the sum before the block, or None at the first block.
    variance = 1.0
    stream: fx.Node | None = None
    for block in anatomy.blocks:
        if anatomy.takes_part(block.path):
            try:
                _place(builder, block, stream, 1 / math.sqrt(variance))
            except NotFoldable as why:
                builder.refusals[block.path] = str(why)

        # The variance after the block is beta^2 of the next one. It is counted as well if the user
        # has left the block out of the conversion. A convolution on the skip connection resets the
        # variance to 1, and each branch adds alpha^2.
        skip_variance = 1.0 if block.skip == "projection" else variance
        variance = skip_variance + ALPHA**2
        stream = block.total

    return builder


def _place(builder: PlanBuilder, block: Block, stream: fx.Node | None, factor: float) -> None:
    """Plan 1 / beta at the start of a block, and at the end of its branch the scalar and alpha.

    Args:
        builder: The plan in the making.
        block: The block.
        stream: The node of the sum before the block. None if there is none.
        factor: 1 / beta, by which the branch multiplies its input. beta is the standard deviation
            of that input, by the formula of Brock et al. 2021.

    Raises:
        NotFoldable: No module can hold 1 / beta, or none can hold the scalar and alpha.
    """
    if stream is not None:
        scale_readers(builder, stream, factor)
    if block.tail is None:
        raise NotFoldable(no_tail(builder.anatomy, block))

    place_scale(builder, block.tail, alpha=0.0, bias=False)
    # alpha stands behind the scalar. `place_scale` has put the scalar into `scalars` if another
    # edit leaves a layer at the path, and into `replacements` otherwise.
    fixed = Then("FixedScale", {"alpha": ALPHA})
    if block.tail in builder.scalars:
        builder.scalars[block.tail] += (fixed,)
    else:
        edit = builder.replacements[block.tail]
        builder.replacements[block.tail] = replace(edit, then=(*edit.then, fixed))


def gamma_before(builder: PlanBuilder, path: str) -> float:
    """Return the factor `gamma` of the activation that a convolution reads, or 1 if it reads none.

    Args:
        builder: The plan in the making.
        path: The path of the convolution, which is called once.
    """
    # The search goes up to an activation, past pooling and identities. An activation may be a
    # function, the last step of a norm, or a module.
    traced = builder.traced
    node = traced.main_input(traced.calls[id(traced.modules[path])][0])
    while node is not None:
        site = traced.site_at(node)
        if site is None and node.target in RELU_FUNCTIONS:
            return gamma(nn.ReLU())
        if site is not None and site.activation is not None:
            return gamma(site.activation)

        is_pooled = site is not None and is_pool(site.module)
        if not (is_pooled or builder.is_identity(node)):
            # A layer without parameters, such as a SiLU, is taken for an activation. Any other
            # layer, or another function than ReLU, is taken for none.
            if site is not None and not list(nn.Module.parameters(site.module)):
                return gamma(site.module)
            return 1.0
        node = traced.main_input(node)
    return 1.0


def gamma(activation: nn.Module) -> float:
    """Return 1 / the standard deviation of act(z) for z of N(0, 1), which is 1.7128585504 for ReLU.

    The mean and variance are integrals over z, weighted by the density of N(0, 1). Each is a sum of
    integrals from one whole number to the next, because usual activations have their kinks at whole
    numbers.
    """
    # Gauss-Legendre quadrature in each of the intervals [-12, -11], ..., [11, 12]. Outside of them
    # the density is below 1e-31.
    points, weights = np.polynomial.legendre.leggauss(20)
    starts = np.arange(-12, 12)
    z = torch.from_numpy((starts[:, None] + (points + 1) / 2).ravel())
    density = torch.exp(-z.square() / 2) / math.sqrt(2 * math.pi)
    # The points are of [-1, 1], so an interval of length 1 has half of their weights.
    weight = density * torch.from_numpy(np.tile(weights / 2, len(starts)))

    with torch.no_grad():
        values = copy.deepcopy(activation).eval().to(z)(z.clone())
    mean = weight @ values
    return float(1 / (weight @ (values - mean).square()).sqrt())
