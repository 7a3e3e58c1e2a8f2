"""Diagnose: all checks on one network, the root of the trouble first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from normswap.diagnosis import contradiction, placement, settings, stored_numbers
from normswap.diagnosis.drift import drifted
from normswap.diagnosis.eps_fit import unfit_eps
from normswap.diagnosis.eval_and_train import batch_sizes
from normswap.diagnosis.findings import Case, Check, Diagnosis, Finding, StoredNorm, anatomy_of, sites_of
from normswap.diagnosis.image_batches import ImageBatches
from normswap.diagnosis.normalization import unfit_preprocessing
from normswap.models.calling import Inputs
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

# The first that is a fault explains those behind it: images that are prepared wrongly fit no statistics.
ON_IMAGES: tuple[Check, ...] = (unfit_preprocessing, unfit_eps, drifted)


def diagnose(
    model: nn.Module | Network | HasModel,
    *,
    inputs: Inputs = None,
    images: Iterable[object] | None = None,
    other: nn.Module | None = None,
    name: str = "MODEL",
    data: str = "IMAGES",
) -> Diagnosis:
    """Find what is wrong with the BatchNorms of `model`, which is not changed.

    Args:
        inputs: what it takes, as in `convert`.
        images: batches of what it takes, such as images (N, C, H, W) or (images, labels), for the checks of how its
            statistics fit them; at most 512 are looked at.
        other: the same network with the weights that `model` is an average of, or that are an average of its.
        name: how the commands shall call the network.
        data: how they shall call the images.

    Returns:
        The findings, faults first; none where nothing is wrong.

    Raises:
        SourceError: `model` is no network; unusable images, or too few.
    """
    network = model if isinstance(model, Network) else Network(module_of(model), inputs)
    anatomy, notes = anatomy_of(network)
    sites = sites_of(network.module, anatomy)
    seen = None if images is None else ImageBatches.read(network.module, images)
    case = Case(network, anatomy, sites, _positions(network, sites) if anatomy else {}, name, data, other, seen)
    findings = [finding for check in CHECKS for finding in check(case)]
    if not any(finding.fault for finding in findings):
        findings += _on_images(case)
    ranked = sorted(findings, key=lambda finding: not finding.fault)
    return Diagnosis(tuple(ranked), len(sites), notes)


def _on_images(case: Case) -> list[Finding]:
    """Look at images with a network in which nothing else is wrong: one fault, and how far the modes agree."""
    if case.images is None or not case.sites:
        return []
    faults = next((findings for check in ON_IMAGES if (findings := [*check(case)])), [])
    return [*faults, *batch_sizes(case)]


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
