"""Where a network comes from: its architecture, its source, what was done to it, its old norms.

The record rides on the module itself, so that it survives `copy.deepcopy` and needs no second
argument anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from normswap.plan import AbsorbMode, Arch, Body, Edit, Plan, Step

_KEY = "_normswap_provenance"


@dataclass(frozen=True)
class Provenance:
    """Where a network comes from, and what was done to it.

    Args:
        arch: How to build the network as it was before its conversions, without its weights. None
            if that is not known.
        source: The name, hub id or path of the network before its conversions, as the user gave it.
        sha256: The hash of that network's tensors (see `zoo.hash_tensors`). None for random
            weights.
        pretrained_cfg: timm's record of images and classes (input_size, mean, std, interpolation,
            crop_pct, label_names ...).
        plan: All conversions of the network, in order.
        remarks: Sentences about the network as it was opened, for the notes of its conversion.
        norms: The tensors of every norm that was replaced, by the dotted names that they had.
        changed: Whether a saved network was filled from another weights file than its own, so that
            the measurements of its conversion are about other weights.
    """

    arch: Arch | None = None
    source: str = ""
    sha256: str | None = None
    pretrained_cfg: Body = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    norms: dict[str, Tensor] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    changed: bool = False

    @functools.cached_property
    def original_paths(self) -> tuple[str, ...]:
        """The paths of those replaced norms of the network that have running statistics.

        They are in the order in which the provenance holds the norms' tensors. Norms of branches
        that were added up to one convolution are left out, because nothing in the network has
        their statistics any more.
        """
        # Each norm with statistics has a tensor such as `layer1.0.bn1.running_mean`.
        suffix = ".running_mean"
        paths = (name.removesuffix(suffix) for name in self.norms if name.endswith(suffix))
        return tuple(path for path in paths if path not in self.merged_paths)

    @functools.cached_property
    def merged_paths(self) -> frozenset[str]:
        """The paths of the modules that conversions have merged into one sum of parallel branches.

        These are the convolutions that were added up to one, and the modules, such as norms, that
        had been folded into them.
        """
        # Each edit of the plan has replaced one module by a layer that is built from others (its
        # `reads`).
        edits: list[Edit] = []
        for step in self.plan.steps:
            edits += step.edits

        # The convolutions to which others were added (`SUM`), and the others, which they read.
        merged: set[str] = set()
        for edit in edits:
            if any(absorption.way is AbsorbMode.SUM for absorption in edit.takes):
                merged.update((edit.path, *edit.reads))

        # The modules that had been folded into these convolutions, such as the norms behind them.
        absorbed: set[str] = set()
        for edit in edits:
            if edit.path in merged:
                absorbed.update(edit.reads)
        return frozenset(merged | absorbed)

    def after(self, step: Step, norms: Mapping[str, Tensor]) -> Provenance:
        """Return the provenance of a network after one more conversion.

        The remarks are dropped, since they are about the network as it was opened.

        Args:
            step: The conversion, as a step of the plan.
            norms: The tensors of the norms that the conversion replaced, by their dotted names.
        """
        plan = self.plan.then(step)
        return replace(self, plan=plan, norms={**self.norms, **norms}, remarks=())


def attach(model: nn.Module, record: Provenance) -> nn.Module:
    """Put a provenance on a network, and return the network.

    Args:
        model: The network, which is changed.
        record: The provenance: where the network comes from, and what was done to it.
    """
    model.__dict__[_KEY] = record
    return model


def of(model: nn.Module) -> Provenance:
    """Return the provenance that a network carries: its origin, and what was done to it.

    If the network carries none, the result is a new one that only names the network's class.
    """
    record: Provenance = model.__dict__.get(_KEY) or Provenance(source=type(model).__name__)
    return record
