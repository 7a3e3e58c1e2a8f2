"""Diagnose: all checks on one network, the root of the trouble first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from normswap.diagnosis import contradiction, placement, settings, stored_numbers
from normswap.diagnosis.findings import Case, Check, Diagnosis, StoredNorm, anatomy_of, sites_of
from normswap.models.calling import Inputs
from normswap.models.default_device import cpu_by_default
from normswap.models.modes import evaluating, hooked
from normswap.plan import Body
from normswap.surgery.network import HasModel, Network, module_of

# In this order: a cause stands before what follows from it.
CHECKS: tuple[Check, ...] = (
    stored_numbers.broken,
    stored_numbers.negative_variance,
    settings.untracked,
    settings.thawed,
    settings.momentum,
    settings.unlike_builder,
    placement.shared,
    placement.in_a_row,
    placement.one_value,
    contradiction.stale_copy,
    stored_numbers.never_updated,
    stored_numbers.zero_variance,
    stored_numbers.dead_gammas,
    contradiction.contradicted,
    settings.uneven_eps,
    placement.wasted_bias,
    placement.unreached,
)


@cpu_by_default()
def diagnose(
    model: nn.Module | Network | HasModel,
    *,
    inputs: Inputs = None,
    other: nn.Module | None = None,
    name: str = "MODEL",
    data: str = "IMAGES",
) -> Diagnosis:
    """Find what is wrong with the BatchNorms of `model`, which is not changed.

    Args:
        inputs: what it takes, as in `convert`.
        other: the same network with the weights that `model` is an average of, or that are an average of its.
        name, data: how the commands shall call the network and the images.

    Raises:
        SourceError: `model` is no network.
    """
    network = model if isinstance(model, Network) else Network(module_of(model), inputs)
    anatomy, notes = anatomy_of(network)
    sites = sites_of(network.module, anatomy)
    case = Case(network, anatomy, sites, _positions(network, sites) if anatomy else {}, name, data, other)
    findings = [finding for check in CHECKS for finding in check(case)]
    ranked = sorted(findings, key=lambda finding: not finding.fault)
    return Diagnosis(tuple(ranked), len(sites), notes)


@torch.no_grad()
def _positions(network: Network, sites: Sequence[StoredNorm]) -> dict[str, int]:
    """How many values per channel and image each norm sees at the network's own size, by path."""
    counts: dict[str, int] = {}

    def counting(path: str) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[object, ...]) -> None:
            if args and isinstance(args[0], Tensor):
                counts[path] = math.prod(args[0].shape[2:])

        return hook

    with (
        evaluating(network.module),
        hooked(site.module.register_forward_pre_hook(counting(site.path)) for site in sites),
    ):
        try:
            network.calls[0].call(network.module)
        except Exception:  # what does not run at its own size was recorded at another
            counts.clear()
    return counts


def body_of(diagnosis: Diagnosis, source: str) -> Body:
    """Return a diagnosis as a JSON-able record."""
    rows = [{**asdict(finding), "certainty": finding.certainty.name.lower()} for finding in diagnosis.findings]
    return {
        "source": source, "norms": diagnosis.norms, "findings": rows, "faults": len(diagnosis.faults),
        "notes": list(diagnosis.notes),
    }  # fmt: skip
