"""Diagnose: all checks on one network, the root of the trouble first."""

from collections.abc import Iterable
from dataclasses import asdict

from torch import nn

from normswap.diagnosis import settings, stored_numbers
from normswap.diagnosis.drift import contradicted, drifted, roots_for_variances
from normswap.diagnosis.findings import Case, Check, Diagnosis, Finding, sites_of
from normswap.diagnosis.image_batches import ImageBatches
from normswap.diagnosis.normalization import unfit_preprocessing
from normswap.errors import NormswapError
from normswap.models import network_input
from normswap.models.calling import Inputs
from normswap.plan import Body
from normswap.surgery.network import HasModel, Network

# In this order: a cause stands before what follows from it.
CHECKS: tuple[Check, ...] = (
    stored_numbers.broken_statistics,
    stored_numbers.broken_parameters,
    stored_numbers.negative_variance,
    settings.untracked,
    settings.in_training,
    settings.thawed,
    settings.momentum,
    settings.unlike_builder,
    settings.fused,
    settings.shared,
    settings.in_a_row,
    stored_numbers.never_updated,
    stored_numbers.zero_variance,
    stored_numbers.dead_gammas,
    contradicted,
)

ON_IMAGES: tuple[Check, ...] = (
    roots_for_variances,
    unfit_preprocessing,
    settings.unfit_eps,
    drifted,
)
# What only images show.
_NOT_LOOKED_AT = (
    "only images show whether they are prepared as in training, and whether statistics and eps fit"
    " them"
)


def diagnose(
    model: nn.Module | Network | HasModel,
    *,
    inputs: Inputs = None,
    images: Iterable[object] | None = None,
    name: str = "MODEL",
    data: str = "IMAGES",
) -> Diagnosis:
    """Find what is wrong with the BatchNorms of `model`, which is not changed.

    Args:
        inputs: what it takes, as in `convert`.
        images: batches of what it takes, such as images (N, C, H, W) or (images, labels), for the
            checks of how its statistics fit them; at most 512 are looked at.
        name: how the commands shall call the network.
        data: how they shall call the images.

    Returns:
        The faults; none where nothing is wrong.

    Raises:
        SourceError: `model` is no network; unusable images, or too few.
    """
    network = (
        model
        if isinstance(model, Network)
        else Network(network_input.require_module(model), inputs)
    )
    try:
        anatomy = network.anatomy
        notes = list[str]()
    except NormswapError as error:
        anatomy = None
        notes = [f"its forward was not looked at: {error}"]
    sites = sites_of(network.module, anatomy)
    batches = None if images is None else ImageBatches.read(network.module, images)
    case = Case(network, anatomy, sites, name, data, batches)
    faults, open_questions = _split(check(case) for check in CHECKS)
    notes += open_questions
    if not faults and not open_questions and sites and images is not None:
        # The first fault explains those behind it: images that are prepared wrongly fit no
        # statistics.
        for check in ON_IMAGES:
            faults, open_questions = _split([check(case)])
            if faults or open_questions:
                notes += open_questions
                break
    if not faults and sites and images is None:
        notes.append(f"{_NOT_LOOKED_AT}: normswap doctor {name} --data {data}")
    return Diagnosis(tuple(faults), len(sites), tuple(notes))


def _split(checks: Iterable[Iterable[Finding | str]]) -> tuple[list[Finding], list[str]]:
    answers = [answer for check in checks for answer in check]
    faults = [answer for answer in answers if isinstance(answer, Finding)]
    return faults, [answer for answer in answers if isinstance(answer, str)]


def body_of(diagnosis: Diagnosis, source: str) -> Body:
    """Return a diagnosis as a JSON-able record."""
    rows = [
        {**asdict(finding), "certainty": finding.certainty.name.lower()}
        for finding in diagnosis.faults
    ]
    body = {"source": source, "norms": diagnosis.norms, "findings": rows}
    return {**body, "faults": len(rows), "notes": list(diagnosis.notes)}
