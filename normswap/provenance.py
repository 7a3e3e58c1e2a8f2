"""Where a network comes from: its architecture, its source, what was done to it, the norms it once had.

The record rides on the module itself, so that it survives `copy.deepcopy` and needs no second argument anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from normswap.plan import Arch, Plan

_KEY = "_normswap_provenance"


@dataclass(frozen=True)
class Provenance:
    """The origin of a network.

    Args:
        arch: how to build the bare skeleton, or None when it is not a timm network that can be rebuilt by name.
        source: what the user named: a timm name, a hub id, a path.
        sha256: hash of the source's tensors (see `zoo.hash_tensors`), None for random weights.
        pretrained_cfg: timm's preprocessing record (input_size, mean, std, interpolation, crop_pct, label_names ...).
        plan: everything done since the bare architecture.
        norms: the tensors of every norm that was replaced, by their original dotted path.
    """

    arch: Arch | None = None
    source: str = ""
    sha256: str | None = None
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    norms: dict[str, Tensor] = field(default_factory=dict)


def attach(model: nn.Module, record: Provenance) -> nn.Module:
    """Let `model` carry `record`; returns the model."""
    model.__dict__[_KEY] = record
    return model


def of(model: nn.Module) -> Provenance | None:
    """The record `model` carries, if any."""
    return model.__dict__.get(_KEY)
