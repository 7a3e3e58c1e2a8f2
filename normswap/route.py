"""The way to a target: which steps lead there from a network as it is."""

from __future__ import annotations

from typing import Any

from normswap import affine, estimate, schemes
from normswap.anatomy import Anatomy
from normswap.partial import patterns, restrict
from normswap.sites import sites

Leg = tuple[str, dict[str, Any]]


def legs(seen: Anatomy, to: str, options: dict[str, Any], purpose: str | None, *, measured: bool) -> list[Leg]:
    """Schemes and their options, in order.

    Before the target: with images at hand (`measured`), norms with statistics per sample become BatchNorms; for a
    target that needs BatchNorms, where they are lost, they come back from the statistics that the network carries.
    After it: what the purpose needs.

    Raises:
        OptionError: an unknown scheme, option or purpose, or a pattern that names nothing.
    """
    schemes.demand_target(to)
    schemes.demand_purpose(purpose)
    schemes.resolve(to, options)
    part = patterns(options)
    chosen = restrict(seen, **part)
    modules = chosen.traced.modules
    own = [norm.path for norm in chosen.norms if chosen.takes_part(norm.path)]
    alive = [path for path in own if affine.is_batchnorm(modules[path])]
    others = [path for path in own if estimate.fits(chosen, path)] if measured else []
    way: list[Leg] = [("estimate", part)] if others else []
    lost = [path for path in sites(chosen) if chosen.takes_part(path)]
    if getattr(schemes.get(to), "SOURCE", None) == "batchnorm" and not alive and not others and lost:
        way.append(("batchnorm", part))
    if not (others and to == "batchnorm" and not alive and not options.get("ghost_batch")):
        way.append((to, options))
    return way if purpose is None else [*way, (purpose, {})]
