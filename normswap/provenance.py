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


def input_size(model: nn.Module) -> tuple[int, int, int]:
    """(C, H, W) that the network is made for, as far as its patches, record or timm's configuration say; else 224."""
    channels = next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d)), 3)
    patches = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(patches, tuple) and len(patches) == 2:
        return (channels, *patches)
    record = of(model)
    for config in (record.pretrained_cfg if record else {}, getattr(model, "pretrained_cfg", None) or {}):
        size = config.get("test_input_size") or config.get("input_size")
        if size:
            return tuple(size)  # type: ignore[return-value]
    return (channels, 224, 224)
