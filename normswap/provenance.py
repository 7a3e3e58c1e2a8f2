"""Where a network comes from: its architecture, its source, what was done to it, the norms it once
had.

The record rides on the module itself, so that it survives `copy.deepcopy` and needs no second
argument anywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from normswap.plan import AbsorbMode, Arch, Body, Plan, Step

_KEY = "_normswap_provenance"


@dataclass(frozen=True)
class Provenance:
    """The origin of a network.

    Args:
        arch: how to build the bare skeleton; None where that is not known.
        source: what the user named: a name, a hub id, a path.
        sha256: hash of the source's tensors (see `zoo.hash_tensors`), None for random weights.
        pretrained_cfg: timm's preprocessing record (input_size, mean, std, interpolation, crop_pct,
            label_names ...).
        plan: everything done since the bare architecture.
        norms: the tensors of every norm that was replaced, by their original dotted path.
    """

    arch: Arch | None = None
    source: str = ""
    sha256: str | None = None
    pretrained_cfg: Body = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    norms: dict[str, Tensor] = field(default_factory=dict)

    @functools.cached_property
    def original_paths(self) -> tuple[str, ...]:
        """Where norms stood before the network was converted, in the order of the record.

        Those of branches that were merged are left out: nothing in the network has their statistics
        any more.
        """
        suffix = ".running_mean"
        paths = (name.removesuffix(suffix) for name in self.norms if name.endswith(suffix))
        return tuple(path for path in paths if path not in self.merged_paths)

    @functools.cached_property
    def merged_paths(self) -> frozenset[str]:
        """The modules that were merged with branches beside them, and what these had absorbed
        before.
        """
        edits = [edit for step in self.plan.steps for edit in step.edits]
        merged = {
            path
            for edit in edits
            if any(absorption.way is AbsorbMode.SUM for absorption in edit.takes)
            for path in (edit.path, *edit.reads)
        }
        return frozenset(
            merged | {read for edit in edits if edit.path in merged for read in edit.reads}
        )

    def after(self, step: Step, norms: Mapping[str, Tensor]) -> Provenance:
        """The record one step later, with the tensors of the norms that the step replaced."""
        return replace(self, plan=self.plan.then(step), norms={**self.norms, **norms})


def attach(model: nn.Module, record: Provenance) -> nn.Module:
    """Let `model` carry `record`; returns the model."""
    model.__dict__[_KEY] = record
    return model


def of(model: nn.Module) -> Provenance:
    """The record that `model` carries, or one that names its class alone."""
    record: Provenance = model.__dict__.get(_KEY) or Provenance(source=type(model).__name__)
    return record
