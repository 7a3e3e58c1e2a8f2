"""The path to a target: which schemes lead there from a network as it is."""

from __future__ import annotations

from timm.models.nfnet import NormFreeBlock

from normswap import schemes
from normswap.graph.inspection import Anatomy, Block
from normswap.graph.selection import patterns, restrict
from normswap.schemes import Chosen, Options


def steps(anatomy: Anatomy, to: str, options: Options, *, measured: bool) -> list[Chosen]:
    """The schemes with their options, in order.

    Before the target: with images at hand (`measured`), norms with statistics per sample become BatchNorms; for a
    target that needs BatchNorms, where they are lost, they come back from the statistics that the network carries.
    To become `batchnorm` a network that never had a norm gets some (`_adds_norms`). For a target that puts scalars on
    branches, a normalizer-free block gives up its own first. After it: what the purpose needs.

    Raises:
        OptionError: an unknown scheme, option or purpose, or a pattern that names nothing.
    """
    purpose = options.get("purpose")
    schemes.check_purpose(purpose)
    options = {name: value for name, value in options.items() if name != "purpose"}
    target = schemes.chosen(to, options)
    part = patterns(options)
    anatomy = restrict(anatomy, **part)
    norms = [norm for norm in anatomy.norms if anatomy.takes_part(norm.path)]
    alive = any(norm.is_batchnorm for norm in norms)
    averaged = measured and any(norm.averages for norm in norms)
    before = ["estimate"] if averaged else []
    if target.scheme.on_branches and any(_ends_in_a_factor(anatomy, block) for block in anatomy.part()):
        before.append("folded")
    lost = any(anatomy.takes_part(path) for path in anatomy.provenance.original_paths)
    if target.scheme.starts_from is not None and lost and not (alive or averaged):
        before.append(target.scheme.starts_from)
    if _adds_norms(target, known=alive or lost or averaged, measured=measured):
        where = target.options["where"]
        adding = schemes.chosen("measured-batchnorm", {**part, "where": "activation" if where == "norms" else where})
        return _with_purpose([adding, *([target] if target.options["ghost_batch"] else [])], purpose)
    there = averaged and to == "batchnorm" and not alive and not options.get("ghost_batch")
    way = [schemes.chosen(name, part) for name in before] + ([] if there else [target])
    if to == "folded" and target.options["branches"] == "merge":
        merging = schemes.chosen("merged-branches", part)
        way += [merging] if merging.scheme.plan(anatomy).replacements else []
    return _with_purpose(way, purpose)


def _with_purpose(way: list[Chosen], purpose: str | None) -> list[Chosen]:
    return way if purpose is None else [*way, schemes.chosen(purpose, {})]


def _adds_norms(target: Chosen, *, known: bool, measured: bool) -> bool:
    """Whether BatchNorms are put where there were none: asked for, or there are images and no norm is known."""
    if target.scheme.name != "batchnorm":
        return False
    return target.options["where"] != "norms" or (measured and not known)


def _ends_in_a_factor(seen: Anatomy, block: Block) -> bool:
    """Whether the branch of a block of timm's normalizer-free networks ends in a factor of the block's own."""
    return block.tail is None and isinstance(seen.traced.modules[block.path.partition("+")[0]], NormFreeBlock)
