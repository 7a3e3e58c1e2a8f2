"""The way to a target: which steps lead there from a network as it is."""

from __future__ import annotations

from timm.models.nfnet import NormFreeBlock

from normswap import schemes
from normswap.calibration import norm_estimate
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.selection import patterns, restrict
from normswap.layers import affine
from normswap.schemes import Options
from normswap.schemes.parts.norm_sites import sites

Leg = tuple[str, Options]


def legs(anatomy: Anatomy, to: str, options: Options, *, measured: bool) -> list[Leg]:
    """Schemes and their options, in order.

    Before the target: with images at hand (`measured`), norms with statistics per sample become BatchNorms; for a
    target that needs BatchNorms, where they are lost, they come back from the statistics that the network carries.
    For one that seats scalars on branches, a normalizer-free block gives up its own first. After it: what the purpose
    needs.

    Raises:
        OptionError: an unknown scheme, option or purpose, or a pattern that names nothing.
    """
    schemes.demand_target(to)
    purpose = options.get("purpose")
    options = {name: value for name, value in options.items() if name != "purpose"}
    schemes.demand_purpose(purpose)
    schemes.resolve(to, options)
    target = schemes.get(to)
    part = patterns(options)
    chosen = restrict(anatomy, **part)
    modules = chosen.traced.modules
    own = [norm.path for norm in chosen.norms if chosen.takes_part(norm.path)]
    alive = [path for path in own if affine.is_batchnorm(modules[path])]
    others = [path for path in own if norm_estimate.fits(chosen, path)] if measured else []
    way: list[Leg] = [("estimate", part)] if others else []
    if target.on_branches and any(_ends_in_a_factor(chosen, block) for block in chosen.part()):
        way.append(("folded", part))
    if (
        target.starts_from is not None
        and not (alive or others)
        and any(chosen.takes_part(path) for path in sites(chosen))
    ):
        way.append((target.starts_from, part))
    if not (others and to == "batchnorm" and not alive and not options.get("ghost_batch")):
        way.append((to, options))
    return way if purpose is None else [*way, (purpose, {})]


def _ends_in_a_factor(seen: Anatomy, block: Block) -> bool:
    """Whether the branch of a block of timm's normalizer-free networks ends in a factor of the block's own."""
    return block.tail is None and isinstance(seen.traced.modules[block.path.partition("+")[0]], NormFreeBlock)
