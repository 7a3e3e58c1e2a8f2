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
    """The origin of a network.

    Args:
        arch: How to build the bare skeleton. None where that is not known.
        source: The name, hub id or path that the user gave.
        sha256: The hash of the source's tensors (see `zoo.hash_tensors`). None for random weights.
        pretrained_cfg: timm's record of images and classes (input_size, mean, std, interpolation,
            crop_pct, label_names ...).
        plan: Everything that was done since the bare architecture.
        remarks: Sentences about the network as it was opened, for the notes of its conversion.
        norms: The tensors of every norm that was replaced, by their original dotted path.
        changed: Whether the network was filled from another file than the one that was proven.
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
        """The paths of the norms before the network was converted, in the order of the record.

        Norms of merged branches are left out, as nothing in the network has their statistics any
        more.
        """
        suffix = ".running_mean"
        paths = (name.removesuffix(suffix) for name in self.norms if name.endswith(suffix))
        return tuple(path for path in paths if path not in self.merged_paths)

    @functools.cached_property
    def merged_paths(self) -> frozenset[str]:
        """The paths of modules that were merged with branches, and of modules absorbed in them."""
        edits: list[Edit] = []
        for step in self.plan.steps:
            edits += step.edits

        # The convolutions that absorbed other terms of a sum, and the modules that they read.
        merged: set[str] = set()
        for edit in edits:
            if any(absorption.way is AbsorbMode.SUM for absorption in edit.takes):
                merged.update((edit.path, *edit.reads))

        # What these modules had absorbed themselves, such as the norms behind them.
        absorbed: set[str] = set()
        for edit in edits:
            if edit.path in merged:
                absorbed.update(edit.reads)
        return frozenset(merged | absorbed)

    def after(self, step: Step, norms: Mapping[str, Tensor]) -> Provenance:
        """Return the record of the network that a step made of this one.

        The remarks are dropped, since they are about the network as it was opened.

        Args:
            step: The step.
            norms: The tensors of the norms that the step replaced, by their path.
        """
        plan = self.plan.then(step)
        return replace(self, plan=plan, norms={**self.norms, **norms}, remarks=())


def attach(model: nn.Module, record: Provenance) -> nn.Module:
    """Let `model` carry `record`, and return the model."""
    model.__dict__[_KEY] = record
    return model


def of(model: nn.Module) -> Provenance:
    """Return the record that `model` carries, or a new one that only names the model's class."""
    record: Provenance = model.__dict__.get(_KEY) or Provenance(source=type(model).__name__)
    return record
