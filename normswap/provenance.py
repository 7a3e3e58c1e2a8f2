"""Where a network comes from: its architecture, its source, what was done to it, the norms it once had.

The record rides on the module itself, so that it survives `copy.deepcopy` and needs no second argument anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normswap.plan import Arch, Body, Plan

_KEY = "_normswap_provenance"


@dataclass(frozen=True)
class Provenance:
    """The origin of a network.

    Args:
        arch: how to build the bare skeleton, or None when nobody knows.
        source: what the user named: a name, a hub id, a path.
        sha256: hash of the source's tensors (see `zoo.hash_tensors`), None for random weights.
        pretrained_cfg: timm's preprocessing record (input_size, mean, std, interpolation, crop_pct, label_names ...).
        plan: everything done since the bare architecture.
        norms: the tensors of every norm that was replaced, by their original dotted path.
        notes: what should be said about the weights, now that they have been read; not kept.
    """

    arch: Arch | None = None
    source: str = ""
    sha256: str | None = None
    pretrained_cfg: Body = field(default_factory=dict)
    plan: Plan = field(default_factory=Plan)
    norms: dict[str, Tensor] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def moments(self, path: str) -> tuple[Tensor, Tensor]:
        """Mean and deviation per channel of the output of the norm that stood at `path`: its beta and |gamma|, or what
        its class was registered to say."""
        out_mean, out_std = (self.norms.get(f"{path}.{name}") for name in ("output_mean", "output_std"))
        if out_mean is not None and out_std is not None:
            return out_mean.double(), out_std.double()
        mean, gamma, beta = (self.norms.get(f"{path}.{name}") for name in ("running_mean", "weight", "bias"))
        assert mean is not None
        return output_moments(mean, gamma, beta)


def output_moments(running_mean: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and deviation (C,), float64, of a BatchNorm's output: beta and |gamma| (Ioffe & Szegedy 2015, section 3)."""
    zeros = torch.zeros_like(running_mean, dtype=torch.float64)
    mean = zeros if beta is None else beta.detach().double()
    return mean, zeros + 1 if gamma is None else gamma.detach().double().abs()


def attach(model: nn.Module, record: Provenance) -> nn.Module:
    """Let `model` carry `record`; returns the model."""
    model.__dict__[_KEY] = record
    return model


def of(model: nn.Module) -> Provenance | None:
    """The record `model` carries, if any."""
    return model.__dict__.get(_KEY)
